"""The unit in deploy/systemd under a systemd of its own: it says when the peer is ready, and drains it when stopped."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.containers.services import ServiceMachine, why_unavailable
from tests.support.processes.daemons import wait_until
from tests.support.processes.files import SENTENCE, TINY, write_manifest
from tests.support.tools import needed

pytestmark = [needed(why_unavailable(), "systemd-nspawn"), pytest.mark.timeout(300)]

PATIENCE_SECONDS = 120.0
STATE = "/var/lib/p2ptrain"
ROLE = f"""
role = "trainer"
name = "lone"
run_dir = "{STATE}/lone"
manifest = "/etc/p2ptrain/manifest.bin"
allow_path = ["/etc/p2ptrain/text.txt"]
[network]
listen = ["/ip4/127.0.0.1/tcp/0"]
[resources]
device = "cpu"
threads = 1
"""
"""A trainer that is a swarm by itself."""


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[ServiceMachine]:
    (tmp_path / "machine").mkdir()
    with ServiceMachine(tmp_path / "machine") as made:
        made.write("/etc/p2ptrain/text.txt", SENTENCE * 500)
        write_manifest(
            made.root / "etc/p2ptrain/manifest.bin",
            name="service",
            model={**TINY, "hidden": 64, "intermediate": 96},
            data={"source": "path:/etc/p2ptrain/text.txt"},
            training={"every": 4, "warmup_steps": 4},
        )
        made.write("/etc/p2ptrain/lone.toml", ROLE)
        yield made


def rounds(machine: ServiceMachine) -> list[int]:
    """The rounds that the trainer has committed, over all of its starts."""
    lines = machine.run("cat", f"{STATE}/lone/metrics.jsonl", check=False).splitlines()
    found = [json.loads(line) for line in lines if line.startswith("{") and line.endswith("}")]
    return [values["round"] for values in found if values.get("committed")]


def test_it_says_when_it_is_ready_starts_again_when_killed_and_drains_when_stopped(machine: ServiceMachine) -> None:
    service = "p2ptrain@lone"
    machine.run("systemctl", "enable", "--now", service)  # Returns once the peer has said that it is ready.
    assert machine.tells(service, "ActiveState", "SubState", "NRestarts") == ["active", "running", "0"]
    wait_until(lambda: len(rounds(machine)) >= 2, PATIENCE_SECONDS)
    owner = machine.run("stat", "--format=%U %a", f"{STATE}/lone/identity.key")
    assert owner == "p2ptrain 600"

    machine.run("systemctl", "kill", "--kill-whom=main", "--signal=KILL", service)
    wait_until(lambda: machine.tells(service, "ActiveState", "NRestarts") == ["active", "1"], PATIENCE_SECONDS)
    before = len(rounds(machine))
    wait_until(lambda: len(rounds(machine)) > before, PATIENCE_SECONDS)

    machine.run("systemctl", "stop", service)
    assert machine.tells(service, "ActiveState", "Result", "ExecMainStatus") == ["inactive", "success", "0"]
    saved = machine.run("ls", f"{STATE}/lone/checkpoints").split()
    assert saved[-1].endswith(f"-round-{rounds(machine)[-1]}"), "it did not save what it had when it was stopped"
    assert not machine.run("pgrep", "--uid", "p2ptrain", "--list-full", check=False), "its processes live on"


def test_a_mistake_in_its_file_is_in_the_journal_and_is_not_tried_again_and_again(machine: ServiceMachine) -> None:
    machine.write("/etc/p2ptrain/lone.toml", ROLE.replace("threads", "threds"))
    machine.run("systemctl", "start", "p2ptrain@lone", check=False)
    assert machine.tells("p2ptrain@lone", "ActiveState", "ExecMainStatus", "NRestarts") == ["failed", "3", "0"]
    assert "threads" in machine.journal("p2ptrain@lone")
