"""Peers that a round waits for, avoids and follows, and the order of its leaders."""

import random
from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.leaders import MAX_PROBERS, Leaders, RoundPosition
from p2ptrain.averaging.grouping.membership import (
    MAX_AVOIDED_PEERS,
    MAX_KNOWN_PEERS,
    MOST_EXCUSED_BREAKS,
    RECORD_DELAY_SECONDS,
    UNKNOWN_SUSPICION_SECONDS,
    Membership,
)  # fmt: skip
from p2ptrain.averaging.protocol.certificate import genesis
from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.runtime import Runtime
from tests.support.records import record_of
from tests.unit.averaging.protocol.test_table import make_body, signed, voters


class Clock:
    """Wall-clock time that a test sets."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def knowing(*peers: str, expires_at: float = 1e9) -> tuple[Membership, Clock]:
    """A membership that has seen the record of these peers."""
    clock = Clock()
    membership = Membership("me", Runtime(random.Random(1), clock))
    see(membership, *peers, expires_at=expires_at)
    return membership, clock


def record(peer: str, state: str = "training") -> PeerRecord:
    return record_of(peer, state=state, round=3)


def see(membership: Membership, *peers: str, sequence: int = 1, expires_at: float = 1e9) -> None:
    for peer in peers:
        membership.update(record(peer), sequence, expires_at)


def test_a_peer_is_expected_while_its_record_lives_and_says_that_it_trains() -> None:
    membership, clock = knowing("a", "me", expires_at=1030.0)
    membership.update(record("b", "syncing"), 1, 1030.0)
    membership.update(record("c", "paused"), 1, 1030.0)
    assert membership.expected() == ["a", "c"]
    assert membership.why_not_expected("b") == "syncing"
    clock.now = 1031.0
    assert membership.expected() == []
    membership.forget_expired()
    assert membership.why_not_expected("a") == "no record"


def test_a_record_that_has_expired_is_not_among_the_records() -> None:
    membership, clock = knowing("a", expires_at=1030.0)
    see(membership, "b", expires_at=1040.0)
    clock.now = 1030.0
    assert [each.peer for each in membership.records()] == ["b"]
    assert membership.trainers() == membership.present() == ["b"]
    clock.now = 1040.0
    assert membership.records() == []


def test_older_records_are_ignored() -> None:
    membership, _ = knowing()
    membership.update(record("a"), 5, 2000.0)
    membership.update(record("a", "draining"), 4, 3000.0)
    assert membership.expected() == ["a"]


def test_a_suspect_comes_back_with_a_newer_record_after_the_back_off_but_not_before() -> None:
    membership, clock = knowing("a")
    membership.suspect("a", "silent")
    clock.now += 100
    assert membership.is_suspect("a"), "its record is from before it fell silent"
    see(membership, "a", sequence=2)
    assert not membership.is_suspect("a")
    for _ in range(3):  # The back-off is 4, 8, 16 seconds.
        membership.suspect("a", "silent")
    clock.now += 15.0
    see(membership, "a", sequence=3)
    assert membership.why_not_expected("a") == "silent"
    clock.now += 1.0
    assert not membership.is_suspect("a")


def test_a_record_that_was_written_before_its_peer_fell_silent_and_seen_after_proves_nothing() -> None:
    membership, clock = knowing("a")
    membership.suspect("a", "silent")
    clock.now += RECORD_DELAY_SECONDS - 0.1
    see(membership, "a", sequence=2)
    clock.now += 100
    assert membership.is_suspect("a")
    see(membership, "a", sequence=3)
    assert not membership.is_suspect("a")


@pytest.mark.parametrize("leads", [False, True], ids=["a suspect", "one that missed a round"])
def test_a_peer_that_is_not_waited_for_is_expected_at_once_when_it_acts(leads: bool) -> None:
    membership, _ = knowing("a")
    if leads:
        membership.missed_round("a")
    else:
        membership.suspect("a", "silent")
    assert membership.expected() == []
    assert membership.alive_trainers() == (["a"] if leads else [])
    membership.heard_from("a")
    assert membership.expected() == ["a"]


def test_who_is_waited_for_in_vain_is_so_ever_less_often_whatever_it_reports() -> None:
    membership, _ = knowing("a")
    waits = []
    for round_ in range(1000):
        membership.heard_from("a")
        if membership.is_worth_waiting_for("a", round_):
            waits.append(round_)
            membership.waited_for(["a"], ["b"], round_)
    assert waits[:5] == [0, 1, 6, 15, 32]
    assert len(waits) < 12
    for round_ in range(1000, 1040):
        membership.waited_for([], ["a"], round_)
    assert membership.is_worth_waiting_for("a", 1040)


def test_suspicion_does_not_overflow_after_years() -> None:
    membership, clock = knowing("a")
    for _ in range(3000):
        membership.broke_with("a", "silent")
        membership.mistrust("a")
    clock.now += 300
    assert not membership.is_mistrusted("a")
    assert membership.avoided() == []


def test_only_a_second_break_makes_a_peer_avoided_and_its_word_does_not_end_that() -> None:
    membership, clock = knowing("a")
    membership.broke_with("a", "lost")
    assert membership.avoided() == []
    membership.broke_with("a", "lost")
    membership.heard_from("a")
    assert membership.avoided() == ["a"]
    assert membership.expected() == ["a"]
    clock.now += 16
    assert membership.avoided() == []
    membership.broke_with("a", "lost")
    clock.now += 16
    assert membership.avoided() == ["a"]  # Longer every time,
    membership.finished_with({"a"})
    assert membership.avoided() == []  # until a round with it works.


def test_who_breaks_every_second_round_is_avoided_for_longer_each_time_and_who_seldom_does_is_not() -> None:
    membership, clock = knowing("often", "seldom")
    avoided = 0.0
    for number in range(64):
        if number % 2:
            membership.broke_with("often", "lost")
        if not number % 8:
            membership.broke_with("seldom", "lost")
        assert "seldom" not in membership.avoided()
        while membership.avoided():
            avoided, clock.now = avoided + 1.0, clock.now + 1.0
        membership.finished_with({"often"} if not number % 2 else set())
        membership.finished_with({"seldom"} if number % 8 else set())
    assert avoided > 15 * 240


def test_some_broken_groups_of_one_leader_do_not_make_a_peer_avoided() -> None:
    membership, _ = knowing("a")
    for _ in range(5):
        membership.broke_with("a", "is not in that group", "bad")
    assert membership.avoided() == []
    membership.broke_with("a", "is not in that group", "other")
    assert membership.avoided() == ["a"]


def test_a_peer_that_breaks_all_rounds_is_avoided_even_where_only_one_member_may_lead() -> None:
    membership, _ = knowing("a")
    for _ in range(MOST_EXCUSED_BREAKS):
        membership.broke_with("a", "sent a malformed message", "the only one")
    assert membership.avoided() == []
    membership.finished_with({"a", "the only one"})
    assert membership.conflicts("a") == frozenset()
    for _ in range(2):
        membership.broke_with("a", "sent a malformed message", "the only one")
    assert membership.avoided() == ["a"]


def test_two_peers_of_which_one_breaks_rounds_are_kept_apart_until_a_round_works_with_both() -> None:
    membership, clock = knowing("a", "b", "c")
    membership.broke_with("a", "a member gave up", "b", "leader")
    assert membership.conflicts("a") == frozenset()
    membership.broke_with("a", "a member gave up", "b", "other")
    assert membership.conflicts("a") == {"b"}
    assert membership.avoided() == []
    membership.finished_with({"a", "c"})
    assert membership.conflicts("a") == {"b"}
    membership.finished_with({"a", "b"})
    assert membership.conflicts("a") == frozenset()
    membership.broke_with("a", "a member gave up", "b")
    membership.broke_with("a", "a member gave up", "b")
    assert membership.conflicts("a") == {"b"}
    clock.now += 61
    assert membership.conflicts("a") == frozenset()
    membership.broke_with("a", "a member gave up", "c")  # Neither of the two explains all three.
    assert (membership.conflicts("a"), membership.avoided()) == (frozenset(), ["a"])


def test_what_is_avoided_is_bounded() -> None:
    names = [f"p{index:03}" for index in range(100)]
    membership, _ = knowing(*names)
    for name in names * 2:
        membership.broke_with(name, "lost")
    assert len(membership.avoided()) == MAX_AVOIDED_PEERS


def test_a_broken_promise_outlasts_a_sign_of_life() -> None:
    membership, clock = knowing("a")
    membership.mistrust("a")
    membership.heard_from("a")
    assert membership.is_mistrusted("a")
    clock.now += 6
    assert not membership.is_mistrusted("a")
    membership.mistrust("a")
    clock.now += 6
    assert membership.is_mistrusted("a")


def test_a_peer_that_let_others_wait_is_doubted_until_somebody_vouches_for_it() -> None:
    membership, clock = knowing("a")
    membership.mistrust("a")
    assert not membership.is_doubted("a")
    membership.kept_promise("a")
    membership.mistrust("a", stalled=True)
    clock.now += 6
    assert membership.is_doubted("a")
    membership.vouch("a")
    assert not membership.is_doubted("a")
    membership.mistrust("a")  # To be vouched for is not to have kept a promise: it counts as the second one broken.
    clock.now += 6
    assert membership.is_mistrusted("a")
    membership.kept_promise("a")
    assert not membership.is_doubted("a")
    membership.mistrust("a")
    clock.now += 6
    assert not membership.is_mistrusted("a")


def test_a_peer_without_a_record_is_suspect_for_a_while_and_nothing_else_is_kept_about_it() -> None:
    membership, clock = knowing()
    membership.suspect("ghost", "x")
    membership.mistrust("ghost")
    membership.broke_with("ghost", "x")
    assert membership.is_suspect("ghost")
    assert membership.records() == []
    clock.now += UNKNOWN_SUSPICION_SECONDS + 1
    assert not membership.is_suspect("ghost")


def test_a_flood_of_records_is_bounded() -> None:
    membership, _ = knowing(*(f"p{index}" for index in range(MAX_KNOWN_PEERS + 10)))
    assert len(membership.records()) == MAX_KNOWN_PEERS


KEY = Key(3, b"l" * 32)
NEXT = Key(4, b"m" * 32)


def leaders_of(membership: Membership) -> Leaders:
    return Leaders(RoundPosition(genesis(bytes(32), bytes(32)), "me", Cells(8)), membership)


def test_a_leader_that_failed_goes_to_the_end_of_the_line_until_the_next_round() -> None:
    membership, _ = knowing("a", "b")
    leaders = leaders_of(membership)
    first, second, third = leaders.candidates(KEY, [])
    leaders.failed(KEY, first)
    assert leaders.candidates(KEY, []) == [second, third, first]
    leaders.failed(KEY, second)
    leaders.failed(KEY, third)
    assert leaders.candidates(KEY, []) == [first, second, third]
    leaders.failed(Key(4, b"m" * 32), "a")
    assert leaders.candidates(KEY, []) == [first, second, third]


def test_a_peer_can_always_lead_itself() -> None:
    membership, _ = knowing("a")
    assert leaders_of(membership).candidates(KEY, ["a", "me"]) == ["me"]


def test_newcomers_go_to_one_of_them_once_no_member_is_left_but_not_among_strangers() -> None:
    membership, _ = knowing("member", "other")
    leaders = leaders_of(membership)
    position = leaders.position
    for is_open in (False, True):
        position.head = replace(position.head, table=Table((Row("member"),), is_open))
        membership.heard_from("member")
        assert leaders.candidates(position.key, []) == ["member"]
        assert leaders.candidates(position.key, ["member"]) == ["me"]
        membership.suspect("member", "x")
        assert set(leaders.candidates(position.key, [])) == ({"me"} if is_open else {"me", "other"})


def test_a_peer_without_a_record_counts_while_it_asks_and_answers() -> None:
    membership, _ = knowing()
    leaders = leaders_of(membership)
    leaders.probed_by(KEY, "new")
    assert set(leaders.candidates(KEY, [])) == {"me", "new"}
    leaders.lost("new")
    assert leaders.candidates(KEY, []) == ["me"]
    for index in range(1000):
        leaders.probed_by(KEY, f"p{index}")
    assert len(leaders.probers(KEY)) == MAX_PROBERS


@pytest.mark.parametrize(
    ("members", "signers", "follows"),
    [("abc", "abc", True), ("ab", "ab", False), ("abc", "ab", False), ("ab", "abc", False), ("xyz", "xyz", False)],
)
def test_a_peer_leaves_its_full_head_at_once_if_a_third_signed_rounds_of_their_own(
    members: str, signers: str, follows: bool
) -> None:
    """Three of six; a roster or a vote from elsewhere tells of nobody that went on without the others."""
    table = voters("abcdef")
    position = RoundPosition(replace(genesis(bytes(32), bytes(32)), table=table), "f", Cells(8))
    reduced = make_body(table, 0, members, is_reduced=True)
    reduced = replace(reduced, lineage=position.head.lineage)
    later = replace(position.head, round=1, lineage=reduced.next_lineage, returned=6)
    assert not position.follows(later)
    position.note_left([signed(replace(reduced, lineage=bytes(32)), signers)])
    position.note_left([signed(replace(reduced, is_reduced=False), signers)])
    assert not position.follows(later), "it went on from another head, or in a full round"
    position.note_left([signed(reduced, signers)])
    assert position.follows(later) == follows
    position.attempts = 1
    assert not position.follows(later), "it may have signed a full round"
