"""A swarm is split in two, and comes together again: one lineage by the rule, and nothing of the other one in it.

`tests/sim/test_schedules.py` has partitions of every shape; here real daemons lose each other and meet again.
"""

from pathlib import Path

import pytest

from tests.support.processes.daemons import wait_until
from tests.support.processes.nat import Internet, why_unavailable
from tests.support.processes.swarmlet import Swarmlet, Worker, check_states, nothing_left_behind, wait_for_peace
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.tools import needed

pytestmark = [needed(why_unavailable(), "ip", "nft"), pytest.mark.timeout(300)]

START_SECONDS = 2 * PATIENCE_SECONDS
LEAD_ROUNDS = 3
"""Of the side that does more rounds, and wins unless the other one has a newer full round."""


def round_of(worker: Worker) -> int:
    return int(worker.rounds()[-1]["round"])


def rank(side: list[Worker]) -> tuple[int, int]:
    """Of a side's newest head. The cables may break while a round ends, and one side alone holds its certificate."""
    return max((int(event["full"]), int(event["round"])) for worker in side for event in worker.rounds()[-1:])


def lineages(workers: list[Worker], since: list[int]) -> set[str]:
    """Of the rounds that these committed, from these events on."""
    rounds = (event for worker, mark in zip(workers, since, strict=True) for event in worker.rounds(mark))
    return {event["lineage"] for event in rounds if event["committed"]}


def chain(workers: list[Worker]) -> dict[str, str]:
    """By lineage of each round that one of them committed: the one before. Who is late takes rounds from others."""
    rounds = (event for worker in workers for event in worker.rounds())
    return {event["lineage"]: event["extends"] for event in rounds if event.get("extends")}


@pytest.mark.slow
@pytest.mark.fault(20)
def test_of_two_halves_of_the_voters_the_one_ahead_wins_and_nothing_of_the_other_one_is_merged(
    tmp_path: Path,
) -> None:
    """Neither half can certify a full round, so both close reduced ones after their wait."""
    with nothing_left_behind(), Internet() as net, Swarmlet(tmp_path, averaging={"min_peers": 2}) as swarm:
        hosts = {name: net.public(name) for name in "abcd"}
        for name, host in hosts.items():
            slower = 3 if name in "cd" else 1
            swarm.start(name, prefix=host.command(), listen="/ip4/0.0.0.0/tcp/0", step_seconds=0.05 * slower)
        a, b, c, d = swarm.workers
        for worker in swarm.workers:
            worker.wait_for_commit(4, timeout_seconds=START_SECONDS)
        wait_until(lambda: all(worker.votes() for worker in swarm.workers), PATIENCE_SECONDS)
        sides = [[a, b], [c, d]]

        # Both sides have what the manifest asks for: two lineages.
        net.part(hosts["c"], hosts["d"])
        for side in sides:
            for worker in side:
                worker.wait_for_commit(2, since=len(worker.events), timeout_seconds=START_SECONDS)
        marks = [len(worker.events) for worker in swarm.workers]
        for worker in swarm.workers:
            worker.wait_for_commit(2, since=len(worker.events))
        wait_until(lambda: round_of(a) > round_of(c) + LEAD_ROUNDS, PATIENCE_SECONDS)
        lost, won = (lineages(side, marks[:2] if side is sides[0] else marks[2:]) for side in sorted(sides, key=rank))
        assert not won & lost
        net.heal(hosts["c"], hosts["d"])
        end = wait_for_peace(*swarm.workers)
        known, at = chain(swarm.workers), end["lineage"]
        passed = {at}
        while at in known:
            at = known[at]
            passed.add(at)
        assert won <= passed, "the side ahead gave up some rounds"
        assert not lost & passed, "rounds of both sides are in one lineage"
        check_states(*swarm.workers)
