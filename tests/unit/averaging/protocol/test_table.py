"""The member table: one at all holders, who votes, who sleeps, and which signatures make a certificate."""

import hashlib
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.grouping.pending_group import may_reduce
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, Ticket, genesis
from p2ptrain.averaging.protocol.table import (
    EPOCH_ROUNDS,
    ESTABLISHED,
    ESTABLISHED_AMONG_STRANGERS,
    FORGET_ROUNDS,
    LEAST_LEADERS,
    MAX_ACCUSED,
    MAX_COUNT,
    MAX_ELECTORATE,
    MOST_VIEWS,
    NO_MEMBERS,
    SLEEP_ROUNDS,
    Census,
    Row,
    Table,
    founding_table,
    quorum_of,
)
from p2ptrain.averaging.protocol.table import draw as draw_members
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import from_bytes, to_bytes

SWARM = b"s" * 32


def make_ticket(
    peer: str, *, leaves: bool = False, stalled: bool = False, view: int = 0, accuses: tuple[int, ...] = ()
) -> Ticket:
    return Ticket(
        peer, 0, b"l" * 32, b"d" * 32, b"y" * 32, 10, 1, 0, True, b"", b"n" * 16,
        view=view, leaves=leaves, stalled=stalled, accuses=accuses,
    )  # fmt: skip


def joined(table: Table, rounds: Iterable[Sequence[str]]) -> Table:
    """The table after a full round of each of these rosters."""
    for number, members in enumerate(rounds):
        table = table.after(make_body(table, number, members))
    return table


def make_body(
    table: Table,
    round_: int,
    members: Sequence[str],
    *,
    contributing: Collection[str] | None = None,
    leaving: Collection[str] = (),
    accusing: Mapping[str, Iterable[str]] = {},
    is_reduced: bool = False,
) -> Body:
    """The result of these members that an honest roster would sign after ``table``; some ``accusing`` others."""
    there = tuple(members)
    counted = [peer for peer in there if contributing is None or peer in contributing]
    body = Body(
        SWARM, round_, hashlib.sha256(round_.to_bytes(8, "big")).digest(), b"d" * 32, 0, 0, b"g" * 32, there,
        tuple((there.index(peer), 10, 1) for peer in counted), "fp32/1", tuple(range(len(there) + 1)),
        (b"h" * 32,) * len(there), len(there), 0, 1, (1,) * len(there), is_reduced=is_reduced,
        census=table.census(
            [
                make_ticket(peer, leaves=peer in leaving, accuses=table.accused_by(accusing.get(peer, ())))
                for peer in there
            ],
            counted,
        ),
    )  # fmt: skip
    return table.completed(body)


def go_on(table: Table, rounds: Iterable[int], members: Sequence[str], *, is_reduced: bool = False) -> Table:
    """The table after rounds of the same members, all of which contribute."""
    for round_ in rounds:
        table = table.after(make_body(table, round_, members, is_reduced=is_reduced))
    return table


def voters(names: Iterable[str], *, is_open: bool = False) -> Table:
    return Table(tuple(Row(name, votes=True, elects=True) for name in names), is_open)


def row(table: Table, peer: str) -> Row:
    found = table.row_of(peer)
    assert found is not None
    return found


def signed(body: Body, signers: Iterable[str]) -> Certificate:
    """A certificate; `Certificate.from_bytes` has verified its signatures."""
    return Certificate(body, tuple((peer, b"") for peer in signers))


# --- one table at all holders -------------------------------------------------------------------------------------

NAMES = "abcdefgh"
rosters = st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True)


@st.composite
def histories(draw: st.DrawFn) -> tuple[Table, list[Body]]:
    """A founding table, and bodies that follow from it; rounds are skipped, so that sleep and epochs are met."""
    first = founding_table(draw(st.sampled_from([(), ("s",), ("a", "b")])), is_open=draw(st.booleans()))
    table, bodies, round_ = first, list[Body](), 0
    for _ in range(draw(st.integers(1, 12))):
        members = [peer for peer in draw(rosters) if peer not in table.banned]
        if not members:
            continue
        some = draw(st.lists(st.sampled_from(members), min_size=1, unique=True))
        leaving = draw(st.lists(st.sampled_from(members), max_size=1))
        reduced = draw(st.booleans()) and bool(table.rows)
        accused = draw(st.lists(st.sampled_from(NAMES), max_size=1))
        accusing = dict.fromkeys(draw(st.lists(st.sampled_from(members), max_size=4)), accused)
        told = {"contributing": some, "leaving": leaving, "accusing": accusing, "is_reduced": reduced}
        bodies.append(make_body(table, round_, members, **told))  # type: ignore[arg-type]
        table = table.after(bodies[-1])
        round_ += draw(st.sampled_from([1, 1, 1, 5, 20, 64, 5000]))
    return first, bodies


@given(histories())
def test_all_holders_compute_one_table(history: tuple[Table, list[Body]]) -> None:
    """One that keeps it in memory, and one that reads it from the wire before each round."""
    table, bodies = history
    other = table
    for body in bodies:
        other = from_bytes(Table, to_bytes(other))
        table, other = table.check_body(body), other.check_body(body)
        assert table == other
        assert table.hash == other.hash == body.table


