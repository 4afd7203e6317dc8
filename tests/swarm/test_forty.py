"""Forty real peers with their daemons, more than this suite has elsewhere, on the cores that there are."""

from pathlib import Path

import pytest

from tests.support.processes.swarmlet import Swarmlet, check_states, nothing_left_behind

PEERS, LATER_ROUNDS = 40, 3
PATIENCE_SECONDS = 300.0
"""On two cores, each of the forty is in a group a minute and a half after the last one started."""


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_forty_peers_train_on_one_lineage_and_thirty_go_on_in_one_group_when_ten_are_killed(tmp_path: Path) -> None:
    averaging = {"matchmaking_seconds": 20.0, "round_seconds": 30.0}
    with nothing_left_behind(), Swarmlet(tmp_path, averaging=averaging) as swarm:
        for number in range(PEERS):
            swarm.start(f"peer-{number}", step_seconds=1.0, hidden=8)
        for worker in swarm.workers:
            worker.wait_for("training", timeout_seconds=PATIENCE_SECONDS)
            worker.wait_for_commit(timeout_seconds=PATIENCE_SECONDS)
        killed = swarm.workers[1::4]
        left = [worker for worker in swarm.workers if worker not in killed]
        for worker in killed:
            worker.kill()
        mark = max(worker.rounds()[-1]["round"] for worker in left)
        regrouped = [
            worker.wait_for_commit(len(left), after_round=mark, timeout_seconds=PATIENCE_SECONDS) for worker in left
        ]
        last = max(event["round"] for event in regrouped) + LATER_ROUNDS
        ends = [worker.wait_for_commit(after_round=last, timeout_seconds=PATIENCE_SECONDS) for worker in left]
        lineages = {(end["round"], end["lineage"]) for end in ends}
        assert len(lineages) == len({number for number, _ in lineages}), "peers of the same round are on one lineage"
        check_states(*left)
