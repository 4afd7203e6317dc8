"""A host's checkpoints become complete as the records of the other stages' hosts come in."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from p2ptrain.network.records.record import StageReport
from p2ptrain.pipeline.checkpoints.saving import MAX_ROUNDS, Save, Saves, StageSaves
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.training.checkpoints.stage_list import StageList, read_stage_list
from tests.support.coroutines import on_loop
from tests.unit.pipeline.test_view import LATER, OWN, make_view, record

A, B, C, T = (letter * 32 for letter in (b"a", b"b", b"c", b"t"))


def tell(view: PipelineView, peer: str, sequence: int, *saved: tuple[int, int, bytes], until: float = LATER) -> None:
    said = record(peer, *(unit for unit, _, _ in saved))
    stages = tuple(
        msgspec.structs.replace(stage, saved_round=round, saved_digest=digest)
        for stage, (_, round, digest) in zip(said.stages, saved, strict=True)
    )
    view.update([(replace(said, stages=stages), sequence, until)])


def watched(num_stages: int, **options: Any) -> tuple[PipelineView, StageSaves]:
    view = make_view(num_stages, **options)
    return view, StageSaves(view.plan, view.saves, OWN)


def save(folder: Path, unit: int, round: int, digest: bytes) -> Save:
    path = folder / f"{unit}-round-{round}"
    path.mkdir()
    return Save(unit, round, digest, path)


@on_loop
async def test_a_checkpoint_gets_its_list_when_the_last_stage_was_heard_of(tmp_path: Path) -> None:
    view, saves = watched(3, tied=True)
    own, tied = save(tmp_path, 0, 10, A), save(tmp_path, 3, 10, T)
    saves.note(own)
    saves.note(tied)
    tell(view, "x", 1, (1, 10, B))
    await saves.complete()
    assert read_stage_list(own.path) is None
    assert saves.missing() == "round 10: stage-2: no host has saved any"
    tell(view, "y", 1, (2, 10, C), (3, 10, T))
    await saves.complete()
    expected = StageList(view.plan.manifest.digest, 10, {"stage-0": A, "stage-1": B, "stage-2": C, "tied": T})
    assert read_stage_list(own.path) == read_stage_list(tied.path) == expected
    assert saves.missing() == ""


@on_loop
async def test_an_earlier_checkpoint_is_completed_late(tmp_path: Path) -> None:
    view, saves = watched(2)
    first, second = save(tmp_path, 0, 10, A), save(tmp_path, 0, 20, A)
    saves.note(first)
    saves.note(second)
    tell(view, "x", 1, (1, 10, B))
    await saves.complete()
    assert read_stage_list(first.path) is not None
    assert read_stage_list(second.path) is None
    assert saves.missing() == "round 20: stage-1: 0 of 1 hosts that save agree"


@on_loop
async def test_a_host_that_the_majority_contradicts_has_no_complete_checkpoint(tmp_path: Path) -> None:
    view, saves = watched(2)
    own = save(tmp_path, 0, 10, A)
    saves.note(own)
    tell(view, "x", 1, (1, 10, B))
    for peer in ("y", "z"):
        tell(view, peer, 1, (0, 10, C))
    await saves.complete()
    assert read_stage_list(own.path) is None
    assert saves.missing() == "round 10: other hosts have another state"


@on_loop
async def test_a_host_that_died_is_not_waited_for_once_its_record_is_gone(tmp_path: Path) -> None:
    clock = [1000.0]
    view, saves = watched(2, clock=clock)
    own = save(tmp_path, 0, 10, A)
    saves.note(own)
    tell(view, "dead", 1, (1, 5, C), until=1030.0)
    tell(view, "x", 1, (1, 10, B))
    await saves.complete()
    assert read_stage_list(own.path) is None
    clock[0] = 1031.0
    view.update([])
    await saves.complete()
    assert read_stage_list(own.path) is not None


def test_what_could_not_be_saved_is_said_to_nobody_and_keeps_others_from_nothing(tmp_path: Path) -> None:
    view, saves = watched(2)
    saves.note(save(tmp_path, 0, 10, A))
    saves.failed(0)
    assert saves.newest.get(0) is None
    tell(view, "x", 1, (0, 20, A))
    tell(view, "y", 1, (1, 20, B))
    assert view.saves.agreement((0, 1), 20).is_complete


@on_loop
async def test_a_checkpoint_that_was_deleted_meanwhile_is_passed_over(tmp_path: Path) -> None:
    view, saves = watched(2)
    own = save(tmp_path, 0, 10, A)
    saves.note(own)
    own.path.rmdir()
    tell(view, "x", 1, (1, 10, B))
    await saves.complete()
    assert saves.missing() == ""


# Which belong together

UNITS = (0, 1)


def report(unit: int, round: int, digest: bytes) -> StageReport:
    return StageReport(unit, round + 1, bytes(32), bytes(32), 0, saved_round=round, saved_digest=digest)


def told(**said: tuple[int, int, bytes]) -> Saves:
    made = Saves()
    for peer, each in said.items():
        made.tell(peer, [report(*each)])
    return made


AGREEMENTS: dict[str, tuple[dict[str, tuple[int, int, bytes]], dict[int, str]]] = {
    "all saved it": ({"x": (0, 10, A), "y": (1, 10, B), "z": (1, 10, B)}, {}),
    "nobody told of a stage": ({"x": (0, 10, A)}, {1: "no host has saved any"}),
    "another round": ({"x": (0, 10, A), "y": (1, 15, B)}, {1: "0 of 1 hosts that save agree"}),
    "a tie": ({"w": (0, 10, A), "x": (1, 10, B), "y": (1, 10, C)}, {1: "1 of 2 hosts that save agree"}),
    "a majority": ({"w": (0, 10, A), "x": (1, 10, B), "y": (1, 10, C), "z": (1, 10, B)}, {}),
    "one saves nothing": ({"x": (0, 10, A), "y": (1, 10, B), "z": (1, 0, bytes(32))}, {}),
}


@pytest.mark.parametrize(("said", "missing"), AGREEMENTS.values(), ids=list(AGREEMENTS))
def test_a_round_is_complete_when_most_hosts_of_each_stage_saved_one_state(
    said: dict[str, tuple[int, int, bytes]], missing: dict[int, str]
) -> None:
    found = told(**said).agreement(UNITS, 10)
    assert found.missing == missing
    assert found.is_complete == (not missing)
    assert missing or found.digests == {0: A, 1: B}


def test_what_a_host_saved_before_still_counts() -> None:
    made = told(x=(0, 20, A), y=(1, 20, B))
    made.tell("x", [report(0, 30, C)])
    assert made.agreement(UNITS, 20).is_complete
    for round in range(40, 40 + 10 * MAX_ROUNDS, 10):
        made.tell("x", [report(0, round, C)])
    assert not made.agreement(UNITS, 20).is_complete


def test_who_is_gone_or_has_moved_decides_nothing() -> None:
    made = told(x=(0, 10, A), y=(1, 10, B), z=(1, 5, C))
    assert not made.agreement(UNITS, 10).is_complete
    made.keep_only(["x", "y"])
    assert made.agreement(UNITS, 10).is_complete
    made.tell("y", [report(0, 10, A)])
    assert made.agreement(UNITS, 10).missing == {1: "no host has saved any"}


def test_a_round_that_was_saved_again_after_a_split_counts_as_it_is_now() -> None:
    made = told(x=(0, 10, A), y=(1, 10, B))
    made.tell("y", [report(1, 10, C)])
    assert made.agreement(UNITS, 10).digests == {0: A, 1: C}
