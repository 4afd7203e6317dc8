"""Listening to long jobs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.progress import Advance


class ToldJobs:
    """Implements `p2ptrain.progress.Progress`.

    Attributes:
        told: By job: what was told of it, (done, total) each.
        running: Those that have not ended.
    """

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int]]] = {}
        self.running: list[str] = []

    @contextmanager
    def __call__(self, name: str, unit: str = "bytes") -> Iterator[Advance]:
        """See `Progress.__call__`."""
        told = self.told.setdefault(name, [])
        self.running.append(name)
        try:
            yield lambda done, total: told.append((done, total))
        finally:
            self.running.remove(name)
