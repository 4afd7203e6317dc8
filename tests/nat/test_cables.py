"""Cables are pulled while peers train: for ten seconds, for a minute, for ever."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.support.processes.nat import Internet, why_unavailable
from tests.support.processes.swarmlet import Swarmlet, Worker, check_states, nothing_left_behind, wait_for_agreement
from tests.support.tools import needed

pytestmark = [
    needed(why_unavailable(), "ip", "nft"),
    pytest.mark.timeout(300),
]

NOTICE_SECONDS = 15.0
"""Within which a peer notices that another one is cut off."""
ROUND_SECONDS = 20.0
"""A round of the others, on a busy machine."""
LONGEST_SECONDS = 2 * NOTICE_SECONDS + ROUND_SECONDS
"""Between two rounds: the others follow a leader that is cut off, and after it another one."""
AVERAGING = {"min_peers": 2, "matchmaking_seconds": 20.0}
"""A lone peer waits for others; and matchmaking, as by default, outlasts leaders that fall silent."""


def keep_committing_until(deadline: float, workers: list[Worker]) -> None:
    """Follow workers until this time of the monotonic clock: each commits round after round without those cut off."""
    while True:
        for worker in workers:
            newest = worker.rounds()[-1]["round"]
            worker.wait_for_commit(since=len(worker.events), after_round=newest, timeout_seconds=LONGEST_SECONDS)
        if time.monotonic() >= deadline:
            return


def wait_until_back(worker: Worker, others: list[Worker]) -> None:
    """Wait until it commits rounds in one group with the others, in one state."""
    group = [*others, worker]
    marks = [len(member.events) for member in group]
    newest = max(
        member.wait_for_commit(len(group), since=mark)["round"] for member, mark in zip(group, marks, strict=True)
    )
    wait_for_agreement(*group, after_round=newest)


@pytest.mark.fault(19)
def test_peers_whose_cables_are_pulled_are_left_behind_and_rejoin_by_themselves_once_they_are_back(
    tmp_path: Path,
) -> None:
    with nothing_left_behind(), Internet() as net, Swarmlet(tmp_path, averaging=AVERAGING) as swarm:
        names = ("a", "b", "shortly", "a-minute", "for-ever")
        hosts = {name: net.public(name) for name in names}
        for name, host in hosts.items():
            swarm.start(name, prefix=host.command(), listen="/ip4/0.0.0.0/tcp/0")
        a, b, shortly, a_minute, for_ever = swarm.workers
        for worker in swarm.workers:
            worker.wait_for_commit(5)
        cut = [shortly, a_minute, for_ever]
        marks = {worker.name: len(worker.events) for worker in swarm.workers}
        pulled_at = time.monotonic()
        for worker in cut:
            net.unplug(hosts[worker.name])
        for worker in (a, b):
            worker.wait_for_commit(2, since=marks[worker.name], timeout_seconds=LONGEST_SECONDS)
        keep_committing_until(pulled_at + 10, [a, b])
        stands_at = shortly.rounds()[-1]["tokens"]
        net.plug_in(hosts["shortly"])
        wait_until_back(shortly, [a, b])
        keep_committing_until(pulled_at + 60, [a, b, shortly])
        net.plug_in(hosts["a-minute"])
        wait_until_back(a_minute, [a, b, shortly])
        assert shortly.rounds()[-1]["tokens"] > stands_at
        # Alone they were below the minimum: they said so, and left the state that they had in common as it was.
        for worker in (a_minute, for_ever):
            paused = worker.wait_for("round", lambda event: event["paused"], since=marks[worker.name])
            assert not paused["committed"]
        assert not any(event["committed"] for event in for_ever.rounds()[-2:])
        for worker in swarm.workers:
            assert worker.process.poll() is None, worker.last_words()
        check_states(*swarm.workers)
