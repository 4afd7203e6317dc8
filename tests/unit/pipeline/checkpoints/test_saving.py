"""A host's checkpoints become complete as the records of the other stages' hosts come in."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import msgspec

from p2ptrain.pipeline.checkpoints.saving import Save, StageSaves
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.training.checkpoints.stage_list import StageList, read_stage_list
from tests.unit.pipeline.test_view import LATER, OWN, make_view, record

A, B, C, T = (letter * 32 for letter in (b"a", b"b", b"c", b"t"))


def tell(view: PipelineView, peer: str, sequence: int, *saved: tuple[int, int, bytes], until: float = LATER) -> None:
    said = record(peer, *(unit for unit, _, _ in saved))
    stages = tuple(
        msgspec.structs.replace(stage, saved_round=round, saved_digest=digest)
        for stage, (_, round, digest) in zip(said.stages, saved, strict=True)
    )
    view.update([(replace(said, stages=stages), sequence, until)])


def save(folder: Path, unit: int, round: int, digest: bytes) -> Save:
    path = folder / f"{unit}-round-{round}"
    path.mkdir()
    return Save(unit, round, digest, path)


def test_a_checkpoint_gets_its_list_when_the_last_stage_was_heard_of(tmp_path: Path) -> None:
    view = make_view(3, tied=True)
    saves = StageSaves(view, OWN)
    own, tied = save(tmp_path, 0, 10, A), save(tmp_path, 3, 10, T)
    saves.note(own)
    saves.note(tied)
    tell(view, "x", 1, (1, 10, B))
    asyncio.run(saves.complete())
    assert read_stage_list(own.path) is None
    assert saves.missing() == "round 10: stage-2: no host has saved any"
    tell(view, "y", 1, (2, 10, C), (3, 10, T))
    asyncio.run(saves.complete())
    expected = StageList(view.plan.manifest.digest, 10, {"stage-0": A, "stage-1": B, "stage-2": C, "tied": T})
    assert read_stage_list(own.path) == read_stage_list(tied.path) == expected
    assert saves.missing() == ""


def test_an_earlier_checkpoint_is_completed_late(tmp_path: Path) -> None:
    view = make_view(2)
    saves = StageSaves(view, OWN)
    first, second = save(tmp_path, 0, 10, A), save(tmp_path, 0, 20, A)
    saves.note(first)
    saves.note(second)
    tell(view, "x", 1, (1, 10, B))
    asyncio.run(saves.complete())
    assert read_stage_list(first.path) is not None
    assert read_stage_list(second.path) is None
    assert saves.missing() == "round 20: stage-1: 0 of 1 hosts that save agree"


def test_a_host_that_the_majority_contradicts_has_no_complete_checkpoint(tmp_path: Path) -> None:
    view = make_view(2)
    saves = StageSaves(view, OWN)
    own = save(tmp_path, 0, 10, A)
    saves.note(own)
    tell(view, "x", 1, (1, 10, B))
    for peer in ("y", "z"):
        tell(view, peer, 1, (0, 10, C))
    asyncio.run(saves.complete())
    assert read_stage_list(own.path) is None
    assert saves.missing() == "round 10: other hosts have another state"


def test_a_host_that_died_is_not_waited_for_once_its_record_is_gone(tmp_path: Path) -> None:
    clock = [1000.0]
    view = make_view(2, clock=clock)
    saves = StageSaves(view, OWN)
    own = save(tmp_path, 0, 10, A)
    saves.note(own)
    tell(view, "dead", 1, (1, 5, C), until=1030.0)
    tell(view, "x", 1, (1, 10, B))
    asyncio.run(saves.complete())
    assert read_stage_list(own.path) is None
    clock[0] = 1031.0
    view.update([])
    asyncio.run(saves.complete())
    assert read_stage_list(own.path) is not None


def test_what_could_not_be_saved_is_said_to_nobody_and_keeps_others_from_nothing(tmp_path: Path) -> None:
    view = make_view(2)
    saves = StageSaves(view, OWN)
    saves.note(save(tmp_path, 0, 10, A))
    saves.failed(0)
    assert saves.newest(0) is None
    tell(view, "x", 1, (0, 20, A))
    tell(view, "y", 1, (1, 20, B))
    assert view.saves.agreement((0, 1), 20).is_complete


def test_a_checkpoint_that_was_deleted_meanwhile_is_passed_over(tmp_path: Path) -> None:
    view = make_view(2)
    saves = StageSaves(view, OWN)
    own = save(tmp_path, 0, 10, A)
    saves.note(own)
    own.path.rmdir()
    tell(view, "x", 1, (1, 10, B))
    asyncio.run(saves.complete())
    assert saves.missing() == ""
