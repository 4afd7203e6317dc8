import json
import socket
from pathlib import Path

import pytest
import torch

from p2ptrain.cli import checks
from p2ptrain.cli.commands.doctor import add_arguments, run
from p2ptrain.cli.main import Parser
from tests.support.processes.commands import p2ptrain


def script(folder: Path, text: str) -> Path:
    path = folder / "p2pd"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def test_the_doctor_passes_where_the_tests_run_and_says_so_in_json(tmp_path: Path) -> None:
    done = p2ptrain("doctor", "--json", "--run-dir", str(tmp_path))
    values = json.loads(done.stdout)
    assert values["ok"] is True, done.stdout
    assert done.returncode == 0
    assert {
        "Python",
        "torch",
        "codecs",
        "serving",
        "GPU serving",
        "daemon",
        "listening",
        "clock",
        "disk",
        "memory",
        "file limit",
        "setpriv",
    } <= {check["name"] for check in values["checks"]}


def test_something_required_that_is_missing_exits_with_7_and_its_fix(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    found = [checks.Check("a", True, "fine", ""), checks.Check("b", False, "gone", "buy one")]
    monkeypatch.setattr(checks, "all_checks", lambda *options: found)
    parser = Parser()
    add_arguments(parser)
    assert run(parser.parse_args([])) == 7
    assert "fix: buy one" in capsys.readouterr().out
    found[1] = checks.Check("b", False, "gone", "buy one", required=False)
    assert run(parser.parse_args([])) == 0


def test_a_daemon_that_is_missing_silent_or_broken_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checks, "_DAEMON_SECONDS", 0.2)
    assert "not installed" in checks.check_daemon(None).detail
    assert "not installed" in checks.check_daemon(tmp_path / "p2pd").detail
    path = script(tmp_path, "echo cannot do it; exit 3")
    assert "cannot do it" in checks.check_daemon(path).detail
    path.write_text("not a program")
    assert not checks.check_daemon(path).passed
    path.chmod(0o644)
    assert "chmod" in checks.check_daemon(path).fix
    silent = checks.check_daemon(script(tmp_path, "exec sleep 60"))
    assert not silent.passed
    assert "did not answer" in silent.detail


def test_a_gpu_that_cannot_serve_is_a_warning_with_the_reason() -> None:
    none = checks.check_gpu(has_gpu=False)
    assert (none.passed, none.detail) == (True, "no GPU: a host computes on its CPU")
    if not torch.cuda.is_available():
        broken = checks.check_gpu(has_gpu=True)
        assert (broken.passed, broken.required) == (False, False)
        assert broken.detail.startswith("a host computes on its CPU: ")
        assert "Error: " in broken.detail


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")
def test_a_gpu_that_serves_is_told() -> None:
    found = checks.check_gpu(has_gpu=True)
    assert (found.passed, found.detail) == (True, "exact kernels")


def test_a_port_in_use_is_found_and_another_one_named() -> None:
    with socket.create_server(("0.0.0.0", 0)) as server:
        port = server.getsockname()[1]
        taken = checks.check_ports(port, 0)[1]
        assert not taken.passed
        assert not taken.required
        assert str(port) in taken.detail
        taken = checks.check_ports(port + 1, port)[2]
        assert (taken.name, taken.passed, taken.required) == ("direct port", False, False)
        assert str(port) in taken.detail
    assert all(check.passed for check in checks.check_ports(port, 0))
    assert checks.check_ports(1, port)[2].passed
    assert "daemon's" in checks.check_ports(port, port)[2].detail


def test_the_memory_is_that_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.pipeline.measure._left_in_container", lambda folder: [10_000_000])
    check = checks.check_memory()
    assert (check.passed, check.required, check.detail) == (False, True, "10.0 MB available")


def test_an_absurd_clock_fails() -> None:
    check = checks.check_clock(0.0)
    assert not check.passed
    assert check.required


@pytest.mark.parametrize(("limit", "passed", "required"), [(64, False, True), (512, False, False), (4096, True, False)])
def test_a_small_file_limit_warns_and_a_tiny_one_fails(limit: int, passed: bool, required: bool) -> None:
    check = checks.check_file_limit(limit)
    assert (check.passed, check.required) == (passed, required)


def test_the_disk_is_that_of_the_nearest_folder_that_exists(tmp_path: Path) -> None:
    assert str(tmp_path) in checks.check_disk(tmp_path / "not" / "yet").detail
