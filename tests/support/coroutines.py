"""Tests that are coroutines: in virtual time on a simulated network, or on a real event loop."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable
from typing import Any

import uvloop

from p2ptrain.network.simulated import simulate

Body = Callable[..., Awaitable[None]]
Test = Callable[..., None]
REAL_SECONDS = 100.0


def given(*names: str, by: Callable[[Body, dict[str, Any]], object]) -> Callable[[Body], Test]:
    """Return a decorator for tests some of whose arguments do not come from pytest.

    Args:
        names: Of these arguments; a test takes those that it needs.
        by: Gets the test, to be called with these arguments by name, and its other arguments, which pytest gives it.
    """

    def decorate(test: Body) -> Test:
        signature = inspect.signature(test)
        own = [each for name, each in signature.parameters.items() if name not in names]
        wanted = signature.parameters.keys() & names

        @functools.wraps(test)
        def run(**arguments: Any) -> None:
            async def body(**offered: Any) -> None:
                await test(**{name: offered[name] for name in wanted}, **arguments)

            by(body, arguments)

        setattr(run, "__signature__", signature.replace(parameters=own))  # noqa: B010 - mypy knows of none
        return run

    return decorate


def simulated(seed: int | Callable[..., int] | None = None, **options: Any) -> Callable[[Body], Test]:
    """Return a decorator for tests that run on a simulated network, their argument ``network``.

    Args:
        seed: Of the simulation, or a function of the test's other arguments; its argument ``seed`` by default.
        options: Of `simulate`.
    """

    def run(test: Body, arguments: dict[str, Any]) -> None:
        number = arguments["seed"] if seed is None else seed(**arguments) if callable(seed) else seed
        simulate(lambda network: test(network=network), number, **options)

    return given("network", by=run)


def run(main: Body, on_uvloop: bool = False) -> None:
    """Run a coroutine on an event loop of its own, for at most `REAL_SECONDS`."""

    async def bounded() -> None:
        async with asyncio.timeout(REAL_SECONDS):
            await main()

    (uvloop.run if on_uvloop else asyncio.run)(bounded())


def on_event_loop(test: Body) -> Test:
    """Let a test `run` on an event loop; its argument ``on_uvloop`` chooses which."""
    return given(by=lambda body, arguments: run(body, arguments.get("on_uvloop", False)))(test)


def on_uvloop(test: Body) -> Test:
    """Let a test `run` on uvloop, as peers do."""
    return given(by=lambda body, _: run(body, on_uvloop=True))(test)
