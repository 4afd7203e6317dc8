"""Tokens beside training: a host's stage is trained on its device thread while it computes a session's tokens.

The process runs on one core, which is the hardest case: each token's batch needs the core that a pass has.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import statistics
from collections.abc import Iterator

import torch

from benchmarks.findings import Finding, Section
from benchmarks.serving_batches import Bench
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import IDLE_SECONDS, Device, Pass
from p2ptrain.runtime import Runtime, real_runtime
from p2ptrain.serving.host.share import ComputeShare
from p2ptrain.tasks import Tasks

SHARE = 0.5
HOP_SECONDS = 0.02
SAMPLE = 32
"""Tokens of a microbatch; few, so that a turn has many passes."""
PASSES_ALONE, TOKENS_ALONE = 4, 40
DECODE_GOAL = 0.8


class BesideTraining:
    """A host of one of two like stages. It trains its stage, and computes the tokens of one session."""

    def __init__(self, runtime: Runtime, spec: ModelSpec) -> None:
        half = spec.model_copy(update={"layers": spec.layers // 2})
        self._bench, self._device = Bench(runtime, half), Device(runtime)
        self._bench.executor.share = ComputeShare(SHARE, lambda: self._device.is_in_use)
        self._compute = StageCompute(build_model(half))
        self._ids = torch.arange(SAMPLE)[None] * 37 % half.vocabulary
        self._passes: list[float] = []

    async def run(self, repeats: int, num_tokens: int) -> list[dict[str, float]]:
        """Return the mean seconds of tokens and of passes, alone and beside each other, by turn."""
        found: list[dict[str, float]] = []
        async with Tasks() as tasks:
            computing = tasks.call(self._bench.executor.run(), "executor")
            # The other stage takes as long, and so do the hops to it and back.
            pause = statistics.median(await self._bench.decode(TOKENS_ALONE)) + 2 * HOP_SECONDS
            for turn in range(-1, repeats):
                token = statistics.mean(await self._bench.decode(TOKENS_ALONE, pause))
                passes = [await self._pass() for _ in range(PASSES_ALONE)]
                self._passes.clear()
                training = tasks.call(self._train(), "training")
                token_beside = statistics.mean(await self._bench.decode(num_tokens, pause))
                training.cancel()
                await asyncio.sleep(IDLE_SECONDS + 1)  # A device without passes limits tokens no more.
                if turn >= 0:
                    names = ("token alone", "token beside", "pass alone", "pass beside")
                    values = token, token_beside, statistics.mean(passes), statistics.mean(self._passes)
                    found.append(dict(zip(names, values, strict=True)))
            computing.cancel()
        return found

    async def _pass(self) -> float:
        timed = await self._device.run(Pass.BACKWARD, lambda: self._compute.loss(self._ids, self._ids))
        return timed.busy_seconds

    async def _train(self) -> None:
        while True:
            self._passes.append(await self._pass())


@contextlib.contextmanager
def on_one_core() -> Iterator[None]:
    """Bind the calling thread, and those that it starts, to one core."""
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {max(cores)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, cores)


def beside_training(spec: ModelSpec, repeats: int, num_tokens: int) -> Section:
    """Tokens and passes of a host that trains and serves on one core, beside each other and alone."""
    title = f"Tokens and training on one core, share {SHARE:g}, s"
    with on_one_core(), contextlib.closing(real_runtime("bench")) as runtime:

        async def measure() -> list[dict[str, float]]:
            await runtime.on_device(runtime.yield_to_serving)
            return await BesideTraining(runtime, spec).run(repeats, num_tokens)

        found = asyncio.run(measure())
    section = Section(title, ("what", "alone", "beside"), results={"turns": found})
    for what, pace, goal in (("token", "decode", DECODE_GOAL), ("pass", "training", 1 - SHARE)):
        alone, beside = ([turn[f"{what} {how}"] for turn in found] for how in ("alone", "beside"))
        section.rows.append((what, f"{statistics.median(alone):.3f}", f"{statistics.median(beside):.3f}"))
        ratio = statistics.median(one / other for one, other in zip(alone, beside, strict=True))
        section.findings.append(
            Finding(f"{pace} beside {'training' if what == 'token' else 'decode'}", ratio, "alone", goal, True)
        )
    return section
