"""A peer on a volunteer's machine: it rests, goes on and leaves as its owner wishes, and the others lose no round."""

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.cli.manifests import LINK_FILE
from p2ptrain.errors import P2PTrainError
from p2ptrain.node.guest.control import SOCKET_FILE, Answer, Request, ask
from p2ptrain.node.guest.totals import read_totals
from tests.support.processes.daemons import ROOT, wait_until
from tests.support.processes.files import (
    QUICK,
    TINY,
    committed,
    set_options,
    write_manifest,
    write_role,
    write_text,
)
from tests.support.processes.swarmlet import (
    background_command,
    command,
    init,
    nothing_left_behind,
    run_command,
    seeding,
)
from tests.support.processes.tellers import PATIENCE_SECONDS

NAMES = ("a", "b", "guest")
NICENESS = 3


def look(run_dir: Path) -> Answer:
    """Return what its peer says; an empty answer before it listens."""
    try:
        return ask(run_dir, Request("look"))
    except P2PTrainError:
        return Answer()


def given_rounds(run_dir: Path) -> int:
    """Return how many rounds have its peer's work."""
    look(run_dir)
    return 0 if (totals := read_totals(run_dir)) is None else totals.rounds


def newest(run_dir: Path) -> dict[str, Any]:
    """Return the last round that its trainer committed."""
    return next(iter(committed(run_dir)[::-1]), {"round": -1, "contributors": 0})


