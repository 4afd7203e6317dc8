"""Progress reports of long jobs, such as a download, from the code that does them to a display."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol

Advance = Callable[[int, int], None]
"""Called with the amount done and the total (0 if unknown), from any thread and at any rate."""


class Progress(Protocol):
    """Factory of context managers, each of which reports one job for the duration of its ``with`` block."""

    def __call__(self, name: str, unit: str = "bytes") -> AbstractContextManager[Advance]:
        """
        Args:
            name: The job for people, such as ``downloading the state``.
            unit: The unit of the amounts, in the plural; empty if the job has no amounts.
        """


@contextmanager
def no_progress(name: str, unit: str = "bytes") -> Iterator[Advance]:
    """The `Progress` that reports nothing."""
    yield lambda done, total: None
