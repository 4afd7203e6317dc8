"""Parameters of tests whose values meet in pairs: all other combinations are slow."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

import pytest


def pairs(*axes: Iterable[object]) -> list[Any]:
    """Return the product of some axes for `pytest.mark.parametrize`, of which only every other set is not slow.

    Each value of an axis meets each of any other axis in a set that is not slow, if a third axis has two or more.
    """
    numbered = itertools.product(*(list(enumerate(axis)) for axis in axes))
    return [
        pytest.param(*(value for _, value in chosen), marks=pytest.mark.slow if sum(at for at, _ in chosen) % 2 else [])
        for chosen in numbered
    ]
