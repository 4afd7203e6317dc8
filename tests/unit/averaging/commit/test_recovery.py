"""Ending a broken attempt: completed from any signer, or given up for good."""

import asyncio
from collections.abc import AsyncIterator, Collection
from contextlib import asynccontextmanager

import pytest
import torch

from p2ptrain.averaging.commit.attempt import Standing
from p2ptrain.averaging.commit.recovery import STANDING, AskStanding, StandingReply, can_complete, may_renounce
from p2ptrain.averaging.commit.round_log import MAX_ATTEMPTS_KEPT
from p2ptrain.averaging.protocol.certificate import Certificate, vote
from p2ptrain.averaging.timing.deadlines import straggler_seconds
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averaging import NUM_VALUES, SPEC, RosterMember, make_roster, stop
from tests.support.sim.peers import Member, members


def vectors(count: int) -> list[torch.Tensor]:
    return [torch.full((NUM_VALUES,), float(index)) for index in range(count)]


async def complete(roster: list[RosterMember]) -> None:
    """Run the attempt, so that everybody holds everything."""
    await asyncio.gather(*(each.run() for each in roster))
    await stop(roster, linger=True)


@asynccontextmanager
async def completed(network: SimulatedNetwork) -> AsyncIterator[list[RosterMember]]:
    """Three members that ran an attempt."""
    async with members(network, 3) as swarm:
        roster = make_roster(swarm, vectors(3), [10, 10, 10])
        await complete(roster)
        yield roster


def forget(*those: RosterMember, proofs_only: bool = False) -> None:
    """Put members back to before the end of the attempt."""
    for member in those:
        attempt = member.attempt
        attempt.proofs.clear()
        if proofs_only:
            assert attempt.body is not None
            attempt.proofs[member.member.rpc.peer_id] = member.member.peer.signer.sign(vote(attempt.body.body_hash))
        else:
            attempt.body, attempt.contributors = None, None
            attempt.means = [None] * len(attempt.means)


async def settle(
    *those: RosterMember, elapsed: float = 0.0, silent: Collection[RosterMember] = ()
) -> list[Certificate | None]:
    """What members come to that settle at once; they know who is silent."""
    names = [each.member.rpc.peer_id for each in silent]
    return await asyncio.gather(*(each.recovery.recover(each.attempt, elapsed, names) for each in those))


@simulated(completed, seed=1)
async def test_a_member_that_missed_the_end_takes_it_over_from_a_signer(roster: list[RosterMember]) -> None:
    means = list(roster[1].attempt.means)
    forget(roster[0])
    (certificate,) = await settle(roster[0])
    assert certificate is not None
    assert certificate.body == roster[1].attempt.body
    assert roster[0].attempt.means == means


