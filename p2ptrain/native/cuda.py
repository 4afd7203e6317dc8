"""The kernels of serving on a GPU: `exact.cu`, compiled by NVRTC, which comes with torch's builds for CUDA.

The CUDA driver's interface is called through ctypes: neither a compiler nor CUDA's headers are needed.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.native.build import EXACT_SOURCE
from p2ptrain.native.exact import Batch

SOURCE, HEADER = EXACT_SOURCE.with_suffix(".cu"), EXACT_SOURCE.with_suffix(".h")
THREADS = 256
"""Of a block."""
MAX_HEAD_WIDTH = 256
SHARED_BYTES = 20 * 1024
"""Shared memory of a block: a tile's inputs; > a norm's row, and attention's queries and scores."""
CONSTANTS = (f"-DTHREADS={THREADS}", f"-DWIDEST={MAX_HEAD_WIDTH}")
OPTIONS = ("--fmad=false", "--prec-div=true", "--prec-sqrt=true", "--ftz=false", *CONSTANTS)
"""Without the first four the compiler would fuse operations, and round divisions and roots otherwise than a CPU."""
_MAJOR, _MINOR, _PROCESSORS, _COOPERATIVE = 75, 76, 16, 95
"""Attributes of a device, as the driver numbers them."""


class CudaError(OSError):
    """The GPU, its driver or NVRTC refuses or is missing."""


class CudaProgram:
    """The compiled kernels on one GPU; raises `CudaError` if they cannot be compiled or loaded."""

    def __init__(self, number: int) -> None:
        self._driver = _open(["libcuda.so.1"], "the NVIDIA driver")
        self._call("cuInit", 0)
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self._call("cuDeviceGet", ctypes.byref(device), number)
        self._call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)  # which torch uses
        self._enter()
        major, minor, processors, is_cooperative = (
            self._attribute(each, device) for each in (_MAJOR, _MINOR, _PROCESSORS, _COOPERATIVE)
        )
        if not is_cooperative:
            raise CudaError("the GPU cannot keep all blocks of a launch resident")
        self._module, self._function = ctypes.c_void_p(), ctypes.c_void_p()
        self._call("cuModuleLoadData", ctypes.byref(self._module), compile_source(f"sm_{major}{minor}"))
        self._call("cuModuleGetFunction", ctypes.byref(self._function), self._module, b"run")
        blocks = ctypes.c_int()
        self._call(
            "cuOccupancyMaxActiveBlocksPerMultiprocessor", ctypes.byref(blocks), self._function, THREADS,
            ctypes.c_size_t(SHARED_BYTES),
        )  # fmt: skip
        self.blocks = blocks.value * processors
        self._arrived = ctypes.c_void_p()  # the barrier's counter
        self._call("cuMemAlloc_v2", ctypes.byref(self._arrived), ctypes.c_size_t(8))
        self._call("cuMemsetD8_v2", self._arrived, ctypes.c_ubyte(0), ctypes.c_size_t(8))

    def launch(self, program: int, batch: Batch, stream: int) -> None:
        """Run a program at an address of the device, in a stream; one launch at a time."""
        batch.taken = self._arrived.value
        address = ctypes.c_void_p(program)
        arguments = (ctypes.c_void_p * 2)(ctypes.addressof(address), ctypes.addressof(batch))
        self._enter()
        self._call(
            "cuLaunchCooperativeKernel", self._function, self.blocks, 1, 1, THREADS, 1, 1, SHARED_BYTES,
            ctypes.c_void_p(stream), arguments,
        )  # fmt: skip

    def _enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def _attribute(self, number: int, device: ctypes.c_int) -> int:
        value = ctypes.c_int()
        self._call("cuDeviceGetAttribute", ctypes.byref(value), number, device)
        return value.value

    def _call(self, name: str, *arguments: object) -> None:
        if code := self._driver[name](*arguments):
            text = ctypes.c_char_p()
            self._driver.cuGetErrorName(code, ctypes.byref(text))
            raise CudaError(f"{name}: {(text.value or b'error').decode()} ({code})")


def compile_source(architecture: str) -> bytes:
    """Return `exact.cu` as machine code for an architecture, such as ``sm_90``; raises `CudaError`."""
    nvrtc = _open(_nvrtc_names(), "NVRTC, the CUDA compiler that comes with torch")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    options = [option.encode() for option in (f"--gpu-architecture={architecture}", *OPTIONS)]
    _check(nvrtc.nvrtcCreateProgram(
        ctypes.byref(program), SOURCE.read_bytes(), SOURCE.name.encode(), 1,
        (ctypes.c_char_p * 1)(HEADER.read_bytes()), (ctypes.c_char_p * 1)(HEADER.name.encode()),
    ), "nvrtcCreateProgram")  # fmt: skip
    try:
        if nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options)):
            _check(nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size)), "nvrtcGetProgramLogSize")
            log = ctypes.create_string_buffer(size.value)
            _check(nvrtc.nvrtcGetProgramLog(program, log), "nvrtcGetProgramLog")
            raise CudaError(f"{SOURCE.name} does not compile for {architecture}: {log.value.decode()[:400]}")
        _check(nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size)), "nvrtcGetCUBINSize")
        code = ctypes.create_string_buffer(size.value)
        _check(nvrtc.nvrtcGetCUBIN(program, code), "nvrtcGetCUBIN")
        return code.raw
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _check(code: int, name: str) -> None:
    if code:
        raise CudaError(f"{name} failed with {code}")


def _nvrtc_names() -> Iterator[str]:
    """Yield where NVRTC may be: what the linker finds, then NVIDIA's packages, the newest first."""
    yield from (f"libnvrtc.so.{major}" for major in (13, 12))
    found = importlib.util.find_spec("nvidia")
    for folder in found.submodule_search_locations or () if found is not None else ():
        yield from map(os.fspath, sorted(Path(folder).glob("*/lib/libnvrtc.so.*"), reverse=True))


def _open(names: Iterator[str] | list[str], what: str) -> ctypes.CDLL:
    for name in names:
        try:
            return ctypes.CDLL(name)
        except OSError:
            continue
    raise CudaError(f"{what} is not installed")
