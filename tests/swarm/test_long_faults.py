"""Faults that last: machines that sleep for a minute, a bootstrap peer that answers late, clocks that are off.

What the others do meanwhile is checked, and that whoever was away comes back without help.
"""

import json
import re
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from p2ptrain.network.link import SwarmLink
from tests.support.processes.daemons import wait_until
from tests.support.processes.relay import slow_relay
from tests.support.processes.swarmlet import (
    Swarmlet,
    Worker,
    check_states,
    nothing_left_behind,
    run_command,
    wait_for_peace,
)

SLEEP_SECONDS = 65.0
"""Longer than any lifetime of a record, and than the libp2p daemons keep a connection that does not answer."""
NOTICE_SECONDS = 15.0
SLOW_SECONDS = (1.0, 2.0)
"""Delay of each piece of a slow bootstrap peer's answers.

Two answers make a handshake. The daemon allows it 5 s on loopback and private addresses, 15 s elsewhere. After a
handshake that took longer, the daemon refuses to dial the address for 6, 9, 14 … s, and joining depends on luck.
"""


def keep_committing_until(deadline: float, workers: list[Worker], members: int) -> None:
    """Follow workers until this time of the monotonic clock: each commits round after round, all in one group."""
    while time.monotonic() < deadline:
        for worker in workers:
            newest = worker.rounds()[-1]["round"]
            worker.wait_for_commit(
                members, since=len(worker.events), after_round=newest, timeout_seconds=NOTICE_SECONDS
            )


@pytest.mark.fault(14, 16)
def test_a_bootstrap_and_a_member_that_sleep_for_a_minute_are_left_behind_and_rejoin_by_themselves(
    tmp_path: Path,
) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        bootstrap, member, b, c = swarm.start_all("bootstrap", "member", "b", "c")
        asleep, awake = [bootstrap, member], [b, c]
        wait_until(lambda: all(worker.votes() for worker in swarm.workers))
        marks = {worker.name: len(worker.events) for worker in swarm.workers}
        wakes_at = time.monotonic() + SLEEP_SECONDS
        for worker in asleep:
            worker.signal_all(signal.SIGSTOP)
        try:
            for worker in awake:
                worker.wait_for_commit(2, since=marks[worker.name], timeout_seconds=4 * NOTICE_SECONDS)
            keep_committing_until(wakes_at, awake, members=2)
        finally:
            for worker in asleep:
                worker.signal_all(signal.SIGCONT)
        front = b.rounds()[-1]["round"]
        wait_for_peace(*swarm.workers)
        check_states(*swarm.workers)
        for worker in asleep:
            assert worker.process.poll() is None, worker.last_words()
            worker.wait_for_commit(4, since=marks[worker.name], after_round=front)
        # The bootstrap peer is as good as before: who knows nobody else gets in through it.
        newcomer = swarm.start("newcomer", link=bootstrap.link)
        wait_for_peace(*swarm.workers)
        assert newcomer.wait_for("training")["round"] > front


@pytest.mark.fault(14)
def test_who_joins_through_a_bootstrap_that_answers_seconds_late_gets_in_and_harms_nobody(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        bootstrap, b = swarm.start_all("bootstrap", "b")
        link = SwarmLink.parse(bootstrap.link)
        found = re.fullmatch(r"(/ip4/127\.0\.0\.1/tcp/)(\d+)(/p2p/.+)", link.addresses[0])
        assert found is not None
        with slow_relay(int(found[2]), SLOW_SECONDS) as relay:
            slow = replace(link, addresses=(f"{found[1]}{relay.port}{found[3]}",))
            joiner = swarm.start("joiner", link=str(slow))
            joiner.wait_for("training", timeout_seconds=120)
            assert relay.pieces > 3, "it got in through the relay"
            # Its connection to the bootstrap peer stays slow: it may be left out of rounds, and counts in some.
            joiner.wait_for("round", lambda event: event["contributed"] and event["members"] > 1)
            check_states(*swarm.workers)
        wait_for_peace(bootstrap, b, joiner)


@pytest.mark.fault(38)
def test_peers_whose_clocks_are_off_by_minutes_and_hours_go_by_the_swarms_and_say_so(tmp_path: Path) -> None:
    skews = {"first": 400.0, "right": 0.0, "ahead": 7200.0, "behind": -3 * 3600.0}
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        first, *_ = [swarm.start(name, clock_seconds=seconds) for name, seconds in skews.items()]
        wait_for_peace(*swarm.workers)
        resyncs = {worker.name: worker.rounds()[-1]["resyncs"] for worker in swarm.workers}
        # No record lives longer than half a minute: all have been renewed, or have run out, when this is over.
        keep_committing_until(time.monotonic() + 25, swarm.workers, members=4)
        shown = run_command("status", first.link, "--json")
        assert shown.returncode == 0, shown.stderr
        notes = {peer["name"]: peer["note"] for peer in json.loads(shown.stdout)["peers"]}
        assert set(notes) == set(skews), "nobody's record has expired, whatever their clocks say"
        del notes["first"]  # the first one's clock is the swarm's
        for name in ("right", "ahead", "behind"):
            ahead = skews[name] - skews["first"]
            way = "ahead of" if ahead > 0 else "behind"
            assert re.fullmatch(rf"clock \d+ s {way} the swarm's: corrected", notes[name]), notes
            assert abs(int(notes[name].split()[1]) - abs(ahead)) <= 5, notes
        assert {worker.name: worker.rounds()[-1]["resyncs"] for worker in swarm.workers} == resyncs
        check_states(*swarm.workers)
