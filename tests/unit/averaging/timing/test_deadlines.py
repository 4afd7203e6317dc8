"""How long a round waits and for whom; and signs of life, and what is done when they fail to come."""

import asyncio
import statistics
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.timing.deadlines import (
    MOST_LATE_SECONDS,
    AnswerTimeouts,
    Keepalive,
    KeepaliveStatus,
    attempt_seconds,
    first_result,
    keepalive_seconds,
    leader_dial_seconds,
    least_mask,
    quiet_seconds,
    quorum_of_others,
    receive_answer,
    send_keepalives,
    straggler_seconds,
)
from p2ptrain.errors import DeadlineError, TemporaryError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import Message, Nothing
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.peers import Member, members

SPEC = AveragingSpec(grace_seconds=3.0, round_seconds=60.0)
durations = st.lists(st.floats(0.01, 50.0), min_size=3, max_size=16)


@pytest.mark.parametrize(("others", "quorum", "expected"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (7, 0.5, 4),
                                                            (3, 0.01, 1), (3, 1.0, 3), (0, 0.5, 0)])  # fmt: skip
def test_a_quorum_of_the_others_has_at_least_one_of_them(others: int, quorum: float, expected: int) -> None:
    assert quorum_of_others(others, quorum) == expected


@given(st.integers(1, 64), st.floats(0.01, 1.0))
def test_an_honest_owner_that_refuses_a_minority_counts_enough(members: int, quorum: float) -> None:
    complete = 1 + quorum_of_others(members - 1, quorum)
    assert least_mask(members, quorum) <= complete
    if quorum >= 0.5:
        assert members < 3 or least_mask(members, quorum) >= members / 2, "nobody decides a round alone"


@given(st.floats(0, 1e4), st.floats(0, 600))
def test_the_rest_costs_at_most_a_fifth_more_and_the_grace_period(until_quorum: float, grace: float) -> None:
    assert until_quorum + straggler_seconds(until_quorum, grace) == pytest.approx(1.2 * until_quorum + grace)


def test_a_beat_may_be_later_where_the_link_or_the_machine_is_slow() -> None:
    usual = quiet_seconds(8.0, 0.5, 0.01, 0.0)
    assert usual == keepalive_seconds(8.0) + 0.5
    assert quiet_seconds(8.0, 0.5, 1.0, 0.0) == usual + 3.5
    assert quiet_seconds(8.0, 0.5, 0.01, 2.0) == usual + 5.5


@given(durations)
def test_an_attempt_as_long_as_the_usual_ones_is_never_cut_short(history: list[float]) -> None:
    usual = statistics.median(history)
    assert min(SPEC.round_seconds, 2 * usual) <= attempt_seconds(history, SPEC) <= SPEC.round_seconds
    assert attempt_seconds(history[:2], SPEC) == SPEC.round_seconds, "the manifest's, without a history"
    assert attempt_seconds([1.0] * 8 + [40.0], SPEC) == attempt_seconds([1.0] * 9, SPEC), "whatever one outlier took"


@given(durations, st.floats(1.1, 5.0))
def test_slower_rounds_get_no_earlier_deadline(history: list[float], factor: float) -> None:
    assert attempt_seconds([factor * s for s in history], SPEC) >= attempt_seconds(history, SPEC) - 1e-9


def test_a_dial_of_a_leader_may_take_as_long_as_its_silence_or_longer_where_its_link_is_slow_or_unknown() -> None:
    assert leader_dial_seconds(3.0, None, 8.0) == 8.0
    assert leader_dial_seconds(3.0, 0.01, 8.0) < 3.0
    assert leader_dial_seconds(3.0, 1.0, 8.0) >= 4.0
    assert leader_dial_seconds(3.0, 60.0, 8.0) == 8.0


SECONDS = st.floats(0, 600)

Outcome = str | Exception
Try = Callable[[Callable[[], None]], Any]


@given(SECONDS, SECONDS, SECONDS, SECONDS)
def test_a_beat_is_due_several_times_before_a_peer_counts_as_quiet(
    grace: float, allowance: float, round_trip: float, latest: float
) -> None:
    patience = quiet_seconds(grace, allowance, round_trip, latest)
    assert patience >= 2 * keepalive_seconds(grace)
    assert patience >= keepalive_seconds(grace) + max(allowance, min(max(round_trip, latest), MOST_LATE_SECONDS))
    assert patience <= keepalive_seconds(grace) + max(allowance, MOST_LATE_SECONDS), "a peer may be late on purpose"


def way(after: float, outcome: Outcome, quiet_at: float | None = None) -> tuple[Try, list[str]]:
    """One way to a result, and what becomes of it."""
    log: list[str] = []

    async def run(on_quiet: Callable[[], None]) -> str:
        log.append("begun")
        loop = asyncio.get_running_loop()
        if quiet_at is not None:
            loop.call_later(quiet_at, on_quiet)
        try:
            await asyncio.sleep(after)
        except asyncio.CancelledError:
            log.append("cancelled")
            raise
        if isinstance(outcome, Exception):
            raise outcome
        log.append("done")
        return outcome

    return run, log


