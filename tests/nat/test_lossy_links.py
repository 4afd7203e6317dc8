"""Packets are lost at random on every link while peers train: rounds take longer, and their results are right.

`tests/sim/test_schedules.py` has lossy links in virtual time; here the daemons' TCP has to cope.
"""

from pathlib import Path

import pytest

from tests.support.processes.daemons import wait_until
from tests.support.processes.nat import Internet, why_unavailable
from tests.support.processes.swarmlet import Swarmlet, check_states, nothing_left_behind, wait_for_agreement
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.tools import needed

pytestmark = [needed(why_unavailable(), "ip", "nft"), pytest.mark.timeout(300)]

PERCENTS = (1, 5, 20)
ROUNDS = 1
HIDDEN = 500
"""Of the model: its parts are several packets."""


@pytest.mark.slow
@pytest.mark.fault(15)
def test_rounds_are_committed_and_states_agree_while_packets_are_lost(tmp_path: Path) -> None:
    with nothing_left_behind(), Internet() as net, Swarmlet(tmp_path, averaging={"min_peers": 2}) as swarm:
        hosts = [net.public(name) for name in "abc"]
        for name, host in zip("abc", hosts, strict=True):
            swarm.start(name, prefix=host.command(), listen="/ip4/0.0.0.0/tcp/0", hidden=HIDDEN)
        for worker in swarm.workers:
            worker.wait_for_commit(3, timeout_seconds=2 * PATIENCE_SECONDS)
        for percent in PERCENTS:
            for host in hosts:
                net.lose(host, percent)
            wait_until(lambda: all(net.lost_packets(host) for host in hosts), PATIENCE_SECONDS)
            marks = [len(worker.events) for worker in swarm.workers]
            newest = max(worker.rounds()[-1]["round"] for worker in swarm.workers)
            wait_for_agreement(*swarm.workers, after_round=newest + ROUNDS)
            # A connection that TCP repeats for seconds costs its peer a round; the next one has it again.
            for worker, mark in zip(swarm.workers, marks, strict=True):
                worker.wait_for("round", lambda event: event["contributed"], mark)
            for host in hosts:
                net.lose(host, 0)
        check_states(*swarm.workers)
        for worker in swarm.workers:
            assert worker.process.poll() is None, worker.last_words()
