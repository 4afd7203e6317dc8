"""What a stage adds to its sum of gradients, and what leaves it again."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest
import torch

from p2ptrain.codecs.base import CodecError
from p2ptrain.pipeline.messages import Hop, MicrobatchId, pack
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device
from p2ptrain.pipeline.stage.passes import Passes
from p2ptrain.runtime import Runtime
from tests.support.sim.pipelines import sample
from tests.support.sim.stage_hosts import plan_of, stage_of

NUM_STAGES = 3


def test_a_gradient_that_cannot_be_encoded_leaves_the_sum() -> None:
    """The stage's own gradients are finite, and the one that it would send back is too large for fp16."""

    async def main() -> None:
        plan = plan_of(NUM_STAGES)
        tokens = sample(plan.manifest, 1)
        inputs = StageCompute(stage_of(plan, 0)).forward(tokens[:, :-1])
        compute = StageCompute(stage_of(plan, 1))
        passes = Passes(1, NUM_STAGES, compute, Device(Runtime(random.Random(1))), "fp16", 0, plan.num_classes)
        hop = Hop(
            MicrobatchId("trainer", 0, 1), 1, 2, tokens[:, 1:].numel(), (), pack(inputs, "fp32"),
            pack(tokens[:, 1:], "fp32"),
        )  # fmt: skip
        ordinary = pack(torch.full_like(inputs, 0.01), "fp32")
        assert (await passes.add_backward(hop, inputs, ordinary, 0.0)).gradient is not None
        before = compute.sum.clone()
        assert before.abs().max() > 0
        one = torch.zeros_like(inputs)
        one[0, 0, 0] = 1e5
        huge = pack(one, "fp32")
        with pytest.raises(CodecError):
            await passes.add_backward(replace(hop, id=MicrobatchId("trainer", 0, 2)), inputs, huge, 0.0)
        await passes.until_taken_out()
        torch.testing.assert_close(compute.sum, before, rtol=0, atol=0.5)  # The huge one added 1e5.

    asyncio.run(main())
