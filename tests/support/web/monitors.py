"""`p2ptrain monitor` as a process, for tests: its page, its API, and its end in good order."""

import json
import re
import signal
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.support.processes.daemons import wait_until
from tests.support.processes.swarmlet import background_command
from tests.support.processes.tellers import PATIENCE_SECONDS

RECORD_SECONDS = 30.0
"""How long a record lives without its peer."""
NEXT_LOOK_SECONDS = 5.0
START_SECONDS = 2 * PATIENCE_SECONDS
"""Interpreter, daemon, first look: beside a swarm that starts, too."""


class StatusPage:
    def __init__(self, url: str) -> None:
        self.url = url

    def get(self, path: str) -> str:
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return str(answer.read().decode())

    def api(self, path: str) -> Any:
        return json.loads(self.get(f"api/v1/{path}"))

    def names(self) -> set[str]:
        return {peer["name"] for peer in self.api("peers")["peers"]}


@contextmanager
def monitoring(link: str, database: Path, log: Path) -> Iterator[StatusPage]:
    log.unlink(missing_ok=True)
    with background_command(log, "monitor", link, "--port", "0", "--db", database) as monitor:
        wait_until(lambda: "status page: " in log.read_text(), START_SECONDS)
        found = re.search(r"status page: (\S+)", log.read_text())
        assert found is not None
        yield StatusPage(found[1])
        monitor.send_signal(signal.SIGTERM)
        assert monitor.wait(PATIENCE_SECONDS) == 0, log.read_text()