@simulated(completed, seed=1, model=LinkModel(are_dials_free=True))
async def test_a_far_signer_is_asked_for_as_long_as_its_answers_take(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    own = roster[0].member
    for each in roster[1:]:
        network.set_latency(own.peer, each.member.peer, 0.6)
        own.rpc.dial_seconds[each.member.rpc.peer_id] = 1.2
    forget(roster[0])
    (certificate,) = await settle(roster[0], elapsed=5.0)
    assert certificate is not None
    assert certificate.body == roster[1].attempt.body


@simulated(completed, seed=1, model=LinkModel(are_dials_free=True))
async def test_far_members_of_a_short_attempt_have_the_time_of_their_answers(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    own = roster[0].member
    for each in roster[1:]:
        network.set_latency(own.peer, each.member.peer, 0.6)
        own.rpc.dial_seconds[each.member.rpc.peer_id] = 1.2
    forget(roster[0], proofs_only=True)
    (certificate,) = await settle(roster[0])
    assert certificate is not None


@simulated(completed, seed=2)
async def test_members_that_hold_all_but_each_other_s_signatures_exchange_them(roster: list[RosterMember]) -> None:
    forget(*roster, proofs_only=True)
    certificates = await settle(*roster)
    assert all(certificates)
    assert len({each and each.body for each in certificates}) == 1


@simulated(completed, seed=3)
async def test_an_attempt_that_others_never_end_is_given_up_at_the_deadline(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    forget(roster[0])

    async def run_on(peer: str, request: AskStanding) -> StandingReply:
        return StandingReply(Standing.RUNNING)

    for each in roster[1:]:
        each.member.rpc.serve(STANDING, AskStanding, run_on)
    started = network.loop.time()
    assert await settle(roster[0], elapsed=10.0) == [None]
    assert network.loop.time() - started == pytest.approx(straggler_seconds(10.0, SPEC.grace_seconds), abs=0.4)


@simulated(completed, seed=4)
async def test_who_gave_up_hands_out_no_signature_to_one_that_comes_late(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    """Or a peer that was away could complete, alone, a round that the others have left behind."""
    late, other, gone = roster
    forget(*roster, proofs_only=True)
    network.cut(late.member.peer)
    network.crash(gone.member.peer)
    body = other.attempt.body
    assert body is not None
    assert await settle(other) == [None]
    assert other.history._attempt_of(body.body_hash) is None
    network.mend(late.member.peer)
    assert await settle(late) == [None]
    assert other.member.rpc.peer_id not in late.attempt.proofs


@simulated(completed, seed=6)
async def test_a_result_that_all_others_gave_up_is_given_up_though_a_majority_signed_it(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    """They signed it, went on without the last signature, and came to another result: this peer stood still."""
    late, *others = roster
    forget(*others, proofs_only=True)
    network.cut(late.member.peer)
    for each in others:
        each.attempt.proofs.clear()
        assert await settle(each) == [None]
    network.mend(late.member.peer)
    assert late.attempt.certificate() is not None
    assert await settle(late) == [None]


@simulated(completed, seed=7)
async def test_a_complete_result_is_kept_while_anybody_knows_it_or_nobody_answers(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    late, knows, forgot = roster
    forgot.recovery._abandon(forgot.attempt)
    assert await settle(late) != [None]
    for each in (knows, forgot):
        network.crash(each.member.peer)
    assert await settle(late) != [None]


@simulated(members, 3, seed=5)
async def test_a_result_of_another_roster_is_not_taken_over(swarm: list[Member]) -> None:
    roster = make_roster(swarm, vectors(3), [10, 10, 10])
    other = make_roster(swarm, vectors(3), [10, 10, 50])
    await complete(other)
    wrong, proofs = other[1].attempt.body, tuple(sorted(other[1].attempt.proofs.items()))
    assert wrong is not None

    async def lie(peer: str, request: AskStanding) -> StandingReply:
        return StandingReply(Standing.SIGNED, wrong.to_bytes(), proofs)

    for each in roster[1:]:
        each.member.rpc.serve(STANDING, AskStanding, lie)
    assert await settle(roster[0]) == [None]
    assert roster[0].attempt.body is None
    assert roster[0].attempt.proofs == {}


@pytest.mark.parametrize(
    ("members", "standings", "possible"),
    [
        (3, ["open", "open"], True),
        (3, ["renounced", "open"], True),
        (3, ["renounced", "renounced"], False),
        (3, ["renounced", "signed"], True),  # The third may hold a certificate.
        (3, ["signed", "withholds"], False),
        (4, ["renounced", "renounced"], False),
        (5, ["renounced", "renounced", "lost", "unknown"], True),
        (5, ["renounced", "renounced", "renounced"], False),
        (2, ["renounced"], False),
    ],
)
def test_a_certificate_is_excluded_once_the_rest_is_no_majority(
    members: int, standings: list[str], possible: bool
) -> None:
    majority = members // 2 + 1
    assert can_complete(members, majority, [Standing(standing) for standing in standings]) == possible


@pytest.mark.parametrize("standing", ["running", "fetching", "signed"])
def test_nobody_renounces_while_another_member_may_come_to_a_result(standing: str) -> None:
    others = {"a": Standing.OPEN, "b": Standing(standing)}
    assert not may_renounce(others, [])
    assert may_renounce(others, ["b"])


@simulated(completed, seed=8)
async def test_members_that_hold_no_result_settle_in_round_trips_when_another_one_is_known_to_be_silent(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    frozen, *others = roster
    forget(*roster)
    network.stall(frozen.member.peer)
    started = network.loop.time()
    assert await settle(*others, elapsed=5.0, silent=[frozen]) == [None, None]
    assert network.loop.time() - started < 0.4
    assert {each.attempt.left_as for each in others} == {Standing.RENOUNCED}


@simulated(completed, seed=10)
async def test_who_renounced_signs_no_more_though_a_silent_member_comes_back_with_a_result(
    roster: list[RosterMember], network: SimulatedNetwork
) -> None:
    frozen, *others = roster
    forget(frozen, proofs_only=True)
    forget(*others)
    network.stall(frozen.member.peer)
    await settle(*others, silent=[frozen])
    network.resume(frozen.member.peer)
    assert await settle(frozen) == [None]
    assert all(each.attempt.proofs == {} for each in roster)


@simulated(members, 2, seed=6)
async def test_only_a_few_attempts_are_kept(swarm: list[Member]) -> None:
    first = make_roster(swarm, vectors(2), [10, 10])[0]
    for tokens in range(20, 30):
        first.history.remember(make_roster(swarm, vectors(2), [tokens, 10])[0].attempt)
    assert len(first.history.attempts) == MAX_ATTEMPTS_KEPT
