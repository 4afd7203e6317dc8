"""Listening to long jobs."""

from collections.abc import Iterator
from contextlib import contextmanager

from p2ptrain.progress import Advance


class ToldJobs:
    """Implements `p2ptrain.progress.Progress`.

    ``told`` has what was told of each job, (done, total) each, and ``running`` those that have not ended.
    """

    def __init__(self) -> None:
        self.told: dict[str, list[tuple[int, int]]] = {}
        self.running: list[str] = []

    @contextmanager
    def __call__(self, name: str, unit: str = "bytes") -> Iterator[Advance]:
        told = self.told.setdefault(name, [])
        self.running.append(name)
        try:
            yield lambda done, total: told.append((done, total))
        finally:
            self.running.remove(name)
