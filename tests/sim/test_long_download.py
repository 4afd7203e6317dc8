"""A newcomer arrives however long its download takes, while rounds go on every few seconds and sources leave."""

import asyncio
import errno
import math
import os
from collections.abc import Callable
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.errors import ResourceError
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.training.state.shared_state import SharedState, Stamp
from p2ptrain.training.sync import rounds_since
from p2ptrain.training.sync.background_download import TOO_SLOW, StateDownload
from tests.support.coroutines import simulated
from tests.support.sim.downloads import slow_downloads
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

WIDTH = 100
STATE_BYTES = 8 * WIDTH * (WIDTH + 1)
"""Parameters and outer momentum."""
CHUNK_BYTES = 2048
NUM_CHUNKS = -(-STATE_BYTES // CHUNK_BYTES)
HISTORY_ROUNDS = 4


class Swarm(SimulatedSwarm):
    """Trainers of a model of some chunks, whose sources send them slowly, at so many bytes per second each.

    ``kept`` has the chunks that downloads kept.
    """

    def __init__(self, network: SimulatedNetwork, upload: float, patch: pytest.MonkeyPatch, disk: Path) -> None:
        super().__init__(network, make_manifest(history_rounds=HISTORY_ROUNDS), 1)
        self._disk = disk
        self.kept = slow_downloads(patch, CHUNK_BYTES, upload)

    def _launch(self, peer: SimulatedPeer, step_seconds: float) -> SimulatedTrainer:
        peer.runtime.scratch = self._disk / peer.name
        trainer = SimulatedTrainer(peer, self.manifest, self.ledger, step_seconds, self.seed, width=WIDTH)
        self.trainers[peer.name] = trainer
        self.tasks[peer.name] = peer.spawn(trainer.run())
        return trainer

    async def train(self, names: str) -> None:
        """Start these trainers, and wait until no newcomer can replay the rounds that they had."""
        for name in names:
            self.start(name, step_seconds=2.0)
        await self.until(lambda: self.in_agreement(HISTORY_ROUNDS + 2), 300, "a few rounds")

    async def arrives(self, *newcomers: SimulatedTrainer, seconds: float) -> None:
        """Wait until these have downloaded the state, take part, and hold the same bits as the others."""
        await self.until(lambda: all(each.status == "training" for each in newcomers), seconds, "the download")
        last = max(each.sync.head.round for each in self.alive)
        await self.until(lambda: self.in_agreement(last + 2), 120, "the newcomers take part")
        heads = {trainer.sync.head.lineage: trainer.sync.head.digest for trainer in self.alive}
        assert all(heads[trainer.sync.head.lineage] == trainer.sync.head.digest for trainer in self.alive)
        assert all(each.sync.catch_up.resyncs == 1 for each in newcomers)
        assert not list(self._disk.glob("*/*/*")), "what was downloaded is of no use any more"


Begin = Callable[[SimulatedNetwork, float], Swarm]


@pytest.fixture
def begin(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Begin:
    return partial(Swarm, patch=monkeypatch, disk=tmp_path)


def tear(disk: Path) -> None:
    chunks = next(disk.glob("n/*/state/chunks"))
    torn = bytearray(chunks.read_bytes())
    torn[100:200] = bytes(100)
    chunks.write_bytes(torn)


@pytest.mark.fault(54)
@pytest.mark.parametrize("seconds", [300, pytest.param(3600, marks=pytest.mark.slow)])
@simulated(seed=1)
async def test_a_long_download_arrives_though_rounds_go_on_and_sources_leave(
    network: SimulatedNetwork, seconds: int, begin: Begin
) -> None:
    swarm = begin(network, STATE_BYTES / seconds / 3)
    await swarm.train("abcd")
    newcomer = swarm.start("n", step_seconds=2.0)
    began, first = network.loop.time(), swarm.trainers["d"].sync.head.round
    for name in "ab":
        await asyncio.sleep(seconds / 3)
        assert newcomer.status == "syncing"
        swarm.crash(name)
    await swarm.arrives(newcomer, seconds=2 * seconds)
    took = network.loop.time() - began
    assert took >= seconds
    assert took < 15 * (swarm.trainers["d"].sync.head.round - first), "the others' rounds go on"
    assert len(swarm.kept) <= 1.2 * NUM_CHUNKS


@pytest.mark.fault(9)
@pytest.mark.parametrize(
    ("download_seconds", "away_seconds", "least", "most"),
    [(300, 10.0, 1.0, 1.2), (120, 30.0 * HISTORY_ROUNDS, 1.4, math.inf)],
    ids=["from its disk", "anew after longer than histories last"],
)
@simulated(seed=1)
async def test_a_newcomer_that_restarts_goes_on_though_rounds_went_on(
    network: SimulatedNetwork,
    download_seconds: int,
    away_seconds: float,
    least: float,
    most: float,
    begin: Begin,
    tmp_path: Path,
) -> None:
    swarm = begin(network, STATE_BYTES / download_seconds / 2)
    await swarm.train("ab")
    swarm.start("n", step_seconds=2.0)
    await swarm.until(lambda: len(swarm.kept) >= NUM_CHUNKS // 2, 600, "half of the download")
    swarm.crash("n")
    tear(tmp_path)
    await asyncio.sleep(away_seconds)
    await swarm.arrives(swarm.restart("n", step_seconds=2.0), seconds=600)
    assert least * NUM_CHUNKS < len(swarm.kept) <= most * NUM_CHUNKS


@simulated(seed=1)
async def test_a_newcomer_whose_download_begins_anew_again_and_again_is_told_what_helps(
    network: SimulatedNetwork, begin: Begin, caplog: pytest.LogCaptureFixture
) -> None:
    swarm = begin(network, STATE_BYTES / 300 / 2)
    await swarm.train("ab")
    newcomer = swarm.start("n", step_seconds=2.0)

    def has_begun(times: int) -> bool:
        return caplog.text.count("begins anew") == times

    for times in (1, 2):
        await asyncio.sleep(40.0)
        network.cut(newcomer.peer)
        await asyncio.sleep(30.0 * HISTORY_ROUNDS)
        network.mend(newcomer.peer)
        await swarm.until(partial(has_begun, times), 120, "a new beginning")
        assert (TOO_SLOW in caplog.text) == (times > 1), "it may have been away"


@pytest.mark.fault(43)
@simulated(seed=1)
async def test_a_trainer_that_is_far_behind_downloads_and_the_others_do_not_wait_for_it(
    network: SimulatedNetwork, begin: Begin
) -> None:
    swarm = begin(network, STATE_BYTES / 200 / 2)
    await swarm.train("abc")
    late = swarm.trainers["c"]
    network.cut(late.peer)
    await asyncio.sleep(30.0 * HISTORY_ROUNDS)
    network.mend(late.peer)
    began = network.loop.time()
    await swarm.until(lambda: late.sync.catch_up.resyncs == 1, 900, "the download")
    assert network.loop.time() - began > 150
    times = [at for at, name, _ in swarm.ledger.commits if name == "a" and at > began]
    gaps = sorted(later - earlier for earlier, later in pairwise(times))
    assert len(gaps) > 10
    assert gaps[-1] <= 2 * gaps[len(gaps) // 2], "longer than usual by a grace period at the most"
    await swarm.arrives(seconds=0)


@simulated(seed=1)
async def test_eight_newcomers_at_once_arrive(network: SimulatedNetwork, begin: Begin) -> None:
    swarm = begin(network, 8 * STATE_BYTES / 200 / 2)
    await swarm.train("ab")
    newcomers = [swarm.start(f"n{index}", step_seconds=2.0) for index in range(8)]
    await swarm.arrives(*newcomers, seconds=600)


@pytest.mark.fault(9)
@simulated(seed=1)
async def test_a_source_that_makes_up_a_state_in_the_middle_is_outvoted(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = begin(network, STATE_BYTES / 200 / 3)
    await swarm.train("abc")
    liar = swarm.trainers["b"]
    read = SharedState.read

    def forge(state: SharedState, index: int, out: memoryview, *rest: Any, **options: Any) -> int:
        size = read(state, index, out, *rest, **options)
        if state is liar.state and size >= 0 and len(swarm.kept) >= 10:
            end = size - len(state._hashed[1].proof(index)) - Stamp.NUM_BYTES  # type: ignore[index]
            stamp = Stamp(state.head.round, state.head.lineage, b"\x01" * 32)
            out[end : end + Stamp.NUM_BYTES] = stamp.to_bytes()
        return size

    monkeypatch.setattr(SharedState, "read", forge)
    newcomer = swarm.start("n", step_seconds=2.0)
    await swarm.arrives(newcomer, seconds=900)
    assert newcomer.rpc.refusals[liar.peer.peer_id, "bad state"] == 1
    for name in "ac":
        assert newcomer.rpc.refusals[swarm.trainers[name].peer.peer_id, "bad state"] == 0


def full_disk(*_: object) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize("writes", ["the state", "the index", "the rounds since"])
@simulated(seed=1)
async def test_a_full_disk_ends_the_newcomer_and_is_no_fault_of_its_sources(
    network: SimulatedNetwork, writes: str, begin: Begin, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    swarm = begin(network, STATE_BYTES / 120 / 2)
    await swarm.train("ab")
    with monkeypatch.context() as patch:
        if writes == "the state":
            patch.setattr(os, "posix_fallocate", full_disk)
        newcomer = swarm.start("n", step_seconds=2.0)
        if writes != "the state":
            await swarm.until(lambda: len(swarm.kept) >= NUM_CHUNKS // 4, 300, "a part of the download")
            patch.setattr(*((os, "write") if writes == "the index" else (rounds_since, "replace_file")), full_disk)
        told = rf"{tmp_path / 'n'}.*No space left on device.*free some space"
        with pytest.raises(ResourceError, match=told):
            async with asyncio.timeout(60):
                await swarm.tasks.pop("n")
    for name in "ab":
        peer = swarm.trainers[name].peer.peer_id
        assert not newcomer.membership.is_suspect(peer)
        assert not newcomer.membership.is_mistrusted(peer)
    assert newcomer.sync.head.round == 0, "it does not train on alone"
    network.crash(newcomer.peer)
    await swarm.arrives(swarm.restart("n", step_seconds=2.0), seconds=600)


@simulated(seed=1)
async def test_a_step_that_moves_a_value_by_others_makes_do_with_chunks_of_one_round(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply, assemble, rounds_of_chunks = SharedState.apply, StateDownload.assemble, list[int]()

    def apply_as_lamb(state: SharedState, *arguments: Any, **options: Any) -> None:
        apply(state, *arguments, **options)
        state.vector.add_(0.01 * state.vector.mean())  # What other chunks hold matters.

    swarm = begin(network, STATE_BYTES / 20 / 2)

    async def assembled(download: StateDownload, *arguments: Any) -> Head:
        assert download._partial is not None
        rounds_of_chunks.append(len({stamp.lineage for _, stamp in download._partial.chunks()}))
        for name in "ab":  # From now on a round lasts longer than a download.
            swarm.trainers[name].step_seconds = 60.0
        return await assemble(download, *arguments)

    monkeypatch.setattr(SharedState, "apply", apply_as_lamb)
    monkeypatch.setattr(StateDownload, "assemble", assembled)
    await swarm.train("ab")
    newcomer = swarm.start("n", step_seconds=2.0)
    await swarm.until(lambda: newcomer.status == "training", 600, "the download")
    assert rounds_of_chunks[0] > 1
    assert rounds_of_chunks[1:] == [1]
    head = newcomer.sync.head
    assert newcomer.state.tree().root == head.digest == swarm.ledger.digests[head.lineage]


@simulated(seed=1)
async def test_a_newcomer_that_drains_while_it_assembles_ends_with_a_whole_state(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    patch = SharedState.patch
    swarm = begin(network, STATE_BYTES / 30 / 2)
    await swarm.train("ab")
    newcomer = swarm.start("n", step_seconds=2.0)
    compute, drained_at = newcomer.peer.runtime.compute, list[int]()

    async def slowly(*arguments: Any, **options: Any) -> Any:
        result = await compute(*arguments, **options)
        await asyncio.sleep(0.01)
        return result

    def patched(state: SharedState, *arguments: Any) -> None:
        patch(state, *arguments)
        if state is newcomer.state and not drained_at:
            drained_at.append(state.head.round)
            swarm.tasks["n"].cancel()

    newcomer.peer.runtime.compute = slowly  # type: ignore[method-assign]
    monkeypatch.setattr(SharedState, "patch", patched)
    with pytest.raises(asyncio.CancelledError):
        await swarm.tasks["n"]
    assert drained_at == [0], "the state was not assembled yet"
    head = newcomer.sync.head
    assert head.round > 0
    assert newcomer.state.tree().root == head.digest == swarm.ledger.digests[head.lineage]
    network.crash(newcomer.peer)
