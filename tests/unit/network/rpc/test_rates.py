"""Bandwidth caps, measured in virtual time on simulated links that are much faster."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.rpc.frames import RateLimit
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.peers import start_member

FAST = LinkModel(up_bytes_per_second=None, down_bytes_per_second=None)
NUM_BYTES = 4_000_000
Rates = tuple[int, int]
"""Caps up and down; 0 sets none."""


@asynccontextmanager
async def pair(network: SimulatedNetwork, sender: Rates, receiver: Rates) -> AsyncIterator[tuple[Rpc, Rpc]]:
    """Two peers; the second one takes what it is sent, and answers pings."""

    async def take(channel: Channel, request: dict[str, Any]) -> None:
        await channel.receive_bytes(request["size"], 3600)
        await channel.send({"done": True})

    async def echo(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        return request

    started = [
        await start_member(network.add_peer(name), *rates)
        for name, rates in (("sender", sender), ("receiver", receiver))
    ]
    left, right = (member.rpc for member in started)
    right.serve_channel("take", dict, take)
    right.serve("echo", dict, echo)
    yield left, right
    for member in started:
        await member.rpc.close()
        await member.peer.close()


async def seconds_to_send(sender: Rpc, receiver: Rpc, num_channels: int, num_bytes: int) -> float:
    """How long it takes to send ``num_bytes`` in all, over so many channels, up to the last receipt."""
    share = num_bytes // num_channels

    async def give() -> None:
        async with sender.open(receiver.peer_id, "take", {"size": share}, 10) as channel:
            await channel.send_bytes(bytes(share))
            assert await channel.receive(dict, 3600) == {"done": True}

    loop = asyncio.get_running_loop()
    started = loop.time()
    async with asyncio.TaskGroup() as group:
        for _ in range(num_channels):
            group.create_task(give())
    return loop.time() - started


def capped(direction: str, rate: int) -> tuple[Rates, Rates]:
    """The caps of a sender and a receiver, one of them capped."""
    if direction == "up":
        return (rate, 0), (0, 0)
    return (0, 0), (0, rate)


@pytest.mark.parametrize(
    ("rate", "num_bytes", "num_channels"),
    [
        (400_000, NUM_BYTES, 1),
        (400_000, NUM_BYTES, 5),
        (10_000, 1_500_000, 2),  # A frame of 256 KiB takes 26 seconds: longer than a live peer may be silent.
    ],
)
@pytest.mark.parametrize("direction", ["up", "down"])
@simulated(model=FAST)
async def test_all_channels_together_stay_within_a_tenth_of_the_cap(
    network: SimulatedNetwork, direction: str, rate: int, num_bytes: int, num_channels: int
) -> None:
    async with pair(network, *capped(direction, rate)) as (left, right):
        seconds = await seconds_to_send(left, right, num_channels, num_bytes)
    assert 0.9 * rate <= num_bytes / seconds <= 1.1 * rate


@simulated(model=FAST)
async def test_without_a_cap_nothing_waits(network: SimulatedNetwork) -> None:
    async with pair(network, (0, 0), (0, 0)) as (left, right):
        assert await seconds_to_send(left, right, 1, NUM_BYTES) < 2
    before = network.loop.time()
    await RateLimit().take(1 << 40)
    assert network.loop.time() == before


@pytest.mark.parametrize("direction", ["up", "down"])
@simulated(model=FAST)
async def test_a_small_call_waits_for_one_piece_of_a_long_transfer_and_not_for_its_end(
    network: SimulatedNetwork, direction: str
) -> None:
    rate = 400_000
    async with pair(network, *capped(direction, rate)) as (left, right):
        transfer = asyncio.create_task(seconds_to_send(left, right, 1, NUM_BYTES))
        await asyncio.sleep(1)
        started = network.loop.time()
        await left.call(right.peer_id, "echo", {"fill": bytes(1000)}, dict, 10)
        assert network.loop.time() - started < 2
        assert not transfer.done()
        await transfer
