"""When checkpoints of stages belong together: more than half of each stage's hosts say so."""

from __future__ import annotations

from p2ptrain.network.records.record import StageReport
from p2ptrain.pipeline.checkpoints.agreement import MAX_ROUNDS, Saves

A, B, C = b"a" * 32, b"b" * 32, b"c" * 32
UNITS = (0, 1)


def report(unit: int, round: int, digest: bytes) -> StageReport:
    return StageReport(unit, round + 1, bytes(32), bytes(32), 0, saved_round=round, saved_digest=digest)


def saves(**told: tuple[int, int, bytes]) -> Saves:
    made = Saves()
    for peer, each in told.items():
        made.tell(peer, [report(*each)])
    return made


def test_a_round_that_all_stages_saved_is_complete() -> None:
    found = saves(x=(0, 10, A), y=(1, 10, B), z=(1, 10, B)).agreement(UNITS, 10)
    assert found.is_complete
    assert found.digests == {0: A, 1: B}


def test_a_stage_of_which_nobody_told_is_missing_by_number() -> None:
    found = saves(x=(0, 10, A)).agreement(UNITS, 10)
    assert not found.is_complete
    assert found.missing == {1: "no host has saved any"}


def test_rounds_that_differ_are_not_put_together() -> None:
    found = saves(x=(0, 10, A), y=(1, 15, B)).agreement(UNITS, 10)
    assert found.missing == {1: "0 of 1 hosts that save agree"}


def test_where_hosts_disagree_the_majority_counts_and_a_tie_is_none() -> None:
    made = saves(w=(0, 10, A), x=(1, 10, B), y=(1, 10, C))
    assert made.agreement(UNITS, 10).missing == {1: "1 of 2 hosts that save agree"}
    made.tell("z", [report(1, 10, B)])
    assert made.agreement(UNITS, 10).digests == {0: A, 1: B}


def test_what_a_host_saved_before_still_counts() -> None:
    made = saves(x=(0, 20, A), y=(1, 20, B))
    made.tell("x", [report(0, 30, C)])
    assert made.agreement(UNITS, 20).is_complete
    for round in range(40, 40 + 10 * MAX_ROUNDS, 10):
        made.tell("x", [report(0, round, C)])
    assert not made.agreement(UNITS, 20).is_complete


def test_hosts_that_save_nothing_are_not_waited_for() -> None:
    made = saves(x=(0, 10, A), y=(1, 10, B), z=(1, 0, bytes(32)))
    assert made.agreement(UNITS, 10).is_complete


def test_who_is_gone_or_has_moved_decides_nothing() -> None:
    made = saves(x=(0, 10, A), y=(1, 10, B), z=(1, 5, C))
    assert not made.agreement(UNITS, 10).is_complete
    made.keep_only(["x", "y"])
    assert made.agreement(UNITS, 10).is_complete
    made.tell("y", [report(0, 10, A)])
    assert made.agreement(UNITS, 10).missing == {1: "no host has saved any"}


def test_a_round_that_was_saved_again_after_a_split_counts_as_it_is_now() -> None:
    made = saves(x=(0, 10, A), y=(1, 10, B))
    made.tell("y", [report(1, 10, C)])
    assert made.agreement(UNITS, 10).digests == {0: A, 1: C}
