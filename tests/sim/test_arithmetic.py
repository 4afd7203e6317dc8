"""The simulation's arithmetic beside the messages of real members: the same bits."""

import random

import pytest
import torch

from p2ptrain.averaging.allreduce.bandwidth import share_weights, split_shares
from p2ptrain.averaging.arithmetic import Update, average_group, average_round, draw_groups
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.codecs import get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime
from tests.support.coroutines import simulated
from tests.support.sim.averaging import decoded, make_roster, run_all
from tests.support.sim.peers import Member, members

NUM_VALUES = 20_000
TOKENS = [3, 100, 7, 12, 40]


def _vectors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(NUM_VALUES, generator=generator) * (1 + 3 * (index == 1)) for index in range(count)]


@pytest.mark.parametrize("rule", ["mean", "norm_clip", "centered_clip", "median"])
@pytest.mark.parametrize("codec", ["fp32", "int8", "int4", "topk"])
@simulated(members, 5, seed=2)
async def test_a_group_has_the_bits_of_a_real_one(swarm: list[Member], codec: str, rule: str) -> None:
    if codec == "topk" and rule == "median":
        pytest.skip("the manifest refuses it")
    spec = AveragingSpec.model_validate({"codec": codec, "aggregation": rule, "round_seconds": 10.0})
    weights = share_weights([1.0] * len(swarm))
    bounds = (0, *(high for _, high in split_shares(NUM_VALUES, weights, get_codec(codec).block_size)))
    vectors = _vectors(len(swarm))
    roster = make_roster(swarm, vectors, TOKENS, codec, bounds, spec)
    assert all(isinstance(each, Certificate) for each in await run_all(roster))
    peers = [member.rpc.peer_id for member in swarm]
    updates = [Update(*each) for each in zip(peers, vectors, TOKENS, strict=True)]
    found = await average_group(Runtime(random.Random(1)), spec, get_codec(codec), updates)
    assert torch.equal(found.vector, decoded(roster[0]))
    for each in roster:
        (encoded,) = found.encoded[each.member.rpc.peer_id]
        assert encoded.bounds == each.attempt.bounds
        assert {owner: bytes(part) for owner, part in encoded.sent_parts.items()} == {
            owner: bytes(part) for owner, part in each.result.sent_parts.items()
        }
        own = each.attempt.means[encoded.own_index]
        assert bytes(encoded.own_mean) == bytes(own or b"")


@pytest.mark.parametrize("rule", ["mean", "median"])
@simulated(members, 0, seed=3)
async def test_small_tensors_keep_their_own_codec(swarm: list[Member], rule: str) -> None:
    codec, vectors = by_size(get_codec("int4"), get_codec("bf16"), [15_000, 200, 4_800], 1000), _vectors(5)
    updates = [Update(*each) for each in zip("abcde", vectors, TOKENS, strict=True)]
    found = await average_group(Runtime(random.Random(1)), AveragingSpec(aggregation=rule), codec, updates)
    weights, stack = torch.tensor(TOKENS), torch.stack(vectors)
    exact = stack.median(0).values if rule == "median" else (stack * weights[:, None]).sum(0) / weights.sum()
    assert torch.dist(found.vector[15_000:15_200], exact[15_000:15_200]) < 0.01 * exact[15_000:15_200].norm()
    assert torch.dist(found.vector, exact) > 0.02 * exact.norm()


@simulated(members, 0, seed=3)
async def test_a_tree_averages_all_that_have_a_place(swarm: list[Member]) -> None:
    spec = AveragingSpec(codec="fp32", aggregation="mean", group_size=8, max_weight_ratio=1e9)
    peers = [f"peer{index:03d}" for index in range(60)]
    groups = draw_groups(peers, spec.group_size, 4, bytes(32))
    placed = {peer for group in groups.values() for peer in group}
    assert len(groups) > 8
    assert max(len(group) for group in groups.values()) <= spec.group_size
    generator = torch.Generator().manual_seed(6)
    updates = {peer: Update(peer, torch.randn(500, generator=generator), 1 + index) for index, peer in enumerate(peers)}
    found = await average_round(Runtime(random.Random(1)), spec, get_codec("fp32"), groups, updates)
    total = sum(updates[peer].tokens for peer in placed)
    exact = torch.stack([updates[peer].vector.double() * updates[peer].tokens for peer in placed]).sum(0) / total
    assert found.tokens == total
    assert found.encoded.keys() == placed
    assert torch.allclose(found.vector.double(), exact, atol=1e-6)
    delegates = [peer for peer, levels in found.encoded.items() if len(levels) > 1]
    assert len(delegates) == len(groups)
