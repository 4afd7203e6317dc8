"""Running one simulation from its seed to its end, and checking that nothing is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

from p2ptrain.network.simulated.directory import Verify
from p2ptrain.network.simulated.links import LinkModel
from p2ptrain.network.simulated.loop import MAX_REAP_ROUNDS, SimulationError, VirtualTimeLoop
from p2ptrain.network.simulated.network import SimulatedNetwork
from p2ptrain.tasks import logger as failures

T = TypeVar("T")


def simulate(
    main: Callable[[SimulatedNetwork], Awaitable[T]],
    seed: int,
    *,
    model: LinkModel | None = None,
    verify: Verify | None = None,
    max_seconds: float = 7 * 86400.0,
    max_callbacks: int = 100_000_000,
    settle_seconds: float = 1.0,
) -> T:
    """Run ``main(network)`` in virtual time to its end, and check that nothing is left of it.

    Args:
        main: The simulation; starts its peers and ends all that it started.
        seed: What every random decision follows from.
        model: What the links are like.
        verify: Which directory records are stored; None: all.
        max_seconds: Virtual time at which the simulation is given up.
        max_callbacks: Callbacks after which it is given up.
        settle_seconds: Virtual time after ``main`` in which what is ending may end.

    Raises:
        SimulationDeadlock: Everything waits for ever.
        SimulationError: A limit was reached, an exception was lost, or tasks or streams were left behind.
    """
    loop = VirtualTimeLoop.create(max_seconds=max_seconds, max_callbacks=max_callbacks)
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)  # The trace and thousands of tasks are alive: collecting often finds nothing.
    gc.freeze()  # Nor does it among what was there before, such as all of torch.
    try:
        network = SimulatedNetwork(loop, seed, model, verify)

        async def run() -> T:
            result = await main(network)
            await _settle(network, settle_seconds)
            return result

        with _watched(loop):
            return loop.run_until_complete(run())
    finally:
        _clean_up(loop)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


@contextlib.contextmanager
def _watched(loop: VirtualTimeLoop) -> Iterator[None]:
    """Count a background task that a defect ended as a lost exception, though its owner goes on."""
    handler = logging.Handler(logging.ERROR)

    def emit(record: logging.LogRecord) -> None:
        if record.exc_info:
            loop.errors.append({"message": record.getMessage(), "exception": record.exc_info[1]})

    handler.emit = emit  # type: ignore[method-assign]
    failures.addHandler(handler)
    try:
        yield
    finally:
        failures.removeHandler(handler)


async def _settle(network: SimulatedNetwork, settle_seconds: float) -> None:
    loop = network.loop
    current = asyncio.current_task()
    deadline = loop.time() + settle_seconds
    while True:
        left = [task for task in loop.pending_tasks() if task is not current]
        streams = network.leftovers()
        if not left and not streams:
            break
        if loop.time() >= deadline:
            raise SimulationError(f"the simulation left something behind: {loop.describe_tasks()}\n  {streams}")
        await asyncio.sleep(settle_seconds / 20)
    if loop.errors:
        first = loop.errors[0]
        raise SimulationError(f"an exception was lost: {first.get('message')}") from first.get("exception")


def _clean_up(loop: VirtualTimeLoop) -> None:
    """Cancel what a failed simulation left, so that the interpreter has nothing to complain about."""
    for peer in {task.owner: None for task in loop.pending_tasks()}:
        loop.thaw(peer)
    try:
        for _ in range(MAX_REAP_ROUNDS):
            tasks = loop.pending_tasks()
            if not tasks:
                break
            for task in tasks:
                task.cancel()
            loop.run_until_complete(asyncio.sleep(0))
    except SimulationError:
        pass  # The first failure is what matters.
    finally:
        loop.close()
