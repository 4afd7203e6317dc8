"""Hosts that move while others do: each says where it goes, and the others decide with that in mind."""

import asyncio
from collections import Counter, deque
from dataclasses import replace

import pytest

from p2ptrain.network.records.exchange import RecordExchange
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.presence import LEAST_PAUSE_SECONDS, PUBLISH_SECONDS, REFRESH_SECONDS
from p2ptrain.pipeline.migration import LEAST_STAY_SECONDS, PROMISE_SECONDS
from p2ptrain.pipeline.placement import Host
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.pipeline.view import PipelineView
from tests.support.coroutines import simulated
from tests.support.sim.peers import until
from tests.support.sim.pipelines import Pipeline, PipelinePeer, make_manifest

DOWNLOAD_SECONDS = 60.0
SPREADING_SECONDS = LEAST_PAUSE_SECONDS + 0.5
"""From a change until the directory shows it: the least pause, and two requests."""


@pytest.fixture
def _slow_downloads(monkeypatch: pytest.MonkeyPatch) -> None:
    take_on = PipelinePeer.take_on

    async def take_on_slowly(self: PipelinePeer, number: int) -> HostedStage:
        await asyncio.sleep(DOWNLOAD_SECONDS)
        return await take_on(self, number)

    monkeypatch.setattr(PipelinePeer, "take_on", take_on_slowly)


@pytest.fixture
def _each_thinks_it_should_go(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hosts take the others for faster than themselves: of two that help as much the slower one should go. And what one
    publishes is long seen by nobody."""
    hosts = PipelineView.hosts

    def faster(self: PipelineView) -> list[Host]:
        return [replace(host, speed=1.01 * host.speed) for host in hosts(self)]

    monkeypatch.setattr(PipelineView, "hosts", faster)
    exchange = RecordExchange.exchange

    async def exchange_slowly(self: RecordExchange, peer: str) -> bool:
        await asyncio.sleep(0.5)
        return await exchange(self, peer)

    monkeypatch.setattr(RecordExchange, "exchange", exchange_slowly)


def targets(pipeline: Pipeline) -> Counter[int]:
    going = [(peer.mover.next_stage, peer.stage) for peer in pipeline.alive if peer.mover is not None]
    return Counter(target for target, stage in going if target is not None and target != stage)


def moves(pipeline: Pipeline) -> Counter[tuple[int, int]]:
    return Counter(move for peer in pipeline.alive for move in peer.moves)


@pytest.mark.usefixtures("_slow_downloads")
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
@simulated()
async def test_the_next_host_decides_while_another_still_downloads(network: SimulatedNetwork, seed: int) -> None:
    pipeline = Pipeline(network, make_manifest(3, layers=6), may_move=True)
    for number, stage in enumerate((0, 0, 0, 0, 0, 1, 2)):
        await pipeline.add(f"host{number}", stage)
    await until(lambda: targets(pipeline) == {1: 1, 2: 1}, 150.0)  # Two that announce one move withdraw it first.
    await asyncio.sleep(400.0)
    assert not targets(pipeline), "moves come to an end"
    assert min(Counter(peer.stage for peer in pipeline.hosts).values()) == 2
    assert max(len(peer.moves) for peer in pipeline.hosts) == 1, "nobody wanders about"


@pytest.mark.fault(29)
@pytest.mark.usefixtures("_slow_downloads", "_each_thinks_it_should_go")
@pytest.mark.parametrize("seed", [1, 4, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (2, 3, 5, 6))])
@simulated()
async def test_of_hosts_that_decide_on_records_before_those_say_so_one_goes(
    network: SimulatedNetwork, seed: int
) -> None:
    """Two that look within one publishing interval do not both go to the one stage that lacks a host."""
    pipeline = Pipeline(network, make_manifest(2, layers=4), may_move=True)
    for number, stage in enumerate((0, 0, 0, 0, 1, 1, 1, 1)):
        await pipeline.add(f"host{number}", stage)
    await until(lambda: all(peer.mover is not None for peer in pipeline.hosts))
    await asyncio.sleep(LEAST_STAY_SECONDS + 10.0)
    wanted: set[str] = set()

    lost = pipeline.peers[-1]

    async def read() -> None:
        """Give all hosts the records of half a second ago, so that they see at the same time that one is gone."""
        told: deque[list[bytes]] = deque(maxlen=5)
        while True:
            told.append([peer.presence.exchange.own for peer in pipeline.alive])
            for peer in pipeline.alive:
                if peer is not lost:
                    for own in told[0]:
                        peer.presence.book.take(own)
                    peer.presence._tell()
                    assert peer.mover is not None
                    if peer.mover.next_stage not in (None, peer.stage):
                        wanted.add(peer.peer.name)
            await asyncio.sleep(0.1)

    reading = [network.loop.create_task(read())]
    await asyncio.sleep(10.0)
    network.crash(lost.peer)
    await asyncio.sleep(40.0)
    for task in reading:
        task.cancel()
    await asyncio.gather(*reading, return_exceptions=True)
    assert wanted, "of most seeds three or four had decided by then"
    await asyncio.sleep(300.0)
    assert moves(pipeline) == {(0, 1): 1}
    assert all(len(peer.all_hosted) == 1 for peer in pipeline.alive), "nothing is left of what others began"


async def said_by(reader: PipelinePeer, host: PipelinePeer) -> int | None:
    """Where a host's record says that it goes, as another peer reads it now."""
    assert await reader.presence.exchange.exchange(host.peer.peer_id)
    (held,) = (held for held in reader.presence.book.held() if held.record.peer == host.peer.peer_id)
    return held.record.next_stage


@pytest.mark.parametrize("seed", range(3))
@simulated()
async def test_a_record_says_at_once_whether_its_host_can_move(network: SimulatedNetwork, seed: int) -> None:
    assert SPREADING_SECONDS < PUBLISH_SECONDS / 2
    pipeline = Pipeline(network, make_manifest(2, layers=4), may_move=True)
    host, _, reader, _ = [await pipeline.add(f"host{number}", number // 2) for number in range(4)]
    await until(lambda: host.mover is not None)
    await asyncio.sleep(LEAST_STAY_SECONDS - 10.0)
    assert await said_by(reader, host) == 0, "it has just come"
    assert host.mover is not None
    await until(lambda: host.mover.next_stage is None)  # type: ignore[union-attr]
    await asyncio.sleep(SPREADING_SECONDS)
    assert await said_by(reader, host) is None
    for _ in range(3):
        reply = await reader.rpc.call(host.peer.peer_id, "pipeline.stay", {"stage": 0, "round": 0}, dict, 5.0)
        assert reply["stays"] is True
    await asyncio.sleep(SPREADING_SECONDS)
    assert await said_by(reader, host) == 0
    await asyncio.sleep(PROMISE_SECONDS - SPREADING_SECONDS - REFRESH_SECONDS)
    assert await said_by(reader, host) == 0
    await asyncio.sleep(REFRESH_SECONDS + SPREADING_SECONDS)
    assert await said_by(reader, host) is None