@given(histories())
def test_what_holds_after_every_round(history: tuple[Table, list[Body]]) -> None:
    table, bodies = history
    for body in bodies:
        before, table = table, table.after(body)
        peers = [each.peer for each in table.rows]
        assert len(set(peers)) == len(peers)
        assert [each for each in peers if before.row_of(each)] == [r.peer for r in before.rows if r.peer in peers]
        assert table.is_reduced == body.is_reduced
        for each in table.rows:
            old = before.row_of(each.peer) or Row(each.peer)
            joins = before.row_of(each.peer) is None
            counts = each.peer in body.contributing and not (joins or each.is_banned)
            assert each.counted - old.counted == counts
            assert each.votes >= old.votes or each.is_banned
            assert each.is_banned >= old.is_banned
            if each.is_banned:
                assert (each.votes, each.elects, each.is_witness) == (False, False, False)
                assert each.sleeps
            elif each.peer in body.members:
                assert (each.last, each.sleeps) == (body.round, False)
        left = {peer for peer in before.electorate if table.row_of(peer) is None or peer in table.banned}
        if body.is_reduced:
            assert table.electorate == before.electorate - left
            assert table.full_round == before.full_round
        else:
            assert table.electorate == table.awake
            assert (table.full_round, table.num_returned) == (body.round + 1, 0)
            assert all(not each.sleeps for each in table.rows if each.is_witness)


@given(st.permutations("abcd"))
def test_the_order_of_arrival_at_a_leader_changes_nothing(order: list[str]) -> None:
    table = voters("ab")
    assert table.census(map(make_ticket, order), "abcd") == table.census(map(make_ticket, "abcd"), "abcd")
    one = make_body(table, 3, "abcd")
    assert table.after(one).hash == table.after(replace(one, members=tuple(order))).hash


def test_each_field_of_a_row_is_in_the_hash() -> None:
    base, other = Row("a"), Row("b", 1, 1, 1, True, True, True, True, True, True, 1)
    tables = {Table((base._replace(**{name: getattr(other, name)}),)).hash for name in Row._fields}
    tables |= {Table((base,), True).hash, Table((base,), full_round=1).hash, Table((base,), is_reduced=True).hash}
    assert len(tables | {Table((base,)).hash}) == len(Row._fields) + 4


@given(a=st.binary(max_size=3), b=st.binary(max_size=3))
def test_the_census_of_two_groups_is_that_of_their_members_together(a: bytes, b: bytes) -> None:
    first, second = Census(a, b"", b"", ("x",)), Census(b, b"", b"", ("w",))
    both = first.merged(second)
    assert both == second.merged(first)
    assert int.from_bytes(both.roster, "little") == int.from_bytes(a, "little") | int.from_bytes(b, "little")
    assert both.joining == ("w", "x")


# --- quorums --------------------------------------------------------------------------------------------------------


def test_a_quorum_is_two_thirds() -> None:
    assert [quorum_of(n) for n in range(1, 8)] == [1, 2, 2, 3, 4, 4, 5]


@given(st.integers(1, 300))
def test_two_quorums_share_more_than_a_third_or_all_but_two_thirds(n: int) -> None:
    shared = 2 * quorum_of(n) - n
    assert 3 * quorum_of(n) >= 2 * n > 3 * (quorum_of(n) - 1)
    assert 3 * shared >= n
    assert shared > (n - 1) // 3, "with fewer than a third hostile, one of those that they share is honest"


@pytest.mark.parametrize("n", range(1, 9))
def test_a_certificate_with_one_vote_less_than_the_quorum_is_refused(n: int) -> None:
    names = NAMES[:n]
    table = voters(names)
    body = make_body(table, 0, names)
    for signers in combinations(names, table.quorum):
        assert table.check(signed(body, signers)) == table.after(body)
        assert table.believes(signed(body, signers))
    for signers in combinations(names, table.quorum - 1):
        with pytest.raises(IntegrityError, match=f"{n - 1 - n // 3} of the {n} voters|voters signed"):
            table.check(signed(body, [*signers, "stranger", "other"]))
        assert not table.believes(signed(body, [*signers, "stranger", "other"]))


