"""Where kernels come from: the image kept beside this package's byte code, or the process that makes one.

The image lies in ``__pycache__`` (or wherever Python was told to keep byte code), so whoever can change it can change
the package. Its name holds a hash of the sources, of LLVM's version and of what the CPU can do: another version or
another machine on the same disk makes its own. Processes that start at once each make it, and the last one's replaces
the others', which are the same. Where the folder is read-only, each process makes its own at its start and keeps none.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import json
import logging
import mmap
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

logger = logging.getLogger(__name__)

BUILD_SECONDS = 30.0
"""How long the building process, which takes a second of an idle CPU, may last."""
MAX_IMAGE_BYTES = 1 << 20

_Function = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_float)
"""Calls release the GIL."""


class Kernel:
    """One kernel, callable from any thread; it owns the memory that its code is in."""

    def __init__(self, memory: mmap.mmap, address: int) -> None:
        self._memory = memory
        self._function = _Function(address)

    def at(self, source: int, target: int, count: int, weight: float) -> bool:
        """Run on ``count`` blocks from the address ``source`` to the address ``target``; whether one was refused.

        The caller answers for the addresses. They may be unaligned, but must not overlap.
        """
        return bool(self._function(source, target, count, weight))

    def __call__(self, source: bytearray, target: bytearray, count: int, weight: float) -> bool:
        """As `at`, on the beginnings of buffers that are large enough."""
        holders = [(ctypes.c_char * len(buffer)).from_buffer(buffer) for buffer in (source, target)]
        return self.at(ctypes.addressof(holders[0]), ctypes.addressof(holders[1]), count, weight)


def load_kernels() -> Mapping[str, Kernel]:
    """All kernels by their names, ``<operation>_<codec>``; nothing where there can be none (a log line says why).

    Takes milliseconds, and a second the first time on an installation: keep it off an event loop.
    """
    try:
        path = image_path()
        with contextlib.suppress(OSError, ValueError):
            return unpack(path.read_bytes())
        image = _build()
        found = unpack(image)
        _keep(image, path)
        return found
    except (OSError, ValueError, subprocess.SubprocessError, PackageNotFoundError) as error:
        logger.warning("codecs stay without kernels, which is slower: %s", error)
        return {}


def image_path() -> Path:
    """Where this installation's image for this CPU is kept.

    Raises:
        OSError, PackageNotFoundError: There can be none here.
    """
    if sys.platform != "linux" or platform.machine() != "x86_64":
        raise OSError(f"no kernels for {sys.platform} on {platform.machine()}")
    digest = hashlib.sha256(f"{version('llvmlite')} {_cpu()}".encode())
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    return Path(importlib.util.cache_from_source(__file__)).with_name(f"kernels-{digest.hexdigest()[:16]}.bin")


def _cpu() -> str:
    """The first processor's model and abilities, as the kernel tells them."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").split("\n\n")[0].splitlines()
    return "\n".join(line for line in lines if line.startswith(("model", "flags", "vendor_id", "cpu family")))


def _build() -> bytes:
    """What a process of its own, which imports this very package, makes.

    Raises:
        subprocess.SubprocessError: It failed, or took too long.
    """
    root = str(Path(__file__).parents[2])
    command = f"import sys; sys.path.insert(0, {root!r}); from p2ptrain.kernels.build import main; main()"
    done = subprocess.run(  # -P: whatever lies in the current folder is nobody's module.
        [sys.executable, "-P", "-c", command], stdin=subprocess.DEVNULL, capture_output=True, timeout=BUILD_SECONDS
    )
    if done.returncode != 0:
        reason = done.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise subprocess.SubprocessError(f"the kernels could not be built: status {done.returncode}, {reason[:200]}")
    return done.stdout


def _keep(image: bytes, path: Path) -> None:
    """Put the image where the next process finds it, if that can be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(dir=path.parent, prefix=f"{path.name}.")
    except OSError as error:
        logger.info("the kernels are not kept: %s", error)
        return
    try:
        with open(descriptor, "wb") as file:
            file.write(image)
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except OSError as error:
        logger.info("the kernels are not kept: %s", error)
        with contextlib.suppress(OSError):
            os.unlink(temporary)


def pack(offsets: Mapping[str, int], code: bytes) -> bytes:
    """An image: a hash of the rest, 32 bytes; a line of JSON with each kernel's offset in the code; the code."""
    body = json.dumps(offsets).encode() + b"\n" + code
    return hashlib.sha256(body).digest() + body


def unpack(image: bytes) -> dict[str, Kernel]:
    """Make an image's kernels callable.

    Raises:
        ValueError: It is damaged.
        OSError: The system grants no executable memory.
    """
    header, newline, code = image[32:].partition(b"\n")
    if hashlib.sha256(image[32:]).digest() != image[:32] or not newline or not code or len(image) > MAX_IMAGE_BYTES:
        raise ValueError("the kernels' image is damaged")
    memory = mmap.mmap(-1, len(code), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    memory.write(code)
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    protect = ctypes.CDLL(None, use_errno=True).mprotect
    protect.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    if protect(address, len(code), mmap.PROT_READ | mmap.PROT_EXEC) != 0:
        raise OSError(ctypes.get_errno(), "no executable memory")
    return {name: Kernel(memory, address + offset) for name, offset in json.loads(header).items()}
