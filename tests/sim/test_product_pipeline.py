"""Pipelines of the peers that `p2ptrain peer` runs, from role file to summary, on a simulated network."""

import asyncio
import json
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Any

import pytest

from p2ptrain.manifest import AdmissionSpec
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.pipeline.client.sender import Accepted
from p2ptrain.pipeline.client.trainer import POSITION_FILE, PipelineTrainer
from tests.support.coroutines import simulated
from tests.support.sim.product_peers import Begin, ProductSwarm

ROUNDS = 3
TRAINING: dict[str, Any] = {"every": 1, "global_batch": 24, "warmup_steps": 2}
STAGES: dict[str, Any] = {"num_stages": 2, "codec": "fp32"}
HOSTS = {"host0a": 0, "host0b": 0, "host1a": 1, "host1b": 1}


def start_all(swarm: ProductSwarm, max_rounds: int, hosts: Iterable[str] = HOSTS) -> None:
    for name in hosts:
        start_host(swarm, name, max_rounds)
    swarm.start_all(("trainer1", "trainer2"), max_rounds)


def start_host(swarm: ProductSwarm, name: str, max_rounds: int = 0) -> None:
    swarm.start(name, max_rounds, "stage", pipeline={"stage": HOSTS[name]})


async def stop_all(swarm: ProductSwarm) -> None:
    """SIGTERM for everybody."""
    for name in swarm.tasks:
        swarm.stop(name)
    await swarm.end()


def watch_windows(swarm: ProductSwarm, monkeypatch: pytest.MonkeyPatch) -> dict[str, Counter[int]]:
    """How often each trainer has had each window accepted."""
    windows: dict[str, Counter[int]] = defaultdict(Counter)
    send = PipelineTrainer._send

    async def seen(trainer: PipelineTrainer, sent: list[int], position: int) -> Accepted:
        accepted = await send(trainer, sent, position)
        name = next(name for name, peer in swarm.network.peers.items() if peer.peer_id == accepted.id.trainer)
        windows[name].update(sent)
        return accepted

    monkeypatch.setattr(PipelineTrainer, "_send", seen)
    return windows


@simulated(seed=1)
async def test_a_pipeline_trains_to_its_last_round_and_saves_it_whole(network: SimulatedNetwork, begin: Begin) -> None:
    swarm = begin(network, TRAINING, **STAGES)
    start_all(swarm, ROUNDS)
    await swarm.end()
    assert {swarm.round(name) for name in HOSTS} == {ROUNDS}
    for name in HOSTS:
        summary = swarm.summary(name)
        assert (summary.exit_reason, summary.round, summary.rounds_aborted) == ("rounds", ROUNDS, 0)
        assert swarm.saved_head(name) == (ROUNDS, swarm.sync(name).head.digest)
        assert all(not hosted.saves.missing() for hosted in swarm.nodes[name].held.stages)
    tokens = {swarm.sync(name).head.tokens for name in HOSTS}
    assert len(tokens) == 1
    counted = sum(swarm.summary(name).tokens for name in ("trainer1", "trainer2"))
    assert tokens.pop() <= counted


@pytest.mark.fault(27)
@simulated(seed=1)
async def test_a_stage_host_that_is_killed_costs_no_round_and_comes_back_from_its_checkpoint(
    network: SimulatedNetwork, begin: Begin
) -> None:
    swarm = begin(network, TRAINING, **STAGES)
    start_all(swarm, 5 * ROUNDS)
    await swarm.until(lambda: swarm.round("host1b") >= 2)
    await swarm.kill("host1b")
    killed_at = swarm.round("host1b")
    await swarm.until(lambda: swarm.round("host1a") >= killed_at + 2)
    start_host(swarm, "host1b", 5 * ROUNDS)
    await swarm.end()
    assert {swarm.round(name) for name in HOSTS} == {5 * ROUNDS}
    assert swarm.sync("host1b").replica.trained_rounds > 0
    assert swarm.summary("host1a").rounds_aborted <= 1


@pytest.mark.fault(27)
@simulated(seed=1)
async def test_a_stage_that_lost_samples_in_the_last_round_ends_it_with_the_others(
    network: SimulatedNetwork, begin: Begin
) -> None:
    swarm = begin(network, TRAINING, **STAGES)
    start_all(swarm, ROUNDS)
    await swarm.until(lambda: swarm.round("host1b") == ROUNDS - 1)
    ledger = swarm.nodes["host1b"].held.stages[0].host.ledger
    await swarm.until(lambda: ledger.round == ROUNDS - 1 and ledger.settled_samples > 0)
    await swarm.kill("host1b")
    del swarm.nodes["host1b"], swarm.tasks["host1b"]
    await swarm.until(lambda: all(task.done() for task in swarm.tasks.values()))
    for name in swarm.nodes.keys() & HOSTS.keys():
        assert swarm.saved_head(name) == (ROUNDS, swarm.sync(name).head.digest)
        assert all(not hosted.saves.missing() for hosted in swarm.nodes[name].held.stages)


