"""Rounds of one fragment each that run under compute, in real processes: the same bits, also after a kill."""

import signal
from pathlib import Path

from tests.support.processes.swarmlet import Swarmlet, check_states, nothing_left_behind, wait_for_agreement

TRAINING = {
    "every": 6,
    "fragments": 2,
    "overlap_steps": 2,
    "outer": "adam",
    "outer_learning_rate": 0.02,
    "local_batch": 4,
}


def test_fragments_under_compute_agree_and_survive_a_killed_peer(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, training=TRAINING, averaging={"codec": "int8"}) as swarm:
        workers = swarm.start_all("a", "b", "c", step_seconds=0.05)
        for worker in workers:
            worker.wait_for_commit(3)
        agreed = wait_for_agreement(*workers, after_round=5)
        workers[2].signal_all(signal.SIGKILL)
        wait_for_agreement(*workers[:2], after_round=agreed["round"] + 4)
        check_states(*workers)
        losses = [event["loss"] for event in workers[0].rounds()]
        assert all(loss == loss for loss in losses)
