"""Peers that stop in the middle of a round, that get a tenth of a core, and more of them than cores.

Real processes with real daemons, in one swarm that grows from four to eight. A stopped process neither answers nor
ends: its daemon still takes streams for it, and its kernel bytes. It stops itself as it enters the phase, so that the
phase is hit for certain. (`test_faults` kills them.)
"""

import contextlib
import signal
import threading
from collections import Counter
from collections.abc import Iterator

import pytest

from p2ptrain.averaging.timing.deadlines import straggler_seconds
from p2ptrain.network.rpc.channel import SILENCE_SECONDS
from tests.support.processes.swarmlet import (
    Swarmlet,
    Worker,
    check_states,
    nothing_left_behind,
    wait_for_agreement,
    wait_for_peace,
)
from tests.support.processes.tellers import Event

PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")
NAMES = ("a", "b", "c", "d")
PERIOD_SECONDS = 0.5
STEP_SECONDS = 0.15
"""So that eight of them leave each other time."""
PATIENCE_SECONDS = 120.0


@pytest.fixture(scope="module")
def swarm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Swarmlet]:
    with nothing_left_behind(), Swarmlet(tmp_path_factory.mktemp("stopped")) as swarm:
        for name in NAMES:
            swarm.start(name, step_seconds=STEP_SECONDS)
        for worker in swarm.workers:
            worker.wait_for_commit(len(NAMES), timeout_seconds=PATIENCE_SECONDS)
        yield swarm


def promised_seconds(swarm: Swarmlet) -> float:
    """How long a round may take in which a member falls silent, by the manifest: one attempt that breaks, and another.

    Each is matched, waits no longer than the heartbeat for who says nothing, and the first is settled.
    """
    spec = swarm.manifest["averaging"]
    attempt = min(spec["round_seconds"], spec["grace_seconds"] + SILENCE_SECONDS)
    return float(2 * (spec["matchmaking_seconds"] + attempt) + straggler_seconds(attempt, spec["grace_seconds"]))


def counted_tokens(swarm: Swarmlet, lineage: str) -> Counter[str]:
    """By peer id: what it has in a lineage, by the certificates that anybody told of."""
    rounds = {event["lineage"]: event for worker in swarm.workers for event in worker.rounds() if event["extends"]}
    totals: Counter[str] = Counter()
    while lineage in rounds:
        totals.update(rounds[lineage]["counted"])
        lineage = rounds[lineage]["extends"]
    return totals


def assert_work_counts_once(swarm: Swarmlet, agreed: Event) -> None:
    """Nobody has more in the lineage than it made and does not hold any more; and the head counts what all have."""
    totals = counted_tokens(swarm, agreed["lineage"])
    assert totals.total() == agreed["tokens"]
    for worker in swarm.workers:
        told = next(event for event in worker.rounds() if event["lineage"] == agreed["lineage"])
        assert 0 < totals[worker.wait_for("joined")["peer"]] <= told["made"] - told["waiting"], worker.name


@pytest.mark.fault(2, 16)
@pytest.mark.parametrize("phase", PHASES)
def test_a_peer_that_stops_in_any_phase_delays_one_round_by_its_deadlines_and_its_work_counts_once(
    swarm: Swarmlet, phase: str
) -> None:
    *others, stopped = swarm.workers
    marks = {worker.name: len(worker.events) for worker in swarm.workers}
    stopped.order(f"fault {phase} SIGSTOP")
    hit = stopped.wait_for("fault", since=marks[stopped.name])
    try:
        for worker in others:
            first = worker.wait_for_commit(
                0, marks[worker.name], after_round=hit["round"], timeout_seconds=PATIENCE_SECONDS
            )
            assert first["seconds"] <= promised_seconds(swarm)
            # Nor is it waited for in the rounds after that.
            again = worker.wait_for_commit(len(others), marks[worker.name], after_round=first["round"] + 1)
            assert again["contributed"]
        wait_for_agreement(*others, after_round=hit["round"] + 1)
    finally:
        stopped.signal(signal.SIGCONT)
    agreed = wait_for_peace(*swarm.workers, timeout_seconds=PATIENCE_SECONDS)
    assert stopped.process.poll() is None
    check_states(*swarm.workers)
    assert_work_counts_once(swarm, agreed)


@contextlib.contextmanager
def slowed_down(worker: Worker, share: float) -> Iterator[None]:
    """Let a process run this share of the time only."""
    over = threading.Event()

    def alternate() -> None:
        while not over.wait(PERIOD_SECONDS * share):
            worker.signal(signal.SIGSTOP)
            over.wait(PERIOD_SECONDS * (1 - share))
            worker.signal(signal.SIGCONT)

    thread = threading.Thread(target=alternate, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
        worker.signal(signal.SIGCONT)


@pytest.mark.fault(17)
def test_a_peer_at_a_tenth_of_the_speed_holds_nobody_up_and_its_work_counts(swarm: Swarmlet) -> None:
    slow, *others = swarm.workers
    marks = {worker.name: len(worker.events) for worker in swarm.workers}
    with slowed_down(slow, 0.1):
        for worker in others:
            front = worker.rounds()[-1]["round"]
            worker.wait_for_commit(0, marks[worker.name], after_round=front + 6, timeout_seconds=PATIENCE_SECONDS)
            rounds = [event for event in worker.rounds(marks[worker.name]) if event["committed"]]
            assert max(event["seconds"] for event in rounds) <= promised_seconds(swarm)
        its = marks[slow.name]
        slow.wait_for("round", lambda each: each["contributed"] and each["members"] > 1, its, 2 * PATIENCE_SECONDS)
    agreed = wait_for_peace(*swarm.workers, timeout_seconds=PATIENCE_SECONDS)
    check_states(*swarm.workers)
    assert_work_counts_once(swarm, agreed)


@pytest.mark.fault(4)
def test_eight_peers_on_few_cores_go_on_when_two_of_them_stop_at_once(swarm: Swarmlet) -> None:
    for worker in swarm.workers:  # Starting four processes takes both cores.
        worker.order("hold 0")
    newcomers = [swarm.start(name, step_seconds=STEP_SECONDS, hold=True) for name in ("e", "f", "g", "h")]
    for worker in newcomers:
        worker.wait_for("training", timeout_seconds=PATIENCE_SECONDS)
    for worker in swarm.workers:
        worker.order("go")
    wait_for_peace(*swarm.workers, timeout_seconds=PATIENCE_SECONDS)
    stopped, others = newcomers[:2], [worker for worker in swarm.workers if worker not in newcomers[:2]]
    marks = {worker.name: len(worker.events) for worker in swarm.workers}
    for worker, phase in zip(stopped, ("scatter", "gather"), strict=True):
        worker.order(f"fault {phase} SIGSTOP")
    try:
        hit = max(worker.wait_for("fault", since=marks[worker.name])["round"] for worker in stopped)
        for worker in others:
            next_round = worker.wait_for_commit(
                0, marks[worker.name], after_round=hit, timeout_seconds=PATIENCE_SECONDS
            )
            assert next_round["seconds"] <= 2 * promised_seconds(swarm)
    finally:
        for worker in stopped:
            worker.signal(signal.SIGCONT)
    agreed = wait_for_peace(*swarm.workers, timeout_seconds=PATIENCE_SECONDS)
    check_states(*swarm.workers)
    assert_work_counts_once(swarm, agreed)
