"""What a stage adds to its sum of gradients, and what leaves it again."""

import random

import pytest
import torch

from p2ptrain.pipeline.messages import BadMicrobatchError, Hop, MicrobatchId, pack
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device
from p2ptrain.pipeline.stage.gradients import StageGradients
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.runtime import Runtime
from tests.support.coroutines import on_loop
from tests.support.sim.pipelines import make_manifest, sample
from tests.support.sim.stage_hosts import stage_of


@on_loop
async def test_a_gradient_that_cannot_be_encoded_adds_nothing() -> None:
    """The stage's own gradients are finite, and the one that it would send back is too large for fp16."""
    plan = PipelinePlan(make_manifest(3, codec="fp16"))
    tokens = sample(plan.manifest, 1)
    inputs = StageCompute(stage_of(plan, 0)).forward(tokens[:, :-1])
    worker = StageWorker(plan, 1, StageCompute(stage_of(plan, 1)), Device(Runtime(random.Random(1))))
    gradients = StageGradients(worker)
    hop = Hop(
        MicrobatchId("trainer", 0, 1), 1, 2, tokens[:, 1:].numel(), (), pack(inputs, "fp32"),
        pack(tokens[:, 1:], "fp32"),
    )  # fmt: skip
    ordinary = pack(torch.full_like(inputs, 0.01), "fp32")
    first = (await gradients.add(hop, ordinary)).result
    assert first.gradient is not None
    before = gradients.total.values.clone()
    assert before.abs().max() > 0
    one = torch.zeros_like(inputs)
    one[0, 0, 0] = 1e5
    with pytest.raises(BadMicrobatchError):
        await gradients.add(hop, pack(one, "fp32"))
    await gradients.until_taken_out()
    assert torch.equal(gradients.total.values, before)
    gradients.take_out(first.added)
    gradients.take_out(first.added)
    await gradients.until_taken_out()
    assert not gradients.total.values.any(), "it is taken out once"
