"""Swarms whose rounds synchronise one fragment each, also under compute: the same promises, under the same faults."""

import itertools
from dataclasses import replace

import pytest
import torch

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.seeds import changing_seeds
from tests.support.sim.accounts import Accounts
from tests.support.sim.heads import watch_head
from tests.support.sim.schedules import draw_schedule, find_problems
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

FRAGMENTS = {"fragments": 2, "outer": "adam", "outer_learning_rate": 0.01}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("fragments", "overlap_steps"), [(2, 0), (2, 2), (1, 3)])
@pytest.mark.parametrize(("peers", "group_size", "first", "count"), [((2, 6), 0, 40, 5), ((5, 9), 3, 100, 2)])
def test_they_keep_every_promise_whatever_befalls_them(
    peers: tuple[int, int], group_size: int, first: int, count: int, fragments: int, overlap_steps: int
) -> None:
    """Also where they are more than a group."""
    changing = changing_seeds(f"streaming {fragments} {overlap_steps} {count}", count)
    for seed in (*range(first, first + count), *changing):
        schedule = replace(draw_schedule(seed, *peers), fragments=fragments, overlap_steps=overlap_steps)
        assert find_problems(replace(schedule, group_size=group_size or schedule.group_size)) == []


@simulated(seed=2)
async def test_laggards_find_as_many_rounds_of_each_fragment(network: SimulatedNetwork) -> None:
    swarm = SimulatedSwarm(network, make_manifest(FRAGMENTS, history_rounds=2), 0)
    trainer, _ = swarm.start("t0"), swarm.start("t1")
    lineages: dict[int, bytes] = {}

    def watch() -> None:
        lineages[trainer.sync.head.round] = trainer.sync.head.lineage

    watch_head(trainer.sync.replica, watch)
    await swarm.until(lambda: swarm.in_agreement(7), 120, "rounds are committed")
    history, last = trainer.sync.averager.round_log, trainer.sync.head.round
    assert len(history.chain(lineages[last - 4])) == 4
    assert history.chain(lineages[last - 5]) == []


@simulated(seed=1)
async def test_a_round_moves_its_fragment_alone(network: SimulatedNetwork) -> None:
    swarm = SimulatedSwarm(network, make_manifest(FRAGMENTS), 0)
    Accounts(swarm)
    history: dict[int, torch.Tensor] = {}
    for index in range(3):
        trainer = swarm.start(f"t{index}")

        def watch(trainer: SimulatedTrainer = trainer) -> None:
            vector = history.setdefault(trainer.sync.head.round, trainer.state.vector.clone())
            assert torch.equal(vector, trainer.state.vector)

        watch_head(trainer.sync.replica, watch)
    await swarm.until(lambda: swarm.in_agreement(6), 120, "rounds are committed")
    state = swarm.trainers["t0"].state
    for before, after in itertools.pairwise(sorted(history)):
        moved = history[before] != history[after]
        own = torch.zeros_like(moved)
        for start, _, count in state.fragments.of_round(before).parameter_spans:
            own[start : start + count] = True
        assert after == before + 1
        assert not bool(moved[~own].any())
        assert bool(moved[own].any())
