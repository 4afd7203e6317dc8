"""Processes that say what they do, one JSON object a line on standard output."""

import contextlib
import json
import os
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, Any

from tests.support.processes.daemons import ROOT

Event = dict[str, Any]

PATIENCE_SECONDS = 120.0
"""How long to wait for what should take a few seconds: other work may load the machine."""


class Teller:
    """One such process. It takes orders on standard input, and its errors go to the end of a log.

    ``events`` has what it said, oldest first, and only grows. Each names its kind under ``event``.
    """

    def __init__(self, name: str, command: Sequence[str], log: Path) -> None:
        self.name = name
        self.log = log
        self.events: list[Event] = []
        with log.open("ab") as errors:
            self.process = self._start(command, errors)
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _start(self, command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[str]:
        return subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
        )

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.events.append(json.loads(line))

    def wait_for(
        self,
        what: str,
        condition: Callable[[Event], bool] = lambda event: True,
        since: int = 0,
        timeout_seconds: float = PATIENCE_SECONDS,
    ) -> Event:
        """The first event of kind ``what``, number ``since`` or later, for which ``condition`` holds."""
        deadline = time.monotonic() + timeout_seconds
        while True:
            over = not self._reader.is_alive()
            for event in self.events[since:]:
                if event["event"] == what and condition(event):
                    return event
            assert not over, f"{self.name} ended with {self.process.wait()}: {self.last_words()}"
            assert time.monotonic() < deadline, f"{self.name} said no such {what!r}: {self.last_words()}"
            time.sleep(0.02)

    def last_words(self) -> str:
        """For a failure: its last events, without long lists, and the end of its log."""
        brief = [{k: v for k, v in event.items() if k not in ("values", "samples")} for event in self.events[-3:]]
        return f"{brief}\n{self.log.read_text()[-1500:]}"

    def tell(self, line: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self, timeout_seconds: float = PATIENCE_SECONDS) -> int:
        """Its exit code, once it has ended and everything that it said is in ``events``."""
        code = self.process.wait(timeout_seconds)
        self._reader.join(timeout_seconds)
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(BrokenPipeError):
                pipe.close()
        return code

    def kill(self) -> None:
        self.process.kill()
        self.wait()
