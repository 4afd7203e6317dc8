"""Receiving: who is dead is noticed in time, what is read ahead is bounded, and bad frames end the channel."""

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from p2ptrain.errors import PeerLostError, PeerSilentError, ProtocolError
from p2ptrain.network.rpc.channel import INBOX_BYTES, Channel
from p2ptrain.network.rpc.frames import FRAME, MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Kind, frame, pack
from p2ptrain.network.rpc.receive import Heartbeat, Inbox, Sink
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.sim.channels import against, conversation, talkers


async def idle(end: Channel | Stream) -> None:
    await asyncio.sleep(3600)


@simulated(model=LinkModel(loss=0.05))
async def test_an_idle_channel_stays_alive_by_heartbeat(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(300)
        await channel.send({"still": "here"})

    async with conversation(network, server) as (channel, _, _):
        assert await channel.receive(dict, 600) == {"still": "here"}


@pytest.mark.parametrize("fault", ["stall", "cut"])
@pytest.mark.parametrize("side", ["receiving", "sending"])
@simulated()
async def test_a_silent_peer_is_noticed_within_15_seconds(network: SimulatedNetwork, fault: str, side: str) -> None:
    async def server(channel: Channel) -> None:
        while side == "sending":
            await channel.receive_bytes(1 << 20, 60)
        await asyncio.sleep(3600)

    async with talkers(network, server) as (caller, other):

        async def talk() -> None:
            async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                while side == "sending":
                    await channel.send_bytes(bytes(1 << 20))
                await channel.receive(dict, 3600)

        talking = asyncio.create_task(talk())
        await asyncio.sleep(20)
        struck_at = network.loop.time()
        getattr(network, fault)(other.peer)
        with pytest.raises(PeerLostError, match="sent nothing"):
            await talking
        assert 5 < network.loop.time() - struck_at < 15
        assert caller.peer.transport.num_streams == 0


@simulated()
async def test_a_peer_that_was_stopped_itself_does_not_blame_the_others(network: SimulatedNetwork) -> None:
    async with talkers(network, idle) as (caller, other):

        async def talk() -> str:
            async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                try:
                    await channel.receive(dict, 3600)
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


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("fault", ["stall", "cut"])
@simulated()
async def test_a_channel_that_expects_beats_ends_within_the_silence_that_it_was_told_and_no_sooner(
    network: SimulatedNetwork, fault: str, seed: int
) -> None:
    async def server(channel: Channel) -> None:
        channel.heartbeat.beat(0.4)
        await asyncio.sleep(3600)

    async with talkers(network, server) as (caller, other):

        async def talk() -> None:
            async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                channel.heartbeat.expect(2.0, lambda last_heard: last_heard + 2.0)
                await channel.receive(dict, 3600)

        talking = asyncio.create_task(talk())
        await asyncio.sleep(60 + seed / 7)
        assert not talking.done()
        struck_at = network.loop.time()
        getattr(network, fault)(other.peer)
        with pytest.raises(PeerSilentError):
            await talking
        assert 1.5 < network.loop.time() - struck_at < 2.2


@simulated()
async def test_a_channel_that_expects_beats_asks_when_silence_ends_it(network: SimulatedNetwork) -> None:
    """What is heard elsewhere, or what silence means at all, the owner knows."""
    async with conversation(network, idle) as (channel, _, _):
        started = network.loop.time()
        channel.heartbeat.expect(1.0, lambda last_heard: max(last_heard, started + 20.0) + 1.0)
        network.cut(network.peers["peer1"])
        with pytest.raises(PeerSilentError):
            await channel.receive(dict, 3600)
        assert 21 <= network.loop.time() - started < 21.5


@simulated(model=LinkModel(up_bytes_per_second=15000.0))
async def test_a_slow_bulk_transfer_that_moves_is_not_silence(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await channel.receive_bytes(1 << 20, 600)
        await channel.send({"thanks": True})

    async with conversation(network, server) as (channel, _, _):
        await channel.send_bytes(bytes(1 << 20))
        assert await channel.receive(dict, 600) == {"thanks": True}
        assert network.loop.time() > 60


@simulated()
async def test_a_pause_of_ones_own_is_no_silence_and_counts_from_its_end(network: SimulatedNetwork) -> None:
    events: list[tuple[str, float]] = []
    loop = network.loop
    async with against(network, idle) as channel:
        channel.heartbeat.stop()
        heartbeat = Heartbeat(
            channel._stream,
            3.0,
            10.0,
            lambda: events.append(("ping", loop.time() - started)),
            lambda: events.append(("silent", loop.time() - started)),
        )
        started = loop.time()
        heartbeat.pause()
        await asyncio.sleep(100)
        assert {name for name, _ in events} == {"ping"}
        heartbeat.resume()
        await asyncio.sleep(100)
        heartbeat.stop()
        channel.abort()
    pings = [seconds for name, seconds in events if name == "ping"]
    assert all(later - earlier == pytest.approx(3.0) for earlier, later in pairwise(pings))
    assert [seconds for name, seconds in events if name == "silent"] == [pytest.approx(110.0)]
    assert events[-1][0] == "silent"


@simulated()
async def test_a_process_that_stood_still_gives_the_other_side_its_whole_time_again(network: SimulatedNetwork) -> None:
    loop, silences = network.loop, list[float]()
    peer = network.add_peer("a")
    stream = cast(Stream, SimpleNamespace(num_arrived=0))

    async def listen() -> None:
        heartbeat = Heartbeat(stream, 2.0, 10.0, lambda: None, lambda: silences.append(loop.time()))
        await asyncio.sleep(120.0)
        heartbeat.stop()

    listening = peer.spawn(listen())
    await asyncio.sleep(1.0)
    network.stall(peer, 60.0)
    await asyncio.sleep(69.0)
    assert silences == []
    await asyncio.sleep(5.0)
    assert silences == [71.0]
    await listening
    await peer.close()


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
        assert caller.rpc.traffic.sent < 2 << 20
        assert other.rpc.traffic.received < INBOX_BYTES + 70_000
        await sending
    assert 0 < held[0] <= INBOX_BYTES + 70_000


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
    async with conversation(network, lambda channel: channel.send({"data": bytes(5 << 20)})) as (channel, caller, _):
        await asyncio.sleep(5)
        assert caller.rpc.traffic.received < 100
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


@pytest.mark.parametrize("sent", [0, 999, 1001, 300_000])
@pytest.mark.parametrize("wait_seconds", [0, 2])
@simulated()
async def test_a_buffer_of_another_length_is_a_protocol_error(
    network: SimulatedNetwork, sent: int, wait_seconds: float
) -> None:
    async with conversation(network, lambda channel: channel.send_bytes(bytes(sent))) as (channel, _, _):
        await asyncio.sleep(wait_seconds)
        with pytest.raises(ProtocolError, match="not 1000 bytes long"):
            await channel.receive_bytes(1000, 5)
        with pytest.raises(ProtocolError):
            await channel.send({})


@pytest.mark.parametrize("wait_seconds", [0, 1])
@pytest.mark.parametrize("due", ["bulk data", "a message"])
@simulated()
async def test_a_message_where_bulk_is_due_and_the_reverse_are_protocol_errors(
    network: SimulatedNetwork, due: str, wait_seconds: float
) -> None:
    async def server(channel: Channel) -> None:
        await (channel.send({"bulk": False}) if due == "bulk data" else channel.send_bytes(b"bulk"))
        await asyncio.sleep(30)

    async with conversation(network, server) as (channel, _, _):
        await asyncio.sleep(wait_seconds)
        with pytest.raises(ProtocolError, match=f"{due} was due"):
            await (channel.receive_bytes(4, 5) if due == "bulk data" else channel.receive(dict, 5))


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
        (frame(Kind.ERROR, pack({"reason": "\x1b[2J"})), "printable"),
        (frame(Kind.ERROR, b"no"), "not a message"),
        (frame(Kind.ACK), "acknowledged"),
        (frame(Kind.MESSAGE, b"\xc1"), "not a message"),
        (frame(Kind.MESSAGE, b"\x91" * 3000), "not a message"),
        (frame(Kind.MESSAGE, b"\x81\x01\x02"), "not a m"),
    ],
)
@simulated()
async def test_malformed_frames_are_protocol_errors(network: SimulatedNetwork, data: bytes, what: str) -> None:
    async def server(stream: Stream) -> None:
        await stream.write(data)
        await asyncio.sleep(30)

    async with against(network, server) as channel:
        with pytest.raises(ProtocolError, match=what):
            await channel.receive(dict, 5)


@pytest.mark.parametrize("cut_after", [0, 3, 5, 50])
@simulated()
async def test_an_end_of_stream_without_an_end_mark_is_a_lost_peer(network: SimulatedNetwork, cut_after: int) -> None:
    data = frame(Kind.BULK_END, bytes(100))

    async def server(stream: Stream) -> None:
        await stream.write(data[:cut_after])
        await stream.close()

    async with against(network, server) as channel:
        with pytest.raises(PeerLostError):
            await channel.receive_bytes(100, 5)
        assert network.loop.time() < 5
