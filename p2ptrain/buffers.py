"""Large buffers on huge pages where the system has them.

Fresh memory costs a page fault for every 4 KiB, which for a state that is downloaded is as much work as checking it.
Linux gives 2 MiB pages to whoever asks (https://docs.kernel.org/admin-guide/mm/transhuge.html); elsewhere the pages
stay small.
"""

from __future__ import annotations

import contextlib
import mmap

HUGE_PAGE_BYTES = 2 << 20


def new_buffer(num_bytes: int) -> memoryview:
    """Zeroed, writable memory that lives as long as something refers to it.

    Raises:
        MemoryError: The system does not give so much.
    """
    if num_bytes < HUGE_PAGE_BYTES:
        return memoryview(bytearray(num_bytes))
    try:
        pages = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as error:
        raise MemoryError(f"the system does not give {num_bytes >> 20} MiB") from error
    with contextlib.suppress(AttributeError, OSError):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return memoryview(pages)
