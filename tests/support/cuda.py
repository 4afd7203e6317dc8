"""The GPU's kernels on a CPU: `exact.cu`, compiled with `cuda_emulator.c`, where each thread is a fiber."""

from __future__ import annotations

import ctypes
import functools
import subprocess
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from p2ptrain.native.cuda import CONSTANTS, SHARED_BYTES, SOURCE
from p2ptrain.native.exact import Batch

FLAGS = (*CONSTANTS, "-std=gnu11", "-O2", "-ffp-contract=off", "-U_FORTIFY_SOURCE", "-fPIC", "-shared")


class EmulatedKernels:
    """Kernels whose blocks take turns on one CPU thread."""

    build = "emulated"

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self._arrived = ctypes.c_long()

    def run(self, program: int, batch: Batch, helpers: ThreadPoolExecutor | None = None) -> None:
        batch.taken = ctypes.addressof(self._arrived)
        assert _library().emulate(ctypes.c_void_p(program), ctypes.byref(batch), self.blocks, SHARED_BYTES) == 0
        assert self._arrived.value == 0, "the barrier was left in use"


@functools.cache
def _library() -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "emulated.so")
        source = Path(__file__).with_name("cuda_emulator.c")
        subprocess.run(["cc", *FLAGS, f"-I{SOURCE.parent}", "-o", path, source, "-lm"], check=True, timeout=90)
        library = ctypes.CDLL(str(path))
    library.emulate.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_long)
    return library
