"""The simulation of hosts that come and go: what nobody can surpass is not surpassed, and nothing is lost in peace."""

from dataclasses import replace
from random import Random

import pytest

from benchmarks.pipeline_moves import DOWNLOAD_SECONDS, Deciding, Scene, Simulation
from benchmarks.pipeline_rebalancing import LIMIT, OURS, POLICIES, Case, limit, percent
from p2ptrain.pipeline.view import SILENT_SECONDS


@pytest.mark.parametrize("policy", POLICIES)
def test_nothing_is_lost_where_nobody_leaves(policy: str) -> None:
    assert percent(Case(Scene(12, 3, 1e9), policy, 1, 4.0)) == pytest.approx(100.0)


def test_the_limit_is_above_what_is_decided_and_moves_beat_none() -> None:
    scene = Scene(16, 4, 1.0)
    found = {
        policy: sum(percent(Case(scene, policy, seed, 6.0)) for seed in range(4)) / 4
        for policy in ("random", OURS, LIMIT)
    }
    assert found["random"] + 5 < found[OURS] <= found[LIMIT] + 0.5 < 100.0


def test_hosts_that_leave_are_counted_once_and_those_that_come_after_their_download() -> None:
    scene = Scene(4, 2, 1.0)
    stays = [stay for stay in scene.stays(1, 1.0) if stay.arrives == 0]
    seconds = min(stay.leaves for stay in stays)
    assert Simulation(scene, "random", Random(1)).run(stays, seconds) == pytest.approx(1.0)
    assert limit(scene, stays, seconds, Random(1)) == pytest.approx(1.0)


@pytest.mark.parametrize("seed", range(10))
def test_one_host_goes_where_one_is_missing_and_is_there_after_its_download(seed: int) -> None:
    scene, killed_at = Scene(12, 3, 1e9), 200.0
    missed_at = killed_at + SILENT_SECONDS
    stays = [
        replace(stay, leaves=killed_at, missed=missed_at) if number in (2, 5) else stay
        for number, stay in enumerate(scene.stays(seed, 1.0))
    ]
    simulation = Deciding(scene, OURS, Random(seed))
    simulation.run(stays, missed_at + DOWNLOAD_SECONDS - 1.0)
    assert [peer.stage for peer in simulation.peers.values()].count(2) == 2
    simulation = Deciding(scene, OURS, Random(seed))
    simulation.run(stays, missed_at + DOWNLOAD_SECONDS + 10.0)
    assert [peer.stage for peer in simulation.peers.values()].count(2) == 3
    assert simulation.moves == 1
