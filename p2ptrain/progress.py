"""Long jobs: what a person waits for, such as a download. Whoever does one tells how far it is; others may show it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int, int], None]
"""Told how much of a job is done, and of how much (0 where that is not known); from any thread, at any pace."""


class Jobs(Protocol):
    """Begins a job, which ends with the ``with`` block, however that is left."""

    def __call__(self, name: str, unit: str = "bytes") -> AbstractContextManager[Advance]:
        """
        Args:
            name: What is being done, for people: ``downloading the state``.
            unit: What is counted, in the plural; empty where nothing is.
        """


@contextmanager
def untold(name: str, unit: str = "bytes") -> Iterator[Advance]:
    """The `Jobs` of those whom nobody watches."""
    yield lambda done, total: None
