"""Whole models that average gradients (`every = 1`), at a learning rate that changes with every round."""

from __future__ import annotations

import asyncio
import logging

import pytest
import torch

from p2ptrain.averaging.grouping.messages import REPORT, BatchAdvice, BatchReport
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.coroutines import simulated
from tests.support.sim.accounts import Accounts
from tests.support.sim.trainers import BASE_RATE, SimulatedSwarm, SimulatedTrainer, make_manifest, rate_factor

SECONDS = 300.0
TRAINING = {"every": 1, "global_batch": 12, "local_batch": 1}


def start(network: SimulatedNetwork, num_peers: int = 3, **averaging: object) -> SimulatedSwarm:
    swarm = SimulatedSwarm(network, make_manifest(TRAINING, **averaging), 0)
    for index in range(num_peers):
        swarm.start(f"t{index}")
    return swarm


def record_rounds(trainer: SimulatedTrainer) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
    """Each round that this trainer applies from now on: its number, its mean, and the parameters after it."""
    apply, applied = trainer.state.apply, []

    def recorded(mean: torch.Tensor, round_: int, *rest: object) -> None:
        apply(mean, round_, *rest)  # type: ignore[arg-type]
        applied.append((trainer.sync.head.round, mean.clone(), trainer.state.vector.clone()))

    trainer.state.apply = recorded  # type: ignore[method-assign, assignment]
    return applied


def test_a_trainer_that_replays_rounds_steps_at_their_rates(caplog: pytest.LogCaptureFixture) -> None:
    async def main(network: SimulatedNetwork) -> None:
        swarm = SimulatedSwarm(network, make_manifest(TRAINING), 0)
        accounts = Accounts(swarm)
        for index in range(3):
            swarm.start(f"t{index}")
        late = swarm.trainers["t2"]
        await swarm.until(lambda: swarm.in_agreement(3), 90, "the swarm trains")
        for _ in range(2):
            seen = late.sync.head.round
            network.stall(late.peer, 30.0)
            others = [swarm.trainers["t0"], swarm.trainers["t1"]]
            await swarm.until(lambda: min(t.sync.head.round for t in others) >= seen + 6, SECONDS, "the others go on")  # noqa: B023
            await swarm.until(
                lambda: late.sync.head.round >= seen + 8 and swarm.in_agreement(seen + 8),  # noqa: B023
                SECONDS,
                "all are together again",
            )
        assert late.sync.catch_up.resyncs == 0, "it downloaded the state"
        accounts.check_conservation()
        assert accounts.values.num_checked > 0
        await swarm.end()

    with caplog.at_level(logging.INFO, "p2ptrain.training.sync.catch_up"):
        simulate(main, seed=5)
    assert sum("replayed round" in record.message for record in caplog.records) >= 8


@pytest.mark.parametrize("codec", ["fp32", "int8"])
@simulated(seed=6)
async def test_the_swarm_steps_like_one_process_on_the_means_of_its_rounds(
    network: SimulatedNetwork, codec: str
) -> None:
    swarm = start(network, codec=codec)
    trainer = swarm.trainers["t0"]
    layout, plain = trainer.state.layout, torch.nn.Linear(12, 12)
    layout.write(trainer.state.vector, plain)
    applied = record_rounds(trainer)
    await swarm.until(lambda: swarm.in_agreement(8), SECONDS, "eight rounds")
    await swarm.end()
    optimizer = torch.optim.AdamW(plain.parameters(), BASE_RATE)
    for number, (round_, mean, vector) in enumerate(applied):
        assert round_ == number
        for entry, parameter in layout.parameters_of(plain):
            parameter.grad = mean[entry.offset : entry.end].view(entry.shape).clone()
        optimizer.param_groups[0]["lr"] = BASE_RATE * rate_factor(round_)
        optimizer.step()
        torch.testing.assert_close(torch.cat([p.detach().reshape(-1) for p in plain.parameters()]), vector)
    assert len(applied) >= 8


@simulated(seed=7)
async def test_a_newcomer_downloads_the_state_and_goes_on_at_the_rates_of_the_others(network: SimulatedNetwork) -> None:
    swarm = start(network)
    await swarm.until(lambda: swarm.in_agreement(7), SECONDS, "the swarm trains")
    newcomer = swarm.start("late")
    await swarm.until(lambda: newcomer.sync.rounds_committed >= 6, SECONDS, "the newcomer takes part")
    await swarm.end()


@pytest.mark.parametrize("seed", range(4))
@simulated()
async def test_a_survivor_does_not_wait_for_a_dead_leader_to_tell_it_that_the_batch_is_full(
    network: SimulatedNetwork, seed: int
) -> None:
    swarm = start(network, num_peers=2)
    one, two = swarm.trainers.values()

    def has_called(a: SimulatedTrainer, b: SimulatedTrainer) -> bool:
        leaders, key = b.sync.averager.matchmaker._leaders, b.sync.averager.matchmaker._position.key
        return a.peer.peer_id in leaders.probers(key) and leaders.candidates(key, [])[0] == a.peer.peer_id

    await swarm.until(lambda: has_called(one, two) or has_called(two, one), 90, "a leader has shown itself")
    dead, survivor = (one, two) if has_called(one, two) else (two, one)
    round_ = survivor.sync.head.round
    swarm.crash(dead.peer.name)
    await swarm.until(lambda: survivor.sync.head.round >= round_ + 3, 90, "the survivor goes on")
    await swarm.end()


@simulated(seed=8)
async def test_a_trainer_that_waits_for_a_full_batch_sees_that_the_others_are_ahead(network: SimulatedNetwork) -> None:
    swarm = start(network, num_peers=4)
    await swarm.until(lambda: swarm.in_agreement(2), 90, "the swarm trains")
    late = swarm.trainers["t3"]
    network.cut(late.peer)
    others = [trainer for trainer in swarm.alive if trainer is not late]
    # By itself it leads, and would wait for what the others were about to bring, which they do not any more.
    serve_report, asked = late.sync.averager.matchmaker._coordinator._serve_report, []

    async def never_full(peer: str, report: BatchReport) -> BatchAdvice:
        asked.append(peer)
        await serve_report(peer, report)
        await asyncio.sleep(1.0)
        return BatchAdvice(closing=False, wait=True)

    late.rpc.serve(REPORT, BatchReport, never_full)
    await swarm.until(lambda: len(asked) > 3, 120, "the late trainer waits")
    front = max(trainer.sync.head.round for trainer in others)
    network.mend(late.peer)
    await swarm.until(lambda: late.sync.head.round > front, 60, "the late trainer catches up")
    await swarm.end()
