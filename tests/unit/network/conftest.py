"""No socket is left open by tests of direct connections."""

import contextlib
import os
from collections.abc import Iterator

import pytest


@pytest.fixture
def nothing_leaks() -> Iterator[None]:
    before = open_sockets()
    yield
    assert open_sockets() <= before


def open_sockets() -> set[str]:
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # what listed them
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return {name for name in found if name.startswith("socket:")}
