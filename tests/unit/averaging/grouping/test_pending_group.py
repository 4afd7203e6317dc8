"""The leader's policy: when a round closes, and with whom."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.messages import Formed, Later, Refused
from p2ptrain.averaging.grouping.pending_group import PendingGroup, Situation, decide
from p2ptrain.averaging.protocol.certificate import Head, Ticket
from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.averaging.timing.goal import GlobalBatch
from p2ptrain.manifest import AveragingSpec
from tests.support.coroutines import simulated

SPEC = AveragingSpec(grace_seconds=3, matchmaking_seconds=20, quorum=0.5, min_peers=2, group_size=8)
HEAD = Head(3, b"l" * 32, 100, 40, b"d" * 32)
KEY = Key(HEAD.round, HEAD.lineage)


def ticket(peer: str, digest: bytes = b"d" * 32, layout: bytes = b"y" * 32) -> Ticket:
    return Ticket(peer, HEAD.round, HEAD.lineage, digest, layout, 10, 2, 0, True, b"", peer.encode().ljust(16, b"-"))


def situation(
    ready: int, missing: int, full: bool = False, waiting: float = 0.0, quorum: float | None = None,
    delegates: bool = False, reduced: bool | None = False,
) -> Situation:  # fmt: skip
    return Situation(ready, missing, full, waiting, quorum, delegates, is_reduced=reduced)


@pytest.mark.parametrize(
    ("seen", "min_peers", "action"),
    [
        pytest.param(situation(3, 0), 2, "form", id="everybody is ready"),
        pytest.param(situation(1, 2), 1, "wait", id="no quorum yet"),
        pytest.param(situation(2, 1, quorum=0.0), 2, "close", id="a quorum hurries the rest"),
        pytest.param(situation(2, 1, quorum=2.9), 2, "close", id="within the grace period"),
        pytest.param(situation(2, 1, quorum=3.0), 2, "form", id="after the grace period"),
        pytest.param(situation(0, 3, full=True), 2, "close", id="a full global batch hurries everybody"),
        pytest.param(situation(0, 3), 2, "wait", id="nobody is ready"),
        pytest.param(situation(2, 4, waiting=20.0), 2, "give up", id="without_a_quorum at the deadline"),
        pytest.param(situation(2, 2, quorum=0.0, delegates=True), 2, "wait", id="half of the delegates"),
        pytest.param(situation(3, 2, quorum=0.0, delegates=True), 2, "close", id="more than half of the delegates"),
        pytest.param(situation(2, 2, False, 20.0, 0.0, True), 2, "form", id="half of the delegates at the deadline"),
        pytest.param(situation(2, 4, waiting=20.0, reduced=None), 2, "wait", id="tickets that may soon do without"),
        pytest.param(situation(2, 4, waiting=23.0, reduced=None), 2, "give up", id="too few voters at the deadline"),
        pytest.param(situation(3, 2, False, 20.6, 0.1, reduced=True), 2, "close", id="some agree sooner to do without"),
        pytest.param(situation(3, 2, False, 23.0, 2.5, reduced=True), 2, "form", id="some agree to do without"),
        pytest.param(situation(1, 0), 2, "wait", id="below_the_minimum"),
        pytest.param(situation(1, 0, waiting=20.0), 2, "give up", id="below_the_minimum at the deadline"),
    ],
)
def test_a_leader_decides(seen: Situation, min_peers: int, action: str) -> None:
    decision = decide(seen, SPEC.model_copy(update={"min_peers": min_peers}))
    assert decision.action == action
    assert action != "give up" or f"{seen.ready} of" in decision.reason


@given(
    ready=st.integers(0, 20),
    missing=st.integers(0, 20),
    full=st.booleans(),
    waiting=st.floats(0, 100),
    quorum=st.none() | st.floats(0, 100),
    min_peers=st.integers(1, 5),
    share=st.floats(0.1, 1),
)
def test_every_decision_keeps_the_manifest(
    ready: int, missing: int, full: bool, waiting: float, quorum: float | None, min_peers: int, share: float
) -> None:
    spec = SPEC.model_copy(update={"min_peers": min_peers, "quorum": share})
    decision = decide(situation(ready, missing, full=full, waiting=waiting, quorum=quorum), spec)
    assert decision.reason
    if decision.action == "form":
        assert ready >= min_peers
        assert ready >= share * (ready + missing)
    if ready and waiting >= spec.matchmaking_seconds:
        assert decision.action in ("form", "give up"), "a member must not wait beyond the deadline"


@simulated(seed=1)
async def test_members_with_another_state_are_refused_and_the_majority_goes_on() -> None:
    group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
    answers = {p: group.add(ticket(p), 0.0) for p in ("a", "b")}
    answers["c"] = group.add(ticket("c", digest=b"x" * 32), 0.0)
    assert group.form() == ["a", "b"]
    assert answers["c"].result() == Refused("your state differs from the group's", mismatch=True)
    assert answers["a"].result() == Formed((ticket("a"), ticket("b")))


@simulated(seed=1)
async def test_a_full_group_leaves_the_rest_for_the_next_round() -> None:
    group = PendingGroup(HEAD, KEY, SPEC.model_copy(update={"group_size": 3}), GlobalBatch(0))
    answers = [group.add(ticket(p), 0.0) for p in "abcde"]
    assert len(group.form()) == 3
    assert Counter(type(answer.result()) for answer in answers) == {Formed: 3, Refused: 2}


@simulated(seed=1)
async def test_among_strangers_newcomers_that_are_more_than_the_members_wait_for_the_next_round() -> None:
    group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
    table = Table((Row("a", votes=True, elects=True), Row("b")), is_open=True)
    answers = {peer: group.add(ticket(peer), 0.0) for peer in ("a", "b", "n1", "n2", "n3", "n4")}
    members = group.form(table=table)
    assert {"a", "b"} < set(members)
    assert len(members) == 4
    assert sum(isinstance(answer.result(), Refused) for answer in answers.values()) == 2


@simulated(seed=1)
async def test_a_crowd_of_newcomers_neither_outvotes_the_members_nor_complains_them_out() -> None:
    group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
    table = Table((Row("a", votes=True, elects=True), Row("b", votes=True, elects=True)), is_open=True)
    answers = {peer: group.add(ticket(peer), 0.0) for peer in "ab"}
    for number in range(3):
        answers[f"l{number}"] = group.add(ticket(f"l{number}", digest=b"x" * 32), 0.0)
        answers[f"n{number}"] = group.add(ticket(f"n{number}"), 0.0, frozenset("ab"))
    assert group.form(table=table) == ["a", "b"]
    assert [peer for peer, answer in answers.items() if isinstance(answer.result(), Formed)] == ["a", "b"]


@simulated(seed=1)
async def test_of_a_cell_one_peer_speaks_until_it_is_dismissed() -> None:
    group = PendingGroup(HEAD, KEY._replace(level=1), SPEC, GlobalBatch(0, {}), lambda peer: f"cell {peer[0]}")
    first = group.add(ticket("a1"), 0.0)
    assert (group.holder("a1"), group.holder("a2"), group.holder("b1")) == ("", "a1", "")
    assert isinstance(group.add(ticket("a2"), 0.1).result(), Refused)
    group.dismiss("a2", "it does not speak for the cell")
    assert not first.done()
    group.dismiss("a1", "it does not answer")
    assert isinstance(first.result(), Refused)
    second = group.add(ticket("a2"), 0.2)
    assert not second.done()
    assert group.holder("a1") == "a2"
    assert group.form() == ["a2"]
    assert group.holder("a1") == "", "of a group that is over nobody holds a place"


@simulated(seed=1)
async def test_a_peer_whose_turn_is_over_keeps_later_tickets_alone() -> None:
    """One of its new turn came while its turn had not begun: who leads now waits for it elsewhere."""
    group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
    answers = [group.add(ticket(f"peer {turn}"), 0.0, turn=turn) for turn in range(4)]
    group.dismiss_until(2)
    assert [answer.done() for answer in answers] == [True, True, True, False]
    assert all(isinstance(answer.result(), Later) for answer in answers[:3])


@simulated(seed=1)
async def test_a_newer_ticket_replaces_the_older_one_of_the_same_peer() -> None:
    group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
    first = group.add(ticket("a"), 0.0)
    second = group.add(ticket("a"), 1.0)
    assert isinstance(first.result(), Refused)
    group.remove("a", first)
    assert group.form() == ["a"]
    assert isinstance(second.result(), Formed)
