"""Who lives is not taken for dead, and who is dead is noticed in time."""

from __future__ import annotations

import asyncio
from itertools import pairwise
from types import SimpleNamespace
from typing import cast

import pytest

from p2ptrain.errors import PeerLostError, PeerSilentError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.heartbeat import Heartbeat
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.sim.channels import against, conversation, talkers


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
    async def server(channel: Channel) -> None:
        await asyncio.sleep(3600)

    async with talkers(network, server) as (caller, other):

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
def test_a_channel_that_expects_beats_ends_within_the_silence_that_it_was_told_and_no_sooner(
    fault: str, seed: int
) -> None:
    async def server(channel: Channel) -> None:
        channel.beat(0.4)
        await asyncio.sleep(3600)

    async def main(network: SimulatedNetwork) -> None:
        async with talkers(network, server) as (caller, other):

            async def talk() -> None:
                async with caller.rpc.open(other.rpc.peer_id, "talk", {}, 5) as channel:
                    channel.expect_beats(2.0, lambda last_heard: last_heard + 2.0)
                    await channel.receive(dict, 3600)

            talking = asyncio.create_task(talk())
            await asyncio.sleep(60 + seed / 7)
            assert not talking.done()
            struck_at = network.loop.time()
            getattr(network, fault)(other.peer)
            with pytest.raises(PeerSilentError):
                await talking
            assert 1.5 < network.loop.time() - struck_at < 2.2

    simulate(main, seed)


@simulated()
async def test_a_channel_that_expects_beats_asks_when_silence_ends_it(network: SimulatedNetwork) -> None:
    """What is heard elsewhere, or what silence means at all, the owner knows."""

    async def server(channel: Channel) -> None:
        await asyncio.sleep(3600)

    async with conversation(network, server) as (channel, _, _):
        started = network.loop.time()
        channel.expect_beats(1.0, lambda last_heard: max(last_heard, started + 20.0) + 1.0)
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
    async with against(network, lambda stream: asyncio.sleep(3600)) as channel:
        channel._heartbeat.stop()
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
