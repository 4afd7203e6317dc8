"""JSON that carries a checksum of itself."""

from __future__ import annotations

import hashlib
import json
from typing import Any

DAMAGE = (ValueError, KeyError, TypeError, AttributeError, RecursionError)
"""Errors that reading a damaged description raises."""


def seal(description: dict[str, Any]) -> bytes:
    """Return the description as canonical JSON, with its checksum."""
    return _canonical({**description, "checksum": _checksum(description)})


def unseal(data: bytes) -> dict[str, Any]:
    """Return the description of `seal`; raise one of `DAMAGE` if a byte changed."""
    description: dict[str, Any] = json.loads(data)
    checksum = description.pop("checksum")
    if checksum != _checksum(description) or data != _canonical({**description, "checksum": checksum}):
        raise ValueError("its checksum is wrong")
    return description


def _canonical(value: dict[str, Any]) -> bytes:
    return json.dumps(value, sort_keys=True, indent=1).encode() + b"\n"


def _checksum(description: dict[str, Any]) -> str:
    return hashlib.sha256(_canonical(description)).hexdigest()
