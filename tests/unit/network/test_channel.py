"""Channels: framing, bulk data, heartbeats, ends, back-pressure and cancellation."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from p2ptrain.errors import DeadlineError, PeerLostError, PeerRefusedError, ProtocolError, ResourceError
from p2ptrain.network.channel import Channel, ChannelLimits
from p2ptrain.network.frames import FRAME, MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Kind, error_frame, frame, pack
from p2ptrain.network.rpc import PROTOCOL
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.network.transport import Stream
from tests.support.simulation import Member, members, until

Server = Callable[[Channel], Awaitable[None]]


@asynccontextmanager
async def conversation(network: SimulatedNetwork, server: Server) -> AsyncIterator[tuple[Channel, Member, Member]]:
    """A channel to a peer that runs ``server`` on its end."""
    async with members(network, 2) as (caller, other):

        async def serve(channel: Channel, request: dict[str, Any]) -> None:
            await server(channel)

        other.rpc.serve_channel("talk", serve)
        async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
            yield channel, caller, other
        await until(lambda: other.rpc.num_inbound == 0, 3700)


@asynccontextmanager
async def against(network: SimulatedNetwork, server: Callable[[Stream], Awaitable[None]]) -> AsyncIterator[Channel]:
    """A channel to a peer that does with the raw stream whatever ``server`` does."""
    async with members(network, 2) as (caller, other):
        await other.peer.transport.serve(PROTOCOL, server)
        async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
            yield channel


async def sleep_long(channel: Channel) -> None:
    await asyncio.sleep(3600)


def test_messages_and_bulk_buffers_arrive_whole_and_in_order() -> None:
    sizes = (0, 1, 65536, 65537, 262144, 262145, 1_000_003)
    data = random.Random(5).randbytes(max(sizes))

    async def server(channel: Channel) -> None:
        for size in sizes:
            assert await channel.receive(5) == {"size": size}
            got = await channel.receive_bytes(size, 30)
            await channel.send_bytes(got)
        await channel.send({"done": True})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            for size in sizes:
                await channel.send({"size": size})
                await channel.send_bytes(memoryview(data)[:size])
            for size in sizes:
                into = bytearray(size)
                assert await channel.receive_bytes(size, 30, memoryview(into)) is not None
                assert into == data[:size]
            assert await channel.receive(5) == {"done": True}

    simulate(main, 1)


@pytest.mark.parametrize("sent", [0, 999, 1001, 300_000])
@pytest.mark.parametrize("wait_seconds", [0, 2])
def test_a_buffer_of_another_length_is_a_protocol_error(sent: int, wait_seconds: float) -> None:
    async def server(channel: Channel) -> None:
        await channel.send_bytes(bytes(sent))

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            await asyncio.sleep(wait_seconds)
            with pytest.raises(ProtocolError, match="not 1000 bytes long"):
                await channel.receive_bytes(1000, 5)
            with pytest.raises(ProtocolError):
                await channel.send({})

    simulate(main, 1)


def test_a_message_where_bulk_is_due_and_the_reverse_are_protocol_errors() -> None:
    async def server(channel: Channel) -> None:
        await channel.send({"bulk": False})
        await asyncio.sleep(30)

    async def bulk(channel: Channel) -> None:
        await channel.send_bytes(b"bulk")
        await asyncio.sleep(30)

    async def expects_bulk(network: SimulatedNetwork, wait: float) -> None:
        async with conversation(network, server) as (channel, _, _):
            await asyncio.sleep(wait)
            with pytest.raises(ProtocolError, match="bulk data was due"):
                await channel.receive_bytes(4, 5)

    async def expects_message(network: SimulatedNetwork) -> None:
        async with conversation(network, bulk) as (channel, _, _):
            with pytest.raises(ProtocolError, match="a message was due"):
                await channel.receive(5)

    simulate(lambda network: expects_bulk(network, 0), 1)
    simulate(lambda network: expects_bulk(network, 1), 1)
    simulate(expects_message, 1)


@pytest.mark.parametrize(
    ("data", "what"),
    [
        (FRAME.pack(MAX_MESSAGE_BYTES + 1, Kind.MESSAGE), "are allowed"),
        (FRAME.pack(70_000, Kind.MESSAGE), "are allowed"),
        (FRAME.pack(MAX_FRAME_BYTES + 1, Kind.BULK), "are allowed"),
        (FRAME.pack(0, Kind.BULK), "empty piece"),
        (FRAME.pack(5, Kind.PING), "kind 4 with 5 bytes"),
        (FRAME.pack(0, 99), "unknown kind 99"),
        (FRAME.pack(5000, Kind.ERROR), "kind 7 with 5000 bytes"),
        (frame(Kind.ACK), "acknowledged"),
        (frame(Kind.MESSAGE, b"\xc1"), "not a message"),
        (frame(Kind.MESSAGE, b"\x91" * 3000), "not a message"),
        (frame(Kind.MESSAGE, b"\x81\x01\x02"), "not a m"),
    ],
)
def test_malformed_frames_are_protocol_errors(data: bytes, what: str) -> None:
    async def server(stream: Stream) -> None:
        await stream.write(data)
        await asyncio.sleep(30)

    async def main(network: SimulatedNetwork) -> None:
        async with against(network, server) as channel:
            with pytest.raises(ProtocolError, match=what):
                await channel.receive(5)

    simulate(main, 1)


def test_a_server_tells_and_counts_what_a_peer_did_wrong() -> None:
    async def server(channel: Channel) -> None:
        await channel.receive(5, max_bytes=100)

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, caller, other):
            await channel.send({"data": bytes(1000)})
            with pytest.raises(PeerRefusedError, match="100 are allowed"):
                await channel.receive(5)
            assert other.rpc.refusals == {(caller.rpc.peer_id, "ProtocolError"): 1}

    simulate(main, 1)


@pytest.mark.parametrize("cut_after", [0, 3, 5, 50])
def test_an_end_of_stream_without_an_end_mark_is_a_lost_peer(cut_after: int) -> None:
    data = frame(Kind.BULK_END, bytes(100))

    async def server(stream: Stream) -> None:
        await stream.write(data[:cut_after])
        await stream.close()

    async def main(network: SimulatedNetwork) -> None:
        async with against(network, server) as channel:
            with pytest.raises(PeerLostError):
                await channel.receive_bytes(100, 5)
            assert network.loop.time() < 5

    simulate(main, 1)


def test_a_channel_that_ends_early_is_a_lost_peer_but_what_it_sent_is_read_first() -> None:
    async def server(channel: Channel) -> None:
        await channel.send({"number": 1})
        await channel.send({"number": 2})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            await asyncio.sleep(2)
            assert await channel.receive(5) == {"number": 1}
            assert await channel.receive(5) == {"number": 2}
            with pytest.raises(PeerLostError, match="ended the channel early"):
                await channel.receive(5)

    simulate(main, 1)


def test_bulk_data_right_before_the_end_is_not_lost() -> None:
    async def server(channel: Channel) -> None:
        await channel.send_bytes(b"x" * 700_000)

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            assert bytes(await channel.receive_bytes(700_000, 30)) == b"x" * 700_000

    simulate(main, 1)


def test_closing_waits_until_all_has_arrived_but_not_for_the_other_side_to_finish() -> None:
    received: list[bytes] = []

    async def server(channel: Channel) -> None:
        received.append(bytes(await channel.receive_bytes(1_000_000, 30)))
        await asyncio.sleep(100)

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, other):

            async def serve(channel: Channel, request: dict[str, Any]) -> None:
                await server(channel)

            other.rpc.serve_channel("talk", serve)
            async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                await channel.send_bytes(bytes(1_000_000))
            assert received == [bytes(1_000_000)]
            assert network.loop.time() < 2

    simulate(main, 1)


def test_a_deadline_in_receive_leaves_the_channel_usable() -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(2)
        await channel.send({"late": True})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            with pytest.raises(DeadlineError):
                await channel.receive(0.5)
            assert await channel.receive(5) == {"late": True}

    simulate(main, 1)


def test_a_deadline_in_receive_bytes_ends_the_channel() -> None:
    async def server(channel: Channel) -> None:
        await channel.send_bytes(bytes(10_000_000))

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            with pytest.raises(DeadlineError):
                await channel.receive_bytes(10_000_000, 0.3)
            with pytest.raises(DeadlineError):
                await channel.receive(5)

    simulate(main, 1)


def test_an_idle_channel_stays_alive_by_heartbeat() -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(300)
        await channel.send({"still": "here"})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            assert await channel.receive(600) == {"still": "here"}

    simulate(main, 1, model=LinkModel(loss=0.05))


@pytest.mark.parametrize("fault", ["stall", "cut"])
@pytest.mark.parametrize("side", ["receiving", "sending"])
def test_a_silent_peer_is_noticed_within_15_seconds(fault: str, side: str) -> None:
    async def server(channel: Channel) -> None:
        while side == "sending":
            await channel.receive_bytes(1 << 20, 60)
        await asyncio.sleep(3600)

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, other):

            async def serve(channel: Channel, request: dict[str, Any]) -> None:
                await server(channel)

            other.rpc.serve_channel("talk", serve)

            async def talk() -> None:
                async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                    while side == "sending":
                        await channel.send_bytes(bytes(1 << 20))
                    await channel.receive(3600)

            talking = asyncio.create_task(talk())
            await asyncio.sleep(20)
            struck_at = network.loop.time()
            getattr(network, fault)(other.peer)
            with pytest.raises(PeerLostError, match="sent nothing"):
                await talking
            assert 5 < network.loop.time() - struck_at < 15
            assert caller.peer.transport.num_streams == 0

    simulate(main, 1)


def test_a_peer_that_was_stopped_itself_does_not_blame_the_others() -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(3600)

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, other):

            async def serve(channel: Channel, request: dict[str, Any]) -> None:
                await server(channel)

            other.rpc.serve_channel("talk", serve)

            async def talk() -> str:
                async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                    try:
                        await channel.receive(3600)
                    except PeerLostError as error:
                        return error.reason
                    return "?"

            talking = caller.peer.spawn(talk())
            await asyncio.sleep(5)
            network.stall(caller.peer, 6)
            await asyncio.sleep(30)
            assert not talking.done()
            network.stall(caller.peer, 60)
            assert "sent nothing" not in await talking

    simulate(main, 1)


def test_a_slow_bulk_transfer_that_moves_is_not_silence() -> None:
    async def server(channel: Channel) -> None:
        await channel.receive_bytes(1 << 20, 600)
        await channel.send({"thanks": True})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            await channel.send_bytes(bytes(1 << 20))
            assert await channel.receive(600) == {"thanks": True}
            assert network.loop.time() > 60

    simulate(main, 1, model=LinkModel(up_bytes_per_second=15_000.0))


def test_a_peer_that_lives_but_never_reads_meets_the_send_deadline() -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(400)

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            with pytest.raises(DeadlineError, match="took nothing"):
                await channel.send_bytes(bytes(64 << 20))
            assert network.loop.time() < 70

    simulate(main, 1)


def test_what_is_buffered_for_an_owner_that_does_not_read_is_bounded() -> None:
    held: list[int] = []

    async def server(channel: Channel) -> None:
        await asyncio.sleep(30)
        held.append(channel._inbox_bytes)
        await channel.receive_bytes(32 << 20, 600)

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, caller, other):
            sending = asyncio.create_task(channel.send_bytes(bytes(32 << 20)))
            await asyncio.sleep(25)
            assert caller.rpc.bytes_sent < 2 << 20
            assert other.rpc.bytes_received < ChannelLimits().inbox_bytes + 70_000
            await sending

    simulate(main, 1, model=LinkModel(up_bytes_per_second=None, down_bytes_per_second=None))
    assert 0 < held[0] <= ChannelLimits().inbox_bytes + 70_000


def test_a_flood_of_tiny_messages_is_bounded() -> None:
    tiny = frame(Kind.MESSAGE, pack({}))

    async def server(stream: Stream) -> None:
        while True:
            await stream.write(tiny * 1000)

    async def main(network: SimulatedNetwork) -> None:
        async with against(network, server) as channel:
            await asyncio.sleep(10)
            assert len(channel._inbox) < 3000
            channel.abort()

    simulate(main, 1)


def test_a_long_message_is_not_read_before_it_is_asked_for() -> None:
    async def server(channel: Channel) -> None:
        await channel.send({"data": bytes(5 << 20)})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, caller, _):
            await asyncio.sleep(5)
            assert caller.rpc.bytes_received < 100
            message = await channel.receive(30, max_bytes=MAX_MESSAGE_BYTES)
            assert len(message["data"]) == 5 << 20

    simulate(main, 1)


@pytest.mark.parametrize("operation", ["receive", "receive_bytes", "send_bytes"])
def test_cancellation_frees_everything_on_both_sides(operation: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, other):
            seen: list[BaseException] = []

            async def serve(channel: Channel, request: dict[str, Any]) -> None:
                try:
                    await channel.receive_bytes(1 << 30, 3600)
                except PeerLostError as error:
                    seen.append(error)
                    raise

            other.rpc.serve_channel("talk", serve)

            async def talk() -> None:
                async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                    if operation == "receive":
                        await channel.receive(600)
                    elif operation == "receive_bytes":
                        await channel.receive_bytes(1000, 600)
                    else:
                        await channel.send_bytes(bytes(1 << 30))

            talking = asyncio.create_task(talk())
            await asyncio.sleep(1)
            before = len(network.loop.pending_tasks())
            assert before >= 5
            talking.cancel()
            with pytest.raises(asyncio.CancelledError):
                await talking
            await until(lambda: other.rpc.num_inbound == 0, 1)
            assert len(seen) == 1
            assert len(network.loop.pending_tasks()) == 1
            assert caller.peer.transport.num_streams == other.peer.transport.num_streams == 0

    simulate(main, 1)


def test_a_cancelled_receive_kills_the_channel() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, lambda channel: channel.close()) as (channel, _, _):
            receiving = asyncio.create_task(channel.receive(600))
            await asyncio.sleep(0)
            receiving.cancel()
            with pytest.raises(asyncio.CancelledError):
                await receiving
            with pytest.raises(PeerLostError, match="aborted at this end"):
                await channel.send({})

    simulate(main, 1)


def test_an_error_frame_reaches_receiver_and_sender_with_its_reason() -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(1)
        raise ResourceError("no memory for this")

    async def receives(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            with pytest.raises(PeerRefusedError, match="no memory for this"):
                await channel.receive(5)

    async def sends(network: SimulatedNetwork) -> None:
        with pytest.raises(PeerRefusedError, match="no memory for this"):
            async with conversation(network, server) as (channel, _, _):
                await channel.send_bytes(bytes(64 << 20))

    simulate(receives, 1)
    simulate(sends, 1)


def test_a_reason_is_cut_to_a_bounded_length() -> None:
    assert len(error_frame("é" * 5000)) == FRAME.size + 1024

    async def server(channel: Channel) -> None:
        raise ResourceError("x" * 5000)

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            with pytest.raises(PeerRefusedError) as refusal:
                await channel.receive(5)
            assert refusal.value.reason == "x" * 1024

    simulate(main, 1)


def test_several_tasks_may_send_and_frames_stay_whole() -> None:
    async def server(channel: Channel) -> None:
        numbers = [(await channel.receive(30))["number"] for _ in range(200)]
        await channel.send({"sorted": sorted(numbers) == list(range(200))})

    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, server) as (channel, _, _):
            await asyncio.gather(*(channel.send({"number": n, "fill": bytes(20_000)}) for n in range(200)))
            assert await channel.receive(30) == {"sorted": True}

    simulate(main, 1)


def test_only_one_task_receives() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with conversation(network, lambda channel: channel.close()) as (channel, _, _):
            first = asyncio.create_task(channel.receive(5))
            await asyncio.sleep(0)
            with pytest.raises(ValueError, match="only one task"):
                await channel.receive(5)
            with pytest.raises(PeerLostError):
                await first

    simulate(main, 1)
