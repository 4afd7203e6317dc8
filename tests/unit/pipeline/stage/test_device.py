"""Passes on one device: one at a time, and what frees memory first."""

import asyncio
import itertools
import random
from functools import partial

import pytest

from p2ptrain.pipeline.stage.device import Device, Pass
from p2ptrain.runtime import Runtime
from tests.support.coroutines import on_loop


class _SlowDevice(Device):
    """Lets other coroutines run during a pass, and counts how many passes run."""

    def __init__(self) -> None:
        super().__init__(Runtime(random.Random(1)))
        self.running = self.most_running = 0

    async def _compute(self, kind, work):  # type: ignore[no-untyped-def]
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0.001)
        self.running -= 1
        return await super()._compute(kind, work)


@pytest.mark.parametrize("asked", list(itertools.permutations([Pass.FORWARD, Pass.BACKWARD, Pass.UNDO])))
@on_loop
async def test_backward_goes_before_forward_undoing_before_both_and_equals_in_order(asked: tuple[Pass, ...]) -> None:
    device, done = _SlowDevice(), list[tuple[Pass, int]]()
    order = [(Pass.FORWARD, 0), *((kind, number) for number in (1, 2) for kind in asked)]
    await asyncio.gather(*(device.run(each[0], partial(done.append, each)) for each in order))
    ranks = [Pass.UNDO, Pass.BACKWARD, Pass.FORWARD]
    assert done == [order[0], *((kind, number) for kind in ranks for number in (1, 2))], "the first one runs at once"
    assert device.most_running == 1
