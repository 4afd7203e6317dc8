"""Runs one simulation from its seed to its end, and checks that it leaves nothing behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Awaitable, Callable, Iterator
from typing import TypeVar

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
    max_seconds: float = 7 * 86400.0,
    max_callbacks: int = 100_000_000,
    settle_seconds: float = 1.0,
) -> T:
    """Run ``main(network)`` in virtual time and return its result; check that it leaves nothing behind.

    Args:
        main: Starts the peers, and ends everything that it started.
        seed: Seed of every random decision.
        max_seconds: Limit on virtual time.
        settle_seconds: Grace period in virtual time after ``main``, for tasks and streams that are ending.

    Raises:
        SimulationDeadlock: All tasks wait forever.
        SimulationError: A limit was reached, an exception was lost, or tasks or streams were left behind.
    """
    loop = VirtualTimeLoop.create(max_seconds=max_seconds, max_callbacks=max_callbacks)
    thresholds = gc.get_threshold()
    gc.set_threshold(100_000, 20, 20)  # The trace and thousands of tasks stay alive: frequent collection is useless.
    gc.freeze()  # Exclude all earlier objects, such as torch's, from collection.
    try:
        network = SimulatedNetwork(loop, seed, model)

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
    """Record a background task that died of a defect as a lost exception, even if its owner continues."""
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
    """Cancel the tasks of a failed simulation, so that the interpreter reports no pending tasks."""
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
        pass  # The first failure is reported.
    finally:
        loop.close()
