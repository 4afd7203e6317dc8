"""Hosts that only serve, beside trainers, in virtual time: what they serve is what the swarm has certified."""

import asyncio
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import ResourceError
from p2ptrain.network.chunks import fetch
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.node.serving import kept, source
from p2ptrain.node.serving.held import Held
from p2ptrain.node.serving.kept import KeptWeights
from p2ptrain.node.serving.source import WeightSource
from p2ptrain.training.state.digest import ChunkedBytes, byte_view, tree_of
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.shared_state import Snapshot
from tests.support.coroutines import at_end, simulated
from tests.support.sim.product_peers import Begin, ProductSwarm, SimulatedNode

TRAINING = {"every": 4, "warmup_steps": 4}
SERVING = {"enabled": True, "cache": 10**6}


class Served:
    """The versions that hosts serve, compared with the trainers' own vectors."""

    def __init__(self, swarm: ProductSwarm, monkeypatch: pytest.MonkeyPatch) -> None:
        self.swarm = swarm
        self.downloaded: list[tuple[int, bytes]] = []
        self._vectors: dict[bytes, bytes] = {}
        changed, keep, begin = SimulatedNode.state_changed, KeptWeights.keep, SimulatedNode.__init__

        def with_files(node: SimulatedNode, peer: SimulatedPeer, *arguments: Any) -> None:
            peer.runtime.scratch = swarm.folder / peer.name
            begin(node, peer, *arguments)

        def noting(node: SimulatedNode) -> None:
            changed(node)
            if (sync := node.held.synchronizer) is not None:
                self._vectors[sync.head.digest] = bytes(byte_view(sync.state.vector))

        def compared(kept: KeptWeights, vector: memoryview, head: Head) -> None:
            assert bytes(vector) == self._vectors[head.digest]
            self.downloaded.append((head.round, head.digest))
            keep(kept, vector, head)

        monkeypatch.setattr(SimulatedNode, "__init__", with_files)
        monkeypatch.setattr(SimulatedNode, "state_changed", noting)
        monkeypatch.setattr(KeptWeights, "keep", compared)

    def versions(self, name: str) -> list[tuple[int, bytes]]:
        """Versions that a host serves, by its record."""
        node = self.swarm.nodes.get(name)
        report = node.record.describe().serving if node is not None else None
        return list(report.served.versions) if report is not None and report.served is not None else []

    async def end(self) -> None:
        for name in self.swarm.tasks:
            await self.swarm.kill(name)

    def newest(self, name: str) -> int:
        return max((number for number, _ in self.versions(name)), default=-1)


@pytest.fixture
def started(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Served]:
    def start(network: SimulatedNetwork, names: str = "ab") -> Served:
        served = Served(begin(network, TRAINING), monkeypatch)
        served.swarm.start_all(names)
        at_end(served.end)
        return served

    return start


def _is_newer(served: Served, before: int) -> bool:
    return served.newest("s") > before


def lies(held: Held) -> tuple[list[tuple[Layout, Snapshot]], float]:
    """Return a snapshot of other weights, with a digest of their own."""
    (state,) = held.states
    vector = torch.zeros_like(state.vector)
    chunks = ChunkedBytes([("vector", vector), *state.tensors()[1:]])
    tree = tree_of(chunks)
    return [(state.layout, Snapshot(replace(state.head, digest=tree.root), chunks.specs, tree, byte_view(vector)))], 0.0


@pytest.mark.parametrize("seed", range(3))
@simulated()
async def test_it_follows_the_rounds_and_goes_on_without_trainers_and_after_a_restart(
    network: SimulatedNetwork, started: Callable[..., Served], caplog: pytest.LogCaptureFixture, seed: int
) -> None:
    served = started(network)
    swarm = served.swarm
    await swarm.until(lambda: swarm.round("a") >= 2)
    swarm.start("s", role="server", serving=SERVING)
    await swarm.until(lambda: served.newest("s") >= 1)
    for _ in range(3):
        before = served.newest("s")
        await swarm.until(partial(_is_newer, served, before))
    assert len(served.versions("s")) == 2
    for name in "ab":
        await swarm.kill(name)
        del swarm.nodes[name], swarm.tasks[name]
    await asyncio.sleep(120.0)
    newest, count = served.newest("s"), len(served.downloaded)
    assert "no peer that trains is here: still serving round" in caplog.text
    await swarm.drain("s")
    swarm.start("s", role="server", serving=SERVING)
    await swarm.until(lambda: served.newest("s") >= 0)
    assert served.newest("s") == newest
    assert len(served.downloaded) == count
    swarm.start_all("ab")
    await swarm.until(lambda: served.newest("s") > newest)


