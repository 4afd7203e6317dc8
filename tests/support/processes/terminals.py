"""Commands on a terminal of their own, as a person has one: what they draw, and how they leave it."""

import fcntl
import os
import pty
import re
import struct
import subprocess
import termios
import threading
from collections.abc import Mapping
from pathlib import Path

from tests.support.processes.daemons import ROOT, wait_until
from tests.support.processes.swarmlet import command
from tests.support.processes.tellers import PATIENCE_SECONDS

SEQUENCE = re.compile(r"\x1b(\[[0-9;?]*[A-Za-z]|.)")
SHOW_CURSOR, HIDE_CURSOR, OTHER_SCREEN = "\x1b[?25h", "\x1b[?25l", "\x1b[?1049h"
CTRL_C = b"\x03"
END_MARK = "\x1b[999z"
"""Written by the test behind all that the command wrote; a terminal ignores it."""


class TerminalCommand:
    """A ``p2ptrain`` command in the foreground of a pseudo-terminal; a context manager that kills it at the end."""

    def __init__(
        self, *arguments: str | Path, columns: int = 80, lines: int = 24, environment: Mapping[str, str] | None = None
    ) -> None:
        self._master, self._terminal = pty.openpty()
        fcntl.ioctl(self._terminal, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
        self._before = termios.tcgetattr(self._terminal)
        self._read: list[bytes] = []
        self._marks = 0
        unwanted = {"COLUMNS", "LINES", "NO_COLOR", "FORCE_COLOR"}
        inherited = {key: value for key, value in os.environ.items() if key not in unwanted}
        self.process = subprocess.Popen(
            command(*arguments), cwd=ROOT, stdin=self._terminal, stdout=self._terminal, stderr=self._terminal,
            start_new_session=True, preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
            env={**inherited, "TERM": "xterm", "PYTHONPATH": str(ROOT), **(environment or {})},
        )  # fmt: skip
        self._reader = threading.Thread(target=self._follow, daemon=True)
        self._reader.start()

    def _follow(self) -> None:
        while True:
            try:
                self._read.append(os.read(self._master, 65536))
            except OSError:
                return

    @property
    def raw(self) -> str:
        """All that it wrote so far, with what it commanded the terminal to do."""
        return b"".join(self._read).decode(errors="replace").replace(END_MARK, "")

    @property
    def text(self) -> str:
        return SEQUENCE.sub("", self.raw)

    def wait_for(self, text: str, since: int = 0) -> None:
        """Wait until it wrote this, after so many characters of `text`."""
        wait_until(lambda: text in self.text[since:] or self.process.poll() is not None, 2 * PATIENCE_SECONDS)
        if self.process.poll() is not None:
            self._read_all()
        assert text in self.text[since:], self.text[-3000:]

    def press(self, keys: bytes) -> None:
        os.write(self._master, keys)

    def wait(self) -> int:
        code = self.process.wait(PATIENCE_SECONDS)
        self._read_all()
        return code

    def _read_all(self) -> None:
        """Wait until the reader has all that a command wrote which has ended."""
        self._marks += 1
        os.write(self._terminal, END_MARK.encode())
        wait_until(lambda: b"".join(self._read).count(END_MARK.encode()) == self._marks, PATIENCE_SECONDS)

    def is_as_before(self) -> bool:
        """Whether the terminal is as it was: its settings, its screen, its cursor, and that at the start of a line.

        The terminal echoes what is typed once the command no longer reads it.
        """
        shown = self.raw.rfind(SHOW_CURSOR) >= self.raw.rfind(HIDE_CURSOR)
        same = termios.tcgetattr(self._terminal) == self._before
        return same and shown and OTHER_SCREEN not in self.raw and self.text.removesuffix("^C").endswith("\n")

    def __enter__(self) -> "TerminalCommand":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self._terminal)  # Then nobody has it open, and the reader's next read fails.
        self._reader.join(10)
        os.close(self._master)
        if error is not None:
            error.add_note(self.text[-3000:])