def tell(*arguments: str | Path) -> str:
    done = run_command(*arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def niceness_of_session(process: int) -> int | None:
    """None if this kernel's sessions have none."""
    path = Path(f"/proc/{process}/autogroup")
    return int(path.read_text().rpartition(" ")[2]) if path.exists() else None


@contextlib.contextmanager
def in_a_session(log: Path, *arguments: str | Path) -> Iterator[subprocess.Popen[Any]]:
    """A ``p2ptrain`` command in a session of its own, as a terminal's is; killed at the end."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            command(*arguments), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            start_new_session=True, env={**os.environ, "PYTHONPATH": str(ROOT)},
        )  # fmt: skip
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def three_trainers(directory: Path) -> Iterator[dict[str, subprocess.Popen[Any]]]:
    """Trainers of one swarm, each a process, once all of them are in a round."""
    text = write_text(directory / "text.txt", 500)
    training = {"every": 8, "warmup_steps": 4}
    data = {"source": f"path:{text}"}
    write_manifest(directory / "manifest", name="guests", data=data, model=TINY, training=training, averaging=QUICK)
    where: dict[str, Any] = {"manifest": str(directory / "manifest")}
    processes = {}
    with nothing_left_behind(), contextlib.ExitStack() as stack:
        for name in NAMES:
            resources = {"device": "cpu", "threads": 1, "nice": NICENESS if name == "guest" else 0}
            role = write_role(directory / f"{name}.toml", "trainer", resources=resources, **where)
            start = in_a_session if name == "guest" else background_command
            processes[name] = stack.enter_context(start(directory / f"{name}.log", "peer", role))
            if name == "a":
                wait_until((link := directory / "a" / LINK_FILE).exists, PATIENCE_SECONDS)
                where = {"link": link.read_text().strip()}
        wait_until(lambda: all(newest(directory / name)["contributors"] == 3 for name in NAMES), PATIENCE_SECONDS)
        yield processes


def test_a_guest_rests_goes_on_and_leaves_and_no_round_is_lost(tmp_path: Path) -> None:
    guest, a, b = (tmp_path / name for name in ("guest", "a", "b"))
    with three_trainers(tmp_path) as processes:
        own = psutil.Process(processes["guest"].pid)
        there = psutil.Process().nice() + NICENESS
        assert {each.nice() for each in (own, *own.children(recursive=True))} == {there}
        assert {niceness_of_session(each.pid) for each in (own, *own.children(recursive=True))} <= {there, None}
        assert (guest / SOCKET_FILE).stat().st_mode & 0o777 == 0o600

        assert "paused by its owner" in tell("pause", guest)
        wait_until(lambda: look(guest).state == "resting", PATIENCE_SECONDS)
        handed_in, since = len(committed(guest)), newest(a)["round"]
        wait_until(lambda: newest(a)["round"] >= since + 4, PATIENCE_SECONDS)
        assert len(committed(guest)) == handed_in
        without = [each for each in committed(a) if each["round"] > since + 1]
        assert max(each["contributors"] for each in without) == 2
        assert all(each["seconds"] < QUICK["matchmaking_seconds"] for each in without), "a round waited for the guest"
        wait_until(lambda: look(guest).round >= since + 4, PATIENCE_SECONDS)

        assert "goes on" in tell("resume", guest)
        wait_until(lambda: newest(a)["contributors"] == 3, PATIENCE_SECONDS)
        wait_until(lambda: len(committed(guest)) > handed_in, PATIENCE_SECONDS)

        assert "leaves after its round" in tell("leave", guest, "--finish")
        assert processes["guest"].wait(PATIENCE_SECONDS) == 0, (tmp_path / "guest.log").read_text()[-2000:]
        assert not (guest / SOCKET_FILE).exists()
        last = newest(guest)["round"]
        assert json.loads((guest / "summary.json").read_text())["exit_reason"] == "rounds"
        wait_until(lambda: newest(a)["round"] >= last + 3, PATIENCE_SECONDS)
        assert newest(guest)["contributed"], "its last round has its work"
        assert max(each["contributors"] for each in committed(a) if each["round"] > last) == 2

        tell("pause", b)
        wait_until(lambda: look(b).state == "resting", PATIENCE_SECONDS)
        assert "leaves now" in tell("leave", b, "--finish"), "a peer that rests has no round to finish"
        assert processes["b"].wait(PATIENCE_SECONDS) == 0, (tmp_path / "b.log").read_text()[-2000:]
        assert json.loads((b / "summary.json").read_text())["exit_reason"] == "its owner"
    given = json.loads(tell("status", "--mine", guest, "--json"))[0]
    assert given["state"] == "not running"
    assert given["rounds"] >= handed_in
    assert given["tokens"] == json.loads((guest / "summary.json").read_text())["tokens"]


def test_a_host_of_a_stage_rests_and_goes_on_and_the_pipeline_runs_meanwhile(tmp_path: Path) -> None:
    text = write_text(tmp_path / "text.txt", 500)
    options = set_options(
        name="guests", data={"source": f"path:{text}"}, model={**TINY, "layers": 2},
        training={"every": 1, "global_batch": 8, "local_batch": 2, "warmup_steps": 0}, averaging=QUICK,
        pipeline={"stages": 2},
    )  # fmt: skip
    folder, guest = init(tmp_path / "swarm", *options), tmp_path / "guest"
    with nothing_left_behind(), seeding(folder) as seed, contextlib.ExitStack() as stack:
        for name, role, stage in (("a", "both", 0), ("b", "stage", 1), ("guest", "both", 1)):
            file = write_role(tmp_path / f"{name}.toml", role, pipeline={"stage": stage}, link=seed.link)
            process = stack.enter_context(background_command(tmp_path / f"{name}.log", "peer", file))
        wait_until(lambda: given_rounds(guest) >= 1, PATIENCE_SECONDS)

        tell("pause", guest)
        assert look(guest).state == "resting"
        since = look(guest).round
        wait_until(lambda: look(guest).round >= since + 3, PATIENCE_SECONDS)
        handed_in = given_rounds(guest)
        wait_until(lambda: look(guest).round >= since + 6, PATIENCE_SECONDS)
        assert given_rounds(guest) == handed_in

        tell("resume", guest)
        wait_until(lambda: given_rounds(guest) > handed_in, PATIENCE_SECONDS)
        tell("leave", guest, "--finish")
        assert process.wait(PATIENCE_SECONDS) == 0, (tmp_path / "guest.log").read_text()[-2000:]
        ended = look(tmp_path / "a").round
        wait_until(lambda: look(tmp_path / "a").round >= ended + 2, PATIENCE_SECONDS)
