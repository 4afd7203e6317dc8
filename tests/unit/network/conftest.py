"""Both event loops, and nothing left open, for tests of direct connections."""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Awaitable, Callable, Iterator

import pytest
import uvloop

Main = Callable[[], Awaitable[None]]


@pytest.fixture(params=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Callable[[Main], None]:
    """Runs a scenario, on both event loops, with a deadline."""

    def run_it(main: Main) -> None:
        async def bounded() -> None:
            async with asyncio.timeout(30):
                await main()

        (uvloop.run if request.param == "uvloop" else asyncio.run)(bounded())

    return run_it


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
