"""A few changing lines at the bottom of a terminal, with log lines scrolling above them."""

from __future__ import annotations

import io
import logging
import os
import sys
from collections.abc import Sequence
from typing import TextIO

from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from p2ptrain.cli.screen.table import printable


class Screen:
    """A context manager that draws on a terminal (see `can_draw`), and leaves the last drawing unless it is transient.

    It neither hides the cursor nor uses the alternate screen, so a killed process leaves the terminal usable.
    """

    def __init__(self, stream: TextIO, is_transient: bool = False) -> None:
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
        """True if lines can be redrawn: not on a pipe, a dumb terminal, or in a background process."""
        if not stream.isatty() or os.environ.get("TERM", "dumb") == "":
            return False
        return _console(stream).is_interactive and _is_in_foreground(stream)

    @property
    def width(self) -> int:
        return self._console.width

    @property
    def height(self) -> int:
        return max(1, self._console.height - 1)

    def __enter__(self) -> Screen:
        self._live.start()
        self._console.show_cursor(True)
        if sys.stderr.isatty():
            root = logging.getLogger()
            self._handlers = root.handlers[:]
            root.handlers[:] = [_Above(self, handler) for handler in self._handlers]
        return self

    def __exit__(self, *_: object) -> None:
        self.leave()

    def leave(self) -> None:
        """Stop drawing, with the cursor below the last drawing; idempotent."""
        if self._handlers:
            logging.getLogger().handlers[:] = self._handlers
            self._handlers = []
        self._live.stop()

    def draw(self, lines: Sequence[Text], footer: str = "") -> None:
        """Replace the drawing; lines beyond `height` are cut off.

        Args:
            lines: Lines of at most `width` characters.
            footer: A short last line. The terminal writes ``^C`` behind it, which must not wrap and shift the drawing.
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
        """Print text above the drawing; the terminal wraps long lines, so that they can be copied whole."""
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
    """True if this process is in the terminal's foreground, or if that is unknown."""
    try:
        return os.tcgetpgrp(stream.fileno()) == os.getpgrp()
    except (OSError, io.UnsupportedOperation):
        return True
