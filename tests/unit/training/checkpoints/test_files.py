"""A checkpoint, and the list that completes one of a stage, is whole or not there, and no changed byte goes unseen."""

import fcntl
import json
import logging
import os
import subprocess
import sys
import threading
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from p2ptrain.averaging.protocol.certificate import Head, genesis
from p2ptrain.errors import CheckpointError, IncompatibleError, ResourceError
from p2ptrain.training.checkpoints import files as checkpoint_module
from p2ptrain.training.checkpoints.files import (
    LoadedCheckpoint,
    describe_checkpoint,
    load_checkpoint,
    load_newest_valid,
    save_checkpoint,
    verify_checkpoint,
)
from p2ptrain.training.checkpoints.sealed_json import seal
from p2ptrain.training.checkpoints.stage_list import (
    MAX_LIST_BYTES,
    STAGES_FILE,
    StageList,
    read_stage_list,
    write_stage_list,
)
from p2ptrain.training.state.digest import merkle_tree
from tests.support.jobs import ToldJobs

SWARM = b"s" * 32


def _tensors(seed: int = 1, num_values: int = 3000) -> list[tuple[str, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        ("vector", torch.randn(num_values, generator=generator)),
        ("optim.weight.exp_avg", torch.randn(7, 3, generator=generator)),
        ("optim.weight.step", torch.tensor(3.0)),
    ]


def _head(tensors: list[tuple[str, Tensor]], round_: int = 5) -> Head:
    head = genesis(SWARM, merkle_tree(tensors).root)
    return replace(head, round=round_, tokens=999, members=("Qma", "Qmb"), certificate=b"\x00\xff" * 50)


def _save(directory: Path, round_: int = 5, keep_last: int = 3, **changes: Any) -> Path:
    tensors = changes.pop("tensors", None) or _tensors()
    values: dict[str, Any] = {
        "head": _head(tensors, round_), "local": {"residual": torch.full((11,), float(round_))},
        "extra": {"steps": 12}, "swarm": SWARM,
    }  # fmt: skip
    return save_checkpoint(directory, keep_last=keep_last, tensors=tensors, **{**values, **changes})


def _newest(directory: Path) -> LoadedCheckpoint:
    newest = load_newest_valid(directory, SWARM)
    assert newest is not None
    return newest


def _rounds(directory: Path) -> list[int]:
    return [describe_checkpoint(path).head.round for path in _folders(directory)]


def _folders(directory: Path) -> list[Path]:
    return sorted(path for path in directory.iterdir() if path.is_dir() and not path.name.startswith("."))


def _unfinished(directory: Path) -> list[Path]:
    return list(directory.glob(".unfinished*"))


def test_everything_comes_back_exactly(tmp_path: Path) -> None:
    tensors = _tensors()
    local = {
        "bf16": torch.randn(5).bfloat16(),
        "flags": torch.tensor([True, False, True]),
        "bytes": torch.arange(3, dtype=torch.uint8),
        "ints": torch.tensor([-(2**62), 7]),
        "transposed": torch.randn(4, 6).t(),
        "empty": torch.zeros(0, 4),
        "parameter": torch.nn.Parameter(torch.tensor(float("-inf"))),
    }
    extra = {"rates": [1e-3, 0.1], "name": "ü", "none": None, "nested": {"10": 1, "2": [True]}}
    path = _save(tmp_path / "deep" / "er", tensors=tensors, local=local, extra=extra)
    loaded, plain = load_checkpoint(path), load_file(path / "shared.safetensors")
    assert loaded.head == _head(tensors)
    assert (loaded.swarm, loaded.extra, loaded.path) == (SWARM, extra, path)
    assert [name for name, _ in loaded.tensors] == [name for name, _ in tensors]
    assert list(loaded.local) == list(local)
    for (name, one), (_, two) in zip([*tensors, *local.items()], [*loaded.tensors, *loaded.local.items()], strict=True):
        assert one.dtype == two.dtype, name
        assert torch.equal(one, two), name
    assert {name: value.tolist() for name, value in plain.items()} == {name: t.tolist() for name, t in tensors}


def test_what_was_loaded_does_not_change_with_the_file(tmp_path: Path) -> None:
    path = _save(tmp_path)
    loaded = load_checkpoint(path)
    file = path / "shared.safetensors"
    file.write_bytes(bytes(file.stat().st_size))
    assert merkle_tree(loaded.tensors).root == loaded.head.digest


def test_the_last_ones_are_kept_and_a_smaller_round_may_be_newer(tmp_path: Path) -> None:
    for round_ in (7, 8, 9, 3, 3):
        _save(tmp_path, round_, keep_last=3)
    assert _rounds(tmp_path) == [9, 3, 3]
    assert _newest(tmp_path).head.round == 3
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        ".lock", "000003-round-9", "000004-round-3", "000005-round-3",
    ]  # fmt: skip


