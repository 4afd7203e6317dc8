"""What is read ahead of its owner is bounded, and reaches it in order."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import PeerLostError, ProtocolError
from p2ptrain.network.rpc.channel import Channel, ChannelLimits
from p2ptrain.network.rpc.frames import MAX_MESSAGE_BYTES, Kind, frame, pack
from p2ptrain.network.rpc.inbox import Inbox, Sink
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.coroutines import on_loop, simulated
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
async def test_only_one_task_receives(network: SimulatedNetwork) -> None:
    async with conversation(network, lambda channel: channel.close()) as (channel, _, _):
        first = asyncio.create_task(channel.receive(dict, 5))
        await asyncio.sleep(0)
        with pytest.raises(ValueError, match="only one task"):
            await channel.receive(dict, 5)
        with pytest.raises(PeerLostError):
            await first


@simulated()
async def test_a_second_receiver_does_not_disturb_the_first(network: SimulatedNetwork) -> None:
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


@on_loop
async def test_a_long_message_has_room_only_once_its_owner_waits_for_one() -> None:
    inbox = Inbox("remote", 1000)
    assert not inbox.has_room(100, if_wanted=True)
    waiting = asyncio.create_task(inbox.wait(message_bytes=100))
    await asyncio.wait_for(inbox.wait_for_room(100, if_wanted=True), 5)
    assert inbox.wanted_bytes == 100
    inbox.put(Kind.MESSAGE, bytes(100))
    await asyncio.wait_for(waiting, 5)
    assert inbox.pop_message(100) == bytes(100)
    assert inbox.wanted_bytes == 0


def test_a_sink_fills_in_order_and_tells_how_far() -> None:
    progress: list[int] = []
    buffer = bytearray(6)
    sink = Sink("remote", memoryview(buffer), progress.append)
    sink.take(Kind.BULK, b"ab")
    sink.room(2)[:] = b"cd"
    sink.advance(2, Kind.BULK)
    states = [sink.complete]
    sink.take(Kind.BULK_END, b"ef")
    states.append(sink.complete)
    assert (bytes(buffer), progress, states) == (b"abcdef", [2, 4, 6], [False, True])


@pytest.mark.parametrize(
    ("kind", "size"), [(Kind.BULK, 7), (Kind.BULK_END, 7), (Kind.BULK_END, 5), (Kind.BULK_END, 0), (Kind.MESSAGE, 6)]
)
def test_a_sink_refuses_what_does_not_fit(kind: Kind, size: int) -> None:
    sink = Sink("remote", memoryview(bytearray(6)))
    with pytest.raises(ProtocolError):
        sink.take(kind, bytes(size))
    assert not sink.complete
