"""What protocol code may take from outside: time, chance, and somewhere to do arithmetic.

All protocol code takes deadlines from the running event loop, wall-clock time from `Runtime.now`, randomness from
`Runtime.random`, and runs tensor work through `Runtime.compute`. Real peers use `real_runtime`; the simulation
(`p2ptrain.network.simulated`) supplies virtual time, a seeded generator and inline computation, so that the same code
replays exactly from its seed.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import ParamSpec, TypeVar

from p2ptrain.buffers import Pool, let_heap_keep

HEAP_CHUNK_BYTES = 8 << 20
"""More than what is taken and given back all the time: frames of bulk data, pieces of vectors."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Runtime:
    """Time, chance and computation for one peer.

    Attributes:
        random: The generator for every random decision of this peer.
        clock: Returns wall-clock time in seconds since the epoch.
        executor: Where tensor work runs; None runs it inline on the event loop (simulation only).
        buffers: Memory for bulk data.
        clock_offset_seconds: Added to ``clock``; set when the swarm's clocks agree that this machine's is off.
    """

    random: random.Random
    clock: Callable[[], float] = time.time
    executor: Executor | None = None
    clock_offset_seconds: float = field(default=0.0)
    buffers: Pool = field(default_factory=Pool)

    def now(self) -> float:
        """Wall-clock time in seconds since the epoch, corrected by the measured offset."""
        return self.clock() + self.clock_offset_seconds

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run tensor or hashing work off the event loop and return its result; its exceptions are raised here."""
        if self.executor is None:
            return function(*args, **kwargs)
        return await asyncio.get_running_loop().run_in_executor(self.executor, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Stop the worker thread once it is done with what it is doing."""
        if self.executor is not None:
            self.executor.shutdown(wait=True, cancel_futures=True)


def real_runtime(name: str = "cpu") -> Runtime:
    """A runtime with real time, entropy from the operating system, and one worker thread called ``compute-<name>``."""
    let_heap_keep(HEAP_CHUNK_BYTES)
    executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix=f"compute-{name}")
    # Others see some of the numbers drawn (nonces), and must not learn from them which ones come next (spot checks).
    return Runtime(random=random.SystemRandom(), executor=executor)
