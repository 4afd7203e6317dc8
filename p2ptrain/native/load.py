"""Finds a library: in the package, in the cache beside its byte code, or by compilation.

A wheel or image carries the libraries. A checkout builds each on first use into the package's byte-code folder, which
has the package's permissions. The cached file's name holds a hash of source, build script and machine. Concurrent
processes each build, and replace each other's equal file. Without a writable folder, no copy is kept.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import importlib.util
import logging
import platform
import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from p2ptrain.disk import replace_file
from p2ptrain.native.build import DIGEST_BYTES, SOURCE, build_library

logger = logging.getLogger(__name__)

Opened = TypeVar("Opened")

INSTALLED = SOURCE.with_name("libcodecs.so")
CODEC_OPERATIONS: Mapping[str, tuple[str, ...]] = {
    "fp32": ("encode", "accumulate", "validate", "energy"),  # Decoding is a copy.
    "fp16": ("encode", "decode", "accumulate", "validate"),
    "bf16": ("encode", "decode", "accumulate", "validate"),
    "int8": ("encode", "decode", "accumulate", "squares"),
    "int4": ("encode", "decode", "accumulate", "squares"),
    "topk": ("encode", "decode", "accumulate", "validate"),
    "masked": ("add",),
}

Function = Callable[[int, int, int, float], int]
"""Takes source address, target address, number of blocks and weight; nonzero if it refused a block. See `codecs.c`."""
Functions = Mapping[str, Mapping[str, Function]]


def load_functions() -> Functions:
    """Return all functions; empty without a library, with a warning. It may build: call it off the event loop."""
    try:
        return load_library()[1]
    except OSError as error:
        logger.warning("the codecs compute with torch, which is slower: %s", error)
        return {}


def load_library() -> tuple[Path, Functions]:
    """Find or build the codecs' library; return its path and functions.

    Raises `OSError` if no library can be found, built (`p2ptrain.native.build.BuildError`) or loaded.
    """
    return find_library(INSTALLED, cached_path(), build_library, open_library)


def find_library(
    installed: Path, cached: Path, build: Callable[[], bytes], open_file: Callable[[Path], Opened]
) -> tuple[Path, Opened]:
    """Open the installed, the cached or a newly built library; return its path, and the result of ``open_file``.

    Raises `OSError` if none of them works.
    """
    for path in (installed, cached):
        try:
            return path, open_file(path)
        except FileNotFoundError:
            continue
        except OSError as error:
            logger.warning("%s is not used: %s", path, error)
    library = build()
    with contextlib.suppress(OSError):
        cached.parent.mkdir(parents=True, exist_ok=True)
        replace_file(cached, library)
        return cached, open_file(cached)
    with tempfile.TemporaryDirectory(prefix="p2ptrain-native-") as folder:
        path = Path(folder, cached.name)
        path.write_bytes(library)
        return path, open_file(path)  # The mapping outlives the file.


def cached_path() -> Path:
    """Return the path of a checkout's library of codecs for this source and machine."""
    return cached_library(SOURCE)


def cached_library(source: Path) -> Path:
    """Return the path of a checkout's library for a source, in its present state, and this machine."""
    digest = hashlib.sha256(platform.machine().encode())
    for path in (source, *sorted(source.parent.glob("*.h")), source.with_name("build.py")):
        digest.update(path.read_bytes())
    name = f"{source.stem}-{digest.hexdigest()[:16]}.so"
    return Path(importlib.util.cache_from_source(__file__)).with_name(name)


def open_library(path: Path) -> Functions:
    """Load the codecs' library; raises `OSError` if it is damaged, of another machine, or lacks a function."""
    library = open_verified(path)
    kinds = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_long, ctypes.c_float)
    return {
        codec: {
            operation: get_function(library, f"{operation}_{codec}", kinds, ctypes.c_int) for operation in operations
        }
        for codec, operations in CODEC_OPERATIONS.items()
    }


def open_verified(path: Path) -> ctypes.CDLL:
    """Load a library; raises `OSError` if it is damaged or of another machine."""
    data = path.read_bytes()
    # Verified first: loading a truncated file may crash the process.
    if hashlib.sha256(data[:-DIGEST_BYTES]).digest() != data[-DIGEST_BYTES:]:
        raise OSError("the library is damaged")
    return ctypes.CDLL(str(path))


def get_function(library: ctypes.CDLL, name: str, parameters: Sequence[type[Any]], result: type[Any] | None) -> Any:
    """Return a function of a library, with its types set; raises `OSError` if there is none."""
    try:
        function = library[name]
    except AttributeError as error:
        raise OSError(f"the library lacks {name}") from error
    function.argtypes, function.restype = parameters, result
    return function
