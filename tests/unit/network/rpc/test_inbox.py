"""What is read ahead of its owner is bounded, and reaches it in order."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.network.rpc.channel import Channel, ChannelLimits
from p2ptrain.network.rpc.frames import MAX_MESSAGE_BYTES, Kind, frame, pack
from p2ptrain.network.rpc.inbox import Inbox, Sink
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.sim.channels import against, conversation


@simulated(model=LinkModel(up_bytes_per_second=None, down_bytes_per_second=None))
async def test_what_is_buffered_for_an_owner_that_does_not_read_is_bounded(network: SimulatedNetwork) -> None:
    held: list[int] = []

    async def server(channel: Channel) -> None:
        await asyncio.sleep(30)
        held.append(channel._inbox.num_bytes)
        await channel.receive_bytes(32 << 20, 600)

    async with conversation(network, server) as (channel, caller, other):
        sending = asyncio.create_task(channel.send_bytes(bytes(32 << 20)))
        await asyncio.sleep(25)
        assert caller.rpc.bytes_sent < 2 << 20
        assert other.rpc.bytes_received < ChannelLimits().inbox_bytes + 70_000
        await sending
    assert 0 < held[0] <= ChannelLimits().inbox_bytes + 70_000


@simulated()
async def test_a_flood_of_tiny_messages_is_bounded(network: SimulatedNetwork) -> None:
    tiny = frame(Kind.MESSAGE, pack({}))

    async def server(stream: Stream) -> None:
        while True:
            await stream.write(tiny * 1000)

    async with against(network, server) as channel:
        await asyncio.sleep(10)
        assert len(channel._inbox) < 3000
        channel.abort()


@simulated()
async def test_a_long_message_is_not_read_before_it_is_asked_for(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await channel.send({"data": bytes(5 << 20)})

    async with conversation(network, server) as (channel, caller, _):
        await asyncio.sleep(5)
        assert caller.rpc.bytes_received < 100
        message = await channel.receive(dict, 30, max_bytes=MAX_MESSAGE_BYTES)
        assert len(message["data"]) == 5 << 20


@simulated()
async def test_only_one_task_receives_and_a_second_does_not_disturb_it(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(1)
        await channel.send({"data": bytes(100_000)})

    async with conversation(network, server) as (channel, _, _):
        first = asyncio.create_task(channel.receive(dict, 5, max_bytes=200_000))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="only one task"):
            await channel.receive_bytes(5, 5)
        assert len((await first)["data"]) == 100_000


def test_an_inbox_has_room_up_to_its_bound_and_always_for_one_item() -> None:
    inbox = Inbox("remote", 1000)
    assert inbox.has_room(5000)
    inbox.put(Kind.BULK, bytes(700))
    assert 700 < inbox.num_bytes < 1000
    assert inbox.has_room(1000 - inbox.num_bytes)
    assert not inbox.has_room(1001 - inbox.num_bytes)
    sink = Sink("remote", memoryview(bytearray(700)))
    inbox.pour(sink)
    assert inbox.num_bytes == len(inbox) == 0
    assert not sink.complete


def test_an_inbox_that_is_closed_holds_nobody_back_and_keeps_nothing() -> None:
    inbox = Inbox("remote", 10)
    inbox.put(Kind.BULK, bytes(10))
    assert not inbox.has_room(1)
    inbox.close()
    assert inbox.has_room(1 << 20, if_wanted=True)
    inbox.put(Kind.BULK, bytes(10))
    assert len(inbox) == 1
