"""The virtual-time loop: time jumps, order is fixed, and what is stuck is said."""

import asyncio
import random

import pytest

from p2ptrain.network.simulated import SimulationDeadlock, SimulationError, VirtualTimeLoop
from p2ptrain.network.simulated.loop import current_owner


def test_a_deadlock_names_the_task_that_waits() -> None:
    async def waits_for_ever() -> None:
        await asyncio.get_running_loop().create_future()

    loop = VirtualTimeLoop.create()
    with pytest.raises(SimulationDeadlock, match="waits_for_ever"):
        loop.run_until_complete(waits_for_ever())
    for task in loop.pending_tasks():
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))


@pytest.mark.parametrize("limits", [{"max_seconds": 100.0}, {"max_callbacks": 1000}])
def test_an_endless_simulation_is_given_up(limits: dict[str, float]) -> None:
    async def endless() -> None:
        for _ in range(1_000_000_000):
            await asyncio.sleep(1)

    loop = VirtualTimeLoop.create(**limits)  # type: ignore[arg-type]
    with pytest.raises(SimulationError, match="not done after"):
        loop.run_until_complete(endless())
    loop.close()


def test_a_frozen_owner_does_not_run_and_catches_up_when_thawed() -> None:
    ticks: list[float] = []

    async def ticker() -> None:
        for _ in range(10):
            await asyncio.sleep(1)
            ticks.append(asyncio.get_running_loop().time())

    async def main() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, VirtualTimeLoop)
        owner = object()
        token = current_owner.set(owner)
        task = asyncio.create_task(ticker())
        current_owner.reset(token)
        await asyncio.sleep(3.5)
        loop.freeze(owner)
        await asyncio.sleep(20)
        assert len(ticks) == 3
        loop.thaw(owner)
        await task

    VirtualTimeLoop.create().run_until_complete(main())
    assert ticks[3] == pytest.approx(23.5)
    assert len(ticks) == 10


def test_an_exception_in_a_plain_callback_ends_the_simulation() -> None:
    async def main() -> None:
        asyncio.get_running_loop().call_later(1, lambda: 1 // 0)
        await asyncio.sleep(5)

    loop = VirtualTimeLoop.create()
    with pytest.raises(SimulationError, match="ZeroDivisionError"):
        loop.run_until_complete(main())
    for task in loop.pending_tasks():
        task.cancel()
    loop.run_until_complete(asyncio.sleep(0))


def test_threads_are_refused() -> None:
    loop = VirtualTimeLoop.create()
    with pytest.raises(SimulationError, match="threads"):
        loop.call_soon_threadsafe(print)


def test_waits_too_short_to_change_the_time_come_to_an_end() -> None:
    async def main() -> None:
        loop = asyncio.get_running_loop()
        generator = random.Random(1)
        for _ in range(1000):
            asked_at = loop.time() - 0.1 * generator.random()
            left = 2.0
            while left > 0:
                await asyncio.sleep(left)
                left = 2.0 - (loop.time() - asked_at)  # Rounding may leave 1e-16 s of it.

    VirtualTimeLoop.create(max_callbacks=20_000).run_until_complete(main())


def test_timers_at_one_instant_run_in_the_order_of_their_creation() -> None:
    order: list[int] = []

    async def main() -> None:
        loop = asyncio.get_running_loop()
        for number in range(50):
            loop.call_at(1.0, order.append, number)
        await asyncio.sleep(2)

    VirtualTimeLoop.create().run_until_complete(main())
    assert order == list(range(50))


def test_a_task_group_cancels_in_the_order_of_creation() -> None:
    cancelled: list[int] = []

    async def child(number: int) -> None:
        try:
            await asyncio.sleep(100)
        finally:
            cancelled.append(number)

    async def main() -> None:
        async with asyncio.TaskGroup() as group:
            for number in range(40):
                group.create_task(child(number))
            await asyncio.sleep(1)
            raise RuntimeError("stop")

    def run() -> list[int]:
        cancelled.clear()
        with pytest.raises(ExceptionGroup):
            VirtualTimeLoop.create().run_until_complete(main())
        return list(cancelled)

    first = run()
    assert len(first) == 40
    assert run() == first