@simulated(seed=1)
async def test_a_trainer_that_is_told_to_stop_reads_on_where_it_stopped(
    network: SimulatedNetwork, begin: Begin, monkeypatch: pytest.MonkeyPatch
) -> None:
    swarm = begin(network, TRAINING, **STAGES)
    windows = watch_windows(swarm, monkeypatch)
    start_all(swarm, 0)
    await swarm.until(lambda: windows["trainer1"].total() >= 20)
    await swarm.drain("trainer1")
    assert swarm.summary("trainer1").exit_reason == "signal"
    read = windows["trainer1"].total()
    assert json.loads((swarm.folder / "trainer1" / POSITION_FILE).read_text())["next"] == read
    swarm.start("trainer1")
    await swarm.until(lambda: windows["trainer1"].total() >= read + 20)
    await stop_all(swarm)
    assert max(windows["trainer1"].values()) == 1


@simulated(seed=1)
async def test_a_host_that_is_told_to_stop_saves_the_last_round(network: SimulatedNetwork, begin: Begin) -> None:
    swarm = begin(network, TRAINING, **STAGES)
    start_all(swarm, 2 * ROUNDS)
    await swarm.until(lambda: swarm.round("host0b") >= 2)
    assert await swarm.drain("host0b") <= 45.0
    assert swarm.summary("host0b").exit_reason == "signal"
    assert swarm.saved_head("host0b") == (swarm.round("host0b"), swarm.sync("host0b").head.digest)
    del swarm.nodes["host0b"]
    await swarm.end()
    assert {swarm.round(name) for name in ("host0a", "host1a", "host1b")} == {2 * ROUNDS}


@pytest.mark.parametrize("is_late", [False, True], ids=["with-it", "after-it"])
@pytest.mark.parametrize("seed", [2, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, *range(3, 7)))])
@simulated()
async def test_the_first_host_of_a_stage_rests_and_its_others_go_on_from_its_state(
    network: SimulatedNetwork, seed: int, is_late: bool, begin: Begin
) -> None:
    """It alone has voted so far, and holds the stage's only state if the other host came ``after it``.

    Strangers would have to wait for it.
    """
    names = [*HOSTS, "trainer1", "trainer2"]
    members = tuple(SimulatedSigner(network.seed, name, {}).peer_id for name in names)
    swarm = begin(network, TRAINING, **STAGES, admission=AdmissionSpec(mode="allowlist", members=members))
    start_all(swarm, 0, ["host0a", "host1a", *([] if is_late else ["host1b"])])
    await swarm.until(lambda: swarm.round("host1a") >= 1)
    swarm.signals["host1a"].wishes.set("owner", "by its owner")
    rested_at, given = swarm.round("host1a"), swarm.sync("host1a").replica.trained_rounds
    if is_late:
        start_host(swarm, "host1b")
    for ended in (rested_at + 3, rested_at + 6):
        await swarm.until(lambda: min(map(swarm.round, ("host0a", "host1a", "host1b"))) >= ended, 120.0)  # noqa: B023
    last_work = swarm.sync("host1a").replica.trained_rounds - given
    assert last_work <= 1, "a resting host hands in what it had, and no more"
    swarm.signals["host1a"].wishes.set("owner", "")
    await swarm.until(lambda: swarm.sync("host1a").replica.trained_rounds > given + last_work, 120.0)
    await stop_all(swarm)


@pytest.mark.parametrize("seconds", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("role", ["stage", "trainer"])
@simulated(seed=1)
async def test_who_is_told_to_stop_while_it_starts_leaves_nothing_behind(
    network: SimulatedNetwork, role: str, seconds: float, begin: Begin
) -> None:
    swarm = begin(network, TRAINING, **STAGES)
    start_all(swarm, 0, ("host0a", "host1a"))
    await swarm.until(lambda: swarm.round("host1a") >= 1)
    more: dict[str, Any] = {"pipeline": {"stage": 1}} if role == "stage" else {}
    swarm.start("late", 0, role, **more)
    await swarm.until(lambda: "late" in swarm.signals)
    await asyncio.sleep(seconds)
    assert await swarm.drain("late") <= 45.0
    left_at = swarm.round("host1a")
    await swarm.until(lambda: min(swarm.round("host0a"), swarm.round("host1a")) >= left_at + 2)
    await stop_all(swarm)


@pytest.mark.parametrize("limit", [0, 4])
@simulated(seed=1)
async def test_a_late_host_that_is_told_to_finish_ends_after_a_round_that_has_its_work(
    network: SimulatedNetwork, limit: int, begin: Begin
) -> None:
    """Also if the other hosts ended the round without it, but never after its owner's last round."""
    swarm = begin(network, TRAINING, **STAGES)
    start_all(swarm, 0, ["host0a", "host0b", "host1a"])
    start_host(swarm, "host1b", limit)
    await swarm.until(lambda: swarm.round("host1b") >= 2)
    hosted = swarm.nodes["host1b"].held.stages[0]
    late, handed_in = swarm.round("host1b"), swarm.sync("host1b").replica.trained_rounds
    await swarm.until(lambda: hosted.host.ledger.settled_samples > 0 and not hosted.host.ledger.is_closed)
    network.cut(network.peers["host1b"])
    swarm.signals["host1b"].wishes.finish()
    await swarm.until(lambda: swarm.round("host1a") > late + 1)
    network.mend(network.peers["host1b"])
    await swarm.tasks["host1b"]
    assert swarm.summary("host1b").exit_reason == "rounds"
    assert swarm.sync("host1b").replica.trained_rounds > handed_in or limit
    assert not any(unit.work.tokens for unit in hosted.units) or limit
    assert not limit or hosted.rounds.last_round <= limit
    del swarm.nodes["host1b"]
    await stop_all(swarm)