@simulated(seed=1)
async def test_after_a_pause_it_serves_what_it_served_before(
    network: SimulatedNetwork, started: Callable[..., Served]
) -> None:
    served = started(network)
    swarm = served.swarm
    swarm.start("s", role="server", serving=SERVING)
    await swarm.until(lambda: served.newest("s") >= 1)
    for name in "ab":
        await swarm.kill(name)
        del swarm.nodes[name], swarm.tasks[name]
    await asyncio.sleep(120.0)
    newest, count = served.newest("s"), len(served.downloaded)
    wishes = swarm.signals["s"].wishes
    wishes.set("owner", "by its owner")
    await swarm.until(lambda: not served.versions("s"))
    wishes.set("owner", "")
    await swarm.until(lambda: bool(served.versions("s")))
    assert served.newest("s") == newest
    assert len(served.downloaded) == count


@simulated(seed=1)
async def test_a_pause_ends_serving_at_once_also_in_the_middle_of_a_download(
    network: SimulatedNetwork, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = started(network)
    swarm = served.swarm
    honest, downloading, ended = fetch.fetch, asyncio.Event(), asyncio.Event()

    async def slow(*arguments: Any, **options: Any) -> Any:
        if served.versions("s"):
            downloading.set()
            try:
                await asyncio.sleep(300.0)
            finally:
                ended.set()
        return await honest(*arguments, **options)

    monkeypatch.setattr(fetch, "fetch", slow)
    swarm.start("s", role="server", serving=SERVING)
    await downloading.wait()
    swarm.signals["s"].wishes.set("owner", "by its owner")
    await swarm.until(lambda: not served.versions("s"), 2.0)
    assert ended.is_set()
    swarm.signals["s"].wishes.set("owner", "")
    await swarm.until(lambda: bool(served.versions("s")), 5.0)
    assert {digest for _, digest in served.versions("s")} <= set(swarm.digests.values())


@simulated(seed=range(3))
async def test_a_source_that_invents_weights_is_not_believed(
    network: SimulatedNetwork, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = started(network, "abc")
    swarm, honest = served.swarm, WeightSource._snapshots
    told = itertools.count()

    def snapshots(self: WeightSource, held: Held, digest: bytes) -> tuple[list[tuple[Layout, Snapshot]], float]:
        if self._peer is not swarm.nodes["a"]:
            return honest(self, held, digest)
        next(told)
        return lies(held)

    monkeypatch.setattr(WeightSource, "_snapshots", snapshots)
    await swarm.until(lambda: swarm.round("a") >= 2)
    swarm.start("s", role="server", serving=SERVING)
    await swarm.until(lambda: len(served.downloaded) >= 4, 3000.0)
    assert next(told)
    assert {digest for _, digest in served.versions("s")} <= set(swarm.digests.values())


@simulated(seed=range(3))
async def test_a_source_that_dies_while_it_sends_is_replaced(
    network: SimulatedNetwork, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = started(network, "abc")
    swarm = served.swarm
    honest, victims = fetch.fetch, list[str]()

    async def interrupted(*arguments: Any, **options: Any) -> Any:
        *_, find_sources = arguments
        if not victims:
            (victim,) = (each.name for each in network.peers.values() if each.peer_id == find_sources()[0])
            victims.append(victim)
            await swarm.kill(victim)
            del swarm.nodes[victim], swarm.tasks[victim]
        return await honest(*arguments, **options)

    monkeypatch.setattr(fetch, "fetch", interrupted)
    await swarm.until(lambda: swarm.round("a") >= 2)
    swarm.start("s", role="server", serving=SERVING)
    await swarm.until(lambda: served.newest("s") >= 1)
    assert len(victims) == 1


@simulated(seed=1)
async def test_a_round_that_ends_in_the_middle_of_a_download_changes_nothing(
    network: SimulatedNetwork, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = started(network)
    swarm = served.swarm
    honest, ended_within = fetch.fetch, list[int]()

    async def slow(*arguments: Any, **options: Any) -> Any:
        before = swarm.round("a")
        await swarm.until(lambda: swarm.round("a") > before)
        ended_within.append(before)
        return await honest(*arguments, **options)

    monkeypatch.setattr(fetch, "fetch", slow)
    monkeypatch.setattr(source, "KEPT_SECONDS", 60.0)
    await swarm.until(lambda: swarm.round("a") >= 2)
    swarm.start("s", role="server", serving=SERVING)
    await swarm.until(lambda: len(served.downloaded) >= 3, 3000.0)
    assert [number for number, _ in served.downloaded] == ended_within, "the state from before the round that ended"
    assert {digest for _, digest in served.downloaded} <= set(swarm.digests.values())


@simulated(seed=1)
async def test_a_full_disk_of_a_source_ends_nothing_and_that_of_the_host_says_so(
    network: SimulatedNetwork, started: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    served = started(network)
    swarm, memory, full = served.swarm, kept._file_memory, set[str]()

    def allocate(path: Path, num_bytes: int) -> memoryview:
        if path.parent.name in full:
            raise ResourceError("cannot keep weights: free some space")
        return memory(path, num_bytes)

    monkeypatch.setattr(kept, "_file_memory", allocate)
    full.update("ab")
    await swarm.until(lambda: swarm.round("a") >= 2)
    swarm.start("s", role="server", serving=SERVING)
    await asyncio.sleep(60.0)
    assert served.newest("s") == -1
    assert swarm.round("a") > 2
    full.clear()
    await swarm.until(lambda: served.newest("s") >= 1)
    full.add("s")
    with pytest.raises(ResourceError, match="free some space"):
        await swarm.tasks.pop("s")


@pytest.mark.parametrize("tied", [False, True])
@simulated(seed=1)
async def test_it_follows_one_stage_with_all_its_units(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch, tied: bool
) -> None:
    swarm = begin(network, {"every": 1, "global_batch": 12, "warmup_steps": 4}, num_stages=2, tied=tied)
    downloaded = list[tuple[int, bytes]]()
    keep = KeptWeights.keep

    def noting(kept: KeptWeights, vector: memoryview, head: Head) -> None:
        assert swarm.digests[head.lineage] == head.digest, "a host has held these bits"
        downloaded.append((head.round, head.digest))
        keep(kept, vector, head)

    monkeypatch.setattr(KeptWeights, "keep", noting)
    for number, name in enumerate("abcd"):
        swarm.start(name, role="both", pipeline={"stage": number % 2})
    await swarm.until(lambda: swarm.round("a") >= 2 and swarm.round("b") >= 2)
    swarm.start("s", role="server", serving=SERVING, pipeline={"stage": 1})
    await swarm.until(lambda: len({number for number, _ in downloaded}) >= 2)
    assert all(digest in swarm.digests.values() for _, digest in downloaded)
    assert len(downloaded) % (2 if tied else 1) == 0
    for name in swarm.tasks:
        await swarm.kill(name)


def _served_stages(swarm: ProductSwarm) -> dict[str, int]:
    """The stage that each host serves, by its own record."""
    reports = {name: node.record.describe().serving for name, node in swarm.nodes.items()}
    return {name: each.served.stage for name, each in reports.items() if each is not None and each.served is not None}


@simulated(seed=range(4))
async def test_hosts_spread_over_the_stages_and_take_the_place_of_one_that_died(
    network: SimulatedNetwork, begin: Begin
) -> None:
    """They begin together, so that none knows what the others choose. At the end one stage has lost its only host."""
    swarm = begin(network, {"every": 1, "global_batch": 12}, num_stages=2)
    for name in "stu":
        swarm.start(name, role="server", serving=SERVING)
    at_end(lambda: asyncio.gather(*(swarm.kill(name) for name in [*swarm.tasks])))
    await swarm.until(lambda: sorted(_served_stages(swarm).values()) in ([0, 0, 1], [0, 1, 1]), 120.0)
    await asyncio.sleep(120.0)
    stages = _served_stages(swarm)
    assert len(stages) == 3, "hosts that are spread stay where they are"
    (alone,) = (name for name, stage in stages.items() if list(stages.values()).count(stage) == 1)
    await swarm.kill(alone)
    del swarm.nodes[alone], swarm.tasks[alone]
    await swarm.until(lambda: sorted(_served_stages(swarm).values()) == [0, 1], 180.0)
    before = _served_stages(swarm)
    await asyncio.sleep(120.0)
    assert _served_stages(swarm) == before
