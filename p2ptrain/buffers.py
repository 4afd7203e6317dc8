"""Large buffers: fresh ones on huge pages where the system has them, and those that are used again and again.

Fresh memory costs a page fault for every 4 KiB, which for a state that is downloaded is as much work as checking it.
Linux gives 2 MiB pages to whoever asks (https://docs.kernel.org/admin-guide/mm/transhuge.html); elsewhere the pages
stay small.

A round's buffers are smaller, and needed again in the next one: a peer keeps some of them (`Pool`). What is beyond a
bound goes back to the system at once, which memory of the C library's heap does not.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import weakref

HUGE_PAGE_BYTES = 2 << 20
LEAST_LENT_BYTES = 1 << 20
"""Less comes from the heap; more in multiples of this, so that buffers of about one size fit one another."""

Buffer = bytes | bytearray | memoryview
"""Whatever holds bytes; `new_buffer` makes one that can be written."""


def new_buffer(num_bytes: int) -> memoryview:
    """Zeroed, writable memory that lives as long as something refers to it.

    Raises:
        MemoryError: The system does not give so much.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return memoryview(bytearray(num_bytes))
    return memoryview(_pages(num_bytes, are_huge=True))


class Pool:
    """Lends large buffers, and keeps a bounded part of the memory that comes back.

    Args:
        max_kept_bytes: What is kept at the most while nobody uses it.

    Attributes:
        kept_bytes: What is kept now.
    """

    def __init__(self, max_kept_bytes: int = 32 << 20) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._kept: list[mmap.mmap] = []

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self._kept))

    def lend(self, num_bytes: int) -> memoryview:
        """Writable memory that holds anything; it comes back by itself when nothing refers to it any more.

        Raises:
            MemoryError: The system does not give so much.
        """
        if num_bytes < LEAST_LENT_BYTES:
            return memoryview(bytearray(num_bytes))
        pages = self._fitting(num_bytes) or _pages(-(-num_bytes // LEAST_LENT_BYTES) * LEAST_LENT_BYTES)
        lent = (ctypes.c_ubyte * num_bytes).from_buffer(pages)
        weakref.finalize(lent, self._take_back, pages).atexit = False
        return memoryview(lent).cast("B")

    def _fitting(self, num_bytes: int) -> mmap.mmap | None:
        """The least of what is kept that is large enough, but not much larger."""
        # In one step at a time: memory may come back in another thread, and between any two steps in this one.
        fitting = [pages for pages in tuple(self._kept) if num_bytes <= len(pages) <= 2 * num_bytes]
        for pages in sorted(fitting, key=len):
            with contextlib.suppress(ValueError):
                self._kept.remove(pages)
                return pages
        return None

    def _take_back(self, pages: mmap.mmap) -> None:
        if self.kept_bytes + len(pages) <= self._max_kept_bytes:
            self._kept.append(pages)


def let_heap_keep(chunk_bytes: int) -> None:
    """Have the C library take memory for chunks of up to this size from its heap, not from the system each time.

    glibc does so for up to 128 KiB at first, and then for as much as it was once given back.
    """
    bytearray(chunk_bytes)


def _pages(num_bytes: int, *, are_huge: bool = False) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system does not give {num_bytes >> 20} MiB") from error
    if are_huge:
        with contextlib.suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
