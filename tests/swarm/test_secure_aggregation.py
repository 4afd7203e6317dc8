"""Five real processes average masked updates, while one of them is killed in one phase after another."""

import signal
from pathlib import Path

import pytest

from tests.support.processes.swarmlet import Swarmlet, check_states, nothing_left_behind, wait_for_agreement

NAMES = ("a", "b", "c", "d", "e")
MASKED = {"aggregation": "mean", "codec": "fp32", "group_size": 32, "min_peers": 3}


@pytest.mark.fault(57)
def test_five_sites_commit_masked_rounds_and_outlive_kills(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging=MASKED, secure_aggregation={}) as swarm:
        sites = dict(zip(NAMES, swarm.start_all(*NAMES, hidden=128), strict=True))
        for victim, phase in (("e", "gather"), ("d", "scatter")):
            marks = {name: len(site.events) for name, site in sites.items()}
            sites[victim].order(f"fault {phase} SIGKILL")
            assert sites[victim].wait() == -signal.SIGKILL
            died_in = sites[victim].wait_for("fault", since=marks[victim])["round"]
            del sites[victim]
            for name, site in sites.items():
                committed = site.wait_for_commit(len(sites), since=marks[name], after_round=died_in)
                assert committed["contributed"]
            wait_for_agreement(*sites.values(), after_round=died_in)
        check_states(*sites.values())
