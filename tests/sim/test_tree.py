"""Swarms larger than a group: cells, delegates, and how everybody comes to the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from p2ptrain.averaging.attempt import AttemptFailedError
from p2ptrain.averaging.cells import Cells
from p2ptrain.averaging.encodings import mean_codec_of
from p2ptrain.averaging.feedback import ErrorFeedback
from p2ptrain.averaging.head import Head
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.averagers import AveragingPeer, start_averagers, stop_averagers
from tests.support.simulation import until

NUM_VALUES = 512
SPEC = AveragingSpec(codec="fp32", aggregation="mean", group_size=8, grace_seconds=1.0)

Scenario = Callable[[SimulatedNetwork, list[AveragingPeer]], Awaitable[None]]


def run(num_peers: int, scenario: Scenario, seed: int = 1, spec: AveragingSpec = SPEC) -> None:
    async def main(network: SimulatedNetwork) -> None:
        peers = [network.add_peer(f"p{i}") for i in range(num_peers)]
        started = await start_averagers(network, peers, spec, NUM_VALUES)
        try:
            await scenario(network, started)
        finally:
            await stop_averagers(started)

    simulate(main, seed=seed)


async def grow(started: list[AveragingPeer]) -> None:
    """The first round, in which a group can only count those who do not fit in it."""
    await asyncio.gather(*(each.try_round() for each in started))
    assert max(len(each.outcomes) for each in started) == 1


def exact_mean(started: list[AveragingPeer]) -> torch.Tensor:
    return torch.stack([each.vector.double() for each in started]).mean(0).float()


@pytest.mark.parametrize(("num_peers", "seed"), [(12, 1), (12, 2), (24, 3), (64, 4)])
def test_all_peers_come_to_the_exact_mean_of_all(num_peers: int, seed: int) -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        for _ in range(2):
            await asyncio.gather(*(each.round() for each in started))
            bodies = {each.outcomes[-1].result.certificate.body.body_hash for each in started}
            assert len(bodies) == 1
            body = started[0].outcomes[-1].result.certificate.body
            assert body.levels == Cells(SPEC.group_size).num_levels(num_peers) > 1
            contributed = [each for each in started if each.outcomes[-1].contributed]
            assert len(contributed) >= 0.9 * num_peers, "a cell that overflows leaves some out, seldom"
            assert body.tokens == 10 * len(contributed)
            torch.testing.assert_close(started[0].mean(), exact_mean(contributed), rtol=1e-5, atol=1e-6)
            assert all(torch.equal(each.mean(), started[0].mean()) for each in started)
            places = sorted(each.outcomes[-1].place for each in started)
            assert places == [(rank, num_peers) for rank in range(num_peers)]

    run(num_peers, scenario, seed)


def hit_first_delegate(started: list[AveragingPeer], fault: Callable[[AveragingPeer], object]) -> list[AveragingPeer]:
    """Let ``fault`` befall the first peer that is about to stand for its cell; the list then holds it."""
    hit: list[AveragingPeer] = []

    def watch(each: AveragingPeer) -> None:
        represent = each.averager._represent

        async def represent_or_fail(*arguments: Any) -> Any:
            if not hit:
                hit.append(each)
                fault(each)
            return await represent(*arguments)

        each.averager._represent = represent_or_fail  # type: ignore[method-assign, assignment]

    for each in started:
        watch(each)
    return hit


def test_when_a_delegate_fails_the_next_one_brings_its_cell_s_result() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)

        def fail(who: AveragingPeer) -> None:
            raise AttemptFailedError("something is wrong here")

        hit = hit_first_delegate(started, fail)
        await asyncio.gather(*(each.round() for each in started))
        assert hit
        assert len({each.outcomes[-1].result.certificate.body.body_hash for each in started}) == 1
        assert all(each.outcomes[-1].contributed for each in started)
        assert started[0].outcomes[-1].result.certificate.body.tokens == 10 * len(started)
        assert torch.equal(hit[0].mean(), started[0].mean())

    run(12, scenario, seed=2)


def test_a_delegate_that_falls_silent_costs_the_other_cells_no_round() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        hit = hit_first_delegate(started, lambda who: network.cut(who.peer))
        tasks = {each: asyncio.create_task(each.try_round()) for each in started}
        await until(lambda: bool(hit), 60)
        silent = hit[0]
        cells = Cells(SPEC.group_size)
        key = cells.key_of(silent.averager.head, silent.peer.peer_id)
        elsewhere = [each for each in started if not cells.includes(key, each.peer.peer_id)]
        assert all(await asyncio.gather(*(tasks[each] for each in elsewhere)))
        assert len({each.outcomes[-1].result.certificate.body.body_hash for each in elsewhere}) == 1
        network.mend(silent.peer)
        await asyncio.gather(*tasks.values())
        for _ in range(3):  # Whoever missed the round comes back.
            await asyncio.gather(*(each.try_round() for each in started))
        last = [each.outcomes[-1] for each in started]
        assert len({outcome.result.certificate.body.body_hash for outcome in last}) == 1
        assert all(outcome.contributed for outcome in last)

    run(12, scenario, seed=2)


def test_a_delegate_that_claims_more_than_its_cell_has_is_left_out() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        liars: list[str] = []

        def claim_more(who: AveragingPeer) -> None:
            ticket = who.averager._ticket

            def exaggerated(head: Head, wish: Any) -> Any:
                if wish.level:
                    liars.append(who.peer.peer_id)
                    wish = replace(wish, tokens=wish.tokens * 50)
                return ticket(head, wish)

            who.averager._ticket = exaggerated  # type: ignore[method-assign]

        hit = hit_first_delegate(started, claim_more)
        results = await asyncio.gather(*(each.try_round() for each in started))
        assert hit
        assert liars
        committed = [each for each, done in zip(started, results, strict=True) if done and each not in hit]
        assert committed
        for each in committed:
            body = each.outcomes[-1].result.certificate.body
            assert hit[0].peer.peer_id not in [body.members[index] for index, *_ in body.contributors]
            assert body.tokens <= 10 * len(started)

    run(12, scenario, seed=2)


def test_false_pieces_of_a_result_are_fetched_elsewhere_and_counted_against_who_sent_them() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        evil = started[3]

        async def send_other_bytes(channel: Channel, request: dict[str, Any]) -> None:
            pieces = evil.averager._descent._kept.get(request["body"])
            if pieces is not None:
                for piece in request["pieces"]:
                    await channel.send_bytes(bytes(len(pieces.view(piece))))
            await channel.send({"done": True})

        evil.rpc.serve_channel("descent.pieces", send_other_bytes)
        for _ in range(4):
            await asyncio.gather(*(each.try_round() for each in started))
        honest = [each for each in started if each is not evil]
        front = max(each.outcomes[-1].result.certificate.body.round for each in honest)
        last = [each.outcomes[-1].result.certificate.body for each in honest]
        assert sum(body.round == front for body in last) >= len(honest) - 2
        assert len({body.body_hash for body in last if body.round == front}) == 1
        refused = [peer for each in honest for peer, _ in each.rpc.refusals]
        assert set(refused) <= {evil.peer.peer_id}

    run(12, scenario, seed=2, spec=SPEC.model_copy(update={"codec": "fp32"}))


def test_a_swarm_that_grows_beyond_a_group_and_shrinks_again_goes_on() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        levels = []
        for present in (6, 6, 16, 16, 16, 5, 5, 5):
            there = started[:present]
            for each in started:
                each.others = [other for other in there if other is not each]
            await asyncio.gather(*(each.try_round() for each in there))
            levels.append(there[0].outcomes[-1].result.certificate.body.levels)
            for each in there:
                for gone in started[present:]:
                    each.membership.suspect(gone.peer.peer_id, "left")
        assert levels[0] == 1
        assert max(levels) > 1
        assert levels[-1] == 1
        body = started[0].outcomes[-1].result.certificate.body
        assert sum(body.peers) == 5

    run(16, scenario, seed=3)


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_what_codecs_drop_on_all_levels_comes_again(codec: str) -> None:
    """Summed over rounds, what was applied and what the peers keep for later is what they contributed."""
    spec = SPEC.model_copy(update={"codec": codec, "group_size": 4})
    num_rounds, num_values = 6, 2 * 4096

    async def main(network: SimulatedNetwork) -> None:
        peers = [network.add_peer(f"p{i}") for i in range(9)]
        started = await start_averagers(network, peers, spec, num_values)
        feedbacks = [ErrorFeedback(num_values, get_codec(codec)) for _ in started]
        wanted, got = torch.zeros(num_values, dtype=torch.float64), torch.zeros(num_values, dtype=torch.float64)
        updates = [torch.randn(num_values, generator=torch.Generator().manual_seed(i)) for i in range(len(started))]
        counted = 0
        for _ in range(num_rounds):
            for each, feedback, update in zip(started, feedbacks, updates, strict=True):
                each.vector = update.clone()
                feedback.add_to(each.vector)
            await asyncio.gather(*(each.try_round() for each in started))
            if not all(each.outcomes and each.outcomes[-1].contributed for each in started):
                feedback_of_round = [each.outcomes[-1] if each.outcomes else None for each in started]
                assert any(outcome is None or not outcome.contributed for outcome in feedback_of_round)
                for feedback in feedbacks:
                    feedback.reset()
                wanted.zero_()
                got.zero_()
                counted = 0
                continue
            counted += 1
            wanted += torch.stack(updates).double().mean(0)
            got += decode(started[0], spec, num_values)
            for each, feedback in zip(started, feedbacks, strict=True):
                feedback.update(each.outcomes[-1].encoded)
        assert counted >= 2
        kept = torch.stack([f.residual.double() for f in feedbacks if f.residual is not None]).mean(0)
        torch.testing.assert_close(wanted - got, kept, rtol=0, atol=1e-3)
        await stop_averagers(started)

    simulate(main, seed=4)


def decode(each: AveragingPeer, spec: AveragingSpec, num_values: int) -> torch.Tensor:
    """The last round's mean."""
    result, out = each.outcomes[-1].result, torch.zeros(num_values)
    body = result.certificate.body
    codec = mean_codec_of(spec, get_codec(spec.codec), body)
    for mean, (low, high) in zip(result.means, pairwise(body.bounds), strict=True):
        if mean:
            codec.part(low, high).decode_into(mean, out[low:high])
    return out.double()
