"""A swarm is announced and found in an index: real processes, from the organizer's folder to the line that joins."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx

from p2ptrain.network.link import SwarmLink
from tests.support.processes.daemons import free_port, wait_until
from tests.support.processes.files import LOOPBACK, OPEN_TO_ALL, QUICK, TINY, set_options, write_role
from tests.support.processes.swarmlet import background_command, init, nothing_left_behind, run_command, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS


def said(*arguments: str | Path) -> str:
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def listed(index: str | Path, *options: str) -> dict[str, Any]:
    """Return the one swarm of an index."""
    (swarm,) = json.loads(said("list", "--index", index, "--json", *options))["swarms"]
    assert isinstance(swarm, dict)
    return swarm


def answers(url: str) -> bool:
    try:
        return httpx.get(url).is_success
    except httpx.HTTPError:
        return False


def test_a_swarm_is_announced_found_asked_and_joined(tmp_path: Path) -> None:
    folder, index, key = tmp_path / "swarm", tmp_path / "public" / "index.json", tmp_path / "host.key"
    init(folder, *set_options(model=TINY, training={"every": 4}, averaging=QUICK, admission=OPEN_TO_ALL))
    with nothing_left_behind():
        with seeding(folder) as seed:
            plain = str(SwarmLink.parse(seed.link).plain)
            trainer = write_role(tmp_path / "ada.toml", "trainer", link=plain)
            with background_command(tmp_path / "ada.log", "peer", trainer):
                log = tmp_path / "ada.log"
                wait_until(lambda: "committed" in log.read_text() or "round 1:" in log.read_text(), PATIENCE_SECONDS)
                pin = said("announce", folder, "--into", index, "--key", key).split("--index-key ")[1].strip()
                found = listed(index, "--index-key", pin, "--live")
                assert (found["link"], found["admission"]) == (plain, "open")
                assert (found["announced"]["training"], found["live"]["training"]) == (1, 1)
                assert (found["announced"]["peers"], found["live"]["peers"]) == (2, 2)
                assert found["live"]["round"] >= found["announced"]["round"] >= 1

                port = free_port()
                command = [sys.executable, "-m", "http.server", str(port), "--bind", "127.0.0.1"]
                server = subprocess.Popen(command, cwd=index.parent, stderr=subprocess.DEVNULL)
                try:
                    url = f"http://127.0.0.1:{port}/index.json"
                    wait_until(lambda: answers(url))
                    assert listed(url, "--index-key", pin)["link"] == plain
                    text = said("list", "--index", url)
                finally:
                    server.kill()
                    server.wait()

                (line,) = [line.strip() for line in text.splitlines() if "p2ptrain join" in line]
                join = [*shlex.split(line)[1:], "--yes", "--rounds", "1", "--listen", LOOPBACK]
                done = run_command(*join, "--run-dir", tmp_path / "bob", "--name", "bob")
                assert done.returncode == 0, done.stderr

                entry = tmp_path / "entry.json"
                entry.write_text(said("announce", folder))
                said("announce", entry, "--into", index, "--key", key)
                assert listed(index, "--index-key", pin)["announced"]["at"] > found["announced"]["at"]
        gone = listed(index, "--live")
        assert gone["live"]["error"]
        assert gone["announced"]["training"] == 1
