"""Peers die, stop and go wrong in the middle of rounds; the others go on, and whoever comes back catches up.

Three real processes train a tiny model. Most tests share one swarm: each breaks something, sees it mended, and leaves
three peers in agreement for the next one.
"""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.swarmlet import (
    Swarmlet,
    Worker,
    check_states,
    nothing_left_behind,
    wait_for_agreement,
    wait_for_peace,
)

NAMES = ("a", "b", "c")
HIDDEN = 128
"""Of the model: five blocks of values, so that each peer can own a share."""
PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")


class Trio:
    """A swarm of three whose members can be brought back. The first one's address is in the link."""

    def __init__(self, swarm: Swarmlet) -> None:
        self.swarm = swarm
        self.members: dict[str, Worker] = {}
        for name in NAMES:
            self.members[name] = swarm.start(name, hidden=HIDDEN)
        self.wait_for_peace()

    def __getitem__(self, name: str) -> Worker:
        return self.members[name]

    def restart(self, *names: str) -> None:
        """Start members again as the same peers."""
        for name in names:
            before = self.members[name]
            self.members[name] = self.swarm.start(name, hidden=HIDDEN)
            assert self.members[name].wait_for("joined")["peer"] == before.wait_for("joined")["peer"]

    def wait_for_peace(self) -> None:
        """Wait until all three are in one group again, with one state."""
        wait_for_peace(*self.members.values())


@pytest.fixture(scope="module")
def trio(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trio]:
    with nothing_left_behind(), Swarmlet(tmp_path_factory.mktemp("trio")) as swarm:
        yield Trio(swarm)


@pytest.mark.fault(1, 2)
@pytest.mark.parametrize("phase", PHASES)
def test_survivors_of_a_peer_killed_in_any_phase_commit_the_next_round_and_it_comes_back(
    trio: Trio, phase: str
) -> None:
    marks = {name: len(trio[name].events) for name in NAMES}
    trio["c"].order(f"fault {phase} SIGKILL")
    assert trio["c"].wait() == -signal.SIGKILL
    died_in = trio["c"].wait_for("fault", since=marks["c"])["round"]
    for name in ("a", "b"):
        next_round = trio[name].wait_for_commit(2, since=marks[name], after_round=died_in)
        assert next_round["contributed"]
        check_states(trio[name], since=marks[name])
    wait_for_agreement(trio["a"], trio["b"], after_round=died_in + 1)
    trio.restart("c")
    trio.wait_for_peace()


@pytest.mark.fault(21)
def test_corrupted_parameters_are_found_in_the_next_round_and_only_their_owner_fetches_others(trio: Trio) -> None:
    marks = {name: len(trio[name].events) for name in NAMES}
    before = {name: trio[name].rounds()[-1]["resyncs"] for name in NAMES}
    trio["b"].order("corrupt")
    assert not trio["b"].wait_for("corrupted", since=marks["b"])["intact"]
    told = len(trio["b"].events)
    healed = trio["b"].wait_for("round", since=told)
    assert healed["resyncs"] == before["b"] + 1
    trio.wait_for_peace()
    assert {name: trio[name].rounds()[-1]["resyncs"] - before[name] for name in NAMES} == {"a": 0, "b": 1, "c": 0}
    check_states(*trio.members.values(), since=0)


@pytest.mark.fault(53)
def test_a_batch_of_nan_is_dropped_and_its_peer_goes_on_in_a_finite_swarm(trio: Trio) -> None:
    marks = {name: len(trio[name].events) for name in NAMES}
    before = trio["b"].rounds()[-1]
    trio["b"].order("nan")
    spoiled = trio["b"].wait_for("spoiled", since=marks["b"])
    assert spoiled["made"] == 0, "the batch counts"
    own = trio["b"].wait_for_commit(3, since=marks["b"], after_round=spoiled["round"])
    assert own["contributed"]
    assert own["dropped"] == before["dropped"] + 1
    trio.wait_for_peace()
    for name in NAMES:
        assert all(event["finite"] for event in trio[name].rounds(marks[name])), name
    assert trio["b"].rounds()[-1]["resyncs"] == before["resyncs"]


@pytest.mark.fault(32)
@pytest.mark.parametrize("value", ["nan", "inf"])
def test_a_contribution_that_is_not_finite_is_refused_and_counted_against_its_sender(trio: Trio, value: str) -> None:
    marks = {name: len(trio[name].events) for name in NAMES}
    peer = trio["c"].wait_for("joined")["peer"]

    def refusals(name: str) -> int:
        since = len(trio[name].events)
        trio[name].order("refusals")
        counts = trio[name].wait_for("refusals", since=since)["counts"]
        return sum(count for sender, cause, count in counts if (sender, cause) == (peer, "ProtocolError"))

    before = {name: refusals(name) for name in NAMES}
    trio["c"].order(f"poison {value}")
    trio["c"].wait_for("poisoned", since=marks["c"])
    trio.wait_for_peace()
    counted = {name: refusals(name) - before[name] for name in NAMES}
    assert 1 <= counted["a"] + counted["b"] <= 2, counted  # By each that owns a share.
    assert counted["c"] == 0
    trio["a"].wait_for(
        "round", lambda event: peer in event["counted"], since=len(trio["a"].events)
    )  # It takes part again.
    for name in NAMES:
        assert all(event["finite"] for event in trio[name].rounds(marks[name])), name


@pytest.mark.fault(7, 12)
def test_a_lone_survivor_goes_on_and_two_joiners_at_once_find_it(trio: Trio) -> None:
    marks = {name: len(trio[name].events) for name in NAMES}
    for name in ("b", "c"):
        trio[name].signal(signal.SIGKILL)
    for name in ("b", "c"):
        assert trio[name].wait() == -signal.SIGKILL
    alone = trio["a"].wait_for_commit(1, since=marks["a"])
    trio["a"].wait_for_commit(1, after_round=alone["round"] + 2)
    trio.restart("b", "c")
    trio.wait_for_peace()


@pytest.mark.fault(25)
def test_a_peer_whose_network_daemon_dies_says_so_and_ends_and_can_be_started_again(trio: Trio) -> None:
    mark = len(trio["a"].events)
    os.kill(trio["c"].daemon, signal.SIGKILL)
    assert trio["c"].wait(30) == 75
    assert "network daemon ended" in trio["c"].wait_for("error")["message"]
    check_states(*trio.members.values())
    trio["a"].wait_for_commit(2, since=mark)
    trio.restart("c")
    trio.wait_for_peace()


@pytest.mark.fault(12)
def test_below_the_minimum_of_peers_a_survivor_pauses_says_so_and_resumes(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"min_peers": 2}) as swarm:
        a, b = swarm.start_all("a", "b")
        b.kill()
        mark = len(a.events)
        paused = a.wait_for("round", lambda event: event["paused"], since=mark)
        assert not paused["committed"]
        assert "minimum" in paused["reason"] or "at least 2 peers" in paused["reason"]
        stands_at = paused["lineage"]
        again = swarm.start("b")
        resumed = a.wait_for_commit(2, since=mark, after_round=paused["round"])
        assert all(e["lineage"] == stands_at for e in a.rounds(mark) if not e["committed"] and e["paused"])
        wait_for_agreement(a, again, after_round=resumed["round"])
