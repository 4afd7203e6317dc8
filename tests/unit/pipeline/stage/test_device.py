"""Passes on one device: one at a time, and what frees memory first."""

from __future__ import annotations

import asyncio
import random
from functools import partial

from p2ptrain.pipeline.stage.device import Device, Pass
from p2ptrain.runtime import Runtime


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


async def _order(*kinds: tuple[Pass, str]) -> tuple[list[str], int]:
    """The order in which passes run that were asked for in another, all while the first runs."""
    device, done = _SlowDevice(), list[str]()
    asked = [asyncio.create_task(device.run(kind, partial(done.append, name))) for kind, name in kinds]
    await asyncio.gather(*asked)
    return done, device.most_running


def test_backward_goes_before_forward_and_undoing_before_both() -> None:
    first, forward, backward, undo = (
        (Pass.FORWARD, "first"), (Pass.FORWARD, "forward"), (Pass.BACKWARD, "backward"), (Pass.UNDO, "undo"),
    )  # fmt: skip
    for asked in ([forward, backward, undo], [backward, forward, undo], [undo, forward, backward]):
        done, most_running = asyncio.run(_order(first, *asked))
        assert done == ["first", "undo", "backward", "forward"]
        assert most_running == 1


def test_passes_of_one_kind_go_in_order_of_arrival() -> None:
    names = [f"pass {number}" for number in range(9)]
    done, most_running = asyncio.run(_order(*((Pass.BACKWARD, name) for name in names)))
    assert done == names
    assert most_running == 1
