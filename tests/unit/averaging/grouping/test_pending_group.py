"""The leader's policy: when a round closes, and with whom."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.messages import Formed, Refused
from p2ptrain.averaging.grouping.pending_group import PendingGroup, Situation, decide
from p2ptrain.averaging.protocol.certificate import Head, Ticket
from p2ptrain.averaging.timing.goal import BatchProgress, GlobalBatch
from p2ptrain.manifest import AveragingSpec

SPEC = AveragingSpec(grace_seconds=3, matchmaking_seconds=20, quorum=0.5, min_peers=2, group_size=8)
HEAD = Head(3, b"l" * 32, 100, 40, b"d" * 32)
KEY = Key(HEAD.round, HEAD.lineage)


def situation(
    ready: int, missing: int, *, full: bool = False, waiting: float = 0.0, quorum: float | None = None
) -> Situation:
    return Situation(ready, missing, full, waiting, quorum)


def ticket(peer: str, digest: bytes = b"d" * 32, layout: bytes = b"y" * 32) -> Ticket:
    return Ticket(peer, HEAD.round, HEAD.lineage, digest, layout, 10, 2, 0, True, b"", peer.encode().ljust(16, b"-"))


def test_a_group_forms_at_once_when_everybody_is_ready() -> None:
    assert decide(situation(3, 0), SPEC).action == "form"


def test_the_rest_is_hurried_once_a_quorum_is_ready_and_left_out_after_the_grace_period() -> None:
    assert decide(situation(1, 2), SPEC.model_copy(update={"min_peers": 1})).action == "wait"
    assert decide(situation(2, 1, quorum=0.0), SPEC).action == "close"
    assert decide(situation(2, 1, quorum=2.9), SPEC).action == "close"
    assert decide(situation(2, 1, quorum=3.0), SPEC).action == "form"


def test_a_full_global_batch_hurries_everybody() -> None:
    assert decide(situation(0, 3, full=True), SPEC).action == "close"
    assert decide(situation(0, 3), SPEC).action == "wait"


def test_without_a_quorum_the_deadline_gives_up_instead_of_forking_the_swarm() -> None:
    decision = decide(situation(2, 4, waiting=20.0), SPEC)
    assert decision.action == "give up"
    assert "2 of 6" in decision.reason


def test_half_of_the_delegates_are_no_quorum_before_the_time_is_up() -> None:
    def of_delegates(ready: int, missing: int, waiting: float = 0.0) -> Situation:
        return Situation(ready, missing, False, waiting, 0.0, of_delegates=True)

    assert decide(of_delegates(2, 2), SPEC).action == "wait"
    assert decide(of_delegates(3, 2), SPEC).action == "close"
    assert decide(of_delegates(2, 2, waiting=20.0), SPEC).action == "form"


def test_below_the_minimum_nothing_forms() -> None:
    assert decide(situation(1, 0), SPEC).action == "wait"
    assert decide(situation(1, 0, waiting=20.0), SPEC).action == "give up"


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


def test_members_with_another_state_are_refused_and_the_majority_goes_on() -> None:
    async def main() -> None:
        group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
        answers = {p: group.add(ticket(p), 0.0) for p in ("a", "b")}
        answers["c"] = group.add(ticket("c", digest=b"x" * 32), 0.0)
        assert group.form() == ["a", "b"]
        assert answers["c"].result() == Refused("your state differs from the group's", mismatch=True)
        assert answers["a"].result() == Formed((ticket("a"), ticket("b")))

    asyncio.run(main())


def test_a_full_group_leaves_the_rest_for_the_next_round() -> None:
    async def main() -> None:
        group = PendingGroup(HEAD, KEY, SPEC.model_copy(update={"group_size": 3}), GlobalBatch(0))
        answers = [group.add(ticket(p), 0.0) for p in "abcde"]
        assert len(group.form()) == 3
        assert Counter(type(answer.result()) for answer in answers) == {Formed: 3, Refused: 2}

    asyncio.run(main())


def test_of_a_cell_one_peer_speaks_until_it_is_dismissed() -> None:
    async def main() -> None:
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

    asyncio.run(main())


def test_a_newer_ticket_replaces_the_older_one_of_the_same_peer() -> None:
    async def main() -> None:
        group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(0))
        first = group.add(ticket("a"), 0.0)
        second = group.add(ticket("a"), 1.0)
        assert isinstance(first.result(), Refused)
        group.remove("a", first)
        assert group.form() == ["a"]
        assert isinstance(second.result(), Formed)

    asyncio.run(main())


@pytest.mark.parametrize(("samples", "full"), [((30, 33), False), ((30, 34), True)])
def test_the_global_batch_counts_every_peer_once(samples: tuple[int, int], full: bool) -> None:
    group = PendingGroup(HEAD, KEY, SPEC, GlobalBatch(64))
    group.report("a", BatchProgress(5, 5, 1.0, 0.0))
    group.report("a", BatchProgress(samples[0], 5, 1.0, 1.0))
    group.report("b", BatchProgress(samples[1], 5, 1.0, 1.0))
    assert group.batch.is_full is full
