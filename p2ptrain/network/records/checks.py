"""Checks of single values in a record from a stranger: each returns the value, or raises `ValueError` with its name."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any


def expect(condition: bool, name: str, message: str) -> None:
    if not condition:
        raise ValueError(f"{name} {message}")


def text(max_chars: int) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        expect(isinstance(value, str) and len(value) <= max_chars, name, f"is not text of up to {max_chars} characters")
        expect(value.isprintable(), name, "holds control characters")  # it is printed on terminals
        return str(value)

    return check


def one_of(choices: tuple[str, ...]) -> Callable[[str, Any], str]:
    def check(name: str, value: Any) -> str:
        expect(isinstance(value, str) and value in choices, name, f"is none of {', '.join(choices)}")
        return str(value)

    return check


def count(name: str, value: Any) -> int:
    expect(type(value) is int and 0 <= value < 1 << 63, name, "is not a count")
    return int(value)


def amount(name: str, value: Any) -> float:
    expect(type(value) in (int, float) and math.isfinite(value) and 0 <= value <= 1e18, name, "is not an amount")
    return float(value)


def number(name: str, value: Any) -> float:
    expect(type(value) in (int, float) and math.isfinite(value) and abs(value) <= 1e12, name, "is not a number")
    return float(value)


def digest(name: str, value: Any) -> bytes:
    expect(isinstance(value, bytes) and len(value) == 32, name, "is not 32 bytes")
    return bytes(value)


def boolean(name: str, value: Any) -> bool:
    expect(isinstance(value, bool), name, "is not a truth value")
    return bool(value)
