"""Checkpoints of stages are put together when a list says that they belong together, and else with a reason not."""

from pathlib import Path

import pytest

from p2ptrain.errors import CheckpointError
from p2ptrain.pipeline.checkpoints.join import Found, join
from p2ptrain.training.checkpoints.stage_list import StageList

NAMES = ["stage-0", "stage-1"]
A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


def listed(round: int, first: bytes, second: bytes) -> StageList:
    return StageList(b"s" * 32, round, {"stage-0": first, "stage-1": second})


def found(host: str, stage: int, round: int, digest: bytes, given: StageList | None = None) -> Found:
    return Found(f"stage-{stage}", Path(host, str(round)), round, digest, given)


def test_the_newest_complete_round_is_taken_though_a_newer_one_has_all_stages() -> None:
    joined = join(
        [
            found("x", 0, 10, A, listed(10, A, B)),
            found("x", 0, 20, A, listed(20, A, B)),
            found("x", 0, 30, A),
            *(found("y", 1, round, B) for round in (10, 20, 30)),
        ],
        NAMES,
    )
    assert (joined.round, joined.is_complete) == (20, True)
    assert joined.paths == {"stage-0": [Path("x/20")], "stage-1": [Path("y/20")]}


def test_of_two_parts_of_a_split_swarm_the_one_that_is_whole_here_is_taken() -> None:
    first, second = listed(20, A, B), listed(20, C, D)
    joined = join([found("x", 0, 20, A, first), found("y", 0, 20, C, second), found("z", 1, 20, D)], NAMES)
    assert joined.paths == {"stage-0": [Path("y/20")], "stage-1": [Path("z/20")]}


def test_a_stage_that_lacks_the_complete_round_is_named() -> None:
    there = [found("x", 0, 20, A, listed(20, A, B)), found("x", 0, 30, A), found("y", 1, 30, B)]
    with pytest.raises(CheckpointError, match=r"stage-1 is missing of round 20.*another host of stage-1"):
        join(there, NAMES)


def test_by_round_a_stage_with_two_states_is_refused() -> None:
    there = [found("x", 0, 20, A), found("y", 1, 20, B), found("z", 1, 20, C)]
    with pytest.raises(CheckpointError, match=r"stage-1 of round 20 has several states.*y/20, z/20"):
        join(there, NAMES, by_round=True)
    with pytest.raises(CheckpointError, match="no round was saved by all stages"):
        join([found("x", 0, 10, A), found("y", 1, 20, B)], NAMES, by_round=True)


@pytest.mark.parametrize("by_round", [False, True])
def test_a_stage_that_is_not_there_at_all_is_named(by_round: bool) -> None:
    with pytest.raises(CheckpointError, match=r"missing: stage-1.*put the run directories"):
        join([found("x", 0, 20, A, listed(20, A, B))], NAMES, by_round)


def test_a_list_of_fewer_stages_than_the_model_has_counts_as_none() -> None:
    given = StageList(b"s" * 32, 20, {"stage-0": A})
    with pytest.raises(CheckpointError, match="none of these checkpoints is complete"):
        join([found("x", 0, 20, A, given), found("y", 1, 20, B)], NAMES)