@pytest.mark.parametrize("is_reduced", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
def test_signatures_of_strangers_count_nothing(is_open: bool, is_reduced: bool) -> None:
    table = voters("abc", is_open=is_open)
    strangers = [f"stranger{number}" for number in range(100)]
    body = make_body(table, 0, strangers, is_reduced=is_reduced)
    with pytest.raises(IntegrityError, match="does not count"):
        table.check(signed(body, strangers))
    assert not table.believes(signed(body, strangers))


def test_members_that_do_not_vote_yet_count_nothing() -> None:
    table = go_on(voters("a"), range(2), "abc")
    assert table.electorate == {"a"}
    assert table.why_invalid(make_body(table, 2, "abc"), "bc")


def test_a_reduced_certificate_among_strangers_needs_a_third_of_the_electorate() -> None:
    table = voters("abcdef", is_open=True)
    for members, counts in (("a", False), ("ab", True), ("axyz", False), ("xyz", False)):
        assert counts != bool(table.why_invalid(make_body(table, 0, members, is_reduced=True), members))
    body = make_body(table, 0, "abc", is_reduced=True)
    assert table.why_invalid(body, "a")
    assert not table.why_invalid(body, "ab")


def test_a_lone_survivor_among_friends_may_close_a_reduced_round_and_no_full_one() -> None:
    table = voters("abc")
    assert not table.why_invalid(make_body(table, 0, "a", is_reduced=True), "a")
    assert table.why_invalid(make_body(table, 0, "a"), "a")


def test_a_reduced_lineage_becomes_full_by_one_certificate_of_the_electorate_before_it() -> None:
    table = go_on(voters("abc"), range(5), "a", is_reduced=True)
    body = make_body(table, 5, "ab")
    assert table.why_invalid(body, "a")
    full = table.check(signed(body, "ab"))
    assert (full.is_reduced, full.full_round, {*full.electorate}) == (False, 6, {"a", "b"})


@pytest.mark.parametrize("is_open", [False, True])
def test_who_may_close_a_reduced_round(is_open: bool) -> None:
    table = voters("abcdef", is_open=is_open)
    waited = [make_ticket(peer, stalled=True) for peer in "ab"]
    assert may_reduce(table, waited)
    assert may_reduce(table, waited[:1]) != is_open, "a third of the electorate among strangers"
    assert not may_reduce(table, [*waited, make_ticket("c")]), "c has not waited"
    strangers = [make_ticket(peer, stalled=True) for peer in "xy"]
    assert may_reduce(table, strangers) != is_open, "among the invited, a voter beyond the roster may sign with them"
    assert table.why_invalid(make_body(table, 0, "xy", is_reduced=True), "xy"), "without one it does not count"
    goes_on = go_on(table, [0], "abc", is_reduced=True)
    assert may_reduce(goes_on, map_tickets("ab")), "two thirds of those that are awake in the reduced lineage"
    assert not may_reduce(goes_on, map_tickets("ad"))


@pytest.mark.parametrize(
    ("claims", "view"),
    [
        ({"a": 3}, 3),
        ({"a": 3, "b": 3}, 3),
        ({"a": 3, "b": 2}, 3),
        ({"a": 300, "b": 0}, 300),
        ({"a": 3, "b": MAX_COUNT}, 3 + MOST_VIEWS),
        ({"a": 3, "b": 0, "c": MAX_COUNT}, 3 + MOST_VIEWS),
        ({"a": 3, "b": 2, "c": 2, "d": MAX_COUNT}, 3 + MOST_VIEWS),
        ({"a": 3, "b": 3, "c": 0, "d": 0}, 3),
        ({"a": 3, "b": 3, "c": 1, "d": 1, "e": MAX_COUNT, "f": MAX_COUNT}, 3 + MOST_VIEWS),
        ({"a": 3, "x": MAX_COUNT, "y": MAX_COUNT, "z": 0}, 3),
        ({"x": 2, "y": MAX_COUNT, "z": 1}, 2 + MOST_VIEWS),
    ],
    ids=str,
)
def test_members_that_claim_more_attempts_than_there_were_decide_no_view(claims: dict[str, int], view: int) -> None:
    """A third of the members, or one of two or three, add `MOST_VIEWS`; newcomers (x, y, z) decide without members."""
    tickets = [make_ticket(peer, view=claim) for peer, claim in claims.items()]
    assert voters("abcdef").view(tickets) == view
    assert voters("abcdef").view(tickets[::-1]) == view


def map_tickets(peers: str) -> list[Ticket]:
    return [make_ticket(peer) for peer in peers]


# --- who joins, votes, sleeps and leaves --------------------------------------------------------------------------


def test_a_founding_round_without_founders_makes_its_members_voters() -> None:
    body = make_body(NO_MEMBERS, 0, "abc", contributing="ac")
    table = NO_MEMBERS.check(signed(body, "ab"))
    assert table.electorate == {"a", "b", "c"}
    assert go_on(table, [1], "abcd").electorate == {"a", "b", "c"}, "later ones wait"


def test_a_place_on_a_roster_makes_a_member_also_where_its_contribution_comes_late() -> None:
    """Otherwise a peer far away would stay a newcomer, for which few rounds wait."""
    table = voters("a").after(make_body(voters("a"), 0, "ab", contributing="a"))
    assert row(table, "b") == Row("b", 0, 0, 0)


def test_founders_that_hold_no_state_vote_and_lead_nothing() -> None:
    table = go_on(founding_table(["s"]), [0], "ab")
    assert ({*table.electorate}, {*table.leading}) == ({"s"}, {"a", "b"})
    table = go_on(table, range(1, 1 + ESTABLISHED), "ab")
    assert ({*table.electorate}, {*table.leading}) == ({"s", "a", "b"}, {"a", "b"})


@pytest.mark.parametrize("is_open", [False, True])
def test_members_that_sleep_stand_in_for_leaders_but_for_witnesses_and_banned_ones(is_open: bool) -> None:
    rows = [
        Row("a", votes=True), Row("b", sleeps=True), Row("c", votes=True, sleeps=True),
        Row("d", sleeps=True, is_banned=True), Row("seed", votes=True, is_witness=True),
        *(Row(f"stranger{number}", counted=100 - number, sleeps=True) for number in range(LEAST_LEADERS)),
    ]  # fmt: skip
    table = Table(tuple(rows), is_open=is_open)
    assert table.leading == {"a"}
    # Among strangers, that are those who vote, and who counted most up to `LEAST_LEADERS`.
    others = (
        {f"stranger{number}" for number in range(LEAST_LEADERS - 2)}
        if is_open
        else {"b", *(f"stranger{number}" for number in range(LEAST_LEADERS))}
    )
    assert table.standing_in == {"a", "c"} | others


@pytest.mark.parametrize(("is_open", "established"), [(False, ESTABLISHED), (True, ESTABLISHED_AMONG_STRANGERS)])
def test_a_member_votes_after_so_many_counted_rounds(is_open: bool, established: int) -> None:
    table, voted = voters("a", is_open=is_open), list[int]()
    for number in range(3 * EPOCH_ROUNDS):
        table = table.after(make_body(table, 1 + number, "abc", contributing="ab" if number % 2 else "abc"))
        if row(table, "b").votes and not voted:
            voted.append(row(table, "b").counted)
        if row(table, "c").votes and len(voted) == 1:
            voted.append(row(table, "c").counted)
    assert established <= voted[0] < established + (EPOCH_ROUNDS if is_open else 1)
    if not is_open:
        assert voted == [established, established], "only rounds in which it contributed count"


@pytest.mark.parametrize("num_voters", [1, 16, 17, 40])
def test_among_strangers_one_for_sixteen_voters_is_promoted_an_epoch_and_who_counted_most_first(
    num_voters: int,
) -> None:
    old = [f"v{number}" for number in range(num_voters)]
    waiting = [Row(f"w{number}", counted=100 + number, last=EPOCH_ROUNDS) for number in range(9)]
    table = Table((*voters(old).rows, *waiting), True)
    there = [each.peer for each in table.rows]
    for round_ in range(EPOCH_ROUNDS + 1, 2 * EPOCH_ROUNDS):
        table = table.after(make_body(table, round_, there, contributing=old))
        assert len(table.electorate) == num_voters
    table = table.after(make_body(table, 2 * EPOCH_ROUNDS, there, contributing=old))
    promoted = [f"w{number}" for number in range(8, 8 - -(-num_voters // 16), -1)]
    assert table.electorate == {*old, *promoted}


def test_among_strangers_only_so_many_join_in_a_round() -> None:
    many = [f"n{number:04}" for number in range(2000)]
    for size, least, most in ((1, 2, 2), (64, 4, 4), (2000, 64, 64)):
        old = [f"v{number}" for number in range(size)]
        for is_open in (True, False):
            table = voters(old, is_open=is_open)
            joined = len(go_on(table, [1], [*old, *many]).rows) - size
            assert joined == (most if is_open else len(many)) >= least


def test_a_leader_cannot_choose_which_newcomers_join() -> None:
    """A hash over the lineage draws them."""
    table, names = voters("a", is_open=True), [f"n{number}" for number in range(50)]
    joined = [{r.peer for r in go_on(table, [round_], ["a", *names]).rows} - {"a"} for round_ in range(1, 20)]
    assert len({frozenset(each) for each in joined}) > 10


def test_who_is_absent_for_eight_rounds_sleeps_and_comes_back_by_a_place_on_a_roster() -> None:
    table = go_on(voters("abc"), range(3), "abc")  # Its last round is 2.
    table = go_on(table, range(3, 2 + SLEEP_ROUNDS), "ab")
    assert table.electorate == {"a", "b", "c"}
    table = go_on(table, [2 + SLEEP_ROUNDS], "ab")
    assert ({*table.electorate}, {*table.awake}, row(table, "c").votes) == ({"a", "b"}, {"a", "b"}, True)
    assert go_on(table, range(20, 40), "ab").electorate == {"a", "b"}
    back = table.after(make_body(table, 11, "abc", contributing="ab"))
    assert back.electorate == {"a", "b", "c"}


def test_a_reduced_round_puts_the_absent_to_sleep_keeps_the_electorate_and_counts_who_returned() -> None:
    table = go_on(voters("abcde"), range(3), "abcde")
    reduced = go_on(table, [3], "ab", is_reduced=True)
    assert ({*reduced.electorate}, {*reduced.awake}) == (set("abcde"), set("ab"))
    assert (reduced.is_reduced, reduced.full_round, reduced.num_returned) == (True, 3, 2)
    more = go_on(reduced, [4], "acx", is_reduced=True)
    assert (more.num_returned, {*more.awake}) == (3, set("ac"))
    full = go_on(more, [5], "acde")
    assert (full.is_reduced, full.full_round, full.num_returned) == (False, 6, 0)
    assert full.electorate == set("acde"), "b sleeps until it is on a roster"


def test_leaving_removes_a_member_at_once_and_its_vote_with_it() -> None:
    table = voters("abcd")
    table = table.after(make_body(table, 0, "abcd", leaving="d"))
    assert (table.row_of("d"), {*table.electorate}, table.quorum) == (None, {"a", "b", "c"}, 2)
    again = go_on(table, [1], "abcd")
    assert row(again, "d") == Row("d", 1, 0, 1), "it begins as a newcomer"


def test_a_newcomer_that_leaves_at_once_does_not_join() -> None:
    table = voters("a")
    body = make_body(table, 0, "ab", leaving="b")
    assert table.check(signed(body, "a")).row_of("b") is None


def test_a_witness_sleeps_in_reduced_lineages_only() -> None:
    table = go_on(founding_table(["s"]), range(6), "ab")
    assert "s" in go_on(table, range(6, 60), "ab").electorate
    reduced = go_on(table, [6], "a", is_reduced=True)
    assert ({*reduced.awake}, {*reduced.electorate}) == ({"a"}, {"s", "a", "b"})
    assert go_on(reduced, [7], "ab").electorate == {"s", "a", "b"}


def test_a_witness_that_contributes_is_a_witness_no_longer() -> None:
    table = go_on(founding_table(["a"]), [0], "ab")
    assert not row(table, "a").is_witness
    assert go_on(table, range(1, 1 + SLEEP_ROUNDS), "b").electorate == {"b"}


def test_who_is_long_gone_is_forgotten_and_no_voter_that_the_quorum_counts() -> None:
    table = Table((*voters("a").rows, Row("b", counted=1), Row("v", counted=9, votes=True, sleeps=True)))
    for round_, left in ((EPOCH_ROUNDS - 1, "abv"), (EPOCH_ROUNDS, "av"), (FORGET_ROUNDS, "a")):
        table = go_on(table, [round_], "a")
        assert [each.peer for each in table.rows] == [*left]


@given(histories())
def test_somebody_always_votes_so_that_nobody_can_found_a_lineage_anew(history: tuple[Table, list[Body]]) -> None:
    table, bodies = history
    for body in bodies:
        table = table.after(body)
        assert table.electorate or body.is_reduced or not table.leading


def test_when_all_voters_leave_the_members_vote_and_no_stranger() -> None:
    table = go_on(voters("ab"), [0], "abc")
    table = table.after(make_body(table, 1, "abc", leaving="ab"))
    assert table.electorate == {"c"}
    assert table.why_invalid(make_body(table, 2, "x"), "x")


def test_voters_that_are_on_no_roster_do_not_all_fall_asleep() -> None:
    """They may vote on the rounds of others, which are members only."""
    table = go_on(voters("ab", is_open=True), range(3 * SLEEP_ROUNDS), "xy")
    assert table.electorate == {"a", "b"}


# --- many voters ----------------------------------------------------------------------------------------------------


def test_of_many_voters_256_are_drawn_anew_in_each_epoch() -> None:
    names = [f"v{number:03}" for number in range(300)]
    table = go_on(voters(names), [0], names)
    first = table.electorate
    assert len(first) == MAX_ELECTORATE < len(table.awake)
    table = go_on(table, [1, 63], names)
    assert (table.electorate, table.quorum) == (first, 171)
    again = go_on(table, [64], names)
    assert again.electorate != first
    assert from_bytes(Table, to_bytes(again)).electorate == again.electorate


def test_a_draw_lets_each_voter_have_the_same_chance() -> None:
    names = [f"v{number:03}" for number in range(320)]
    table, drawn = voters(names), dict.fromkeys(names, 0)
    for epoch in range(1, 41):
        table = replace(go_on(table, [EPOCH_ROUNDS * epoch], names))
        for peer in table.electorate:
            drawn[peer] += 1
    assert min(drawn.values()) > 40 * 0.5
    assert sum(drawn.values()) == 40 * MAX_ELECTORATE


def test_a_reduced_lineage_keeps_the_electorate_that_was_drawn() -> None:
    names = [f"v{number:03}" for number in range(300)]
    table = go_on(voters(names), [1], names)
    reduced = go_on(table, range(62, 67), names[:100], is_reduced=True)
    assert reduced.electorate == table.electorate


# --- false bodies ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "forge",
    [
        lambda body: replace(body, table=b"t" * 32),
        lambda body: replace(body, census=Census()),
        lambda body: replace(body, census=body.census._replace(roster=b"\x07")),
        lambda body: replace(body, census=body.census._replace(contributed=b"\x01")),
        lambda body: replace(body, census=body.census._replace(leaving=b"\x04")),
        lambda body: replace(body, census=body.census._replace(joining=("sybil", "x"))),
        lambda body: replace(body, levels=2, level=0),
        lambda body: replace(body, present=body.present + 1),
    ],
    ids=["hash", "nothing", "roster", "contributed", "leaving", "joining", "no last level", "tree"],
)
@pytest.mark.parametrize("is_hash_right", [False, True])
def test_a_body_whose_census_or_table_lies_is_refused(forge: object, is_hash_right: bool) -> None:
    table = voters("abc")
    honest = make_body(table, 0, "abx")
    table.check(signed(honest, "abc"))
    body = forge(honest)  # type: ignore[operator]
    if is_hash_right and body.census != honest.census:
        body = table.completed(body)
    with pytest.raises(IntegrityError, match=r"member|a part of the swarm"):
        table.check(signed(body, "abc"))


@given(
    st.builds(
        Census,
        st.binary(max_size=4),
        st.binary(max_size=4),
        st.binary(max_size=4),
        st.lists(st.sampled_from("abcxyz"), max_size=6).map(tuple),
    )
)
def test_any_census_makes_a_table_or_is_refused(census: Census) -> None:
    table = voters("abc")
    body = replace(make_body(table, 64, "abx"), census=census)
    after = table.after(body)
    assert len({each.peer for each in after.rows}) == len(after.rows)
    try:
        table.check_body(table.completed(body))
    except IntegrityError:
        return
    assert {each.peer for each in after.rows} <= {*"abcx"}
    assert row(after, "c").last == 0


# --- bans -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("voting", "accusing", "is_banned"), [
    ("abcd", "a", False), ("abcd", "ab", True), ("abcde", "ab", True), ("abcdef", "ab", False),
    ("abcdef", "abc", True), ("abcdefghi", "abc", False), ("abcdefghi", "abcd", True), ("ax", "ax", True),
    ("bx", "b", False), ("bcd", "axy", False),
])  # fmt: skip
def test_a_third_of_the_voters_bans_nobody_and_one_more_does(voting: str, accusing: str, is_banned: bool) -> None:
    """Among two, no voter bans the other. What newcomers say does not count."""
    table = go_on(voters(voting), [0], sorted({*voting, *accusing, "x"}))
    body = make_body(table, 1, sorted({*voting, *accusing}), accusing=dict.fromkeys(accusing, "x"))
    assert ("x" in table.check(signed(body, voting)).banned) is is_banned


def test_a_banned_member_votes_leads_and_joins_no_more_also_if_it_leaves() -> None:
    table = voters("abcx")
    after = table.after(make_body(table, 0, "abcx", accusing={"a": "x", "b": "x"}, leaving="x"))
    assert after.electorate == after.awake == after.leading == {*"abc"}
    assert after.banned == {"x"}
    assert after.quorum == 2
    assert after.accused_by("xa") == (0,), "nobody is accused twice"
    with pytest.raises(IntegrityError, match="other members than its roster"):
        after.check(signed(make_body(after, 1, "abcx"), "abc"))
    later = go_on(after, range(1, EPOCH_ROUNDS + 1), "abc")
    assert later.banned == {"x"}, "who is banned is not forgotten with the others that are gone"


def test_a_reduced_round_bans_nobody() -> None:
    """A few members may close one without the others, and would ban them."""
    table = voters("abcx")
    body = make_body(table, 0, "ab", accusing={"a": "cx", "b": "cx"}, is_reduced=True)
    assert not table.after(body).banned


@given(
    st.dictionaries(st.integers(0, 200), st.integers(1, 9), max_size=MAX_ACCUSED),
    st.dictionaries(st.integers(0, 200), st.integers(1, 9), max_size=MAX_ACCUSED),
)
def test_two_groups_accuse_together_and_no_crowd_of_accused_hides_one(a: dict[int, int], b: dict[int, int]) -> None:
    first, second = (Census(accused=tuple(sorted(each.items()))) for each in (a, b))
    both = dict(first.merged(second).accused)
    assert both == dict(second.merged(first).accused)
    assert len(both) == min(len(a | b), MAX_ACCUSED)
    assert all(both[row] == a.get(row, 0) + b.get(row, 0) for row in both)
    assert min(both.values(), default=0) >= max((a.get(r, 0) + b.get(r, 0) for r in (a | b).keys() - both), default=0)


# --- leaders --------------------------------------------------------------------------------------------------------


def first_of(table: Table, round_: int) -> str:
    """The member that goes first in a round, in the order of all holders."""
    lineage = make_body(table, round_, "a").lineage
    return min(table.leading, key=lambda peer: table.order(peer, lineage))


def led(table: Table, round_: int, silent: Collection[str]) -> Table:
    """The table after a full round that the first of the members led that are not silent."""
    body = make_body(table, round_, sorted(table.leading))
    leader = min(table.leading - {*silent}, key=lambda peer: table.order(peer, body.lineage))
    return table.after(replace(body, leader=leader))


@pytest.mark.parametrize("is_open", [False, True])
def test_a_member_that_lets_its_turn_pass_goes_first_once_in_an_epoch(is_open: bool) -> None:
    table, turns = voters("abcd", is_open=is_open), list[int]()
    for round_ in range(1, 3 * EPOCH_ROUNDS):
        turns += [round_] if first_of(table, round_) == "d" else []
        table = led(table, round_, "d")
    assert sorted(turn // EPOCH_ROUNDS for turn in turns) == [0, 1, 2]


def test_a_member_that_leads_again_has_missed_nothing_and_all_lead_in_turn() -> None:
    table = led(voters("abcd"), next(r for r in range(99) if first_of(voters("abcd"), r) == "d"), "d")
    assert row(table, "d").misses == 1
    alone = table.after(replace(make_body(table, 1, "abcd"), leader="d"))
    assert row(alone, "d").misses == 0
    turns = Counter[str]()
    for round_ in range(EPOCH_ROUNDS, 4 * EPOCH_ROUNDS):
        turns[first_of(alone, round_)] += 1
        alone = led(alone, round_, ())
    assert min(turns[peer] for peer in "abcd") > EPOCH_ROUNDS // 2


def test_no_member_leads_all_rounds_because_the_others_missed_a_turn() -> None:
    """Some may not reach it, and a member that breaks the others' attempts would be the only leader."""
    table, round_ = voters("abcd"), 1
    while not all(row(table, peer).misses for peer in "bcd"):
        table, round_ = led(table, round_, "bcd"), round_ + 1
    misses = {peer: row(table, peer).misses for peer in "abcd"}
    assert misses["a"] == 0
    turns = Counter(first_of(table, later) for later in range(round_, round_ + 200))
    usual = sorted(misses.values())[2]
    assert turns.keys() == {peer for peer in "abcd" if misses[peer] <= usual}


@pytest.mark.parametrize("change", [
    {"is_reduced": True}, {"levels": 2, "level": 1}, {"leader": "stranger"}, {"leader": ""},
])  # fmt: skip
def test_what_is_no_proof_of_a_missed_turn(change: dict[str, object]) -> None:
    """A few close a reduced round, each cell of a tree has a leader of its own, and a stranger may have led."""
    table = voters("abcd")
    for round_ in range(9):
        body = replace(make_body(table, round_, "abcd"), **({"leader": "a"} | change))  # type: ignore[arg-type]
        assert not any(each.misses for each in table.after(body).rows)


# --- which lineage wins ---------------------------------------------------------------------------------------------

heads = st.builds(
    lambda full, returned, round_, tokens, lineage: Head(
        full + round_, lineage, tokens, 0, b"d" * 32, full=full, returned=returned
    ),
    *[st.integers(0, 2)] * 4,
    st.binary(min_size=32, max_size=32),
)


@given(st.lists(heads, min_size=2, max_size=5, unique_by=lambda head: head.lineage))
def test_all_peers_agree_which_lineage_wins(several: list[Head]) -> None:
    best = [head for head in several if all(head.outranks(other) for other in several if other is not head)]
    assert len(best) == 1


def test_no_number_of_reduced_rounds_or_tokens_wins_over_a_full_one() -> None:
    table = voters("abc")
    start = replace(genesis(SWARM, b"d" * 32), table=table, full=table.full_round)
    full = after(start, "abc")
    reduced = start
    for _ in range(10):
        reduced = after(reduced, "a", is_reduced=True)
    assert full.outranks(reduced)
    assert full.outranks(replace(reduced, tokens=1 << 61))
    assert reduced.outranks(start)
    assert reduced.is_reduced
    assert not full.is_reduced
    both = after(start, "ab", is_reduced=True)
    assert both.outranks(reduced), "more voters are there"


def after(head: Head, members: str, *, is_reduced: bool = False) -> Head:
    body = make_body(head.table, head.round, members, is_reduced=is_reduced)
    body = replace(body, lineage=head.lineage, tokens_before=head.tokens)
    body = head.table.completed(body)
    return head.after(signed(body, members), b"d" * 32)


# --- strangers that do all the work -------------------------------------------------------------------------------


def rounds_until(table: Table, honest: Sequence[str], sybils: Sequence[str], shares: Sequence[float]) -> list[int]:
    """Rounds until Sybils, which contribute to every round from the first on, hold these shares of the votes."""
    found, round_ = list[int](), 0
    while len(found) < len(shares):
        round_ += 1
        table = table.after(make_census_body(table, round_, [*honest, *sybils]))
        hostile = sum(peer in table.electorate for peer in sybils) / len(table.electorate)
        found += [round_ for share in shares[len(found) :] if hostile >= share]
    return found


def make_census_body(table: Table, round_: int, members: Sequence[str]) -> Body:
    """Like `make_body`, without a hash that nobody checks."""
    body = Body(
        SWARM, round_, round_.to_bytes(32, "big"), b"d" * 32, 0, 0, b"g" * 32, tuple(members), (), "fp32/1", (), (),
        census=table.census(map(make_ticket, members), members),
    )  # fmt: skip
    return body


@pytest.mark.fault(48)
def test_sybils_beside_ten_honest_voters_need_hundreds_of_rounds_of_full_work() -> None:
    honest, sybils = [f"h{number}" for number in range(10)], [f"s{number}" for number in range(64)]
    third, two_thirds = rounds_until(voters(honest, is_open=True), honest, sybils, [1 / 3, 2 / 3])
    assert (third, two_thirds) == (384, 960), "as docs/explanation/security.md says"


@pytest.mark.parametrize("is_open", [False, True])
def test_among_strangers_a_newcomer_weighs_more_with_each_round_that_it_counts_in(is_open: bool) -> None:
    table = founding_table(["seed"], is_open=is_open)
    trust = []
    for rounds in range(10):
        trust.append(joined(table, [["a", "b"]] * rounds).trust_of("a"))
    # The round in which it joins is not in its count.
    assert trust == ([1, 1, 2, 3, 4, 5, 6, 7, 8, 8] if is_open else [8] * 10)
    assert joined(table, [["a", "b"]]).trust_of("stranger") == (1 if is_open else 8)


@pytest.mark.parametrize(("present", "most"), [(["seed", "a", "b"], 3), (["a"], 2), ([], 2)])
def test_among_strangers_no_more_newcomers_than_members_are_in_a_group(present: list[str], most: int) -> None:
    table = joined(founding_table(["seed"], is_open=True), [["a", "b"]])
    crowd = [*present, *(f"new{number}" for number in range(20))]
    assert table.most_guests(crowd, 1) == most
    assert table.most_guests(crowd, 5) == max(most, 5 - len(present))
    assert table.guests(crowd) == crowd[len(present) :]
    assert replace(table, is_open=False).most_guests(crowd, 1) == len(crowd)
    assert NO_MEMBERS.most_guests(crowd, 1) == len(crowd)


def test_among_strangers_all_of_the_first_roster_are_members_and_none_of_them_votes() -> None:
    first = [f"m{number}" for number in range(40)]
    founding = founding_table(["seed"], is_open=True)
    assert founding.most_guests(first, 1) == len(first)
    assert founding.group_of(first, 64, 1) == first
    table = joined(founding, [first])
    assert table.leading <= {*first} == {row.peer for row in table.rows} - {"seed"}
    assert table.electorate == {"seed"}
    assert len(joined(table, [[*first, *(f"n{number}" for number in range(40))]]).rows) == len(table.rows) + 2


@given(
    members=st.integers(0, 40), guests=st.integers(0, 80), size=st.integers(1, 64), min_peers=st.integers(1, 8),
    mixed=st.randoms(),
)  # fmt: skip
def test_among_strangers_leaders_form_groups_that_no_member_would_refuse_for_its_newcomers(
    members: int, guests: int, size: int, min_peers: int, mixed: Random
) -> None:
    names = [f"m{number}" for number in range(members)]
    table = joined(founding_table(["seed"], is_open=True), [])
    table = replace(table, rows=(*table.rows, *(Row(name) for name in names)))
    peers = [*names, *(f"n{number}" for number in range(guests))]
    mixed.shuffle(peers)
    group = table.group_of(peers, size, min_peers)
    assert len(group) == len({*group} & {*peers}) <= size
    assert len(table.guests(group)) <= table.most_guests(group, min_peers)
    assert len(group) >= min(size, members)
    assert len(group) >= min(size, len(peers), min_peers)
    assert not guests or size < 3 or table.guests(group), "newcomers get in even where members fill the group"


@given(
    awake=st.integers(0, 40), asleep=st.integers(0, 40), guests=st.integers(0, 40), size=st.integers(1, 64),
    is_open=st.booleans(), mixed=st.randoms(),
)  # fmt: skip
def test_a_crowd_keeps_no_awake_member_out_of_a_group_and_a_full_group_grows(
    awake: int, asleep: int, guests: int, size: int, is_open: bool, mixed: Random
) -> None:
    rows = [Row(f"m{number}", votes=True) for number in range(awake)]
    rows += [Row(f"s{number}", sleeps=True, votes=True) for number in range(asleep)]
    table = Table(tuple(rows), is_open)
    peers = [*(row.peer for row in rows), *(f"n{number}" for number in range(guests))]
    mixed.shuffle(peers)
    group = table.group_of(peers, size, 1)
    places = min(2, asleep + guests, size // 2)
    there = Counter(peer[0] for peer in group)
    assert there["m"] >= min(awake, size - places)
    assert there["s"] + there["n"] >= places
    assert is_open or len(group) == min(size, len(peers))
    if awake <= size:
        assert not table.leaves_out_most(make_body(table, 1, group).census)


def test_the_next_tree_is_that_of_the_members_that_are_awake() -> None:
    first, second = ([f"{name}{number}" for number in range(8)] for name in "ab")
    table = joined(founding_table(["seed"]), [first])
    assert make_body(table, 1, [*first, *second]).present == 16, "the seed contributes nothing"
    table = joined(table, [[*first, *second]])
    assert go_on(table, range(2, 2 + SLEEP_ROUNDS), first).num_awake == 8
    assert make_body(table, 2, first[:3], is_reduced=True).present == 3
    assert make_body(table, 2, first, leaving=first[:2]).present == 14


def test_keys_of_newcomers_vouch_for_no_member() -> None:
    table, newcomers = voters(NAMES), [f"n{number}" for number in range(6)]
    members = [*"abcd", *newcomers]
    assert not table.is_vouched(members, newcomers)
    assert not table.is_vouched(members, [*newcomers, *"aef"]), "others are not on the roster"
    assert table.is_vouched(members, "ab")
    assert table.is_vouched(newcomers, ()), "and newcomers alone speak for themselves"


# --- rounds of a part of the members ------------------------------------------------------------------------------


@given(st.binary(min_size=32, max_size=32), st.integers(1, 40), st.floats(0.01, 1), st.integers(1, 50))
def test_as_many_members_are_drawn_as_the_manifest_says(lineage: bytes, count: int, share: float, least: int) -> None:
    members = frozenset(f"peer{number}" for number in range(count))
    drawn = draw_members(lineage, members, share, least)
    assert drawn <= members
    assert len(drawn) == min(count, max(least, math.ceil(round(share * count, 6))))
    assert drawn <= draw_members(lineage, members, 1.0, least)


def test_each_lineage_draws_others_and_all_are_drawn_as_often() -> None:
    table = voters(NAMES)
    undrawn = [table.undrawn(number.to_bytes(32, "big"), 0.25, 1) for number in range(400)]
    assert {len(each) for each in undrawn} == {6}
    assert all(80 < sum(name not in each for each in undrawn) < 120 for name in NAMES)


def test_members_that_sleep_and_all_in_a_reduced_lineage_sit_no_round_out() -> None:
    table = go_on(go_on(founding_table(["s"]), [0], NAMES), range(1, 2 + SLEEP_ROUNDS), "abcd")
    assert {each.peer for each in table.rows if each.sleeps} == {*"efgh"}
    assert table.undrawn(b"l" * 32, 0.01, 1) < {*"abcd"}
    assert not go_on(table, [20], "ab", is_reduced=True).undrawn(b"l" * 32, 0.01, 1)


def test_a_round_may_leave_out_those_that_are_not_drawn_and_no_others() -> None:
    table = voters(NAMES)
    undrawn = frozenset("efgh")

    def is_refused(members: str) -> bool:
        tickets = [make_ticket(peer) for peer in members]
        return table.leaves_out_most(table.census(tickets, members), undrawn) or not table.is_led_by(members, undrawn)

    assert not is_refused("abcd")
    assert not is_refused("ab")
    assert is_refused("a"), "less than half of those that are drawn"
    assert is_refused("aef"), "and less than a half of all"
    assert not is_refused("defg"), "all may close a round without those that are drawn"
    assert table.leaves_out_most(table.census([make_ticket(peer) for peer in "ab"], "ab"))
