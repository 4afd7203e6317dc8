"""A few changing lines at the bottom of a terminal, with log lines scrolling above them."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from types import TracebackType
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from p2ptrain.cli.screen.table import printable


class Screen:
    """Draws on a terminal; a context manager. Nothing is drawn before it is entered, and what was last drawn stays.

    The cursor is never hidden and no other screen is used, so that a process that is killed leaves nothing to mend.
    """

    def __init__(self, stream: TextIO, is_transient: bool = False) -> None:
        """
        Args:
            stream: For which `can_draw` is true.
            is_transient: Whether to clear what was last drawn at the end.
        """
        self._stream = stream
        self._console = _console(stream)
        self._live = Live(
            console=self._console, auto_refresh=False, redirect_stdout=False, redirect_stderr=False,
            transient=is_transient,
        )  # fmt: skip
        self._drawn: tuple[int, list[str]] = (0, [])
        self._handlers: list[logging.Handler] = []

    @staticmethod
    def can_draw(stream: TextIO) -> bool:
        """True if lines can be changed there: not on a pipe, a dumb terminal, or one that another process uses."""
        if not stream.isatty() or os.environ.get("TERM", "dumb") == "":
            return False
        return _console(stream).is_interactive and _is_in_foreground(stream)

    @property
    def width(self) -> int:
        """Characters in a line."""
        return self._console.width

    @property
    def height(self) -> int:
        """Lines that can be drawn."""
        return max(1, self._console.height - 1)

    def __enter__(self) -> Screen:
        self._live.start()
        self._console.show_cursor(True)
        if sys.stderr.isatty():
            root = logging.getLogger()
            self._handlers = root.handlers[:]
            root.handlers[:] = [_Above(self, handler) for handler in self._handlers]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop drawing, with the cursor below the drawing; idempotent."""
        if self._handlers:
            logging.getLogger().handlers[:] = self._handlers
            self._handlers = []
        self._live.stop()

    def draw(self, lines: Sequence[Text], footer: str = "") -> None:
        """Show these lines in place of those before; what is too much for the terminal is cut off.

        Args:
            lines: Made for `width`.
            footer: The last line, which should be short: a terminal writes ``^C`` behind it. Behind a full line that
                would begin a new one, and the next lines would be drawn in the wrong place.
        """
        shown = [*lines[: self.height - bool(footer)], *([Text(footer, "dim")] if footer else [])]
        drawn = (self.width, [line.markup for line in shown])
        if drawn == self._drawn or not _is_in_foreground(self._stream):
            return
        self._drawn = drawn
        for line in shown:
            line.no_wrap, line.overflow = True, "crop"
        self._live.update(Group(*shown), refresh=True)

    def say(self, text: str) -> None:
        """Print text above what is drawn; a terminal wraps long lines, so that they can be copied whole."""
        plain = "\n".join(map(printable, text.split("\n")))
        self._console.print(Text(plain), soft_wrap=True)


class _Above(logging.Handler):
    """Prints another handler's lines above the drawing."""

    def __init__(self, screen: Screen, handler: logging.Handler) -> None:
        super().__init__(handler.level)
        self.setFormatter(handler.formatter)
        self._screen = screen

    def emit(self, record: logging.LogRecord) -> None:
        try:
            self._screen.say(self.format(record))
        except Exception:
            self.handleError(record)


def _console(stream: TextIO) -> Console:
    return Console(file=stream, markup=False, highlight=False, emoji=False)


def _is_in_foreground(stream: TextIO) -> bool:
    """True if this process has the terminal, or if that cannot be known."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, io.UnsupportedOperation):
        return True
