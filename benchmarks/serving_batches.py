"""Tokens of sessions that decode while other sessions' prompts come: the time between them, on one host."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar, cast

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

DECODING, BEGINNING, PROMPT, TURNS = 2, 32, 192, 3
T = TypeVar("T")
KEY: Key = (0, bytes(32))
GOAL = 2.0


class Bench:
    """An executor of a whole model, and sessions that it computes.

    Attributes:
        prompt_rows: Computed rows of prompts.
        used: Processor time of the batches between two tokens, which others on the machine hardly change.
    """

    def __init__(self, runtime: Runtime, spec: ModelSpec) -> None:
        stage = exact_stage(build_model(spec).eval(), spec)
        self._serve, self._computed = runtime.serve, 0.0
        cast(Any, runtime).serve = self._timed
        self.used: list[float] = []
        self.pool, self.executor = PagePool(64), Executor(runtime, 0)
        self.executor.store, self.executor.stages = stage.new_pages(64), {KEY: stage}
        self.prompt_rows = 0
        self._numbers = itertools.count()

    async def _timed(self, function: Callable[..., T], *arguments: Any) -> T:
        def compute() -> tuple[T, float]:
            begin = time.thread_time()
            return function(*arguments), time.thread_time() - begin

        result, seconds = await self._serve(compute)
        self._computed += seconds
        return result

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
        """Return the seconds between tokens of one session, less the first two; note the ``used`` ones of them.

        The host learns a token, as from the last one of a chain, ``pause_seconds`` after it was drawn.
        """
        times: list[tuple[float, float]] = []
        now = asyncio.get_running_loop().time
        with self.session(BEGINNING, num_tokens) as held:
            for position in range(BEGINNING, BEGINNING + num_tokens):
                await self._until_drawn(held, position)
                times.append((now(), self._computed))
                await asyncio.sleep(pause_seconds)
                held.grant(position + 8, "")
                held.put_fed({position: held.tokens[position].id})
                self.executor.wake()
            await self.executor.until_idle(held)
        self.pool.free(held.pages)
        pairs = list(itertools.pairwise(times[2:]))
        self.used += [after - before for (_, before), (_, after) in pairs]
        return [end - begin for (begin, _), (end, _) in pairs]

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

    async def run(self, num_tokens: int) -> dict[bool, tuple[list[float], list[float]]]:
        """Return the seconds between tokens and those used, alone (False) and beside prompts, in turn."""
        found: dict[bool, tuple[list[float], list[float]]] = {False: ([], []), True: ([], [])}
        async with Tasks() as tasks:
            tasks.call(self.executor.run(), "executor")
            for has_prompts in (False, True) * TURNS:
                prefilling = [tasks.call(self.prefill(), "prefill") for _ in range(has_prompts)]
                decoding = [tasks.call(self.decode(num_tokens // TURNS), "decode") for _ in range(DECODING)]
                self.used.clear()
                found[has_prompts][0].extend(each for times in [await one for one in decoding] for each in times)
                found[has_prompts][1].extend(self.used)
                for each in prefilling:
                    each.cancel()
        return found


def beside_prompts(spec: ModelSpec, num_tokens: int) -> Section:
    """The time between tokens of sessions that decode, beside one prompt after another and alone."""
    section = Section(
        f"Tokens of {DECODING} sessions beside prompts of {PROMPT}, ms",
        ("beside", "median", "99 %", "computed, median", "99 %", "prompts' rows/s"),
    )
    with contextlib.closing(real_runtime("bench")) as runtime:
        bench = Bench(runtime, spec)
        found = asyncio.run(bench.run(num_tokens))
    rate = bench.prompt_rows * DECODING / sum(found[True][0])
    for has_prompts, both in found.items():
        shown = [f"{1000 * each:.1f}" for times in both for each in (statistics.median(times), _late(times))]
        section.rows.append(("prompts" if has_prompts else "nothing", *shown, f"{rate * has_prompts:.0f}"))
    for what, alone, beside in zip(("time", "processor time"), *found.values(), strict=True):
        late, usual = _late(beside), statistics.median(alone)
        against = f"median alone, whose 99 % is {_late(alone) / usual:.2f} of it"
        section.findings.append(Finding(f"99 % {what} between tokens beside prompts", late / usual, against, GOAL))
    section.results = {"alone": found[False], "beside": found[True], "prompt rows a second": rate}
    return section


def _late(times: Sequence[float]) -> float:
    return statistics.quantiles(times, n=100)[98]
