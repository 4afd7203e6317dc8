"""What protocol code may take from outside: time, chance, and somewhere to do arithmetic.

All protocol code takes deadlines from the running event loop, wall-clock time from `Runtime.now`, and randomness from
`Runtime.random`. Work that takes long runs off the event loop, on one of three kinds of threads:

=============  ==================  ===============================================================================
method         threads             for
=============  ==================  ===============================================================================
``compute``    one, "state"        what reads or changes the shared state: apply, replace, tree, collect, save.
                                   `p2ptrain.training.state.shared_state.SharedState` relies on one call at a time.
``on_device``  one, "device"       forward and backward passes, one at a time.
``offload``    one a core, "pool"  the rest: codecs, hashes, signatures, checks. Calls run side by side, in any order.
=============  ==================  ===============================================================================

Real peers use `real_runtime`; the simulation (`p2ptrain.network.simulated`) supplies virtual time, a seeded generator
and inline computation, so that the same code replays exactly from its seed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from p2ptrain.buffers import Pool, let_heap_keep

logger = logging.getLogger(__name__)

HEAP_CHUNK_BYTES = 8 << 20
"""More than what is taken and given back all the time: frames of bulk data, pieces of vectors."""
MAX_POOL_THREADS = 8
"""Codecs and hashes use the memory's bandwidth up before they use more cores."""
CLOSE_SECONDS = 3.0
"""How long `Runtime.close` waits for what runs; a pass on a stuck device does not end."""

left_behind: list[str] = []
"""The threads that did not end when their owner did: the process should end without the interpreter's clean-up."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass(frozen=True)
class Threads:
    """Where a real peer computes; see the module."""

    state: Executor
    device: Executor
    pool: Executor


@dataclass
class Runtime:
    """Time, chance and computation for one peer.

    Attributes:
        random: The generator for every random decision of this peer.
        clock: Returns wall-clock time in seconds since the epoch.
        threads: Where work runs; None runs it inline on the event loop (simulation only).
        buffers: Memory for bulk data.
        scratch: Folder for what shall outlive this process, but is no checkpoint; None keeps it in memory.
        clock_offset_seconds: Added to ``clock``; set when the swarm's clocks agree that this machine's is off.
    """

    random: random.Random
    clock: Callable[[], float] = time.time
    threads: Threads | None = None
    scratch: Path | None = None
    clock_offset_seconds: float = field(default=0.0)
    buffers: Pool = field(default_factory=Pool)

    def now(self) -> float:
        """Wall-clock time in seconds since the epoch, corrected by the measured offset."""
        return self.clock() + self.clock_offset_seconds

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work on the shared state, after what was asked for before; its exceptions are raised here."""
        if self.threads is None:
            return function(*args, **kwargs)
        return await _run(self.threads.state, lambda: function(*args, **kwargs))

    async def on_device(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a pass on the device, after what was asked for before; its exceptions are raised here."""
        if self.threads is None:
            return function(*args, **kwargs)
        return await _run(self.threads.device, lambda: function(*args, **kwargs))

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run work that touches nothing but its arguments, beside other such work; its exceptions are raised here."""
        if self.threads is None:
            return function(*args, **kwargs)
        return await _run(self.threads.pool, lambda: function(*args, **kwargs))

    def close(self) -> None:
        """Stop the threads, once they are done with what they are doing or `CLOSE_SECONDS` have passed."""
        if self.threads is None:
            return
        threads = {"state": self.threads.state, "device": self.threads.device, "pool": self.threads.pool}
        ends: dict[Future[None], str] = {executor.submit(_nothing): name for name, executor in threads.items()}
        _, stuck = wait(ends, timeout=CLOSE_SECONDS)
        for end, name in ends.items():
            threads[name].shutdown(wait=end not in stuck, cancel_futures=True)
            if end in stuck:
                logger.warning("the %s thread does not end: leaving it behind", name)
                left_behind.append(name)


def real_runtime(name: str = "cpu", scratch: Path | None = None) -> Runtime:
    """A runtime with real time, entropy from the operating system, and threads called ``state-<name>`` and so on.

    Args:
        name: Of the threads.
        scratch: See `Runtime`.
    """
    let_heap_keep(HEAP_CHUNK_BYTES)
    size = min(os.cpu_count() or 1, MAX_POOL_THREADS)
    threads = Threads(
        ThreadPoolExecutor(1, thread_name_prefix=f"state-{name}"),
        ThreadPoolExecutor(1, thread_name_prefix=f"device-{name}"),
        ThreadPoolExecutor(size, thread_name_prefix=f"pool-{name}"),
    )
    # Others see some of the numbers drawn (nonces), and must not learn from them which ones come next (spot checks).
    return Runtime(random=random.SystemRandom(), threads=threads, scratch=scratch)


async def _run(executor: Executor, work: Callable[[], T]) -> T:
    return await asyncio.get_running_loop().run_in_executor(executor, work)


def _nothing() -> None:
    """What is run to see that a thread has come to it."""
