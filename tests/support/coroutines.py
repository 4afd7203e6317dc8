"""Tests that are coroutines: in virtual time on a simulated network, or on a real event loop."""

import asyncio
import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from contextvars import ContextVar
from typing import Any

import pytest
import uvloop

from p2ptrain.network.simulated import SimulatedNetwork, simulate

Test = Callable[..., Awaitable[None]]
Setup = Callable[..., AbstractAsyncContextManager[Any]]
REAL_SECONDS = 100.0
"""How long a test may take on a real event loop."""
_ENDINGS: ContextVar[list[Callable[[], Awaitable[object]]]] = ContextVar("endings")


def at_end(close: Callable[[], Awaitable[object]]) -> None:
    """Have the `simulated` test in progress await ``close()`` when it has passed; elsewhere the caller closes."""
    _ENDINGS.get([]).append(close)


def simulated(
    setup: Setup | None = None,
    *given: Any,
    seed: int | Sequence[int] | Callable[..., int] | None = None,
    **options: Any,
) -> Callable[[Test], Callable[..., None]]:
    """Run a test in virtual time, within the context ``setup(network, *given)`` if there is a setup.

    The test's first argument is then the context's value. Its argument ``network`` is the simulated network. pytest
    passes all others. ``seed`` may be several, with each of which the test runs, or a function of the test's other
    arguments; by default it is the test's argument ``seed``, or 1. ``options`` are those of `simulate`.
    """

    def decorate(test: Test) -> Callable[..., None]:
        names = list(inspect.signature(test).parameters)

        @functools.wraps(test)
        def run(**named: Any) -> None:
            number = named.get("seed", 1) if seed is None or isinstance(seed, Sequence) else seed
            if "seed" not in names:
                named.pop("seed", None)

            async def main(network: SimulatedNetwork) -> None:
                if "network" in names:
                    named["network"] = network
                endings: list[Callable[[], Awaitable[object]]] = []
                _ENDINGS.set(endings)
                await _within(setup and functools.partial(setup, network, *given), test, named)
                for close in reversed(endings):
                    await close()

            simulate(main, number(**named) if callable(number) else number, **options)

        wanted = [name for name in names[setup is not None :] if name != "network"]
        if not isinstance(seed, Sequence):
            return declared(run, wanted)
        return parametrized(declared(run, [*wanted, "seed"]), "seed", seed)

    return decorate


def on_loop(test: Test) -> Callable[..., None]:
    return _on(asyncio.run)(test)


def on_uvloop(test: Test) -> Callable[..., None]:
    """Run a test on uvloop, as peers do."""
    return _on(uvloop.run)(test)


def on_loop_within(setup: Setup, *given: Any, **options: Any) -> Callable[[Test], Callable[..., None]]:
    """Run a test on asyncio's event loop, within the context ``setup(*given, **options)``, its first argument."""
    return _on(asyncio.run, functools.partial(setup, *given, **options))


def on_both_loops(test: Test) -> Callable[..., None]:
    return _on(None)(test)


def on_both_loops_within(setup: Setup, *given: Any) -> Callable[[Test], Callable[..., None]]:
    """Run a test on both event loops, within the context ``setup(*given)``, its first argument."""
    return _on(None, functools.partial(setup, *given))


def _on(loop: Callable[..., None] | None, setup: Setup | None = None) -> Callable[[Test], Callable[..., None]]:
    """Run a test with ``loop``, such as `asyncio.run`; with each in turn if it is None."""

    def decorate(test: Test) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**named: Any) -> None:
            run_here: Any = loop or named.pop("on_loop")
            run_here(_in_time(setup, test, named))

        names = list(inspect.signature(test).parameters)[setup is not None :]
        if loop is not None:
            return declared(run, names)
        return parametrized(declared(run, [*names, "on_loop"]), "on_loop", [asyncio.run, uvloop.run])

    return decorate


def parametrized(test: Callable[..., None], name: str, values: Sequence[Any]) -> Callable[..., None]:
    mark: Callable[[Callable[..., None]], Callable[..., None]] = pytest.mark.parametrize(name, values)
    return mark(test)


async def _within(setup: Setup | None, test: Test, named: dict[str, Any]) -> None:
    if setup is None:
        await test(**named)
        return
    async with setup() as value:
        await test(value, **named)


async def _in_time(setup: Setup | None, test: Test, named: dict[str, Any]) -> None:
    async with asyncio.timeout(REAL_SECONDS):
        await _within(setup, test, named)


def declared(test: Callable[..., None], names: list[str]) -> Callable[..., None]:
    """Return a test whose arguments pytest sees as ``names``."""
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    vars(test)["__signature__"] = inspect.Signature(parameters)
    return test
