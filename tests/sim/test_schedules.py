"""Hundreds of seeded schedules of crashes, stalls, cuts, partitions and joins; what must hold in each of them.

Checked while they run (`tests.support.trainers`, `tests.support.accounts`): equal digests for equal lineages, nothing
changed by a round that was not applied, every wait bounded, no token counted twice. Checked here: after the faults all
agree on one lineage and go on; no token is lost; nothing is left behind (`simulate`).

A failure names its seed and schedule; the same seed gives the same run, event by event.
"""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.accounts import Accounts
from tests.support.schedules import Schedule, draw_schedule, run_schedule
from tests.support.trainers import SimulatedSwarm, longest_wait_seconds, make_manifest

RECOVERY_SECONDS = 240.0
"""Virtual time after the last fault within which everybody agrees and two more rounds are through."""


def lineages_at_the_front(swarm: SimulatedSwarm) -> int:
    """How many different states the trainers that are furthest ahead hold."""
    front = max(trainer.sync.head.round for trainer in swarm.alive)
    return len({trainer.sync.head.lineage for trainer in swarm.alive if trainer.sync.head.round == front})


def run(schedule: Schedule, seed: int, replay: str, training: dict[str, Any] | None = None) -> None:
    """Run one schedule to its end and check what must hold then; ``training`` overrides that part of the manifest."""

    async def main(network: SimulatedNetwork) -> None:
        # int8 has error feedback; fp32 and bf16, which have no blocks, give everybody a share of the tiny model, which
        # with the latter is encoded in two codecs.
        codec, small = (("int8", ""), ("fp32", ""), ("int4", ""), ("bf16", "fp32"))[seed % 4]
        manifest = make_manifest(training, codec=codec, small_tensors=small, small_values=12)
        swarm = SimulatedSwarm(network, manifest, seed)
        accounts = Accounts(swarm)
        await run_schedule(swarm, schedule)
        front = max(trainer.sync.head.round for trainer in swarm.alive)
        await swarm.until(
            lambda: swarm.in_agreement(front + 2) and lineages_at_the_front(swarm) == 1,
            RECOVERY_SECONDS,
            "everybody agrees after the faults, and rounds go on",
        )
        for trainer in swarm.alive:
            accounts.check(trainer)
        accounts.check_conservation()
        assert swarm.ledger.longest_seconds <= longest_wait_seconds(swarm.manifest)
        await swarm.end()

    try:
        simulate(main, seed)
    except Exception as error:
        raise AssertionError(f"seed {seed}: {error}\n{schedule}\nreplay: {replay}") from error


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("first", "last", "max_peers", "num_events"),
    [*((start, start + 20, 8, 6) for start in range(0, 180, 20)), (1000, 1010, 12, 4), (2000, 2010, 4, 12)],
)
def test_a_block_of_schedules(first: int, last: int, max_peers: int, num_events: int) -> None:
    for seed in range(first, last):
        test = f"test_a_block_of_schedules[{seed}-{seed + 1}-{max_peers}-{num_events}]"
        run(draw_schedule(seed, max_peers, num_events), seed, f"add that block and run {test}")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("num_peers", [16, 32, 64])
def test_many_peers_with_few_faults(num_peers: int) -> None:
    events = ((3.0, "crash", 5), (2.0, "stall", 9), (4.0, "partition", 3), (8.0, "heal", 0), (1.0, "join", 0))
    run(
        Schedule(num_peers, events if num_peers < 64 else events[:1]),
        3000 + num_peers,
        f"test_many_peers_with_few_faults[{num_peers}]",
    )