async def first_of(*ways: tuple[Try, list[str]]) -> str | None:
    return await first_result([each for each, _ in ways], lambda error: isinstance(error, TemporaryError))


NO = TemporaryError("another delegate speaks for the cell")


@simulated()
async def test_ways_are_tried_one_after_the_other_and_quiet_ones_go_on_beside_the_next() -> None:
    second = way(1.0, "second")
    assert await first_of(way(50.0, "first"), second) == "first"
    assert second[1] == []
    assert await first_of(way(1.0, NO), way(1.0, "second")) == "second"
    assert await first_of(way(9.0, "first", quiet_at=1.0), way(1.0, NO), way(1.0, NO)) == "first"
    assert await first_of(way(1.0, NO), way(1.0, NO)) is None
    assert await first_of() is None


@pytest.mark.parametrize(("seconds", "winner"), [(5.0, 0), (50.0, 1)])
@simulated()
async def test_the_first_result_ends_the_other_ways(seconds: float, winner: int) -> None:
    ways = way(seconds, "0", quiet_at=1.0), way(10.0, "1")
    assert await first_of(*ways) == str(winner)
    assert ways[1 - winner][1] == ["begun", "cancelled"]


@simulated()
async def test_an_error_that_is_no_failure_ends_all() -> None:
    first = way(50.0, "first", quiet_at=1.0)
    with pytest.raises(RuntimeError):
        await first_of(first, way(1.0, RuntimeError("a bug")))
    assert first[1] == ["begun", "cancelled"]


GRACE = 2.0


class Said(Message, frozen=True, tag=True):
    """Base of the messages of a peer that others wait for."""


class Waiting(Said, Keepalive, frozen=True, tag="waiting"):
    """Its keepalive."""


class Done(Said, frozen=True, tag="done"):
    """Its answer."""


Fault = Callable[[SimulatedNetwork, Member], object]


async def listen(
    network: SimulatedNetwork,
    swarm: list[Member],
    fault: Fault,
    answer_after: float,
    on_quiet: Callable[[], None] | None = None,
    joins_at: float | None = None,
) -> Said:
    """Return the answer of a peer that a fault befalls after a second."""
    (asker, asked), status = swarm, KeepaliveStatus()
    if joins_at is not None:
        network.loop.call_later(joins_at, status.set, True)

    async def serve(channel: Channel, request: Nothing) -> None:
        end = asyncio.create_task(asyncio.sleep(answer_after))
        try:
            await send_keepalives(channel, end, GRACE, Waiting, status)
            await channel.send(Done())
        finally:
            end.cancel()

    asked.rpc.serve_channel("wait", Nothing, serve)
    network.loop.call_later(1.0, fault, network, asked, context=network.context)
    try:
        async with asker.rpc.open(asked.peer.peer_id, "wait", Nothing(), 5.0) as channel:
            return await receive_answer(channel, Said, AnswerTimeouts(60.0, GRACE, GRACE, 0.1), 1 << 16, on_quiet)
    finally:
        network.mend(asked.peer)
        network.resume(asked.peer)


def slow_down(network: SimulatedNetwork, who: Member) -> None:
    """A tenth of the machine's time, ten times a second, for 20 seconds."""
    for turn in range(200):
        network.loop.call_later(0.1 * turn, network.stall, who.peer, 0.09, context=network.context)


def stop_twice(network: SimulatedNetwork, who: Member) -> None:
    """The second time for longer than the allowance, and for less than thrice the first."""
    network.stall(who.peer, 1.5)
    network.loop.call_later(3.0, network.stall, who.peer, 3.0, context=network.context)


def stop_a_while(network: SimulatedNetwork, who: Member) -> None:
    network.stall(who.peer, 5.0)


@pytest.mark.parametrize(
    ("fault", "answer_after", "joins_at", "times_quiet"),
    [
        (slow_down, 15.0, None, 0),
        (stop_twice, 9.0, None, 0),
        (stop_a_while, 9.0, None, 1),
        (stop_a_while, 9.0, 0.999, 0),  # It joined a group, and has the time of a transfer.
    ],
)
@simulated(members, 2)
async def test_a_peer_may_still_answer_whether_it_was_quiet_or_not(
    swarm: list[Member],
    network: SimulatedNetwork,
    fault: Fault,
    answer_after: float,
    joins_at: float | None,
    times_quiet: int,
) -> None:
    quiet: list[float] = []
    answer = await listen(network, swarm, fault, answer_after, lambda: quiet.append(network.loop.time()), joins_at)
    assert answer == Done()
    assert len(quiet) == times_quiet


@pytest.mark.parametrize("fault", ["cut", "stall"])
@simulated(members, 2)
async def test_a_peer_that_is_cut_off_or_stopped_is_quiet_within_little_more_than_the_grace_period(
    swarm: list[Member], network: SimulatedNetwork, fault: str
) -> None:
    with pytest.raises(DeadlineError, match="fell silent"):
        await listen(network, swarm, lambda network, who: getattr(network, fault)(who.peer), 30.0)
    assert 1.0 + GRACE < network.loop.time() < 1.0 + GRACE + 3 * keepalive_seconds(GRACE)
