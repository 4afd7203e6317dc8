"""The environment of protocol code: wall-clock time, randomness, and threads for computation.

Protocol code takes deadlines from the running event loop, wall-clock time from `Runtime.now`, and randomness from
`Runtime.random`. Long computations run off the event loop:

=============  ==================  ===============================================================================
method         threads             for
=============  ==================  ===============================================================================
``compute``    one, "state"        access to the shared state: apply, replace, tree, collect, save.
                                   `p2ptrain.training.state.shared_state.SharedState` relies on one call at a time.
``on_device``  one, "device"       forward and backward passes, one at a time.
``serve``      one, "serving"      batches of generation, beside the device's passes.
``offload``    up to 8, "pool"     codecs, hashes, signatures, checks; concurrent and unordered.
``process``    these, or none      the same over a number of bytes: few are processed at once, on the event loop.
=============  ==================  ===============================================================================

Real peers use `real_runtime`. The simulation (`p2ptrain.network.simulated`) supplies virtual time, a seeded generator
and inline computation, so that a run replays exactly from its seed.

`be_nice` leaves processor time to other programs. Linux first shares the cores among sessions, and then by niceness
within each (sched(7), "The autogroup feature"). So a peer's niceness alone counts for nothing beside programs of other
terminals: its session needs it, too.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import ctypes
import logging
import os
import random
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Executor, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field
from pathlib import Path
from typing import ParamSpec, TypeVar

from p2ptrain.buffers import Pool

logger = logging.getLogger(__name__)

HEAP_CHUNK_BYTES = 8 << 20
"""Size up to which the heap serves allocations, instead of a mapping for each; > frames of bulk data and slices of
vectors."""
HANDOVER_BYTES = 64 << 10
"""Data up to this size is encoded, hashed or added sooner than a thread is woken, and wakes the event loop again."""
MAX_POOL_THREADS = 8
"""Codecs and hashes saturate memory bandwidth before they use more cores."""
CLOSE_SECONDS = 3.0
"""Timeout of `Runtime.close`; a pass on a stuck device does not end."""
TRAINING_NICENESS = 10
"""Added to the niceness of training where a peer serves, too."""

SESSION_ATTEMPTS = 5
SESSION_PAUSE_SECONDS = 0.1
"""The kernel accepts one change of a session's niceness in this time."""

left_behind: list[str] = []
"""Threads that outlived `Runtime.close`; the process must then exit without the interpreter's clean-up."""

P = ParamSpec("P")
T = TypeVar("T")