def test_the_last_complete_one_of_a_stage_is_kept_beyond_the_last_ones(tmp_path: Path) -> None:
    for round_ in range(1, 4):
        path = _save(tmp_path, round_, keep_last=2)
        if round_ < 3:
            write_stage_list(path, StageList(SWARM, round_, {}))
    for round_ in range(4, 7):
        _save(tmp_path, round_, keep_last=2)
    assert _rounds(tmp_path) == [2, 5, 6]
    write_stage_list(_save(tmp_path, 7, keep_last=2), StageList(SWARM, 7, {}))
    assert _rounds(tmp_path) == [2, 6, 7]
    _save(tmp_path, 8, keep_last=2)
    assert _rounds(tmp_path) == [7, 8]


@pytest.mark.parametrize("file", ["shared.safetensors", "local.safetensors", "checkpoint.json"])
def test_every_changed_byte_is_found(tmp_path: Path, file: str) -> None:
    path = _save(tmp_path, tensors=_tensors(num_values=20))
    data = (path / file).read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 1 << (at % 8)
        (path / file).write_bytes(changed)
        with pytest.raises(CheckpointError, match=file):
            verify_checkpoint(path)
    for cut in (data[:-1], data[: len(data) // 2], b"", data + b"\n", b" " + data):
        (path / file).write_bytes(cut)
        with pytest.raises(CheckpointError, match=f"{file}.*delete this checkpoint"):
            verify_checkpoint(path)
    (path / file).write_bytes(data)
    assert verify_checkpoint(path).head.round == 5
    (path / file).unlink()
    with pytest.raises(CheckpointError, match=file):
        load_checkpoint(path)


def _rewrite(path: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change a checkpoint's description, and its checksum to match."""
    file = path / "checkpoint.json"
    description = json.loads(file.read_bytes())
    del description["checksum"]
    change(description)
    file.write_bytes(seal(description))


def test_a_checkpoint_whose_tensors_have_another_digest_is_refused(tmp_path: Path) -> None:
    """Its checksums are right: only the digest tells that head and tensors do not belong together."""
    path = _save(tmp_path)
    _rewrite(path, lambda description: description["head"].update(digest=bytes(32).hex()))
    verify_checkpoint(path)
    with pytest.raises(CheckpointError, match="has not the digest of its round"):
        load_checkpoint(path)


def test_another_format_is_not_called_damage(tmp_path: Path) -> None:
    path = _save(tmp_path)
    _rewrite(path, lambda description: description.update(format=checkpoint_module.FORMAT + 1))
    with pytest.raises(CheckpointError, match=r"format \d+, this version reads \d+"):
        verify_checkpoint(path)


def test_files_and_folder_are_on_the_disk_before_the_checkpoint_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        done.append("synced " + Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)

    def rename(self: Path, target: Path) -> Path:
        done.append("renamed " + self.name)
        return real_rename(self, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    path = _save(tmp_path)
    unfinished = f".unfinished-{path.name}"
    before = done[: done.index(f"renamed {unfinished}")]
    described = f"synced .checkpoint.json.{os.getpid()}.partial"
    assert {"synced shared.safetensors", "synced local.safetensors", described} <= set(before)
    assert before[-1] == f"synced {unfinished}"
    assert done[-1] == f"synced {tmp_path.name}"


def test_damaged_ones_are_skipped_with_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    paths = [_save(tmp_path, round_) for round_ in (1, 2, 3)]
    (paths[2] / "local.safetensors").write_bytes(b"")
    (paths[1] / "checkpoint.json").unlink()
    with caplog.at_level(logging.WARNING):
        assert _newest(tmp_path).path == paths[0]
    assert str(paths[2]) in caplog.text
    assert str(paths[1]) in caplog.text


def test_nothing_whole_is_an_error_and_nothing_at_all_is_not(tmp_path: Path) -> None:
    for folder in (tmp_path / "absent", tmp_path):
        assert load_newest_valid(folder, SWARM) is None
    path = _save(tmp_path)
    with pytest.raises(IncompatibleError, match="another swarm"):
        load_newest_valid(tmp_path, b"t" * 32)
    (path / "checkpoint.json").write_bytes(b"{}")
    with pytest.raises(CheckpointError, match="none of the 1 checkpoints"):
        load_newest_valid(tmp_path, SWARM)


def test_state_that_is_not_what_its_head_says_is_not_saved(tmp_path: Path) -> None:
    first = _save(tmp_path)
    tensors = _tensors()
    head = _head(tensors)
    tensors[0][1][17] += 1
    with pytest.raises(CheckpointError, match="digest"):
        _save(tmp_path, tensors=tensors, head=head)
    assert _folders(tmp_path) == [first]
    assert not _unfinished(tmp_path)


@pytest.mark.fault(24)
def test_training_that_changes_tensors_meanwhile_cannot_tear_a_checkpoint(tmp_path: Path) -> None:
    tensors = _tensors(num_values=500_000)
    local = {"residual": torch.zeros(500_000), "moment": torch.zeros(500_000)}
    stop = threading.Event()

    def train() -> None:
        while not stop.is_set():
            for tensor in local.values():
                tensor.add_(1.0)

    thread = threading.Thread(target=train)
    thread.start()
    try:
        with pytest.raises(CheckpointError, match="changed while it was saved"):
            _save(tmp_path, tensors=tensors, local=local)
    finally:
        stop.set()
        thread.join()
    assert _folders(tmp_path) == []
    loaded = load_checkpoint(_save(tmp_path, tensors=tensors, local=local))
    assert torch.equal(loaded.local["residual"], local["residual"])


def test_bad_arguments_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="extra"):
        _save(tmp_path / "new", extra={"x": object()})
    assert not (tmp_path / "new").exists()
    with pytest.raises(ValueError, match="different names"):
        _save(tmp_path, tensors=[*_tensors(), _tensors()[0]])
    with pytest.raises(ValueError, match="complex64"):
        _save(tmp_path, local={"z": torch.zeros(2, dtype=torch.complex64)})
    assert not _unfinished(tmp_path)


@pytest.mark.fault(24)
def test_a_full_disk_leaves_the_previous_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = _save(tmp_path, 1)
    real, written = os.write, [0]

    def full(descriptor: int, data: Any) -> int:
        written[0] += len(data)
        if written[0] > 9000:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(ResourceError, match=r"No space left on device.*earlier checkpoints are intact"):
            _save(tmp_path, 2, keep_last=1)
    assert written[0] > 9000
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_module, "SPARE_BYTES", 1 << 60)
        with pytest.raises(ResourceError, match="does not fit"):
            _save(tmp_path, 2, keep_last=1)
    with pytest.raises(ResourceError, match="cannot save"):
        _save(first / "checkpoint.json" / "checkpoints")
    assert _verify_all(tmp_path) == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", first.name]
    _save(tmp_path, 2)


def test_two_processes_cannot_save_in_one_place_and_what_a_crash_left_is_cleaned_by_the_next(tmp_path: Path) -> None:
    first, left = _save(tmp_path), tmp_path / ".unfinished-000002-round-6"
    left.mkdir()
    (left / "shared.safetensors").write_bytes(b"half")
    with (tmp_path / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(ResourceError, match="another process"):
            _save(tmp_path)
        assert _newest(tmp_path).path == first
        assert _unfinished(tmp_path)
    for clean_up in (_newest, _save):
        clean_up(tmp_path)
        assert not _unfinished(tmp_path)
        left.mkdir()
    left.rmdir()
    assert _verify_all(tmp_path) == 2


def test_saving_does_not_copy_the_state(tmp_path: Path) -> None:
    tensors = _tensors(num_values=16_000_000)
    before = _peak_kilobytes()
    tracemalloc.start()
    try:
        _save(tmp_path, tensors=tensors, local={})
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 8 << 20
    assert _peak_kilobytes() - before < 24 << 10  # of 62 MiB


def _peak_kilobytes() -> int:
    status = Path("/proc/self/status").read_text()
    return int(next(line.split()[1] for line in status.splitlines() if line.startswith("VmHWM")))


def _verify_all(directory: Path) -> int:
    return len([verify_checkpoint(path) for path in _folders(directory)])


CRASHER = """
import os, pathlib, sys
sys.path.insert(0, sys.argv[2])
import torch
from tests.unit.training.checkpoints.test_files import _save, _tensors

torch.set_num_threads(1)
tensors = _tensors(num_values=3000)
for line in sys.stdin:
    child = os.fork()
    if child == 0:
        left, real_write = [int(line)], os.write

        def count(event, arguments):
            if sys.argv[1] in str(arguments) or event == "write":
                left[0] -= 1
                if left[0] == 0:
                    os._exit(9)

        def write(descriptor, data):
            count("write", ())
            return real_write(descriptor, data)

        os.write = write
        sys.addaudithook(count)
        _save(pathlib.Path(sys.argv[1]), int(line), tensors=tensors, keep_last=2)
        os._exit(0)
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


@pytest.mark.fault(24)
def test_a_crash_before_any_file_operation_leaves_only_whole_checkpoints(tmp_path: Path) -> None:
    """The process ends right before its first, second, third... operation on a file, until a save gets through."""
    _save(tmp_path, 0)
    _save(tmp_path, 0)
    command = [sys.executable, "-c", CRASHER, str(tmp_path), str(Path(__file__).parents[4])]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1) as parent:
        assert parent.stdin is not None
        assert parent.stdout is not None
        outcomes: list[int] = []
        newest_round = 0
        while not outcomes or outcomes[-1] == 9:
            assert len(outcomes) < 300
            parent.stdin.write(f"{len(outcomes) + 1}\n")
            outcomes.append(int(parent.stdout.readline()))
            assert _verify_all(tmp_path) >= 2
            newest = _newest(tmp_path)
            assert newest.head.round in (newest_round, len(outcomes))
            newest_round = newest.head.round
            assert not _unfinished(tmp_path)
        parent.stdin.close()
    assert outcomes[-1] == 0
    assert len(outcomes) > 15
    assert newest_round == len(outcomes)
    # Crashes after the rename left old ones behind; the save that got through deleted them.
    assert _verify_all(tmp_path) == 2


def test_checking_and_reading_are_told_as_jobs(tmp_path: Path) -> None:
    path, jobs = _save(tmp_path), ToldJobs()
    load_checkpoint(path, jobs)
    checked = jobs.told[f"checking {path.name}"]
    size = sum((path / name).stat().st_size for name in ("shared.safetensors", "local.safetensors"))
    assert checked == sorted(checked)
    assert checked[-1] == (size, size)
    assert f"reading {path.name}" in jobs.told
    (path / "local.safetensors").write_bytes(b"")
    with pytest.raises(CheckpointError):
        verify_checkpoint(path, jobs)
    assert jobs.running == []


LIST = StageList(b"s" * 32, 20, {"stage-0": b"a" * 32, "stage-1": b"b" * 32, "tied": b"c" * 32})


def test_a_list_comes_back_and_may_be_written_again(tmp_path: Path) -> None:
    assert read_stage_list(tmp_path) is None
    for listed in (StageList(b"s" * 32, 10, {}), LIST):
        write_stage_list(tmp_path, listed)
        assert read_stage_list(tmp_path) == listed
    assert [path.name for path in tmp_path.iterdir()] == [STAGES_FILE]


def test_every_changed_byte_of_a_list_is_found(tmp_path: Path) -> None:
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


def test_a_checkpoint_that_is_gone_gets_no_list(tmp_path: Path) -> None:
    with pytest.raises(ResourceError, match="gone"):
        write_stage_list(tmp_path / "gone", LIST)
    assert list(tmp_path.iterdir()) == []
