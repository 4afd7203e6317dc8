"""Tokens of sessions that decode while other sessions' prompts come: the time between them, on one host."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
from collections.abc import Iterator, Sequence

import torch

from benchmarks.findings import Finding, Section
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.models.exact import exact_stage
from p2ptrain.runtime import Runtime, real_runtime
from p2ptrain.serving.host.executor import Executor
from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.host.pool import PagePool
from p2ptrain.serving.host.session import HostSession, Key
from p2ptrain.serving.messages import Ticket, Version
from p2ptrain.serving.sampling import Sampling
from p2ptrain.tasks import Tasks

DECODING, BEGINNING, PROMPT = 2, 32, 192
KEY: Key = (0, bytes(32))
GOAL = 2.0


class Bench:
    """An executor of a whole model, and sessions that it computes."""

    def __init__(self, runtime: Runtime, spec: ModelSpec) -> None:
        stage = exact_stage(build_model(spec).eval(), spec)
        self.pool, self.executor = PagePool(64), Executor(runtime, 0)
        self.executor.store, self.executor.stages = stage.new_pages(64), {KEY: stage}
        self.prompt_rows = 0
        self._numbers = itertools.count()

    @contextlib.contextmanager
    def session(self, prompt: int, max_tokens: int) -> Iterator[HostSession]:
        """Open a session, whose prompt is known; end it after the block."""
        number = next(self._numbers)
        id = number.to_bytes(16, "big")
        version = Version(KEY[0], (KEY[1],), self.executor.stages[KEY].arithmetic)
        ticket = Ticket(id, "client", version, prompt, prompt, max_tokens, Sampling(temperature=0.0), 1e12)
        pages = self.pool.reserve(ticket.num_pages)
        held = HostSession(ticket, KEY, pages, self.executor.stages[KEY], Meter())
        ids = [(number + 37 * each) % held.vocabulary for each in range(prompt)]
        held.put(0, ids, torch.tensor(ids))
        self.executor.sessions[id] = held
        self.executor.wake()
        try:
            yield held
        finally:
            del self.executor.sessions[id]

    async def decode(self, num_tokens: int, pause_seconds: float = 0.0) -> list[float]:
        """Return the seconds between tokens of one session, less the first two.

        The host learns a token, as from the last one of a chain, ``pause_seconds`` after it was drawn.
        """
        times: list[float] = []
        now = asyncio.get_running_loop().time
        with self.session(BEGINNING, num_tokens) as held:
            for position in range(BEGINNING, BEGINNING + num_tokens):
                await self._until_drawn(held, position)
                times.append(now())
                await asyncio.sleep(pause_seconds)
                held.grant(position + 8, "")
                held.put_fed({position: held.tokens[position].id})
                self.executor.wake()
            await self.executor.until_idle(held)
        self.pool.free(held.pages)
        return [after - before for before, after in itertools.pairwise(times[2:])]

    async def prefill(self) -> None:
        """Compute one prompt after another until cancelled."""
        while True:
            with self.session(PROMPT, 1) as held:
                await self._until_drawn(held, PROMPT)
                self.prompt_rows += PROMPT
                await self.executor.until_idle(held)
            self.pool.free(held.pages)

    async def _until_drawn(self, held: HostSession, position: int) -> None:
        while position not in held.tokens:
            await held.drawn.wait()

    async def run(self, num_tokens: int) -> tuple[list[float], list[float]]:
        """Return the seconds between tokens alone, and beside prompts."""
        found: list[list[float]] = []
        async with Tasks() as tasks:
            tasks.call(self.executor.run(), "executor")
            for has_prompts in (False, True):
                prefilling = [tasks.call(self.prefill(), "prefill") for _ in range(has_prompts)]
                decoding = [tasks.call(self.decode(num_tokens), "decode") for _ in range(DECODING)]
                found.append([each for times in [await one for one in decoding] for each in times])
                for each in prefilling:
                    each.cancel()
        return found[0], found[1]


def beside_prompts(spec: ModelSpec, num_tokens: int) -> Section:
    """The time between tokens of sessions that decode, beside one prompt after another and alone."""
    section = Section(
        f"Tokens of {DECODING} sessions beside prompts of {PROMPT}, ms", ("beside", "median", "99 %", "prompts' rows/s")
    )
    with contextlib.closing(real_runtime("bench")) as runtime:
        bench = Bench(runtime, spec)
        alone, beside = asyncio.run(bench.run(num_tokens))
    usual = statistics.median(alone)
    rate = bench.prompt_rows * DECODING / sum(beside)
    for name, times, rows in (("nothing", alone, 0.0), ("prompts", beside, rate)):
        section.rows.append(
            (name, f"{1000 * statistics.median(times):.1f}", f"{1000 * _late(times):.1f}", f"{rows:.0f}")
        )
    section.findings.append(
        Finding("99 % time between tokens beside prompts", _late(beside) / usual, "median alone", GOAL)
    )
    section.results = {"alone": alone, "beside": beside, "prompt rows a second": rate}
    return section


def _late(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98]
