"""SendWindow on a link: order, room, and that no peer holds up what is for others."""

import asyncio

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.pipeline.routing.send_window import SendWindow
from tests.support.coroutines import simulated
from tests.support.sim.peers import until


class Sends:
    """What is being sent, by a name of its own; each goes on until it is told to end."""

    def __init__(self, window_bytes: int) -> None:
        self.window = SendWindow(window_bytes)
        self.under_way: list[str] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        self._ends: dict[str, asyncio.Event] = {}

    async def begin(self, name: str, peer: str, num_bytes: int) -> None:
        self._ends[name] = asyncio.Event()
        self.tasks[name] = asyncio.create_task(self._send(name, peer, num_bytes))
        await asyncio.sleep(0)

    async def end(self, name: str) -> None:
        self._ends[name].set()
        await asyncio.wait([self.tasks[name]])
        await asyncio.sleep(0)

    async def give_up(self, name: str) -> None:
        self.tasks[name].cancel()
        await asyncio.wait([self.tasks[name]])
        await asyncio.sleep(0)

    async def _send(self, name: str, peer: str, num_bytes: int) -> None:
        async with self.window.to(peer, num_bytes):
            self.under_way.append(name)
            try:
                await self._ends[name].wait()
            finally:
                self.under_way.remove(name)


@simulated()
async def test_what_has_room_goes_at_once_and_the_rest_in_order(network: SimulatedNetwork) -> None:
    sends = Sends(10)
    for name, size in (("a", 4), ("b", 6), ("c", 5), ("d", 1)):
        await sends.begin(name, "bob", size)
    assert sends.under_way == ["a", "b"]
    await sends.end("a")
    assert sends.under_way == ["b"]  # c has no room, and d does not overtake it.
    await sends.end("b")
    assert sends.under_way == ["c", "d"]
    await sends.end("c")
    await sends.end("d")


@simulated(seed=2)
async def test_what_is_larger_than_the_window_goes_alone(network: SimulatedNetwork) -> None:
    sends = Sends(10)
    for name, size in (("a", 1), ("b", 100), ("c", 1)):
        await sends.begin(name, "bob", size)
    assert sends.under_way == ["a"]
    await sends.end("a")
    assert sends.under_way == ["b"]
    await sends.end("b")
    assert sends.under_way == ["c"]
    await sends.end("c")


@simulated(seed=3)
async def test_a_peer_that_takes_nothing_holds_up_only_what_is_for_it(network: SimulatedNetwork) -> None:
    sends = Sends(10)
    await sends.begin("stuck", "bob", 10)
    await sends.begin("waiting", "bob", 10)
    await sends.begin("other", "carol", 10)
    assert sends.under_way == ["stuck", "other"]
    for name in ("stuck", "other", "waiting"):
        await sends.end(name)


@pytest.mark.parametrize("who", ["a", "b", "c"])
@simulated(seed=4)
async def test_who_gives_up_lets_the_next_one_go(network: SimulatedNetwork, who: str) -> None:
    """While it sends, as the next in line, and further back."""
    sends = Sends(10)
    for name in ("a", "b", "c"):
        await sends.begin(name, "bob", 10)
    await sends.give_up(who)
    left = [name for name in ("a", "b", "c") if name != who]
    for name in left:
        assert sends.under_way == [name]
        await sends.end(name)
    await sends.begin("later", "bob", 10)
    assert sends.under_way == ["later"]
    await sends.end("later")


@simulated(seed=5)
async def test_who_gives_up_just_when_it_may_go_lets_the_next_one_go(network: SimulatedNetwork) -> None:
    sends = Sends(10)
    for name in ("a", "b", "c"):
        await sends.begin(name, "bob", 10)
    sends._ends["a"].set()
    while sends.under_way:  # noqa: ASYNC110 - an event would let others run first
        await asyncio.sleep(0)
    sends.tasks["b"].cancel()  # Its turn has come, and it does not know yet.
    await until(lambda: sends.under_way == ["c"])
    assert sends.tasks["b"].cancelled()
    await sends.end("c")
    assert sends.under_way == []
