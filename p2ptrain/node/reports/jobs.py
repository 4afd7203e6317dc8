"""A peer's long-running jobs, for its record and its terminal."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from p2ptrain.progress import Advance

logger = logging.getLogger(__name__)

SILENT_SECONDS = 1.0
"""Shorter jobs are not logged."""
TOLD_SECONDS = 15.0
"""Longer transfers are in the peer's record; > the usual pause between two of them."""


@dataclass(frozen=True)
class Job:
    """A running job.

    Attributes:
        name: For people.
        unit: Unit of ``done`` and ``total``; empty if nothing is counted.
        total: 0 if unknown.
        seconds: Since its start.
    """

    name: str
    unit: str
    done: int
    total: int
    seconds: float


class _Running:
    def __init__(self, name: str, unit: str) -> None:
        self.name, self.unit = name, unit
        self.began = time.monotonic()
        self.done = self.total = 0
        self.first: int | None = None
        self.is_told = False

    def advance(self, done: int, total: int) -> None:
        if self.first is None:
            self.first = done  # A download may resume where an earlier process stopped.
        self.done, self.total = done, total


class JobBook:
    """The long-running jobs of one peer, whose start and end it logs; a thread-safe `p2ptrain.progress.Progress`."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._lock = threading.Lock()
        self._running: list[_Running] = []

    @contextmanager
    def __call__(self, name: str, unit: str = "bytes") -> Iterator[Advance]:
        job = _Running(name, unit)
        with self._lock:
            self._running.append(job)
        with contextlib.suppress(RuntimeError):  # The loop is closed.
            self._loop.call_soon_threadsafe(self._loop.call_later, SILENT_SECONDS, self._tell, job)
        try:
            yield job.advance
        finally:
            with self._lock:
                self._running.remove(job)
                is_told = job.is_told
            if is_told:
                logger.info("%s took %.1f s", job.name, time.monotonic() - job.began)

    def _tell(self, job: _Running) -> None:
        with self._lock:
            job.is_told = job in self._running
        if job.is_told:
            logger.info("%s …", job.name)

    def running(self) -> tuple[Job, ...]:
        now = time.monotonic()
        with self._lock:
            return tuple(Job(job.name, job.unit, job.done, job.total, now - job.began) for job in self._running)

    def note(self) -> str:
        """Return a note on a long transfer, such as a download of the state; empty for none."""
        with self._lock:
            running = list(self._running)
        for job in running:
            seconds = time.monotonic() - job.began
            if job.unit == "bytes" and job.total and seconds >= TOLD_SECONDS:
                rate = (job.done - (job.first or 0)) / seconds / 1e6
                return f"{job.name}: {100 * job.done // job.total} % of {job.total / 1e9:.2f} GB, {rate:.2f} MB/s"
        return ""
