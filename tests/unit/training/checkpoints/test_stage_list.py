"""The file that makes a checkpoint of a stage complete is whole or not there, and no changed byte goes unseen."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from p2ptrain.errors import CheckpointError, ResourceError
from p2ptrain.training.checkpoints.stage_list import (
    MAX_LIST_BYTES,
    STAGES_FILE,
    StageList,
    read_stage_list,
    write_stage_list,
)

LIST = StageList(b"s" * 32, 20, {"stage-0": b"a" * 32, "stage-1": b"b" * 32, "tied": b"c" * 32})


def test_it_comes_back_and_may_be_written_again(tmp_path: Path) -> None:
    assert read_stage_list(tmp_path) is None
    for listed in (StageList(b"s" * 32, 10, {}), LIST):
        write_stage_list(tmp_path, listed)
        assert read_stage_list(tmp_path) == listed
    assert [path.name for path in tmp_path.iterdir()] == [STAGES_FILE]


def test_every_changed_byte_is_found(tmp_path: Path) -> None:
    write_stage_list(tmp_path, LIST)
    file = tmp_path / STAGES_FILE
    data = file.read_bytes()
    for place in range(0, len(data), 7):
        file.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        with pytest.raises(CheckpointError, match="damaged"):
            read_stage_list(tmp_path)


@pytest.mark.parametrize("text", ["", "[]", "{}", "null", '{"checksum": 1}', "[" * 5000, " " * (MAX_LIST_BYTES + 1)])
def test_what_is_no_list_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / STAGES_FILE).write_text(text)
    with pytest.raises(CheckpointError, match="delete it"):
        read_stage_list(tmp_path)


def test_a_list_that_was_changed_in_good_form_is_refused(tmp_path: Path) -> None:
    write_stage_list(tmp_path, LIST)
    file = tmp_path / STAGES_FILE
    values = json.loads(file.read_text())
    values["digests"]["stage-1"] = "00" * 32
    file.write_text(json.dumps(values, sort_keys=True, indent=1) + "\n")
    with pytest.raises(CheckpointError, match="checksum"):
        read_stage_list(tmp_path)


def test_a_checkpoint_that_is_gone_gets_no_list(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="gone"):
        write_stage_list(tmp_path / "gone", LIST)
    assert list(tmp_path.iterdir()) == []
