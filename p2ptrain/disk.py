"""Files whose content changes at once: a crash leaves the old content or the new, never a part of it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from p2ptrain.buffers import Buffer


def replace_file(path: Path, *pieces: Buffer, synced: bool = False, mode: int = 0o666) -> None:
    """Replace a file's content; raise `OSError`, and leave the old content in place, if that fails.

    Args:
        pieces: The new content.
        synced: True to have it on the disk before this returns. Else a power failure may lose it, or tear the file.
        mode: Of the file, less the umask.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")  # Another process may replace it at the same time.
    try:
        with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, mode), "wb") as file:
            for piece in pieces:
                file.write(piece)
            if synced:
                file.flush()
                os.fsync(file.fileno())
        partial.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise
    if synced:
        sync_folder(path.parent)  # Else a power failure could bring the old file back.


def sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
