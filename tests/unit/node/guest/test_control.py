"""The control socket: for its owner alone, bounded, and with errors that say what to do."""

import asyncio
import os
import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from p2ptrain.cli.main import main
from p2ptrain.errors import ConfigError, TemporaryError
from p2ptrain.node.guest import control
from p2ptrain.node.guest.control import MAX_LINE_BYTES, SOCKET_FILE, Answer, Request, ask, serving_control


def served(
    run_dir: Path, use: Callable[[], object], handle: Callable[[Request], Answer] | None = None
) -> list[Request]:
    """Serve a run directory while ``use`` runs on another thread; return the requests."""
    requests: list[Request] = []

    def note(request: Request) -> Answer:
        requests.append(request)
        return Answer(name=run_dir.name, state="training", paused="by its owner" if request.do == "pause" else "")

    async def run() -> None:
        async with serving_control(run_dir, handle or note):
            await asyncio.to_thread(use)

    asyncio.run(run())
    return requests


def raw(run_dir: Path, data: bytes) -> bytes:
    """Return what a peer answers to these bytes."""
    here = Path.cwd()
    os.chdir(run_dir)
    try:
        with socket.socket(socket.AF_UNIX) as connection:
            connection.settimeout(10)
            connection.connect(SOCKET_FILE)
            connection.sendall(data)
            return connection.recv(MAX_LINE_BYTES)
    finally:
        os.chdir(here)


def test_a_request_reaches_a_peer_whose_directory_has_a_long_name_and_nobody_elses(tmp_path: Path) -> None:
    run_dir = tmp_path / ("long" * 40) / "peer"
    run_dir.mkdir(parents=True)
    modes = []

    def use() -> None:
        modes.append((run_dir / SOCKET_FILE).stat().st_mode & 0o777)
        assert ask(run_dir, Request("pause")).paused == "by its owner"

    assert served(run_dir, use) == [Request("pause")]
    assert modes == [0o600]
    assert not (run_dir / SOCKET_FILE).exists()


@pytest.mark.parametrize(
    "data",
    [b"nonsense\n", b'{"do": "train"}\n', b'{"do": "pause", "more": 1}\n', b"[" * (MAX_LINE_BYTES + 1), b"\xff\n"],
    ids=["no json", "no such word", "a field more", "too long", "no text"],
)
def test_a_request_that_is_none_gets_an_error_and_changes_nothing(tmp_path: Path, data: bytes) -> None:
    answers: list[bytes] = []
    assert served(tmp_path, lambda: answers.append(raw(tmp_path, data))) == []
    assert b"does not understand" in answers[0]


def test_a_connection_that_says_nothing_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SECONDS", 0.05)
    answers: list[bytes] = []

    def use() -> None:
        try:
            answers.append(raw(tmp_path, b'{"do"'))
        except ConnectionResetError:
            answers.append(b"")

    assert served(tmp_path, use) == []
    assert answers == [b""]


def test_a_peer_that_does_not_answer_ends_the_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(control, "SECONDS", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / SOCKET_FILE))
        silent.listen()
        with pytest.raises(TemporaryError, match="end it with SIGTERM"):
            ask(tmp_path, Request("look"))


def test_a_run_that_is_not_there_or_not_running_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such run directory"):
        ask(tmp_path / "none", Request("look"))
    with pytest.raises(ConfigError, match="no peer runs in"):
        ask(tmp_path, Request("look"))
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(tmp_path / SOCKET_FILE))
    with pytest.raises(ConfigError, match="start it again"):
        ask(tmp_path, Request("look"))
    assert served(tmp_path, lambda: ask(tmp_path, Request("look"))) == [Request("look")], "a stale socket is replaced"


def test_another_users_peer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(self: socket.socket, address: str) -> None:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(socket.socket, "connect", refuse)
        with pytest.raises(ConfigError, match="another user's"):
            ask(tmp_path, Request("look"))


def test_a_refusal_is_an_error(tmp_path: Path) -> None:
    def use() -> None:
        with pytest.raises(ConfigError, match="refuses: nothing to pause"):
            ask(tmp_path, Request("pause"))

    served(tmp_path, use, lambda request: Answer(error="nothing to pause"))


def test_commands_find_the_only_peer_and_name_several(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["pause"]) == 3
    assert "no peer runs below" in capsys.readouterr().err
    one, two = Path("runs/join-1"), Path("runs/up-2/trainer-1")
    for run_dir in (one, two):
        run_dir.mkdir(parents=True)
    assert [request.do for request in served(one, lambda: main(["pause"]))] == ["look", "pause"]
    assert "runs/join-1 (join-1): paused by its owner" in capsys.readouterr().out
    assert [request.do for request in served(two, lambda: main(["leave", "--finish"]))] == ["look", "finish"]
    assert served(one, lambda: served(two, lambda: main(["resume"]))) == [Request("look")]
    assert "name one of runs/join-1 (join-1), runs/up-2/trainer-1 (trainer-1)" in capsys.readouterr().err
