"""`p2ptrain monitor` beside a swarm of real processes: what it shows is what happens."""

from __future__ import annotations

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.support.daemons import wait_until
from tests.support.processes import Swarmlet, background_command, nothing_left_behind, run_command
from tests.support.tellers import PATIENCE_SECONDS

pytestmark = pytest.mark.timeout(300)

RECORD_SECONDS = 30.0
NEXT_LOOK_SECONDS = 5.0


class Page:
    """A status page that is served."""

    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> str:
        """What is served at a path."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def api(self, path: str) -> Any:
        """The same of the API, parsed."""
        return json.loads(self.get(f"api/v1/{path}"))

    def names(self) -> set[str]:
        """Of all peers that it shows."""
        return {peer["name"] for peer in self.api("peers")["peers"]}


@contextmanager
def monitoring(link: str, database: Path, log: Path) -> Iterator[Page]:
    """A monitor of a swarm, ended in good order afterwards."""
    log.unlink(missing_ok=True)
    with background_command(log, "monitor", link, "--port", "0", "--db", database) as monitor:
        wait_until(lambda: "status page: " in log.read_text(), PATIENCE_SECONDS)
        found = re.search(r"status page: (\S+)", log.read_text())
        assert found is not None
        yield Page(found[1])
        monitor.send_signal(signal.SIGTERM)
        assert monitor.wait(PATIENCE_SECONDS) == 0, log.read_text()


def test_the_page_follows_a_swarm_and_remembers_it(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path) as swarm:
        first, _ = swarm.start_all("first", "second")
        first.wait_for_commit(members=2)
        with monitoring(first.link, tmp_path / "history.sqlite", tmp_path / "monitor.log") as page:
            assert page.names() == {"first", "second"}
            wait_until(lambda: any(view["verified"] for view in page.api("rounds")["rounds"]), PATIENCE_SECONDS)
            certified = next(view for view in page.api("rounds")["rounds"] if view["verified"])
            assert certified["members"] == certified["contributors"] == 2
            assert certified["tokens"] > 0
            assert certified["agrees"]
            (group,) = page.api("groups")["groups"]
            assert {peer for peer, _ in group["members"]} == {peer["peer"] for peer in page.api("peers")["peers"]}
            assert page.get("healthz") == '{"status":"ok"}'
            assert "first" in page.get("")

            third = swarm.start("third", step_seconds=0.5)
            third.wait_for("training")
            wait_until(lambda: page.names() == {"first", "second", "third"}, NEXT_LOOK_SECONDS + 5)
            third.signal_all(signal.SIGKILL)
            wait_until(lambda: page.names() == {"first", "second"}, RECORD_SECONDS + NEXT_LOOK_SECONDS)
            told = [(event["kind"], event["text"]) for event in page.api("events")["events"]]
            assert ("joined", "third joined") in told
            assert ("left", "third left") in told

            families = text_string_to_metric_families(page.get("metrics"))
            values = {sample.name: sample.value for family in families for sample in family.samples}
            assert values["p2ptrain_rounds_committed_total"] > 0
            assert values["p2ptrain_directory_up"] == 1
        with monitoring(first.link, tmp_path / "history.sqlite", tmp_path / "monitor.log") as page:
            assert "third left" in [event["text"] for event in page.api("events")["events"]]
            assert {leader["name"] for leader in page.api("leaders")["leaders"]} >= {"first", "second"}


def test_without_a_swarm_it_says_whom_it_asked(tmp_path: Path) -> None:
    with Swarmlet(tmp_path) as swarm:
        link = swarm.start_all("gone")[0].link
    done = run_command("monitor", link, "--port", "0", timeout_seconds=PATIENCE_SECONDS)
    assert done.returncode == 4, done.stderr
    assert "none of the swarm's known peers answers" in done.stderr
