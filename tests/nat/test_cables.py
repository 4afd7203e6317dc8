"""Cables are pulled while peers train: for ten seconds, for a minute, for ever."""

import time
from pathlib import Path

import pytest

from tests.support.processes.nat import Internet, why_unavailable
from tests.support.processes.swarmlet import Swarmlet, Worker, check_states, nothing_left_behind, wait_for_peace
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.tools import needed

pytestmark = [needed(why_unavailable(), "ip", "nft"), pytest.mark.timeout(300)]

QUORUM_WAIT_SECONDS = 20.0
"""How long voters wait for a quorum before they close a reduced round."""
NOTICE_SECONDS = 30.0
"""Within which the others end a round without peers that are cut off; `tests/sim/test_phases.py` has all phases."""
AVERAGING = {"min_peers": 2, "matchmaking_seconds": QUORUM_WAIT_SECONDS}
"""A lone peer waits for others; and matchmaking, as by default, outlasts leaders that fall silent."""


def check_notice(worker: Worker, since: int) -> None:
    """Check how long it was held up, by its own account: the rounds that failed, and the first of two peers.

    More than a third of the voters is gone, so the others wait for a quorum first.
    """
    first = worker.wait_for_commit(2, since=since)
    rounds = worker.rounds(since)
    seconds = [event["seconds"] for event in rounds[: rounds.index(first) + 1]]
    assert sum(seconds) < QUORUM_WAIT_SECONDS + NOTICE_SECONDS, f"{worker.name}: {seconds}"


def keep_committing_until(deadline: float, workers: list[Worker]) -> None:
    """Follow workers until this time of the monotonic clock: each commits round after round without those cut off."""
    while True:
        for worker in workers:
            newest = worker.rounds()[-1]["round"]
            event = worker.wait_for_commit(since=len(worker.events), after_round=newest)
            assert event["seconds"] < NOTICE_SECONDS, f"{worker.name}: {event['seconds']}"
        if time.monotonic() >= deadline:
            return


@pytest.mark.fault(19)
@pytest.mark.parametrize("cut_seconds", [(10,), pytest.param((10, 60), marks=pytest.mark.slow)])
def test_peers_whose_cables_are_pulled_are_left_behind_and_rejoin_by_themselves_once_they_are_back(
    cut_seconds: tuple[int, ...], tmp_path: Path
) -> None:
    with nothing_left_behind(), Internet() as net, Swarmlet(tmp_path, averaging=AVERAGING) as swarm:
        names = ("a", "b", *(f"cut-{seconds}" for seconds in cut_seconds), "for-ever")
        hosts = {name: net.public(name) for name in names}
        for name, host in hosts.items():
            swarm.start(name, prefix=host.command(), listen="/ip4/0.0.0.0/tcp/0")
        a, b, *cut = swarm.workers
        for worker in swarm.workers:
            worker.wait_for_commit(len(names), timeout_seconds=2 * PATIENCE_SECONDS)
        marks = {worker.name: len(worker.events) for worker in swarm.workers}
        pulled_at = time.monotonic()
        for worker in cut:
            net.unplug(hosts[worker.name])
        for worker in (a, b):
            check_notice(worker, marks[worker.name])
        there, for_ever = [a, b], cut[-1]
        for worker, seconds in zip(cut, cut_seconds, strict=False):
            keep_committing_until(pulled_at + seconds, there)
            stands_at = worker.rounds()[-1]["tokens"]
            net.plug_in(hosts[worker.name])
            there.append(worker)
            wait_for_peace(*there)
            assert worker.rounds()[-1]["tokens"] > stands_at
        # Alone they were below the minimum: they said so, and left the state that they had in common as it was.
        paused = for_ever.wait_for("round", lambda event: event["paused"], since=marks[for_ever.name])
        assert not any(event["committed"] for event in for_ever.rounds(for_ever.events.index(paused)))
        for worker in swarm.workers:
            assert worker.process.poll() is None, worker.last_words()
        check_states(*swarm.workers)
