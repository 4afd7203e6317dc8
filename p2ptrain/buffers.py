"""Bounded memory: a dict that drops its oldest entries, large buffers on huge pages, and a pool of them.

Small pages cost a page fault for every 4 KiB. `new_buffer` requests 2 MiB pages where the system has them
(https://docs.kernel.org/admin-guide/mm/transhuge.html). `Pool` maps its memory directly, because the C library's heap
does not return freed memory to the system at once.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import weakref
from collections import OrderedDict
from pathlib import Path
from typing import TypeVar

HUGE_PAGE_BYTES = 2 << 20
LEAST_LENT_BYTES = 1 << 20
"""Smaller buffers come from the heap; larger sizes are rounded up to a multiple, so that similar requests share."""

Buffer = bytes | bytearray | memoryview
K = TypeVar("K")
V = TypeVar("V")


class Bounded(OrderedDict[K, V]):
    """A dict of at most ``limit`` entries: to set one makes it the newest, and drops the oldest beyond the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__()
        self.limit = limit

    def __setitem__(self, key: K, value: V) -> None:
        super().__setitem__(key, value)
        self.move_to_end(key)
        if len(self) > self.limit:
            self.popitem(last=False)


def new_buffer(num_bytes: int) -> memoryview:
    """Return zeroed, writable memory; raise `MemoryError` if the system refuses it."""
    if num_bytes < HUGE_PAGE_BYTES:
        return memoryview(bytearray(num_bytes))
    return memoryview(_pages(num_bytes, are_huge=True))


def file_buffer(path: Path, num_bytes: int) -> memoryview:
    """Return writable memory mapped to a file, which keeps what it holds; raise `OSError` if the disk is full."""
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, num_bytes)  # On a full disk a write to mapped memory is SIGBUS.
        return memoryview(mmap.mmap(descriptor, num_bytes))
    finally:
        os.close(descriptor)


class Pool:
    """A pool of large buffers, which keeps ``max_kept_bytes`` of idle memory, and unmaps the longest idle beyond that.

    Idle memory stays mapped, which saves the page faults of the next round, but the system may take it at any time
    (MADV_FREE in https://man7.org/linux/man-pages/man2/madvise.2.html). Until then it counts as resident.
    """

    def __init__(self, max_kept_bytes: int = 256 << 20) -> None:
        self._max_kept_bytes = max_kept_bytes
        self._kept: list[mmap.mmap] = []

    @property
    def kept_bytes(self) -> int:
        return sum(map(len, self._kept))

    def lend(self, num_bytes: int) -> memoryview:
        """Return writable memory with arbitrary content; it returns to the pool after its last reference is dropped.

        Raises `MemoryError` if the system refuses the allocation.
        """
        if num_bytes < LEAST_LENT_BYTES:
            return memoryview(bytearray(num_bytes))
        pages = self._fitting(num_bytes) or _pages(-(-num_bytes // LEAST_LENT_BYTES) * LEAST_LENT_BYTES)
        lent = (ctypes.c_ubyte * num_bytes).from_buffer(pages)
        weakref.finalize(lent, self._take_back, pages).atexit = False
        return memoryview(lent).cast("B")

    def _fitting(self, num_bytes: int) -> mmap.mmap | None:
        """Remove and return the smallest idle mapping of one to two times ``num_bytes``; None if there is none."""
        # `_take_back` may run at any point, in any thread: iterate over a copy, and expect a removed entry.
        fitting = [pages for pages in tuple(self._kept) if num_bytes <= len(pages) <= 2 * num_bytes]
        for pages in sorted(fitting, key=len):
            with contextlib.suppress(ValueError):
                self._kept.remove(pages)
                return pages
        return None

    def _take_back(self, pages: mmap.mmap) -> None:
        if len(pages) > self._max_kept_bytes:
            return
        with contextlib.suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_FREE)
        self._kept.append(pages)
        while self.kept_bytes > self._max_kept_bytes:
            with contextlib.suppress(IndexError):  # another thread removed the last one
                self._kept.pop(0)


def _pages(num_bytes: int, *, are_huge: bool = False) -> mmap.mmap:
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system does not give {num_bytes >> 20} MiB") from error
    if are_huge:
        with contextlib.suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
    return pages
