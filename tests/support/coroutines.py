"""Tests that are coroutines: each runs on an event loop of its own, in real or in simulated time."""

from __future__ import annotations

import asyncio
import functools
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, Concatenate, ParamSpec

from p2ptrain.network.simulated import SimulatedNetwork, simulate

P = ParamSpec("P")


def on_loop(test: Callable[P, Coroutine[Any, Any, None]]) -> Callable[P, None]:
    """Run a test on asyncio's event loop."""

    @functools.wraps(test)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        asyncio.run(test(*args, **kwargs))

    return run


def simulated(
    seed: int = 1, **options: Any
) -> Callable[[Callable[Concatenate[SimulatedNetwork, P], Coroutine[Any, Any, None]]], Callable[P, None]]:
    """Run a test on a simulated network, which is its first argument; ``options`` are those of `simulate`."""

    def decorate(test: Callable[Concatenate[SimulatedNetwork, P], Coroutine[Any, Any, None]]) -> Callable[P, None]:
        @functools.wraps(test)
        def run(*args: P.args, **kwargs: P.kwargs) -> None:
            simulate(lambda network: test(network, *args, **kwargs), seed, **options)

        # pytest looks for a fixture for each parameter.
        _, *parameters = inspect.signature(test).parameters.values()
        vars(run)["__signature__"] = inspect.Signature(parameters)
        return run

    return decorate
