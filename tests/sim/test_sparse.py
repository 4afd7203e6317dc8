"""Sparse contributions over many rounds: all hold the same bits, and what error feedback keeps back is not lost."""

from __future__ import annotations

import asyncio
from itertools import pairwise

import pytest
import torch

from p2ptrain.averaging.commit.encodings import mean_codec_of
from p2ptrain.averaging.commit.round_log import Result
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.vector.error_feedback import ErrorFeedback
from p2ptrain.codecs import PartList, get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averagers import AveragingPeer, start_averagers, stop_averagers

NUM_VALUES = 6 * 4096 + 1000
ROUNDS = 8
TOKENS = [10, 20, 30, 40]
TOPK = get_codec("topk")


class Contributor:
    """A peer that has something new to contribute in every round, and keeps what was not sent.

    Attributes:
        contributed: All that it ever had to contribute, added up.
        applied: All means that it decoded, added up.
    """

    def __init__(self, peer: AveragingPeer, tokens: int, seed: int) -> None:
        self.peer = peer
        self.tokens = tokens
        self.feedback = ErrorFeedback(NUM_VALUES, TOPK)
        self.contributed = torch.zeros(NUM_VALUES, dtype=torch.float64)
        self.applied = torch.zeros(NUM_VALUES, dtype=torch.float64)
        self._generator = torch.Generator().manual_seed(seed)
        self._waiting = torch.zeros(NUM_VALUES)

    def compute(self) -> None:
        """Make the next contribution, on top of one that waits."""
        update = torch.randn(NUM_VALUES, generator=self._generator)
        self.contributed += update
        self._waiting += update

    async def average(self) -> Result | None:
        """Contribute, apply the result, and keep what was not sent, as `p2ptrain.training.sync.synchronizer` does; None
        without one.

        Whoever was away finds that the others went on without it, and is in time for the round after.
        """
        self.peer.vector.copy_(self._waiting)
        self.feedback.add_to(self.peer.vector)
        if not await self.peer.try_round(self.tokens):
            return None
        outcome = self.peer.outcomes[-1]
        assert outcome.contributed
        self.feedback.update(outcome.encoded)
        self._waiting.zero_()
        self.applied += self.peer.mean()
        return outcome.result

    @property
    def residual(self) -> torch.Tensor:
        assert self.feedback.residual is not None
        return self.feedback.residual + self._waiting


def parts_of(result: Result, spec: AveragingSpec) -> dict[str, torch.Tensor]:
    """By contributor: its vector as the lists of a result have it."""
    body, codec = result.certificate.body, TOPK
    found = {body.members[index]: torch.zeros(NUM_VALUES) for index, *_ in body.contributors}
    for mean, (low, high) in zip(result.means, pairwise(body.bounds), strict=True):
        reader = mean_codec_of(spec, codec, body)
        assert isinstance(reader, PartList)
        for part, vector in zip(reader.split(mean, high - low)[1], found.values(), strict=True):
            codec.part(low, high).decode_into(part, vector[low:high])
    return found


def weighted(body: Body, parts: dict[str, torch.Tensor]) -> torch.Tensor:
    """SparseLoCo's mean of these contributions, weighted by tokens."""
    total = sum(tokens for _, tokens, _ in body.contributors)
    return sum(
        (parts[body.members[index]] * torch.tensor(tokens / total) for index, tokens, _ in body.contributors),
        torch.zeros(NUM_VALUES),
    )


@pytest.mark.parametrize("seed", [1, 2])
@simulated()
async def test_means_and_residuals_add_up_to_what_was_contributed(network: SimulatedNetwork, seed: int) -> None:
    spec = AveragingSpec(codec="topk", aggregation="mean", grace_seconds=1.0)
    names = [network.add_peer(f"p{i}") for i in range(len(TOKENS))]
    peers = await start_averagers(network, names, spec, NUM_VALUES)
    group = [Contributor(peer, n, 10 * seed + n) for peer, n in zip(peers, TOKENS, strict=True)]
    sent = {each.peer.peer.peer_id: torch.zeros(NUM_VALUES, dtype=torch.float64) for each in group}
    counts = []
    try:
        for number in range(ROUNDS):
            # One stays away for some rounds, and brings all of it later.
            here = [each for each in group if not (each is group[-1] and number in (2, 3, 4))]
            for each in group:
                each.compute()
            results = await asyncio.gather(*(each.average() for each in here))
            result = next(result for result in results if result is not None)
            parts = parts_of(result, spec)
            counts.append(len(parts))
            expected = weighted(result.certificate.body, parts)
            for each, other in zip(here, results, strict=True):
                if other is not None:
                    assert other.certificate.body == result.certificate.body
                    assert each.peer.mean().numpy().tobytes() == expected.numpy().tobytes()
            for peer_id, part in parts.items():
                sent[peer_id] += part
            for each in group:
                # What it sent so far and what it keeps are what it had, to the rounding of fp32.
                kept = sent[each.peer.peer.peer_id] + each.residual
                torch.testing.assert_close(kept, each.contributed, rtol=0, atol=1e-4)
        assert counts[:5] == [4, 4, 3, 3, 3]
        assert counts[-1] == 4
        assert float(group[0].residual.norm()) < float(group[0].contributed.norm())
    finally:
        await stop_averagers(peers)


@pytest.mark.parametrize("rule", ["mean", "centered_clip"])
@simulated(seed=4)
async def test_what_all_applied_and_keep_is_what_all_contributed(network: SimulatedNetwork, rule: str) -> None:
    """As seen from the model: under equal weights the means' sum lacks the mean residual and nothing else."""
    spec = AveragingSpec.model_validate(
        {"codec": "topk", "aggregation": rule, "grace_seconds": 1.0}
        | ({"center_ratio": 1000.0} if rule == "centered_clip" else {})
    )
    names = [network.add_peer(f"p{i}") for i in range(4)]
    peers = await start_averagers(network, names, spec, NUM_VALUES)
    group = [Contributor(peer, 10, 100 + i) for i, peer in enumerate(peers)]
    try:
        for _ in range(ROUNDS):
            for each in group:
                each.compute()
            await asyncio.gather(*(each.average() for each in group))
        contributed = torch.stack([each.contributed for each in group]).mean(0)
        kept = torch.stack([each.residual for each in group]).double().mean(0)
        for each in group:
            torch.testing.assert_close(each.applied + kept, contributed, rtol=0, atol=1e-4)
    finally:
        await stop_averagers(peers)


@simulated(seed=5)
async def test_holders_of_a_result_of_a_tree_hold_the_same_bits(network: SimulatedNetwork) -> None:
    """Lists on the ground, dense means of them above."""
    spec = AveragingSpec(codec="topk", aggregation="mean", grace_seconds=1.0, group_size=4)
    peers = await start_averagers(network, [network.add_peer(f"p{i}") for i in range(8)], spec, NUM_VALUES)
    group = [Contributor(peer, 10, 200 + i) for i, peer in enumerate(peers)]
    means: dict[bytes, bytes] = {}
    rounds_above = 0
    try:
        for _ in range(4):
            for each in group:
                each.compute()
            for each, result in zip(group, await asyncio.gather(*(each.average() for each in group)), strict=True):
                if result is not None:
                    mean = each.peer.mean().numpy().tobytes()
                    assert means.setdefault(result.certificate.body.body_hash, mean) == mean
                    rounds_above += result.certificate.body.level > 0
        assert rounds_above >= len(group)
    finally:
        await stop_averagers(peers)
