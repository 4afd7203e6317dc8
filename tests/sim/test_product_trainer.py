"""The trainer that `p2ptrain peer` runs, thread and checkpoints included, on a simulated network."""

from __future__ import annotations

import asyncio
import json
import math
from pathlib import Path
from typing import Any, cast

import pytest

from p2ptrain.cli.summary import combine
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.node import run
from p2ptrain.training.trainer import Trainer
from tests.support.sim.product_trainer import ProductSwarm, small_manifest, use_virtual_time

ROUNDS = 6
EVERY = {1: {"every": 1, "global_batch": 12, "warmup_steps": 4}, 4: {"every": 4, "warmup_steps": 4}}


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("".join(f"{number} bottles of beer on the wall\n" for number in range(400)))
    return path


@pytest.mark.parametrize("every", EVERY)
def test_trainers_commit_rounds_and_hold_the_same_bits(
    every: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(network: SimulatedNetwork) -> None:
        use_virtual_time(monkeypatch, network)
        swarm = ProductSwarm(network, small_manifest(text, EVERY[every]), tmp_path)
        for name in "abc":
            swarm.start(name, ROUNDS)
        await asyncio.gather(*swarm.tasks.values())
        assert len(swarm.heads()) == 1
        syncs = [node.synchronizer for node in swarm.nodes.values()]
        heads = [sync.head for sync in syncs if sync is not None]
        assert heads[0].round == ROUNDS
        assert sum(sync.trained_tokens for sync in syncs if sync is not None) == heads[0].tokens
        assert all(sync.rounds_committed for sync in syncs if sync is not None)

    simulate(main, seed=every)


@pytest.mark.fault(1)
@pytest.mark.parametrize("every", EVERY)
def test_a_trainer_that_is_killed_goes_on_from_its_checkpoint(
    every: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def main(network: SimulatedNetwork) -> None:
        use_virtual_time(monkeypatch, network)
        swarm = ProductSwarm(network, small_manifest(text, EVERY[every]), tmp_path)
        has_saved = asyncio.Event()

        def look(name: str, trainer: Trainer) -> None:
            if (tmp_path / "c" / "checkpoints").is_dir():
                has_saved.set()

        swarm.before_step = look
        for name in "abc":
            swarm.start(name, 4 * ROUNDS)
        await has_saved.wait()
        network.crash(network.peers["c"])
        await asyncio.gather(swarm.tasks["c"], return_exceptions=True)
        await asyncio.sleep(20.0)
        swarm.start("c", 4 * ROUNDS)
        await asyncio.gather(*swarm.tasks.values())
        assert len(swarm.heads()) == 1
        again = swarm.nodes["c"].synchronizer
        assert again is not None
        assert again.trained_rounds > 0

    simulate(main, seed=every)


@pytest.mark.parametrize("every", EVERY)
def test_trainers_follow_the_manifests_learning_rate_and_a_summary_counts_committed_tokens(
    every: int, text: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = {**EVERY[every], "schedule": "cosine", "rounds": ROUNDS, "final_rate": 0.25, "learning_rate": 0.004}
    seen: list[tuple[int, float]] = []

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

    async def main(network: SimulatedNetwork) -> None:
        use_virtual_time(monkeypatch, network)
        swarm = ProductSwarm(network, small_manifest(text, training), tmp_path)
        swarm.before_step = observe
        for name in "ab":
            swarm.start(name, ROUNDS)
        await asyncio.gather(*swarm.tasks.values())
        paths = {name: tmp_path / f"{name}.json" for name in "ab"}
        for name, path in paths.items():
            run._write_summary(cast(Any, swarm.nodes[name]), swarm.trainers[name], [path], 0.0, "rounds")
        sync = swarm.nodes["a"].synchronizer
        assert sync is not None
        combined = combine({name: json.loads(path.read_text()) for name, path in paths.items()}, 2)
        assert combined.tokens == sync.head.tokens
        assert combined.tokens <= sum(trainer.optimizer.total_tokens for trainer in swarm.trainers.values())

    observed: set[str] = set()
    simulate(main, seed=every)
    assert {step for step, _ in seen} >= set(range(ROUNDS * every))
    assert all(rate == pytest.approx(expected(step), rel=1e-9) for step, rate in seen)
    assert len({rate for _, rate in seen}) > 4
