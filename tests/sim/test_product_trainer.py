"""The trainer that `p2ptrain peer` runs, from its role file to its summary, on a simulated network."""

import asyncio
import math
from typing import Any

import pytest

from p2ptrain.errors import TemporaryError
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.reports.summary import combine
from p2ptrain.training.loop import Trainer
from tests.support.coroutines import simulated
from tests.support.sim.product_peers import Begin

ROUNDS = 6
EVERY: dict[int, dict[str, Any]] = {
    1: {"every": 1, "global_batch": 12, "warmup_steps": 4},
    4: {"every": 4, "warmup_steps": 4},
}


@pytest.mark.fault(1)
@pytest.mark.parametrize("every", EVERY)
@simulated(seed=lambda every, **_: every)
async def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint(
    network: SimulatedNetwork, every: int, begin: Begin
) -> None:
    swarm = begin(network, EVERY[every])
    has_saved = asyncio.Event()

    def look(name: str, trainer: Trainer) -> None:
        if (swarm.folder / "c" / "checkpoints").is_dir():
            has_saved.set()

    swarm.before_step = look
    swarm.start_all("abc", 4 * ROUNDS)
    await has_saved.wait()
    await swarm.kill("c")
    await asyncio.sleep(20.0)
    swarm.start("c", 4 * ROUNDS)
    await swarm.end()
    assert len(swarm.heads()) == 1
    assert swarm.sync("c").replica.trained_rounds > 0


@pytest.mark.parametrize("every", EVERY)
@simulated(seed=lambda every, **_: every)
async def test_trainers_hold_the_same_bits_follow_the_manifests_learning_rate_and_count_committed_tokens(
    network: SimulatedNetwork, every: int, begin: Begin
) -> None:
    training = {**EVERY[every], "schedule": "cosine", "rounds": ROUNDS, "final_rate": 0.25, "learning_rate": 0.004}
    swarm, seen = begin(network, training), list[tuple[int, float]]()

    def expected(step: int) -> float:
        warmup, total = 4, ROUNDS * every
        if step < warmup:
            return 0.004 * (step + 1) / warmup
        share = min(1.0, (step - warmup) / (total - warmup))
        return 0.004 * (0.25 + 0.75 * (1 + math.cos(math.pi * share)) / 2)

    def observe(name: str, trainer: Trainer) -> None:
        if name in observed:
            return
        observed.add(name)
        optimizer, step = trainer.optimizer, trainer.optimizer.step

        def observed_step(closure: Any = None) -> Any:
            at = optimizer.round * every + min(optimizer.work.steps, every - 1)
            result = step(closure)
            seen.append((at, optimizer.inner.param_groups[0]["lr"]))
            return result

        optimizer.step = observed_step  # type: ignore[method-assign]

    observed: set[str] = set()
    swarm.before_step = observe
    swarm.start_all("abc", ROUNDS)
    await swarm.end()
    assert {number for number, _ in swarm.heads()} == {ROUNDS}
    assert len(swarm.heads()) == 1
    syncs = [swarm.sync(name) for name in "abc"]
    assert all(sync.rounds_committed for sync in syncs)
    combined = combine({name: swarm.summary(name) for name in "abc"}, 3)
    assert combined.tokens == syncs[0].head.tokens == sum(sync.replica.trained_tokens for sync in syncs)
    assert combined.tokens <= sum(trainer.optimizer.total_tokens for trainer in swarm.trainers.values())
    assert {step for step, _ in seen} >= set(range(ROUNDS * every))
    assert all(rate == pytest.approx(expected(step), rel=1e-9) for step, rate in seen)
    assert len({rate for _, rate in seen}) > 4


@pytest.mark.parametrize("every", EVERY)
@simulated(seed=lambda every, **_: every)
async def test_a_trainer_that_is_told_to_stop_hands_in_its_work_and_saves(
    network: SimulatedNetwork, every: int, begin: Begin
) -> None:
    swarm = begin(network, EVERY[every])
    swarm.start_all("abc", 4 * ROUNDS, checkpoints={"every_rounds": 0})
    await swarm.until(lambda: swarm.round("c") >= 2)
    left_at = swarm.round("c")
    await swarm.drain("c")
    summary = swarm.summary("c")
    assert summary.exit_reason == "signal"
    assert summary.round >= left_at
    assert swarm.saved_head("c") == (summary.round, bytes.fromhex(summary.state_digest))
    assert swarm.trainers["c"].optimizer.work.tokens == 0
    swarm.start("c", 4 * ROUNDS)
    await swarm.end()
    assert len(swarm.heads()) == 1
    assert "c" in swarm.trainers
    assert swarm.sync("c").replica.trained_rounds > 0


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("limit", [0, 4])
@simulated(seed=lambda every, **_: every)
async def test_a_trainer_that_is_told_to_finish_ends_after_a_round_that_has_its_work(
    network: SimulatedNetwork, every: int, limit: int, begin: Begin
) -> None:
    """Also if the others went on without it meanwhile, but never after its owner's last round."""
    swarm = begin(network, EVERY[every])
    swarm.start_all("ab", 4 * ROUNDS)
    swarm.start("c", limit)
    await swarm.until(lambda: swarm.round("c") >= 2)
    handed_in, missed = swarm.sync("c").replica.trained_rounds, swarm.round("c")
    network.cut(network.peers["c"])
    swarm.trainers["c"].finish()
    await swarm.until(lambda: swarm.round("a") > missed + 1)
    network.mend(network.peers["c"])
    await swarm.tasks["c"]
    assert swarm.summary("c").exit_reason == "rounds"
    ended = swarm.sync("c")
    assert ended.replica.trained_rounds > handed_in or ended.last_round == limit
    assert not limit or ended.last_round <= limit
    await swarm.end()


