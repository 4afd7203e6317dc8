"""The kernels of serving (`exact.c`) as programs: lists of operations, which threads run together.

A caller fills `Operation` and `Batch`, the structures of `exact.c`, with addresses, and passes them to `Kernels.run`.
All builds give the same bits; the fastest that this CPU can run is chosen.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import platform
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from enum import IntEnum
from pathlib import Path
from typing import NamedTuple, Protocol

from p2ptrain.native.build import EXACT_SOURCE, build_exact, exact_builds
from p2ptrain.native.load import cached_library, find_library, get_function, open_verified

logger = logging.getLogger(__name__)

INSTALLED = EXACT_SOURCE.with_name("libexact.so")
PAGE = 64
"""Positions of a page."""
MAX_INT8_INPUTS = 1 << 16
"""Inputs of an int8 product, at most: sums of so many stay within 32 bits."""
LANES = 16
"""A value's width in a page is rounded up to a multiple of it."""
QUERIES = 4
"""Queries of a tile of attention, for which a thread needs scratch memory."""


class Kind(IntEnum):
    """Kinds of operations, in the order of `exact.c`."""

    RMS_NORM = 0
    LAYER_NORM = 1
    LINEAR = 2
    DIGITS = 3
    LINEAR8 = 4
    PLACE = 5
    ATTEND = 6
    SILU = 7
    GELU = 8
    ADD = 9
    HEAD_NORM = 10


class Operation(ctypes.Structure):
    """One operation of a program; `exact.c` says which fields it reads."""

    _fields_ = (
        ("kind", ctypes.c_long),
        ("layer", ctypes.c_long),
        ("x", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("scale", ctypes.c_void_p),
        ("bias", ctypes.c_void_p),
        ("weight_sums", ctypes.c_void_p),
        ("row_scale", ctypes.c_void_p),
        ("y", ctypes.c_void_p),
        ("inputs", ctypes.c_long),
        ("outputs", ctypes.c_long),
        ("stride", ctypes.c_long),
        ("factor", ctypes.c_float),
    )


class Batch(ctypes.Structure):
    """Rows, positions, pages and threads of one call; a part is four longs."""

    _fields_ = (
        ("rows", ctypes.c_long),
        ("num_parts", ctypes.c_long),
        ("num_ops", ctypes.c_long),
        ("threads", ctypes.c_long),
        ("parts", ctypes.c_void_p),
        ("positions", ctypes.c_void_p),
        ("row_pages", ctypes.c_void_p),
        ("pages", ctypes.c_void_p),
        ("cosines", ctypes.c_void_p),
        ("sines", ctypes.c_void_p),
        ("keys", ctypes.c_void_p),
        ("values", ctypes.c_void_p),
        ("scratch", ctypes.c_void_p),
        ("num_pages", ctypes.c_long),
        ("heads", ctypes.c_long),
        ("kv_heads", ctypes.c_long),
        ("width", ctypes.c_long),
        ("stride", ctypes.c_long),
        ("scratch_floats", ctypes.c_long),
        ("taken", ctypes.c_void_p),
        ("arrived", ctypes.c_int),
        ("generation", ctypes.c_int),
        ("sleeping", ctypes.c_int),
    )


Run = Callable[[int, int, int], None]
"""Takes the addresses of operations and batch, and the thread's number."""
Exponentials = Callable[[int, int, int], None]
"""Takes the addresses of doubles and results, and their number."""
Gumbel = Callable[[int, int, int, int, int], None]
"""Takes the addresses of ids and results, their number, seed and position."""


class AnyKernels(Protocol):
    """Kernels of a CPU or GPU, which all compute the same bits."""

    @property
    def build(self) -> str:
        """For people."""

    def run(self, program: int, batch: Batch, helpers: ThreadPoolExecutor | None = None) -> None:
        """Run the program at an address."""


class Kernels(NamedTuple):
    """One build of a CPU's kernels."""

    build: str
    function: Run
    exponentials: Exponentials
    gumbel: Gumbel

    def run(self, program: int, batch: Batch, helpers: ThreadPoolExecutor | None = None) -> None:
        """Run the program at an address in this thread and ``batch.threads - 1`` of the helpers, which must be free."""
        assert batch.threads == 1 or helpers is not None
        taken = (ctypes.c_long * batch.num_ops)()
        batch.taken = ctypes.addressof(taken)
        addresses = program, ctypes.addressof(batch)
        others = []
        if helpers is not None:
            others = [helpers.submit(self.function, *addresses, number) for number in range(1, batch.threads)]
        self.function(*addresses, 0)
        for each in others:
            each.result()


@functools.cache
def load_kernels() -> Kernels | None:
    """Return the fastest kernels for this CPU; None, with a warning, if there is no library.

    It may build the library: call it off the event loop.
    """
    try:
        return next(iter(all_kernels().values()))
    except OSError as error:
        logger.warning("serving computes with torch, whose results differ between machines: %s", error)
        return None


def all_kernels() -> Mapping[str, Kernels]:
    """Return all builds that this CPU can run, the fastest first; raises `OSError` as `find_library`."""
    return find_library(INSTALLED, cached_library(EXACT_SOURCE), build_exact, open_kernels)[1]


def open_kernels(path: Path) -> Mapping[str, Kernels]:
    """Load the library; raises `OSError` if it is damaged, of another machine, or lacks a function."""
    library = open_verified(path)
    level = get_function(library, "cpu_level", (), ctypes.c_int)()
    arrays = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long)
    builds = list(exact_builds(platform.machine()))
    return {
        build: Kernels(
            build,
            get_function(library, f"run_{build}", arrays, None),
            get_function(library, f"exponentials_{build}", arrays, None),
            get_function(library, f"gumbel_{build}", (*arrays, ctypes.c_uint64, ctypes.c_uint64), None),
        )
        for build in builds[max(len(builds) - 1 - level, 0) :]
    }
