"""Ending a broken attempt: completed from any signer, or given up for good."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
import torch

from p2ptrain.averaging.commit.attempt import Standing
from p2ptrain.averaging.commit.recovery import STANDING, can_complete, may_renounce
from p2ptrain.averaging.commit.round_log import MAX_ATTEMPTS_KEPT
from p2ptrain.averaging.protocol.certificate import vote
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.averaging import NUM_VALUES, RosterMember, make_roster, stop
from tests.support.sim.peers import members


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


def forget(member: RosterMember, *, proofs_only: bool = False) -> None:
    """Put a member back to before the end of the attempt."""
    attempt = member.attempt
    attempt.proofs.clear()
    if proofs_only:
        assert attempt.body is not None
        attempt.proofs[member.member.rpc.peer_id] = member.member.peer.signer.sign(vote(attempt.body.body_hash))
    else:
        attempt.body, attempt.contributors = None, None
        attempt.means = [None] * len(attempt.means)


def vectors(count: int) -> list[torch.Tensor]:
    return [torch.full((NUM_VALUES,), float(index)) for index in range(count)]


def test_a_member_that_missed_the_end_takes_it_over_from_a_signer() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            means = list(roster[1].attempt.means)
            forget(roster[0])
            certificate = await roster[0].recovery.recover(roster[0].attempt)
            assert certificate is not None
            assert certificate.body == roster[1].attempt.body
            assert roster[0].attempt.means == means

    simulate(main, seed=1)


def test_members_that_hold_all_but_each_other_s_signatures_exchange_them() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            for each in roster:
                forget(each, proofs_only=True)
            certificates = await asyncio.gather(*(each.recovery.recover(each.attempt) for each in roster))
            assert len({certificate.body for certificate in certificates if certificate is not None}) == 1
            assert all(certificates)

    simulate(main, seed=2)


def test_without_a_majority_the_attempt_is_given_up_within_the_deadline() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            forget(roster[0], proofs_only=True)
            for each in roster[1:]:
                network.crash(each.member.peer)
            started = network.loop.time()
            assert await roster[0].recovery.recover(roster[0].attempt) is None
            assert network.loop.time() - started <= 4

    simulate(main, seed=3)


def test_who_gave_up_hands_out_no_signature_to_one_that_comes_late() -> None:
    """Or a peer that was away could complete, alone, a round that the others have left behind."""

    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            for each in roster:
                forget(each, proofs_only=True)
            network.cut(roster[0].member.peer)
            network.crash(roster[2].member.peer)
            body = roster[1].attempt.body
            assert body is not None
            assert await roster[1].recovery.recover(roster[1].attempt) is None
            assert roster[1].history._attempt_of(body.body_hash) is None
            network.mend(roster[0].member.peer)
            assert await roster[0].recovery.recover(roster[0].attempt) is None
            assert roster[1].member.rpc.peer_id not in roster[0].attempt.proofs

    simulate(main, seed=4)


def test_a_result_that_all_others_gave_up_is_given_up_though_a_majority_signed_it() -> None:
    """They signed it, went on without the last signature, and came to another result: this peer stood still."""

    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            late, *others = roster
            for each in others:
                forget(each, proofs_only=True)
            network.cut(late.member.peer)
            for each in others:
                each.attempt.proofs.clear()
                assert await each.recovery.recover(each.attempt) is None
            network.mend(late.member.peer)
            assert late.attempt.certificate() is not None
            assert await late.recovery.recover(late.attempt) is None

    simulate(main, seed=6)


def test_a_complete_result_is_kept_while_anybody_knows_it_or_nobody_answers() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            late, knows, forgot = roster
            forgot.recovery._abandon(forgot.attempt)
            assert await late.recovery.recover(late.attempt) is not None
            for each in (knows, forgot):
                network.crash(each.member.peer)
            assert await late.recovery.recover(late.attempt) is not None

    simulate(main, seed=7)


def test_a_result_of_another_roster_is_not_taken_over() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 3) as swarm:
            roster = make_roster(swarm, vectors(3), [10, 10, 10])
            other = make_roster(swarm, vectors(3), [10, 10, 50])
            await complete(other)
            wrong = other[1].attempt.body
            assert wrong is not None

            async def lie(peer: str, request: object) -> dict[str, object]:
                return {"standing": "signed", "body": wrong.to_bytes(), "proofs": []}

            for each in roster[1:]:
                each.member.rpc.serve(STANDING, dict, lie)
            assert await roster[0].recovery.recover(roster[0].attempt) is None
            assert roster[0].attempt.body is None
            assert roster[0].attempt.proofs == {}

    simulate(main, seed=5)


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


def test_members_that_hold_no_result_settle_in_round_trips_when_another_one_is_known_to_be_silent() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            for each in roster:
                forget(each)
            frozen, *others = roster
            network.stall(frozen.member.peer)
            started, silent = network.loop.time(), [frozen.member.rpc.peer_id]
            settling = [each.recovery.recover(each.attempt, 5.0, silent) for each in others]
            assert await asyncio.gather(*settling) == [None, None]
            assert network.loop.time() - started < 1.0
            assert {each.attempt.left_as for each in others} == {Standing.RENOUNCED}

    simulate(main, seed=8)


def test_a_signer_s_result_is_completed_by_the_others_while_one_is_silent() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            frozen, signer, late = roster
            forget(signer, proofs_only=True)
            forget(late)
            network.stall(frozen.member.peer)
            silent = [frozen.member.rpc.peer_id]
            certificates = await asyncio.gather(
                *(each.recovery.recover(each.attempt, 0.0, silent) for each in (late, signer))
            )
            assert len({certificate.body for certificate in certificates if certificate is not None}) == 1
            assert all(certificates)

    simulate(main, seed=9)


def test_who_renounced_signs_no_more_though_a_silent_member_comes_back_with_a_result() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with completed(network) as roster:
            frozen, *others = roster
            forget(frozen, proofs_only=True)
            for each in others:
                forget(each)
            network.stall(frozen.member.peer)
            silent = [frozen.member.rpc.peer_id]
            await asyncio.gather(*(each.recovery.recover(each.attempt, 0.0, silent) for each in others))
            network.resume(frozen.member.peer)
            assert await frozen.recovery.recover(frozen.attempt) is None
            assert all(each.attempt.proofs == {} for each in roster)

    simulate(main, seed=10)


def test_only_a_few_attempts_are_kept() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as swarm:
            first = make_roster(swarm, vectors(2), [10, 10])[0]
            for tokens in range(20, 30):
                first.history.remember(make_roster(swarm, vectors(2), [tokens, 10])[0].attempt)
            assert len(first.history.attempts) == MAX_ATTEMPTS_KEPT

    simulate(main, seed=6)
