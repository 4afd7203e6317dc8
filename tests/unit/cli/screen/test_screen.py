import io
import logging
import sys

import pytest
from rich.text import Text

from p2ptrain.cli.screen.bars import bars
from p2ptrain.cli.screen.screen import Screen
from tests.unit.cli.screen.test_live import Terminal


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    for name, value in (("COLUMNS", "40"), ("LINES", "5"), ("TERM", "xterm")):
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("NO_COLOR", raising=False)
    return Terminal()


def test_only_terminals_that_can_move_their_cursor_are_drawn_on(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert Screen.can_draw(terminal)
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert not Screen.can_draw(io.StringIO())
    for term in ("dumb", "unknown", ""):
        monkeypatch.setenv("TERM", term)
        assert not Screen.can_draw(terminal)


def test_the_cursor_is_never_left_hidden(terminal: Terminal) -> None:
    with Screen(terminal) as screen:
        screen.draw([Text("one")], "footer")
        written = terminal.getvalue()
        assert written.rfind("\x1b[?25h") > written.rfind("\x1b[?25l")
    assert terminal.getvalue().rfind("\x1b[?25h") > terminal.getvalue().rfind("\x1b[?25l")


def test_what_has_not_changed_is_not_drawn_again(terminal: Terminal) -> None:
    with Screen(terminal) as screen:
        screen.draw([Text("one")])
        written = terminal.getvalue()
        screen.draw([Text("one")])
        assert terminal.getvalue() == written
        screen.draw([Text("two")])
        assert "two" in terminal.getvalue()


def test_more_lines_than_the_terminal_has_are_cut_but_the_footer_stays(terminal: Terminal) -> None:
    with Screen(terminal) as screen:
        screen.draw([Text(f"line {number}") for number in range(20)], "footer")
        shown = terminal.getvalue()
        assert "line 2" in shown
        assert "line 3" not in shown
        assert "footer" in shown


def test_colours_are_left_out_where_they_are_not_wanted(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    with Screen(terminal) as screen:
        screen.draw([Text("healthy", "bold green")])
    assert "\x1b[1;32m" in terminal.getvalue()
    monkeypatch.setenv("NO_COLOR", "1")
    plain = Terminal()
    with Screen(plain) as screen:
        screen.draw([Text("healthy", "bold green")])
    assert "32m" not in plain.getvalue()


def test_log_lines_go_above_whole_and_without_commands(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    root = logging.getLogger()
    before = root.handlers[:]
    handler = logging.StreamHandler(io.StringIO())
    handler.setFormatter(logging.Formatter("%(levelname)s %(message)s"))
    root.handlers[:] = [handler]
    try:
        with Screen(terminal) as screen:
            screen.draw([Text("below")])
            mark = len(terminal.getvalue())
            logging.getLogger("p2ptrain").error("from %s [bold]%s", "\x1b[2J", "x" * 60)
            written = terminal.getvalue()[mark:]
        assert root.handlers == [handler]
    finally:
        root.handlers[:] = before
    assert f"ERROR from ?[2J [bold]{'x' * 60}\n" in written
    assert written.index("ERROR") < written.rindex("below")


def test_a_job_has_a_bar_while_it_lasts_and_leaves_no_trace(
    terminal: Terminal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr("p2ptrain.cli.screen.bars.PATIENCE_SECONDS", 0.0)
    monkeypatch.setattr("p2ptrain.cli.screen.bars.REDRAW_SECONDS", 0.0)
    with bars("checking it") as advance:
        advance(5, 10)
        assert "50%  checking it" in terminal.getvalue()
    assert terminal.getvalue().rstrip("\n").endswith("\x1b[2K")
