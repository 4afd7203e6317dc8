"""Random schedules of faults, drawn from a seed and run on a simulated swarm."""

from __future__ import annotations

import asyncio
import random
from dataclasses import dataclass

from tests.support.trainers import SimulatedSwarm

FAULTS = ("crash", "restart", "stall", "partition", "heal", "cut", "mend", "join")


@dataclass(frozen=True)
class Schedule:
    """How a swarm starts and what befalls it.

    Attributes:
        num_peers: Trainers at the start.
        events: (seconds after the one before, fault, number that chooses whom), in order.
    """

    num_peers: int
    events: tuple[tuple[float, str, int], ...]


def draw_schedule(seed: int, max_peers: int = 8, num_events: int = 6) -> Schedule:
    """A schedule that follows from the seed alone."""
    generator = random.Random(f"schedule {seed}")
    events = tuple(
        (generator.expovariate(1 / 6.0), generator.choice(FAULTS), generator.randrange(1 << 30))
        for _ in range(generator.randint(1, num_events))
    )
    return Schedule(generator.randint(3, max_peers), events)


async def run_schedule(swarm: SimulatedSwarm, schedule: Schedule) -> None:
    """Start the swarm, let everything befall it, then mend what can be mended."""
    network = swarm.network
    for index in range(schedule.num_peers):
        swarm.start(f"t{index}", step_seconds=0.4 + 0.1 * (index % 3))
    joined = 0
    for delay, fault, choice in schedule.events:
        await asyncio.sleep(delay)
        alive = [trainer.peer for trainer in swarm.alive]
        dead = [name for name, trainer in swarm.trainers.items() if not trainer.peer.alive]
        chosen = alive[choice % len(alive)]
        match fault:
            case "crash" if len(alive) > 1:
                network.crash(chosen)
            case "restart" if dead:
                swarm.restart(dead[choice % len(dead)])
            case "stall":
                network.stall(chosen, 2.0 + choice % 40)
            case "partition" if len(alive) > 2:
                network.partition(alive[: 1 + choice % (len(alive) - 1)])
            case "heal":
                network.heal()
            case "cut":
                network.cut(chosen)
            case "mend":
                network.mend(chosen)
            case "join" if joined < 3:
                joined += 1
                swarm.start(f"late{joined}")
    await asyncio.sleep(5)
    network.heal()
    for trainer in swarm.alive:
        network.mend(trainer.peer)
        network.resume(trainer.peer)
