"""What commands draw on a real terminal, how they leave it, and that none of that reaches a pipe."""

import json
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes.daemons import wait_until
from tests.support.processes.files import LOOPBACK, TINY, set_options, write_role, write_text
from tests.support.processes.swarmlet import Seed, background_command, init, nothing_left_behind, seeding
from tests.support.processes.tellers import PATIENCE_SECONDS
from tests.support.processes.terminals import CTRL_C, TerminalCommand


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Seed]:
    folder = tmp_path_factory.mktemp("seeded")
    text = write_text(folder / "text.txt")
    swarm = init(folder / "swarm", *set_options(data={"source": f"path:{text}"}, model=TINY))
    with nothing_left_behind(), seeding(swarm) as seed:
        yield seed


def joining(seeded: Seed, run_dir: Path) -> list[str | Path]:
    machine = ["--device", "cpu", "--threads", "1", "--listen", LOOPBACK, "--name", "maple"]
    return ["join", seeded.link, "--yes", "--run-dir", run_dir, "--allow-path", seeded.directory.parent, *machine]


def test_join_draws_drains_on_ctrl_c_and_leaves_the_terminal_as_it_was(tmp_path: Path, seeded: Seed) -> None:
    run_dir = tmp_path / "peer"
    with nothing_left_behind(), TerminalCommand(*joining(seeded, run_dir)) as join:
        join.wait_for("── maple in my-swarm  0:")
        join.wait_for("contributed")  # A log line, above.
        join.wait_for("tokens in ")
        for text in (
            "traffic  ",
            "now      training",
            "learning loss",
            "swarm    ",
            "1 replica",
            "Ctrl-C leaves, twice at once",
        ):
            join.wait_for(text)
        join.press(CTRL_C)
        join.wait_for("draining")
        assert join.wait() == 0
        join.wait_for("has left the swarm")
        assert join.is_as_before()
        assert "Traceback" not in join.text
    assert json.loads((run_dir / "summary.json").read_text())["exit_reason"] == "signal"


def test_a_second_ctrl_c_ends_a_peer_at_once_and_leaves_the_terminal_as_it_was(tmp_path: Path, seeded: Seed) -> None:
    role = write_role(tmp_path / "birch.toml", "trainer", link=seeded.link, allow_path=[str(seeded.directory.parent)])
    with nothing_left_behind(), TerminalCommand("peer", role, columns=40) as peer:
        peer.wait_for("now      training")
        peer.press(CTRL_C)
        peer.wait_for("draining")
        peer.press(CTRL_C)
        assert peer.wait() in (0, 130)  # The drain of a tiny model may be over before the second one comes.
        wait_until(peer.is_as_before, PATIENCE_SECONDS)


@pytest.mark.parametrize("how", ["pipe", "dumb terminal", "JSON log"])
def test_where_nothing_can_be_drawn_there_are_log_lines_alone(tmp_path: Path, seeded: Seed, how: str) -> None:
    arguments = joining(seeded, tmp_path / "peer")
    with nothing_left_behind():
        if how == "pipe":
            log = tmp_path / "join.log"
            with background_command(log, *arguments) as join:
                wait_until(lambda: "contributed" in log.read_text() or join.poll() is not None, PATIENCE_SECONDS)
                join.send_signal(signal.SIGINT)
                assert join.wait(PATIENCE_SECONDS) == 0
            written = log.read_text()
        else:
            environment = {"TERM": "dumb"} if how == "dumb terminal" else {}
            log_format = ["--log-format", "json"] if how == "JSON log" else []
            with TerminalCommand(*arguments, *log_format, environment=environment) as terminal:
                terminal.wait_for("contributed")
                terminal.press(CTRL_C)
                assert terminal.wait() == 0
                terminal.wait_for("draining")
                written = terminal.raw
    assert "contributed" in written
    assert "\x1b" not in written
    assert "Ctrl-C" not in written


def test_watching_on_a_terminal_says_how_healthy_the_swarm_is_without_colours_if_asked(seeded: Seed) -> None:
    arguments = ("status", seeded.link, "--watch")
    with nothing_left_behind(), TerminalCommand(*arguments, environment={"NO_COLOR": "1"}) as watch:
        watch.wait_for("Empty: Nobody trains in this swarm yet")
        watch.wait_for("Ctrl-C ends this")
        watch.press(CTRL_C)
        assert watch.wait() == 130
        assert watch.is_as_before()
        assert "\x1b[3" not in watch.raw
        assert "Traceback" not in watch.text
