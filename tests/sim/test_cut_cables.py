"""Peers whose cables are pulled: the others notice, and end a round without them, within 15 s of virtual time."""

from __future__ import annotations

import asyncio

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.sim.test_phases import PHASES, come_back, same_lineage, set_trap, start
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedTrainer

NOTICE_SECONDS = 15.0


@pytest.mark.fault(19)
@pytest.mark.parametrize("num_cut", [1, 3])
@pytest.mark.parametrize("role", ["leader", "follower"])
@pytest.mark.parametrize("phase", PHASES)
@simulated(seed=lambda phase, **_: PHASES.index(phase))
async def test_the_others_end_a_round_without_those_cut_off_within_15_seconds(
    network: SimulatedNetwork, phase: str, role: str, num_cut: int
) -> None:
    """Three of five are a majority: then it might as well be the others that are cut off."""
    # As in the manifest by default.
    swarm = await start(network, 5, grace_seconds=3.0, matchmaking_seconds=20.0, round_seconds=60.0, min_peers=2)
    names: list[str] = []

    def cut(who: SimulatedTrainer) -> None:
        first = who.peer.name
        names.extend([first, *[name for name in sorted(swarm.trainers) if name != first][: num_cut - 1]])
        for name in names:
            network.cut(swarm.trainers[name].peer)

    hit = set_trap(swarm, phase, role, cut)
    await swarm.until(lambda: bool(hit), 60, "the cables are pulled")
    cut_at = network.loop.time()
    others = [trainer for name, trainer in swarm.trainers.items() if name not in names]
    seen = {each.peer.name: len(each.results) for each in others}

    def went_on() -> bool:
        return all(
            any(r.committed and r.members <= len(others) for r in each.results[seen[each.peer.name] :])
            for each in others
        )

    while not went_on():
        await asyncio.sleep(0.1)
        assert network.loop.time() <= cut_at + NOTICE_SECONDS, "nobody goes on"
    assert same_lineage(swarm)
    await come_back(swarm, names)
    await swarm.end()
