"""Metrics as JSON lines: one object a line, readable while it is written, bounded in size.

A full disk never stops training: the writer warns once, drops lines, and resumes when there is space.
"""

from __future__ import annotations

import json
import logging
import math
import os
import time
from pathlib import Path
from typing import Any

logger = logging.getLogger(__name__)

MAX_BYTES = 64 << 20


class MetricsWriter:
    """Appends to ``path``; at `MAX_BYTES` the file is renamed to ``path`` + ``.1`` (one old file is kept).

    The folder of ``path`` is created as needed.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: int | None = None
        self._failed = False

    def write(self, kind: str, **values: Any) -> None:
        """Append a line with ``time``, in wall-clock seconds, ``kind`` and ``values``.

        Values are JSON types; numbers that are not finite become null. The first failure in a row is logged.
        """
        record = {"time": time.time(), "kind": kind, **values}
        line = json.dumps(_finite(record), separators=(",", ":"), default=str).encode() + b"\n"
        try:
            self._append(line)
        except OSError as error:
            if not self._failed:
                logger.warning("cannot write metrics to %s, going on without: %s", self._path, error)
            self._failed = True
        else:
            self._failed = False

    def close(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None

    def _append(self, line: bytes) -> None:
        if self._file is None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
        size = os.fstat(self._file).st_size
        if size and size + len(line) > MAX_BYTES:
            self.close()
            self._path.replace(self._path.with_name(self._path.name + ".1"))
            self._append(line)
            return
        if size and os.pread(self._file, 1, size - 1) != b"\n":
            line = b"\n" + line  # A crash or a full disk tore the previous line.
        if os.write(self._file, line) != len(line):
            raise OSError("the disk is full")


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
