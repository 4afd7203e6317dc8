"""Tests that are coroutines on a simulated network."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate

Setup = Callable[..., AbstractAsyncContextManager[Any]]


def simulated(
    setup: Setup | None = None, *given: Any, seed: int | Sequence[int], **options: Any
) -> Callable[[Callable[..., Awaitable[None]]], Callable[..., None]]:
    """Run a test in virtual time, within the context ``setup(network, *given)`` if there is a setup.

    The test's first argument is then the context's value. An argument ``network`` is the simulated network. pytest
    passes all others.

    Args:
        setup: Makes the context, such as `tests.support.sim.peers.members`.
        given: Passed to ``setup``.
        seed: Of `simulate`; the test runs once for each of several.
        options: Of `simulate`.
    """

    def decorate(test: Callable[..., Awaitable[None]]) -> Callable[..., None]:
        signature = inspect.signature(test)

        @functools.wraps(test)
        def run(**named: Any) -> None:
            chosen = named.pop("seed") if isinstance(seed, Sequence) else seed

            async def main(network: SimulatedNetwork) -> None:
                if "network" in signature.parameters:
                    named["network"] = network
                if setup is None:
                    await test(**named)
                else:
                    async with setup(network, *given) as value:
                        await test(value, **named)

            simulate(main, chosen, **options)

        parameters = list(signature.parameters.values())[0 if setup is None else 1 :]
        shown = [
            parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)
            for parameter in parameters
            if parameter.name != "network"
        ]
        if isinstance(seed, Sequence):
            shown.append(inspect.Parameter("seed", inspect.Parameter.KEYWORD_ONLY))
            pytest.mark.parametrize("seed", seed)(run)
        run.__signature__ = signature.replace(parameters=shown)  # type: ignore[attr-defined]
        return run

    return decorate