@simulated(seed=1)
async def test_a_trainer_that_is_told_to_stop_in_a_round_that_does_not_end_saves_in_time(
    network: SimulatedNetwork, begin: Begin
) -> None:
    averaging: dict[str, Any] = {"matchmaking_seconds": 120.0, "round_seconds": 120.0, "grace_seconds": 120.0}
    swarm = begin(network, EVERY[4], **averaging)
    swarm.start_all("abc", checkpoints={"every_rounds": 0}, drain_seconds=30.0)
    await swarm.until(lambda: swarm.round("c") >= 2)
    for name in "ab":
        network.cut(network.peers[name])
    await asyncio.sleep(10.0)
    held = swarm.round("c")
    assert await swarm.drain("c") <= 30.0
    assert swarm.summary("c").exit_reason == "signal"
    assert swarm.saved_head("c") == (held, swarm.sync("c").head.digest)
    for name in "ab":
        await swarm.kill(name)


@pytest.mark.parametrize("seconds", [0.0, 0.05, 0.2, 1.0, 2.0])
@simulated(seed=1)
async def test_a_trainer_that_is_told_to_stop_while_it_starts_leaves_nothing_behind(
    network: SimulatedNetwork, seconds: float, begin: Begin
) -> None:
    swarm = begin(network, EVERY[4])
    swarm.start_all("ab", ROUNDS)
    await swarm.until(lambda: swarm.round("a") >= 2)
    swarm.start("c")
    await swarm.until(lambda: "c" in swarm.signals)
    await asyncio.sleep(seconds)
    assert await swarm.drain("c") < 20.0
    await swarm.end()
    assert {swarm.round("a"), swarm.round("b")} == {ROUNDS}


@pytest.mark.fault(25)
@simulated(seed=1)
async def test_a_trainer_whose_network_daemon_ends_saves_and_asks_to_be_started_again(
    network: SimulatedNetwork, begin: Begin
) -> None:
    swarm = begin(network, EVERY[4])
    swarm.start_all("abc", 2 * ROUNDS, checkpoints={"every_rounds": 0})
    await swarm.until(lambda: swarm.round("c") >= 2)
    await swarm.lose_network("c")
    with pytest.raises(TemporaryError, match="start this peer again"):
        await swarm.tasks["c"]
    assert swarm.saved_head("c") == (swarm.round("c"), swarm.sync("c").head.digest)
    del swarm.nodes["c"], swarm.tasks["c"]
    await swarm.end()
    assert len(swarm.heads()) == 1


@simulated(seed=1)
async def test_a_trainer_leaves_after_its_minutes(network: SimulatedNetwork, begin: Begin) -> None:
    swarm = begin(network, EVERY[4])
    swarm.start_all("ab", stop_after={"minutes": 0.5})
    await swarm.end()
    assert {swarm.summary(name).exit_reason for name in "ab"} == {"minutes"}
    assert 30.0 <= network.loop.time() <= 60.0
    for name in "ab":
        assert swarm.saved_head(name) == (swarm.round(name), swarm.sync(name).head.digest)


@pytest.mark.fault(51)
@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 1, 8)], ids=["1:1:1", "1:1:8"])
@simulated(seed=lambda speeds, **_: sum(speeds))
async def test_trainers_of_uneven_speeds_do_the_sum_of_what_they_can(
    network: SimulatedNetwork, speeds: tuple[int, ...], begin: Begin
) -> None:
    seconds = 10.0
    swarm = begin(network, {"every": 16})
    marks: list[tuple[float, int, int]] = []

    def look(name: str, trainer: Trainer) -> None:
        head = trainer.optimizer.synchronizer.head
        if not marks or head.round > marks[-1][1]:
            marks.append((network.loop.time(), head.round, head.tokens))

    swarm.before_step = look
    for index, speed in enumerate(speeds):
        swarm.step_seconds["abc"[index]] = seconds / speed
        swarm.start("abc"[index], ROUNDS + 2)
    await swarm.end()
    (began, _, before), (ended, _, after) = marks[3], marks[-1]
    able = sum(speeds) / seconds * 2 * 8 * (ended - began)
    assert (after - before) / able >= 0.95
    assert all(swarm.sync(name).rounds_committed >= ROUNDS for name in swarm.nodes)
    assert len(swarm.heads()) == 1
