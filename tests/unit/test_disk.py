"""Replaced files: a crash at any step leaves the old content or the new."""

import errno
import os
import re
from pathlib import Path

import pytest

from p2ptrain.disk import WriteLog, replace_file

PACKAGE = Path(__file__).resolve().parents[2] / "p2ptrain"
STEPS = ("open", "write", "fsync", "replace", "sync of the folder")


class CrashError(BaseException):
    """The process ends here."""


def crash_at(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def crash(*_: object, **__: object) -> None:
        raise CrashError(step)

    match step:
        case "open":
            monkeypatch.setattr(os, "open", crash)
        case "fsync" | "replace":
            monkeypatch.setattr(os, step, crash)
        case "sync of the folder":
            monkeypatch.setattr("p2ptrain.disk.sync_folder", crash)


@pytest.mark.parametrize("step", STEPS)
def test_a_crash_leaves_the_old_content_or_the_new(step: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    crash_at(step, monkeypatch)
    is_torn = step == "write"
    with pytest.raises(TypeError if is_torn else CrashError):
        replace_file(path, b"new", b" and", None if is_torn else b" longer", synced=True)  # type: ignore[arg-type]
    monkeypatch.undo()
    assert path.read_bytes() == (b"new and longer" if step == STEPS[-1] else b"old")
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_what_a_killed_process_left_is_in_nobodys_way(tmp_path: Path) -> None:
    path = tmp_path / "file"
    replace_file(path, b"old")
    left = path.with_name(f".file.{os.getpid()}.partial")
    left.write_bytes(b"much longer than the new content")
    replace_file(path, b"new", mode=0o600)
    assert path.read_bytes() == b"new"
    assert not left.exists()


def test_content_and_folder_are_on_the_disk_before_the_name_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        done.append(f"synced {Path(os.readlink(f'/proc/self/fd/{descriptor}')).suffix or 'folder'}")

    def replace(*names: Path) -> None:
        done.append("replaced")
        real_replace(*names)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    replace_file(tmp_path / "file", b"content", synced=True)
    assert done == ["synced .partial", "replaced", "synced folder"]


def test_a_secret_is_readable_by_its_owner_alone(tmp_path: Path) -> None:
    replace_file(tmp_path / "key", b"secret", mode=0o600)
    assert (tmp_path / "key").stat().st_mode & 0o777 == 0o600


def test_nothing_else_writes_beside_a_file_and_renames() -> None:
    allowed = {
        "disk.py",
        "monitor/store.py",  # puts a damaged one aside
        "training/metrics.py",  # turns a log over
    }
    renames = re.compile(r"os\.(replace|rename)\(|(partial|temporary|unfinished|path)\.replace\(|mkstemp")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if renames.search(path.read_text())}
    assert found <= allowed


def test_a_disk_that_is_full_for_a_while_is_logged_twice(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    log = WriteLog("votes", tmp_path / "votes")
    for _ in range(2):
        for _ in range(3):
            with pytest.raises(OSError, match="No space"), log.writing():
                raise OSError(errno.ENOSPC, "No space left on device")
        for _ in range(3):
            with log.writing():
                pass
    began, ended = f"cannot keep votes in {tmp_path}/votes: No space left on device", "can be kept"
    assert [began in text or ended in text for text in caplog.messages] == [True] * 4
    assert caplog.messages[0] == began
    assert caplog.messages[1] == f"votes can be kept in {tmp_path}/votes again"
