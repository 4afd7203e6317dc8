"""A safetensors writer that writes and hashes tensor by tensor.

The library's own writer needs a second copy of the whole state, as bytes. The format: the length of a JSON header
(u64, little endian), the header, then the tensors' bytes without gaps
(https://github.com/huggingface/safetensors, section Format). The library does the reading.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from p2ptrain.training.state.digest import byte_view

PIECE_BYTES = 4 << 20

CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


@dataclass(frozen=True)
class FileHash:
    """SHA-256 (hexadecimal) and size of a file."""

    sha256: str
    num_bytes: int


def write_tensors(path: Path, tensors: Sequence[tuple[str, Tensor]]) -> FileHash:
    """Write ``tensors`` to a new file and sync it to disk; the metadata entry ``order`` keeps their order.

    Tensors on other devices are copied to the CPU one at a time.

    Raises:
        OSError: The file cannot be written.
        ValueError: A name is used twice, or a dtype is not in the format.
    """
    names = [name for name, _ in tensors]
    if len(set(names)) != len(names):
        raise ValueError("tensors that are saved together need different names")
    # Wide dtypes first, so that each tensor is aligned in the file.
    ordered = sorted(tensors, key=lambda item: -item[1].element_size())
    header: dict[str, Any] = {"__metadata__": {"order": json.dumps(names)}}
    end = 0
    for name, tensor in ordered:
        if tensor.dtype not in CODES:
            raise ValueError(f"{name} has dtype {tensor.dtype}, which cannot be saved")
        start, end = end, end + tensor.nbytes
        header[name] = {"dtype": CODES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    digest = hashlib.sha256()
    with path.open("xb", buffering=0) as file:
        _write(file.fileno(), memoryview(len(text).to_bytes(8, "little") + text), digest)
        for _, tensor in ordered:
            _write(file.fileno(), byte_view(tensor.detach().to("cpu").contiguous()), digest)
        os.fsync(file.fileno())
    return FileHash(digest.hexdigest(), 8 + len(text) + end)


def hash_file(path: Path, on_bytes: Callable[[int], None] = lambda count: None) -> FileHash:
    """Hash a file piece by piece; call ``on_bytes`` with each piece's size. Raise `OSError` if it cannot be read."""
    digest = hashlib.sha256()
    num_bytes = 0
    buffer = memoryview(bytearray(PIECE_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
            num_bytes += count
            on_bytes(count)
    return FileHash(digest.hexdigest(), num_bytes)


def _write(descriptor: int, data: memoryview, digest: hashlib._Hash) -> None:
    for start in range(0, len(data), PIECE_BYTES):
        piece = data[start : start + PIECE_BYTES]
        digest.update(piece)
        while piece:
            piece = piece[os.write(descriptor, piece) :]
