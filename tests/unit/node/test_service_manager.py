"""Telling systemd."""

import socket
from pathlib import Path

import pytest

from p2ptrain.node.process import NOTIFY_VARIABLE, notify


@pytest.mark.parametrize("abstract", [False, True])
def test_a_service_manager_gets_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, abstract: bool) -> None:
    path = f"@{tmp_path}" if abstract else str(tmp_path / "notify")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as manager:
        manager.bind("\0" + path[1:] if abstract else path)
        manager.settimeout(5.0)
        monkeypatch.setenv(NOTIFY_VARIABLE, path)
        assert notify("READY=1")
        assert manager.recv(100) == b"READY=1"


@pytest.mark.parametrize("path", [None, "", "relative", "/no/such/socket"])
def test_without_one_nothing_happens(monkeypatch: pytest.MonkeyPatch, path: str | None) -> None:
    monkeypatch.delenv(NOTIFY_VARIABLE, raising=False)
    if path is not None:
        monkeypatch.setenv(NOTIFY_VARIABLE, path)
    assert not notify("READY=1")
