"""Auxiliaries lend their bandwidth to the averaging of others: what they gain, and what they cannot do."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Awaitable, Callable

import pytest
import torch

from p2ptrain.averaging.allreduce.session import Butterfly
from p2ptrain.averaging.lending.auxiliary import Lender
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.averagers import AveragingPeer, LendingPeer, start_averagers, start_lender, stop_averagers
from tests.support.sim.false_owners import falsify

NUM_VALUES = 150_000
SPEC = AveragingSpec(codec="fp32", aggregation="mean", grace_seconds=3.0, auxiliaries=2)
THIN, THICK = 2.5e5, 5e6
"""Bytes per second that trainers send with, and everybody else."""

Scenario = Callable[[SimulatedNetwork, list[AveragingPeer], list[LendingPeer]], Awaitable[None]]


def run(
    scenario: Scenario,
    *,
    trainers: int = 3,
    lenders: int = 2,
    seed: int = 1,
    spec: AveragingSpec = SPEC,
    num_values: int = NUM_VALUES,
) -> None:
    """Trainers with thin uplinks and auxiliaries with thick ones, in a scenario."""

    async def main(network: SimulatedNetwork) -> None:
        peers = [
            network.add_peer(f"t{i}", up_bytes_per_second=THIN, down_bytes_per_second=THICK) for i in range(trainers)
        ]
        started = await start_averagers(network, peers, spec, num_values)
        lent = [
            await start_lender(
                network.add_peer(f"a{i}", up_bytes_per_second=THICK, down_bytes_per_second=THICK), started
            )
            for i in range(lenders)
        ]
        try:
            await scenario(network, started, lent)
        finally:
            for each in lent:
                await each.stop()
            await stop_averagers(started)

    simulate(main, seed)


async def average(started: list[AveragingPeer], lent: list[LendingPeer], count: int = 1) -> list[Body]:
    """All trainers average so many times, having computed for a second; what each round's result was."""
    bodies = []
    for _ in range(count):
        for each in lent:
            each.introduce()
        await asyncio.sleep(1.0)
        await asyncio.gather(*(each.round_until_committed() for each in started))
        told = {each.outcomes[-1].result.certificate.body for each in started}
        assert len(told) == 1
        bodies.append(told.pop())
    return bodies


def lent_share(body: Body) -> float:
    """How much of the vector auxiliaries owned."""
    return 1 - body.bounds[len(body.members)] / body.bounds[-1]


def test_auxiliaries_own_shares_and_the_mean_is_exactly_what_it_is_without_them() -> None:
    means: list[torch.Tensor] = []

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        for index, each in enumerate(started):  # Sums of whole numbers do not depend on their order.
            each.vector = torch.arange(NUM_VALUES, dtype=torch.float32) % 97 * (index + 1)
            each.follow()
        for lender in lent:
            lender.introduce()
        await asyncio.sleep(1.0)
        tokens = (10, 10, 20)  # Weights that are exact, too.
        await asyncio.gather(*(each.round(count) for each, count in zip(started, tokens, strict=True)))
        body = started[0].outcomes[-1].result.certificate.body
        assert len(body.auxiliaries) == len(lent)
        assert lent_share(body) == (0.5 if lent else 0.0)
        means.extend(each.mean() for each in started)

    run(scenario)
    run(scenario, lenders=0)
    assert len(means) == 6
    assert all(torch.equal(mean, means[0]) for mean in means)


def test_rounds_are_faster_where_uplinks_are_thin_and_shares_follow_measured_speeds() -> None:
    medians, shares = [], []

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        bodies = await average(started, lent, 3)
        medians.append(statistics.median(seconds for each in started for seconds in each.seconds[-1:]))
        shares.append([lent_share(body) for body in bodies])

    for lenders in (2, 0):
        run(scenario, trainers=6, lenders=lenders, num_values=4 * NUM_VALUES)
    assert shares[0][0] == pytest.approx(0.5, abs=0.001)  # As long as nothing was measured.
    assert shares[0][-1] > 0.7
    assert shares[1] == [0.0] * 3
    assert medians[0] < 0.8 * medians[1], medians


