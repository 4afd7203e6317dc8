"""The only peer that holds the state dies while a newcomer downloads it."""

import asyncio
import logging
from collections.abc import Callable

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.roles.training import WAITING
from p2ptrain.training.loop import Trainer
from tests.support.coroutines import simulated
from tests.support.processes.files import checkpoints, round_of
from tests.support.sim.downloads import slow_downloads
from tests.support.sim.product_peers import Begin, ProductSwarm

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
    """A swarm of the product's trainers in which state is slow to download."""

    def __init__(self, swarm: ProductSwarm, patch: pytest.MonkeyPatch) -> None:
        self.swarm = swarm
        self.kept = slow_downloads(patch, CHUNK_BYTES, UPLOAD)
        self.stepped: dict[str, list[int]] = {}
        swarm.before_step = self._note

    def _note(self, name: str, trainer: Trainer) -> None:
        self.stepped.setdefault(name, []).append(self.swarm.round(name))

    async def kill(self, name: str) -> int:
        """Kill a peer; the round of its newest durable checkpoint."""
        await self.swarm.kill(name)
        del self.swarm.tasks[name]
        return round_of(checkpoints(self.swarm.folder / name)[-1])


@pytest.fixture
def begin_slowly(begin: Begin, monkeypatch: pytest.MonkeyPatch) -> Callable[[SimulatedNetwork], OneSource]:
    training = {"every": 4, "warmup_steps": 4}
    return lambda network: OneSource(begin(network, training, history_rounds=HISTORY_ROUNDS), monkeypatch)


@pytest.mark.fault(10)
@simulated(seed=1)
async def test_a_newcomer_whose_only_source_died_waits_and_the_swarm_goes_on_from_the_newest_checkpoint(
    network: SimulatedNetwork, begin_slowly: Callable[[SimulatedNetwork], OneSource], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    world = begin_slowly(network)
    swarm = world.swarm
    swarm.start("source", ROUNDS)
    await swarm.until(lambda: world.stepped.get("source", [0])[-1] > HISTORY_ROUNDS)  # No newcomer can replay.
    swarm.start("newcomer", ROUNDS)
    await swarm.until(lambda: len(world.kept) >= HALF)
    saved = await world.kill("source")
    await asyncio.sleep(AWAY_SECONDS)
    assert "newcomer" not in world.stepped, "it trains, though it has no more than a part of the state"
    assert swarm.round("newcomer") == 0
    assert swarm.nodes["newcomer"].record.state == "syncing"
    assert WAITING in [job.name for job in swarm.nodes["newcomer"].jobs.running()]
    assert [r.levelno for r in caplog.records if "no peer that holds" in r.message] == [logging.WARNING]
    swarm.start("source", ROUNDS)
    await swarm.end()
    assert world.stepped["newcomer"][0] >= saved
    assert len(swarm.heads()) == 1, swarm.heads()


@pytest.mark.fault(10)
@simulated(seed=2)
async def test_a_peer_with_a_checkpoint_of_its_own_goes_on_from_that(
    network: SimulatedNetwork, begin_slowly: Callable[[SimulatedNetwork], OneSource]
) -> None:
    world = begin_slowly(network)
    swarm = world.swarm
    swarm.start_all(("source", "late"), ROUNDS)
    await swarm.until(lambda: world.stepped.get("late", [0])[-1] >= 2)
    saved = await world.kill("late")
    assert saved > 0
    await swarm.until(lambda: swarm.round("source") >= saved + HISTORY_ROUNDS + 2)
    before, mark = len(world.kept), len(world.stepped["late"])
    swarm.start("late", ROUNDS)
    await swarm.until(lambda: len(world.kept) >= before + HALF)
    await world.kill("source")
    await swarm.until(lambda: len(world.stepped["late"]) > mark)
    assert world.stepped["late"][mark] == saved
    await swarm.tasks["late"]
    assert swarm.round("late") == ROUNDS
