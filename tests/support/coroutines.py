"""Tests that are coroutines: each runs on an event loop of its own, in real or in simulated time."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

import pytest
import uvloop

from p2ptrain.network.simulated import SimulatedNetwork, simulate

P = ParamSpec("P")


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on asyncio's event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def on_both_loops(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on asyncio's event loop and on uvloop, each time within 30 seconds."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        on_loop: Any = kwargs.pop("on_loop")
        on_loop(asyncio.wait_for(test(*args, **kwargs), 30))

    _declare(run, [*inspect.signature(test).parameters, "on_loop"])
    on_each: Callable[..., Callable[P, None]] = pytest.mark.parametrize(
        "on_loop", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"]
    )
    return on_each(run)


def simulated(
    seed: int = 1, **options: Any
) -> Callable[[Callable[Concatenate[SimulatedNetwork, P], Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Run a test on a simulated network, which is its first argument; ``options`` are those of `simulate`."""

    def decorate(test: Callable[Concatenate[SimulatedNetwork, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            simulate(lambda network: test(network, *args, **kwargs), seed, **options)

        _, *names = inspect.signature(test).parameters
        _declare(run, names)
        return run

    return decorate


def _declare(test: Callable[..., None], names: list[str]) -> None:
    """Have pytest pass these fixtures and parameters."""
    parameters = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in names]
    vars(test)["__signature__"] = inspect.Signature(parameters)