@pytest.mark.parametrize("fault", ["crash", "stall", "cut"])
@pytest.mark.parametrize("phase", ["scatter", "reduce", "gather"])
def test_an_auxiliary_that_fails_costs_an_attempt_at_most_and_the_next_goes_without_it(fault: str, phase: str) -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        await average(started, lent, 3)  # Deadlines follow what was usual.
        faulty = lent[0]
        befall = {"crash": network.crash, "stall": network.stall, "cut": network.cut}[fault]
        faulty.lender.on_phase = lambda entered: befall(faulty.peer) if entered == phase else None
        (body,) = await average(started, lent)
        assert sum(1 for each in started for o in each.outcomes[-1:] if o.attempts <= 2) == len(started)
        if started[0].outcomes[-1].attempts == 2:
            assert faulty.peer.peer_id not in body.auxiliaries
        following = await average(started, [each for each in lent if each is not faulty], 2)
        assert all(faulty.peer.peer_id not in body.auxiliaries for body in following)
        assert all(len(body.contributors) == len(started) for body in following)
        if fault != "crash":
            network.mend(faulty.peer)
            network.resume(faulty.peer)

    run(scenario)


def test_an_auxiliary_that_comes_again_and_again_cannot_break_round_after_round() -> None:
    attempts: list[int] = []

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        broken = 0

        async def hang(*arguments: object) -> None:
            nonlocal broken
            broken += 1
            await asyncio.sleep(20.0)

        lent[0].lender._take_part = hang  # type: ignore[assignment]
        await average(started, lent, 12)
        attempts.extend(outcome.attempts for outcome in started[0].outcomes)
        assert broken > 1

    run(scenario, lenders=1)
    assert sum(number - 1 for number in attempts) <= len(attempts) / 3


def test_a_lying_auxiliary_is_found_where_means_are_checked_and_stays_out() -> None:
    spec = SPEC.model_copy(update={"spot_checks": 2, "codec": "int8"})

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        honest = await average(started, lent)
        assert len(honest[0].auxiliaries) == 2
        liar = lent[0]
        lie(liar.lender)
        bodies = await average(started, lent, 3)
        for body in bodies:
            assert liar.peer.peer_id not in body.auxiliaries
            assert len(body.members) == len(started)
        assert all(each.membership.is_convicted(liar.peer.peer_id) for each in started)
        assert not any(each.membership.is_convicted(lent[1].peer.peer_id) for each in started)

    run(scenario, spec=spec)


def lie(lender: Lender) -> None:
    """Falsify all of the own share's mean from now on."""

    def falsified(*arguments: object) -> Butterfly:
        butterfly = Butterfly(*arguments)  # type: ignore[arg-type]
        falsify(None)(butterfly)
        return butterfly

    lender.new_butterfly = falsified


def test_what_an_auxiliary_s_encoding_loses_comes_back_with_its_next_means() -> None:
    spec = SPEC.model_copy(update={"codec": "int4"})

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        total, exact = torch.zeros(NUM_VALUES), torch.zeros(NUM_VALUES)
        rounds = 6
        for _ in range(rounds):
            (body,) = await average(started, lent)
            total += started[0].mean()
            encoded = [codec_of(spec, each.vector) for each in started]
            exact += sum(encoded, torch.zeros(NUM_VALUES)) / len(started)
        low = body.bounds[len(body.members)]
        # Members' parts are the same each time, so without the loss that is kept all means would be off by the same.
        off = (total - exact)[low:].abs().mean() / rounds
        single = (codec_of(spec, exact / rounds) - exact / rounds)[low:].abs().mean()
        assert off < 0.4 * single, (off, single)
        assert lent[0].lender.rounds_helped == rounds

    run(scenario, spec=spec, lenders=1)


def codec_of(spec: AveragingSpec, vector: torch.Tensor) -> torch.Tensor:
    """A vector as it arrives."""
    codec = get_codec(spec.codec)
    out = torch.empty_like(vector)
    codec.decode_into(codec.encode(vector), out)
    return out


def test_a_swarm_without_auxiliaries_in_its_manifest_takes_none() -> None:
    spec = SPEC.model_copy(update={"auxiliaries": 0})

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        bodies = await average(started, lent, 2)
        assert all(not body.auxiliaries for body in bodies)
        assert all(each.lender.rounds_helped == 0 for each in lent)

    run(scenario, spec=spec)


def test_two_trainers_do_without_auxiliaries() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer], lent: list[LendingPeer]) -> None:
        bodies = await average(started, lent, 2)
        assert all(not body.auxiliaries for body in bodies)

    run(scenario, trainers=2)
