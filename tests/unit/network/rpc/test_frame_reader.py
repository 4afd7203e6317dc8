"""Frames that are malformed, too long, out of place or cut off end the channel with the right error."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.errors import PeerLostError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.frames import FRAME, MAX_FRAME_BYTES, MAX_MESSAGE_BYTES, Kind, frame, pack
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.sim.channels import against, conversation


@pytest.mark.parametrize("sent", [0, 999, 1001, 300_000])
@pytest.mark.parametrize("wait_seconds", [0, 2])
@simulated()
async def test_a_buffer_of_another_length_is_a_protocol_error(
    network: SimulatedNetwork, sent: int, wait_seconds: float
) -> None:
    async def server(channel: Channel) -> None:
        await channel.send_bytes(bytes(sent))

    async with conversation(network, server) as (channel, _, _):
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
