"""The pages of a host's memory: free, of a session, or of a prefix that sessions share."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from p2ptrain.errors import TemporaryError
from p2ptrain.models.exact import PAGE, ExactStage
from p2ptrain.serving.journal import wire_of
from p2ptrain.serving.messages import Ticket, Version


class PoolFullError(TemporaryError):
    """Too few pages are free for a session."""


class PageKey(NamedTuple):
    """A prefix page's content: all tokens up to its end, by ``hash``, in one version; only equal salts share it."""

    client: str
    salt: bytes
    version: Version
    hash: bytes


def key_of(ticket: Ticket, page_hash: bytes) -> PageKey:
    """Return the key of a page of a session's tokens."""
    return PageKey(ticket.client, ticket.salt, ticket.version, page_hash)


@dataclass
class PrefixPage:
    """An immutable page, of a prefix.

    Attributes:
        number: Its keys and values.
        ids: Its `PAGE` tokens.
        outputs: The stage's outputs of `PAGE` rows, as they travel; empty on the last stage.
        users: Sessions that have it.
    """

    key: PageKey
    number: int
    ids: tuple[int, ...]
    outputs: bytes
    users: int = 1


class Pages:
    """A session's pages in a pool; ``numbers`` has the page of each `PAGE` positions, in order.

    Attributes:
        found: The first of them, which other sessions had computed when this one began.
    """

    def __init__(self, pool: PagePool, numbers: Sequence[int], found: Sequence[PrefixPage] = ()) -> None:
        self.pool = pool
        self.numbers = tuple(numbers)
        self.found = tuple(found)


class PagePool:
    """A number of pages. Each is free, of one session, or a prefix page of as many sessions as use it.

    A prefix page without users can be reserved like a free page: the least recently used one is forgotten.
    """

    def __init__(self, num_pages: int) -> None:
        self.num_pages = num_pages
        self._free = list(reversed(range(num_pages)))
        self._prefixes: dict[PageKey, PrefixPage] = {}
        self._shared: dict[int, PrefixPage] = {}
        self._unused: OrderedDict[int, PrefixPage] = OrderedDict()

    @property
    def num_free(self) -> int:
        """Pages that can be reserved: free ones, and prefix pages without users."""
        return len(self._free) + len(self._unused)

    def reserve(self, number: int, keys: Sequence[PageKey] = ()) -> Pages:
        """Take pages for a session; raises `PoolFullError` without taking any if too few are free.

        The first ones are the prefix pages of ``keys``, in order, as far as the pool has them.
        """
        found: list[PrefixPage] = []
        for key in keys[:number]:
            if (page := self._prefixes.get(key)) is None:
                break
            found.append(page)
        num_others = number - len(found)
        if num_others > self.num_free - sum(not page.users for page in found):
            raise PoolFullError(f"a session needs {number} pages, and {self.num_free} of {self.num_pages} are free")
        for page in found:
            page.users += 1
            self._unused.pop(page.number, None)
        while len(self._free) < num_others:
            self._forget(next(iter(self._unused.values())))
        return Pages(self, [*(page.number for page in found), *(self._free.pop() for _ in range(num_others))], found)

    def share(self, pages: Pages, index: int, key: PageKey, ids: Sequence[int], outputs: bytes) -> None:
        """Make a session's page a prefix page, unless it is one or the pool has its like. It must not change again."""
        number = pages.numbers[index]
        if number not in self._shared and key not in self._prefixes:
            self._prefixes[key] = self._shared[number] = PrefixPage(key, number, tuple(ids), outputs)

    def drop(self, is_stale: Callable[[PageKey], bool]) -> None:
        """Find some prefix pages no more; they are free once no session uses them."""
        for page in [page for key, page in self._prefixes.items() if is_stale(key)]:
            if page.users:
                del self._prefixes[page.key]
            else:
                self._forget(page)

    def trim(self, pages: Pages, to_position: int) -> None:
        """Give up a session's pages behind the positions below ``to_position``."""
        kept = -(-to_position // PAGE)
        for number in reversed(pages.numbers[kept:]):  # A page is of no use without those before it.
            self._give_up(number)
        self._free.sort(reverse=True)
        pages.numbers = pages.numbers[:kept]

    def free(self, pages: Pages) -> None:
        """Give up all pages of a session; none are left to free twice."""
        self.trim(pages, 0)

    def _give_up(self, number: int) -> None:
        if (page := self._shared.get(number)) is None:
            self._free.append(number)
            return
        page.users -= 1
        if not page.users:
            self._unused[number] = page
            if self._prefixes.get(page.key) is not page:
                self._forget(page)

    def _forget(self, page: PrefixPage) -> None:
        """Free a prefix page without users."""
        if self._prefixes.get(page.key) is page:
            del self._prefixes[page.key]
        del self._shared[page.number], self._unused[page.number]
        self._free.append(page.number)


def pages_for(positions: int) -> int:
    """Return how many pages some positions need."""
    return -(-positions // PAGE)


def pages_within(cache: int, stage: ExactStage, arithmetic: str) -> int:
    """Return how many pages of a stage fit ``cache`` bytes, and the device; ``arithmetic`` names the wire.

    A page's outputs, which feed the next stage again, lie in the machine's memory. A last stage may have no layers.
    """
    outputs = 0 if stage.is_last and stage.num_layers else PAGE * wire_of(arithmetic, stage.hidden).row_bytes
    return max(1, min(cache // (stage.page_bytes + outputs), stage.free_bytes // max(1, stage.page_bytes)))
