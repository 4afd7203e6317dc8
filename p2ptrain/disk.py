"""Files whose content changes at once: a crash leaves the old content or the new, never a part of it."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from p2ptrain.buffers import Buffer

logger = logging.getLogger(__name__)


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


class WriteLog:
    """Logs the first of several failed writes in a row, and the first success after them."""

    def __init__(self, what: str, path: Path | None) -> None:
        """``what`` is written to ``path``, in words."""
        self._what, self._path = what, path
        self._has_failed = False

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Log the block's result if it differs from the last one; an `OSError` passes on."""
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                logger.error("cannot keep %s in %s: %s", self._what, self._path, error.strerror or error)
            self._has_failed = True
            raise
        if self._has_failed:
            logger.warning("%s can be kept in %s again", self._what, self._path)
        self._has_failed = False
