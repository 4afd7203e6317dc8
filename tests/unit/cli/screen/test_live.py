import contextlib
import io
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.cli.screen import live
from p2ptrain.cli.screen.live import Goal, SwarmScreen, newest_held_out_loss
from p2ptrain.cli.supervise import Child
from p2ptrain.errors import DeadlineError
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.views import Snapshot
from tests.support.coroutines import on_uvloop
from tests.support.web.watched import after_looks
from tests.unit.cli.screen.test_table import COMMITTED, TRAINER


@dataclass
class FakeChild:
    """The attributes of a child process that a view reads."""

    name: str
    exit_code: int | None = None
    ending: str = "ended somehow"


class Terminal(io.StringIO):
    """A stream that says it is a terminal of 80 columns."""

    def isatty(self) -> bool:
        return True


def children(*fakes: FakeChild) -> list[Child]:
    return cast(list[Child], list(fakes))


def shown(*records: PeerRecord) -> Snapshot:
    return after_looks(records)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("TERM", "xterm")
    return Terminal()


def last_frame(terminal: Terminal) -> str:
    """Return the text after the last move of the cursor to the top of the table."""
    return terminal.getvalue().rpartition("p2ptrain up")[2]


def test_the_title_says_how_much_of_what_was_asked_for_is_done(terminal: Terminal) -> None:
    with SwarmScreen(terminal, Goal(minutes=3, rounds=100)) as view:
        view.show(shown(TRAINER), children(FakeChild("trainer-1")))
        assert "0:00 of 3:00  round 5 of 100" in last_frame(terminal)
        assert "2.500" in last_frame(terminal)
        later = replace(TRAINER, round=9, last_rounds=(replace(COMMITTED, round=8),))
        view.show(shown(later), children(FakeChild("trainer-1")))
        assert "round 9 of 100" in last_frame(terminal)


def test_a_trainer_is_shown_from_its_start_to_its_end(terminal: Terminal) -> None:
    child = FakeChild("trainer-1")
    with SwarmScreen(terminal, Goal()) as view:
        view.show(None, children(child))
        assert "starting" in last_frame(terminal)
        view.show(shown(TRAINER), children(child))
        assert "training" in last_frame(terminal)
        view.drain(children(child))
        view.show(shown(TRAINER), children(child))
        assert "draining" in last_frame(terminal)
        child.exit_code = 7
        view.show(None, children(child))
        assert "ended (7)" in last_frame(terminal)
        assert "2.500" in last_frame(terminal)  # its last numbers stay
        again = replace(TRAINER, started_at=time.time() + 1)  # by hand
        view.show(shown(again), children(child))
        assert "training" in last_frame(terminal)


def test_another_peer_of_the_same_swarm_is_shown_while_it_is_there(terminal: Terminal) -> None:
    guest = replace(TRAINER, name="guest", peer="Qm" + "b" * 44)
    with SwarmScreen(terminal, Goal()) as view:
        view.show(shown(TRAINER, guest), children(FakeChild("trainer-1")))
        assert "guest" in last_frame(terminal)
        view.show(shown(TRAINER), children(FakeChild("trainer-1")))
        assert "guest" not in last_frame(terminal)


def test_no_line_of_the_table_is_full_where_the_terminal_may_write_behind_it(terminal: Terminal) -> None:
    with SwarmScreen(terminal, Goal()) as view:
        view.show(shown(replace(TRAINER, bytes_sent=123_000_000)), children(FakeChild("trainer-1")))
        footer = last_frame(terminal).rstrip("\x1b[0m\n").splitlines()[-1]
        assert "Ctrl-C" in footer
        assert len(footer) < 70


def test_without_a_terminal_there_is_one_line_for_each_look_with_something_new() -> None:
    stream = io.StringIO()
    with SwarmScreen(stream, Goal(rounds=9)) as view:
        for snapshot in (None, shown(TRAINER), shown(TRAINER)):
            view.show(snapshot, children(FakeChild("trainer-1")))
    assert stream.getvalue() == "0:00  round 5  2/3 peers  averaged in 0.5 s  loss 2.500  digest abababab\n"


def test_the_held_out_loss_is_that_of_the_latest_round_and_of_a_trainer_that_runs(tmp_path: Path) -> None:
    fakes = children(FakeChild("a"), FakeChild("b"), FakeChild("killed", exit_code=-9), FakeChild("new"))
    assert newest_held_out_loss(tmp_path, fakes) is None
    measured = {"a": [(0, 5.0), (20, 3.0)], "b": [(10, 4.0)], "killed": [(30, 9.0)]}
    for name, values in measured.items():
        (tmp_path / name).mkdir()
        lines = [json.dumps({"kind": "held_out", "round": number, "loss": loss}) for number, loss in values]
        lines += [json.dumps({"kind": "step", "loss": 9.0})] * 3 + ['{"kind": "held_out", "lo']
        (tmp_path / name / "metrics.jsonl").write_text("\n".join(lines))
    assert newest_held_out_loss(tmp_path, fakes) == 3.0


@on_uvloop
async def test_each_trouble_of_a_directory_is_told_once_until_it_answers(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    looks: list[Exception | Snapshot] = [
        *[DeadlineError("one")] * 3, DeadlineError("two"), shown(TRAINER), DeadlineError("two"),
    ]  # fmt: skip

    class Looking:
        def __init__(self, *_: Any) -> None: ...

        async def look(self) -> Snapshot:
            if not looks:
                raise EOFError
            if isinstance(found := looks.pop(0), Exception):
                raise found
            return found

    @contextlib.asynccontextmanager
    async def observing(_: SwarmLink) -> AsyncIterator[Any]:
        yield SimpleNamespace(look=None, peer=SimpleNamespace(signed=None))

    monkeypatch.setattr("p2ptrain.node.observe.observing", observing)
    monkeypatch.setattr("p2ptrain.status.tracker.Looking", Looking)
    monkeypatch.setattr(live, "_REFRESH_SECONDS", 0.0)
    link = SwarmLink(bytes(32), (f"/ip4/127.0.0.1/tcp/1/p2p/Qm{'a' * 44}",))
    stream = io.StringIO()
    with SwarmScreen(stream, Goal()) as view, pytest.raises(EOFError):
        await view.follow(link, tmp_path, children(FakeChild("trainer-1")))
    told = [line for line in stream.getvalue().splitlines() if line.startswith("no news")]
    assert told == ["no news: one", "no news: two", "no news: two"]