@dataclass
class Runtime:
    """Time, randomness and computation of one peer.

    Attributes:
        random: The generator of all random decisions of this peer.
        clock: Returns wall-clock time in seconds since the epoch.
        threads: The executors, by the name in the module's table; work without one runs inline on the event loop
            (simulation only).
        scratch: Folder for data that outlives the process besides checkpoints; None keeps it in memory.
        clock_offset_seconds: Added to ``clock``; corrects this machine's clock by the swarm's.
    """

    random: random.Random
    clock: Callable[[], float] = time.time
    threads: Mapping[str, Executor] = field(default_factory=dict)
    scratch: Path | None = None
    clock_offset_seconds: float = field(default=0.0)
    buffers: Pool = field(default_factory=Pool)

    def now(self) -> float:
        """Return wall-clock time in seconds since the epoch, corrected by ``clock_offset_seconds``."""
        return self.clock() + self.clock_offset_seconds

    async def compute(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function on the shared state, in call order; its exceptions propagate."""
        return await self._run("state", lambda: function(*args, **kwargs))

    async def on_device(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a pass on the device, in call order; its exceptions propagate."""
        return await self._run("device", lambda: function(*args, **kwargs))

    async def serve(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Compute a batch of generation, in call order; its exceptions propagate."""
        return await self._run("serving", lambda: function(*args, **kwargs))

    async def offload(self, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """Run a function that touches only its arguments, concurrently with others; its exceptions propagate."""
        return await self._run("pool", lambda: function(*args, **kwargs))

    async def process(self, num_bytes: int, function: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
        """As `offload`, for a function that goes over ``num_bytes`` of data once; see `HANDOVER_BYTES`."""
        if num_bytes <= HANDOVER_BYTES:
            return function(*args, **kwargs)
        return await self.offload(function, *args, **kwargs)

    def yield_to_serving(self) -> None:
        """Lower the priority of the calling thread, and of those that it starts. Does nothing except on Linux."""
        if self.threads and sys.platform == "linux":  # Elsewhere `os.nice` is of the process, with all its threads.
            os.nice(TRAINING_NICENESS)

    async def trim_heap(self) -> None:
        """Give freed memory of the heap back to the system, as after a large copy. Does nothing without glibc."""
        if self.threads and sys.platform == "linux" and hasattr(heap := ctypes.CDLL(None), "malloc_trim"):
            await self.offload(heap.malloc_trim, 0)

    async def _run(self, thread: str, work: Callable[[], T]) -> T:
        if (executor := self.threads.get(thread)) is None:
            return work()
        return await asyncio.get_running_loop().run_in_executor(executor, work)

    def close(self) -> None:
        """Stop the threads; leave threads behind that are still busy after `CLOSE_SECONDS`."""
        ends: dict[Future[None], str] = {executor.submit(_nothing): name for name, executor in self.threads.items()}
        _, stuck = wait(ends, timeout=CLOSE_SECONDS)
        for end, name in ends.items():
            self.threads[name].shutdown(wait=end not in stuck, cancel_futures=True)
            if end in stuck:
                logger.warning("the %s thread does not end: leaving it behind", name)
                left_behind.append(name)


def real_runtime(name: str = "cpu", scratch: Path | None = None) -> Runtime:
    """Return a runtime with real time, system entropy, and threads ``state-<name>`` and so on."""
    # glibc raises its threshold to the size of the largest mapped chunk freed so far.
    bytearray(HEAP_CHUNK_BYTES)
    size = min(os.cpu_count() or 1, MAX_POOL_THREADS)
    threads = {
        thread: ThreadPoolExecutor(workers, thread_name_prefix=f"{thread}-{name}")
        for thread, workers in (("state", 1), ("device", 1), ("serving", 1), ("pool", size))
    }
    # Other peers see some random numbers (nonces) and must not predict later ones (spot checks).
    return Runtime(random=random.SystemRandom(), threads=threads, scratch=scratch)


def _nothing() -> None:
    """Run on an executor to detect that its earlier work is done."""


def be_nice(niceness: int) -> None:
    """Add to the niceness of this thread, and of all threads and processes that it starts, and to its session's.

    A session that began before this process, such as a terminal's, has its own back at exit.
    """
    if not niceness:
        return
    os.nice(niceness)
    before = share_niceness(os.getpid())
    if before is not None and os.getsid(0) != os.getpid():
        atexit.register(_set_session_niceness, os.getpid(), before)


def share_niceness(process: int) -> int | None:
    """Give this process's niceness to the session of a process if that has less, which is returned; may sleep."""
    before, own = _session_niceness(process), os.nice(0)
    if before is None or before >= own:
        return None
    _set_session_niceness(process, own)
    return before


def _session_file(process: int) -> Path:
    return Path(f"/proc/{process}/autogroup")


def _session_niceness(process: int) -> int | None:
    """Return the niceness of a process's session; None where sessions have none."""
    with contextlib.suppress(OSError, ValueError):
        return int(_session_file(process).read_text().rpartition(" ")[2])
    return None


def _set_session_niceness(process: int, niceness: int) -> None:
    for _ in range(SESSION_ATTEMPTS):
        try:
            _session_file(process).write_text(str(niceness))
        except BlockingIOError:
            time.sleep(SESSION_PAUSE_SECONDS)
        except OSError as error:
            logger.warning("the session of process %d does not get the niceness %d: %s", process, niceness, error)
            return
        else:
            return
    logger.warning("the session of process %d does not get the niceness %d: the kernel is busy", process, niceness)
