"""What commands and scripts say and exit with when they cannot go on: real processes, real daemons."""

from __future__ import annotations

import os
import re
import signal
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from p2ptrain.network.link import SwarmLink
from tests.support.daemons import is_alive, wait_until
from tests.support.processes import (
    PATIENCE_SECONDS,
    Swarmlet,
    background_command,
    nothing_left_behind,
    run_command,
)

pytestmark = pytest.mark.timeout(240)

LOOPBACK = "/ip4/127.0.0.1/tcp/0"


@dataclass(frozen=True)
class Seeded:
    """A swarm whose bootstrap peer runs: its organizer's folder, and its link."""

    directory: Path
    link: str


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seeded]:
    directory = tmp_path_factory.mktemp("seeded") / "swarm"
    assert run_command("init", directory).returncode == 0
    with nothing_left_behind(), background_command(directory / "seed.log", "seed", directory, "--listen", LOOPBACK):
        link_file = directory / "bootstrap" / "link.txt"
        wait_until(link_file.exists, PATIENCE_SECONDS)
        yield Seeded(directory, link_file.read_text().strip())


def expect(exit_code: int, says: str, *arguments: str | Path) -> None:
    """Run a command, which must end with this code and one error line that says this."""
    done = run_command(*arguments)
    errors = [line for line in done.stderr.splitlines() if line.startswith("p2ptrain: error: ")]
    assert done.returncode == exit_code, done.stderr
    assert len(errors) == 1, done.stderr
    assert re.search(says, errors[0]), errors[0]
    assert "Traceback" not in done.stderr


def role_file(directory: Path, text: str) -> Path:
    path = directory / "peer.toml"
    path.write_text(text)
    return path


def test_wrong_usage_exits_with_2() -> None:
    expect(2, "did you mean 'join'", "jion")
    expect(2, "at least 1 trainer", "up", "--peers", "0")


def test_a_misspelt_key_of_a_role_file_exits_with_3_and_names_the_right_one(tmp_path: Path, seeded: Seeded) -> None:
    text = f'role = "trainer"\nlink = "{seeded.link}"\n[resources]\nthread = 1\n'
    expect(3, "resources.thread.*did you mean 'threads'", "peer", role_file(tmp_path, text))


def test_a_cut_off_link_exits_with_3(seeded: Seeded) -> None:
    expect(3, "cut off", "join", seeded.link.partition("?")[0], "--yes")


def test_a_link_with_another_digest_is_refused_by_the_peers_it_names(tmp_path: Path, seeded: Seeded) -> None:
    tampered = str(SwarmLink(bytes(32), SwarmLink.parse(seeded.link).addresses))
    expect(3, "do not know its swarm.*new link", "join", tampered, "--yes", "--run-dir", tmp_path / "peer")


def test_a_taken_port_exits_with_7_and_names_it(tmp_path: Path, seeded: Seeded) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        text = f'role = "bootstrap"\nmanifest = "{seeded.directory}/manifest.bin"\nrun_dir = "peer"\n'
        text += f'[network]\nlisten = ["/ip4/127.0.0.1/tcp/{port}"]\n'
        expect(7, f"port {port} is taken", "peer", role_file(tmp_path, text))


def test_an_identity_in_use_exits_with_5_and_names_the_process(seeded: Seeded) -> None:
    text = f'role = "bootstrap"\nmanifest = "manifest.bin"\nrun_dir = "bootstrap"\n[network]\nlisten = ["{LOOPBACK}"]\n'
    expect(5, r"in use by process \d+", "peer", role_file(seeded.directory, text))


def test_a_peer_whose_daemon_is_killed_exits_with_75_and_says_so(tmp_path: Path, seeded: Seeded) -> None:
    text = f'role = "bootstrap"\nlink = "{seeded.link}"\nrun_dir = "peer"\n[network]\nlisten = ["{LOOPBACK}"]\n'
    log = tmp_path / "peer.log"
    with nothing_left_behind(), background_command(log, "peer", role_file(tmp_path, text)) as peer:
        wait_until((tmp_path / "peer" / "link.txt").exists, PATIENCE_SECONDS)
        (daemon,) = [child for child in psutil.Process(peer.pid).children(recursive=True) if "p2pd" in child.name()]
        os.kill(daemon.pid, signal.SIGKILL)
        assert peer.wait(30) == 75
        assert "the network daemon ended (signal 9)" in log.read_text()
        assert not is_alive(daemon.pid)


def test_another_model_is_refused_with_6_and_does_no_harm(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        first = swarm.start("a")
        first.wait_for_commit()
        other = swarm.start("b", hidden=12)
        assert other.wait() == 6
        refusal = other.wait_for("error")
        assert refusal["kind"] == "IncompatibleError"
        assert "model" in refusal["message"]
        mark = len(first.events)
        assert first.wait_for_commit(1, since=mark)["intact"]
