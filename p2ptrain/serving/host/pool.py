"""The pages of a host's memory: which are free, and which belong to a session."""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.errors import TemporaryError
from p2ptrain.models.exact import PAGE


class PoolFullError(TemporaryError):
    """Too few pages are free for a session."""


class Pages:
    """A session's pages; ``numbers`` has the page of each `PAGE` positions, in order."""

    def __init__(self, numbers: Sequence[int]) -> None:
        self.numbers = tuple(numbers)


class PagePool:
    """A number of pages, each of one session or free. The lowest free pages are reserved first."""

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))

    @property
    def num_free(self) -> int:
        return len(self._free)

    def reserve(self, number: int) -> Pages:
        """Take pages for a session; raises `PoolFullError` without taking any if too few are free."""
        if number > len(self._free):
            raise PoolFullError(f"a session needs {number} pages, and {self.num_free} of {self.num_pages} are free")
        return Pages([self._free.pop() for _ in range(number)])

    def trim(self, pages: Pages, to_position: int) -> None:
        """Free a session's pages behind the positions below ``to_position``."""
        kept = -(-to_position // PAGE)
        self._free = sorted({*self._free, *pages.numbers[kept:]}, reverse=True)
        pages.numbers = pages.numbers[:kept]

    def free(self, pages: Pages) -> None:
        """Free all pages of a session; none are left to free twice."""
        self.trim(pages, 0)


def pages_for(positions: int) -> int:
    """Return how many pages some positions need."""
    return -(-positions // PAGE)
