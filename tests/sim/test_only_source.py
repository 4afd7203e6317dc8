"""The only peer that holds the state dies while a newcomer downloads it."""

from __future__ import annotations

import asyncio
import logging
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.network.chunks.fetch import FetchOptions
from p2ptrain.network.chunks.server import Ration
from p2ptrain.network.rpc.pace import LeastRate
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.node.roles.training import WAITING
from p2ptrain.training.loop import Trainer
from p2ptrain.training.state import digest
from p2ptrain.training.sync import background_download as downloading
from p2ptrain.training.sync import state_server
from p2ptrain.training.sync.download import download_state
from p2ptrain.training.sync.partial_download import PartialDownload
from tests.support.coroutines import simulated
from tests.support.sim.product_peers import ProductSwarm, small_manifest, use_virtual_time

CHUNK_BYTES = 1024
HALF = 5
"""Chunks, of a state of some ten."""
UPLOAD = 200.0
"""Bytes a second: a download lasts for many rounds."""
AWAY_SECONDS = 120.0
"""The dead source's record has expired by then, and whoever trains alone has ended rounds."""
HISTORY_ROUNDS = 4
ROUNDS = 60


class OneSource:
    """A swarm of the product's trainers in which state is slow to download.

    Attributes:
        swarm: Its peers.
        kept: Chunks that downloads kept.
        stepped: The rounds at which each peer did its local steps, in order, by name.
    """

    def __init__(self, network: SimulatedNetwork, folder: Path, patch: pytest.MonkeyPatch) -> None:
        text = folder / "text.txt"
        text.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(400)))
        digest.cut_of.cache_clear()
        patch.setattr(digest, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(state_server, "CHUNK_BYTES", CHUNK_BYTES)
        patch.setattr(state_server, "Ration", partial(Ration, bytes_per_second=UPLOAD))
        self.network = network
        self.swarm = ProductSwarm(
            network, small_manifest(text, {"every": 4, "warmup_steps": 4}, history_rounds=HISTORY_ROUNDS), folder
        )
        use_virtual_time(patch, self.swarm)
        options = FetchOptions(least=LeastRate(bytes_per_second=UPLOAD / 100, window_seconds=600.0))
        patch.setattr(downloading, "download_state", partial(download_state, options=options))
        self.kept = 0
        self.stepped: dict[str, list[int]] = {}
        self.swarm.before_step = self._note
        put = PartialDownload.put

        def counted(download: PartialDownload, *chunk: Any) -> bool:
            self.kept += 1
            return put(download, *chunk)

        patch.setattr(PartialDownload, "put", counted)

    def _note(self, name: str, trainer: Trainer) -> None:
        self.stepped.setdefault(name, []).append(self.round(name))

    def round(self, name: str) -> int:
        """Where a peer stands."""
        return self.swarm.sync(name).head.round

    async def until(self, condition: Any, seconds: float, what: str) -> None:
        """Wait for a condition in virtual time."""
        for _ in range(int(seconds / 0.5)):
            for task in self.swarm.tasks.values():
                if task.done() and not task.cancelled() and task.exception():
                    task.result()
            if condition():
                return
            await asyncio.sleep(0.5)
        raise AssertionError(f"never: {what}")

    async def kill(self, name: str) -> int:
        """Kill a peer; the round of its newest durable checkpoint."""
        self.network.crash(self.network.peers[name])
        await asyncio.gather(self.swarm.tasks.pop(name), return_exceptions=True)
        folders = sorted((self.swarm.folder / name / "checkpoints").glob("[0-9]*-round-*"))
        return int(folders[-1].name.rpartition("-")[2])


@pytest.mark.fault(10)
def test_a_newcomer_whose_only_source_died_waits_and_the_swarm_goes_on_from_the_newest_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(network: SimulatedNetwork) -> None:
        world = OneSource(network, tmp_path, monkeypatch)
        world.swarm.start("source", ROUNDS)
        await world.until(lambda: world.stepped.get("source", [0])[-1] > HISTORY_ROUNDS, 300, "no newcomer can replay")
        world.swarm.start("newcomer", ROUNDS)
        await world.until(lambda: world.kept >= HALF, 300, "half of the download")
        saved = await world.kill("source")
        await asyncio.sleep(AWAY_SECONDS)
        assert "newcomer" not in world.stepped, "it trains, though it has no more than a part of the state"
        assert world.round("newcomer") == 0
        assert world.swarm.nodes["newcomer"].status.state == "syncing"
        assert WAITING in [job.name for job in world.swarm.nodes["newcomer"].jobs.running()]
        assert [r.levelno for r in caplog.records if "no peer that holds" in r.message] == [logging.WARNING]
        world.swarm.start("source", ROUNDS)
        await asyncio.gather(*world.swarm.tasks.values())
        assert world.stepped["newcomer"][0] >= saved
        assert len(world.swarm.heads()) == 1, world.swarm.heads()

    with caplog.at_level(logging.INFO):
        simulate(main, seed=1)


@pytest.mark.fault(10)
@simulated(seed=2)
async def test_a_peer_with_a_checkpoint_of_its_own_goes_on_from_that(
    network: SimulatedNetwork, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = OneSource(network, tmp_path, monkeypatch)
    world.swarm.start("source", ROUNDS)
    world.swarm.start("late", ROUNDS)
    await world.until(lambda: world.stepped.get("late", [0])[-1] >= 2, 300, "both train")
    saved = await world.kill("late")
    assert saved > 0
    await world.until(lambda: world.round("source") >= saved + HISTORY_ROUNDS + 2, 300, "the source goes on alone")
    before, mark = world.kept, len(world.stepped["late"])
    world.swarm.start("late", ROUNDS)
    await world.until(lambda: world.kept >= before + HALF, 300, "half of the download")
    await world.kill("source")
    await world.until(lambda: len(world.stepped["late"]) > mark, 300, "it goes on")
    assert world.stepped["late"][mark] == saved
    await world.swarm.tasks["late"]
    assert world.round("late") == ROUNDS
