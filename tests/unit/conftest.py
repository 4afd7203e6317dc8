"""What all unit tests share."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(autouse=True)
def _logging_as_before() -> Iterator[None]:
    """A command sets up the log of its process, which here is that of other tests."""
    root, own = logging.getLogger(), logging.getLogger("p2ptrain")
    before = root.handlers[:], root.level, own.level
    yield
    root.handlers[:], level, own_level = before
    root.setLevel(level)
    own.setLevel(own_level)
