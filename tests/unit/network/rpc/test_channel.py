"""Channels: messages and bulk data, deadlines, ends, refusals and cancellation."""

import asyncio

import pytest

from p2ptrain.errors import DeadlineError, PeerLostError, PeerRefusedError, ResourceError
from p2ptrain.network.rpc.channel import LEAST_BYTES_PER_SECOND, LINGER_SECONDS, Channel
from p2ptrain.network.rpc.frames import FRAME, MAX_REASON_BYTES, error_frame, ping_frame
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.network.simulated.streams import SimulatedStream
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.sim.channels import against, conversation, talkers
from tests.support.sim.peers import until

NEVER_THERE_BYTES = 64 << 20
"""More than the simulated network carries in five seconds, and than an unread channel holds."""


@simulated()
async def test_a_channel_that_ends_early_is_a_lost_peer_once_all_is_read(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await channel.send({"number": 1})
        await channel.send({"number": 2})
        await channel.send_bytes(b"x" * 700_000)

    async with conversation(network, server) as (channel, _, _):
        await asyncio.sleep(2)
        assert await channel.receive(dict, 5) == {"number": 1}
        assert await channel.receive(dict, 5) == {"number": 2}
        into = bytearray(700_000)
        await channel.receive_bytes(len(into), 5, memoryview(into))
        assert into == b"x" * 700_000
        with pytest.raises(PeerLostError, match="ended the channel early"):
            await channel.receive(dict, 5)


@simulated()
async def test_closing_waits_until_all_has_arrived_but_not_for_the_other_side_to_finish(
    network: SimulatedNetwork,
) -> None:
    received: list[bytes] = []

    async def server(channel: Channel) -> None:
        received.append(bytes(await channel.receive_bytes(1_000_000, 30)))
        await asyncio.sleep(100)

    async with talkers(network, server) as (caller, other):
        async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
            await channel.send_bytes(bytes(1_000_000))
        assert received == [bytes(1_000_000)]
        assert network.loop.time() < 2


@simulated(model=LinkModel(up_bytes_per_second=5_000.0))
async def test_closing_lasts_as_long_as_a_slow_link_delivers(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await channel.send_bytes(bytes(400_000))
        await channel.send_bytes(bytes(100_000))

    async with conversation(network, server) as (channel, _, _):
        for num_bytes in (400_000, 100_000):
            await channel.receive_bytes(num_bytes, 600)
        assert network.loop.time() > 90


@simulated()
async def test_closing_gives_up_a_peer_that_lives_but_takes_nothing_more(network: SimulatedNetwork) -> None:
    async with conversation(network, lambda channel: asyncio.sleep(400)) as (channel, _, _):
        for _ in range(8):
            await channel.send_bytes(bytes(100_000))
        started = network.loop.time()
        await channel.close()
        assert network.loop.time() - started < 2 * LINGER_SECONDS


@pytest.mark.parametrize("begins_at", [0, 1 << 30])
@simulated()
async def test_closing_gives_up_a_peer_that_reports_one_more_byte_each_time(
    network: SimulatedNetwork, begins_at: int
) -> None:
    num_bytes = 100_000

    async def server(stream: Stream) -> None:
        for num_received in range(begins_at, begins_at + 1000):
            await stream.write(ping_frame(num_received))
            await asyncio.sleep(3)

    async with against(network, server) as channel:
        await channel.send_bytes(bytes(num_bytes))
        await asyncio.sleep(1)
        started = network.loop.time()
        await channel.close()
        lasted = network.loop.time() - started
        assert lasted < LINGER_SECONDS + 1.1 * num_bytes / LEAST_BYTES_PER_SECOND
        assert not begins_at or lasted < 1.1 * LINGER_SECONDS


@simulated()
async def test_a_deadline_in_receive_leaves_the_channel_usable(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(2)
        await channel.send({"late": True})

    async with conversation(network, server) as (channel, _, _):
        with pytest.raises(DeadlineError):
            await channel.receive(dict, 0.5)
        assert await channel.receive(dict, 5) == {"late": True}


@simulated()
async def test_a_deadline_in_receive_bytes_ends_the_channel(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        await channel.send_bytes(bytes(1_000_000), more=True)
        await asyncio.sleep(5)

    async with conversation(network, server) as (channel, _, _):
        with pytest.raises(DeadlineError):
            await channel.receive_bytes(1_000_001, 3)
        with pytest.raises(DeadlineError):
            await channel.receive(dict, 5)


@simulated()
async def test_a_peer_that_lives_but_never_reads_meets_the_send_deadline(network: SimulatedNetwork) -> None:
    async with conversation(network, lambda channel: asyncio.sleep(400)) as (channel, _, _):
        with pytest.raises(DeadlineError, match="took nothing"):
            await channel.send_bytes(bytes(NEVER_THERE_BYTES))
        assert network.loop.time() < 70


@simulated()
async def test_a_cancelled_receive_kills_the_channel(network: SimulatedNetwork) -> None:
    async with conversation(network, lambda channel: asyncio.sleep(5)) as (channel, _, _):
        receiving = asyncio.create_task(channel.receive(dict, 600))
        await asyncio.sleep(0)
        receiving.cancel()
        with pytest.raises(asyncio.CancelledError):
            await receiving
        with pytest.raises(PeerLostError, match="aborted at this end"):
            await channel.send({})


@pytest.mark.parametrize("sends", [False, True])
@simulated()
async def test_an_error_frame_reaches_receiver_and_sender_with_its_reason(
    network: SimulatedNetwork, sends: bool
) -> None:
    async def server(channel: Channel) -> None:
        await asyncio.sleep(1)
        raise ResourceError("no memory for this")

    with pytest.raises(PeerRefusedError, match="no memory for this"):
        async with conversation(network, server) as (channel, _, _):
            await (channel.send_bytes(bytes(NEVER_THERE_BYTES)) if sends else channel.receive(dict, 5))


@pytest.mark.parametrize("meanwhile", ["waits", "receives", "sends"])
@simulated()
async def test_an_interruption_says_why_whatever_its_channel_does_meanwhile(
    network: SimulatedNetwork, meanwhile: str
) -> None:
    async def work(channel: Channel) -> None:
        match meanwhile:
            case "waits":
                await channel.receive(dict, 600)
            case "receives":
                await channel.receive_bytes(NEVER_THERE_BYTES, 600)
            case "sends":
                await channel.send_bytes(bytes(NEVER_THERE_BYTES))

    async def server(channel: Channel) -> None:
        working = asyncio.ensure_future(work(channel))
        await asyncio.sleep(1)
        assert not working.done()
        await channel.interrupt({"why": "enough"}, "enough of this")
        with pytest.raises(PeerLostError):
            await working

    async with conversation(network, server) as (channel, _, _):
        if meanwhile == "sends":  # A buffer that was sent in half leaves no room for a message.
            with pytest.raises(PeerRefusedError, match="enough of this"):
                await channel.receive_bytes(NEVER_THERE_BYTES, 600)
            return
        if meanwhile == "receives":
            with pytest.raises(PeerLostError):
                await channel.send_bytes(bytes(NEVER_THERE_BYTES))
        assert await channel.receive(dict, 5) == {"why": "enough"}


@pytest.mark.parametrize("what", ["message", "bytes"])
@simulated()
async def test_who_receives_from_a_channel_that_another_task_closes_loses_its_peer(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    async def rest(stream: Stream) -> None:  # As a socket does.
        await asyncio.sleep(1)
        await stream.close()

    monkeypatch.setattr(SimulatedStream, "rest", rest)

    async with conversation(network, lambda channel: channel.lost) as (channel, _, _):
        receives = channel.receive(dict, 600) if what == "message" else channel.receive_bytes(10, 600)
        receiving = asyncio.ensure_future(receives)
        await asyncio.sleep(1)
        await channel.close()
        with pytest.raises(PeerLostError):
            await receiving


@simulated()
async def test_a_reason_is_cut_to_a_bounded_length_and_printable(network: SimulatedNetwork) -> None:
    assert len(error_frame("\U0001f600" * 5000)) <= FRAME.size + MAX_REASON_BYTES

    async def server(channel: Channel) -> None:
        raise ResourceError("\x1b[2J\n\udc80" + "x" * 5000)

    async with conversation(network, server) as (channel, _, _):
        with pytest.raises(PeerRefusedError) as refusal:
            await channel.receive(dict, 5)
        assert refusal.value.reason == " [2J  " + "x" * 506


@simulated()
async def test_several_tasks_may_send_and_frames_stay_whole(network: SimulatedNetwork) -> None:
    async def server(channel: Channel) -> None:
        numbers = [(await channel.receive(dict, 30))["number"] for _ in range(200)]
        await channel.send({"sorted": sorted(numbers) == list(range(200))})

    async with conversation(network, server) as (channel, _, _):
        await asyncio.gather(*(channel.send({"number": n, "fill": bytes(20_000)}) for n in range(200)))
        assert await channel.receive(dict, 30) == {"sorted": True}


@pytest.mark.parametrize("ending", ["in order", "at once", "refused", "aborted"])
@simulated()
async def test_a_stream_rests_when_both_ends_know_that_nothing_more_comes(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, ending: str
) -> None:
    rested: list[str] = []

    async def rest(stream: Stream) -> None:
        rested.append(stream.remote)
        await stream.close()

    monkeypatch.setattr(SimulatedStream, "rest", rest)

    async def server(channel: Channel) -> None:
        if ending == "refused":
            raise ResourceError("no")
        if ending == "at once":  # Both ends are on their way before either has arrived.
            return
        await channel.lost

    async with conversation(network, server) as (channel, caller, other):
        if ending == "aborted":
            channel.abort()
        elif ending == "refused":
            with pytest.raises(PeerRefusedError):
                await channel.receive(dict, 5)
        elif ending == "at once":
            await until(lambda: other.rpc.inbound.total() == 1, 60)
    ends = sorted([caller.rpc.peer_id, other.rpc.peer_id])
    assert sorted(rested) == (ends if ending in ("in order", "at once") else [])


@simulated()
async def test_nothing_follows_the_last_word(network: SimulatedNetwork) -> None:
    async with conversation(network, lambda channel: channel.lost) as (channel, _, _):

        async def send_for_ever() -> None:
            while True:
                await channel.send({"more": True})

        closing = asyncio.create_task(channel.close())
        with pytest.raises(PeerLostError):
            await send_for_ever()
        await closing


@simulated(seed=31)
async def test_a_defect_in_a_channels_own_task_ends_the_channel(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def server(channel: Channel) -> None:
        await channel.receive(dict, 60)
        await channel.send({"answer": True})

    async with conversation(network, server) as (channel, _, _):

        async def end() -> None:
            raise ZeroDivisionError("a defect")

        monkeypatch.setattr(channel, "_on_end", end)
        await channel.send({"question": True})
        assert await channel.receive(dict, 60) == {"answer": True}
        began = network.loop.time()
        with pytest.raises(PeerLostError, match="this end of the channel failed"):
            await channel.receive(dict, 60)
        assert network.loop.time() - began < 30
        network.loop.errors.clear()
    assert "ZeroDivisionError: a defect" in caplog.text


@pytest.mark.parametrize("num_bytes", [0, 1, 5000, 700_000])
@simulated()
async def test_a_message_and_the_data_after_it_arrive_apart_and_leave_together(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, num_bytes: int
) -> None:
    data, writes = bytes(range(250)) * (num_bytes // 250) + bytes(num_bytes % 250), []
    write = SimulatedStream.write

    async def counted(stream: SimulatedStream, *parts: bytes | bytearray | memoryview) -> None:
        writes.append(sum(map(len, parts)))
        await write(stream, *parts)

    async def server(channel: Channel) -> None:
        monkeypatch.setattr(SimulatedStream, "write", counted)
        await channel.send({"number": 1}, data)
        monkeypatch.setattr(SimulatedStream, "write", write)
        await channel.send({"number": 2})

    async with conversation(network, server) as (channel, _, _):
        assert await channel.receive(dict, 5) == {"number": 1}
        assert not num_bytes or bytes(await channel.receive_bytes(num_bytes, 5)) == data
        assert await channel.receive(dict, 5) == {"number": 2}
        assert num_bytes > 5000 or len(writes) == 1
