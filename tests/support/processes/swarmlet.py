"""Swarms of real processes for tests: start workers and commands, follow what they say, and leave nothing behind."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import psutil

from p2ptrain.averaging.protocol.table import ESTABLISHED
from tests.support.processes.daemons import ROOT, is_alive, wait_until
from tests.support.processes.files import LOOPBACK
from tests.support.processes.preloaded import COMMAND, SERVER, WORKER
from tests.support.processes.tellers import PATIENCE_SECONDS, Event, Teller
from tests.support.settings import training_over

MANIFEST: dict[str, Any] = {
    "name": "test",
    "model": {"family": "custom"},
    "data": {"source": "custom"},
    "training": {"every": 4, "local_batch": 4, "outer": "nesterov", "outer_learning_rate": 0.7, "outer_momentum": 0.5},
    "averaging": {"grace_seconds": 2.0, "matchmaking_seconds": 10.0, "round_seconds": 15.0},
}
"""A manifest with short deadlines, for workers."""


def make_manifest(**sections: dict[str, Any]) -> dict[str, Any]:
    found = {**MANIFEST, **{name: {**MANIFEST.get(name, {}), **values} for name, values in sections.items()}}
    return {**found, "training": training_over(MANIFEST["training"], sections.get("training", {}))}


class Worker(Teller):
    """One process of `tests.support.processes.worker`; its name is the last part of its run directory.

    Its log lies beside that. ``prefix`` is put before its command line, such as ``ip netns exec …``, and has to replace
    itself by the command.
    """

    def __init__(self, run_dir: Path, options: dict[str, Any], prefix: Sequence[str] = ()) -> None:
        self.run_dir = run_dir
        values = json.dumps({"run_dir": str(run_dir), **options})
        command = [*prefix, sys.executable, "-m", "tests.support.processes.worker", values]
        super().__init__(run_dir.name, command, run_dir.with_suffix(".log"))

    def _start(self, command: Sequence[str], errors: IO[bytes]) -> subprocess.Popen[str]:
        *prefix, _, _, _, values = command
        return super()._start(command, errors) if prefix else SERVER.fork(WORKER, [values], errors)

    @property
    def link(self) -> str:
        return str(self.wait_for("joined")["link"])

    @property
    def daemon(self) -> int:
        return int(self.wait_for("joined")["daemon"])

    def votes(self) -> bool:
        """True if this worker contributed to enough rounds to vote: the first made it a member, and is not counted."""
        return sum(bool(each["contributed"]) for each in self.rounds()) > ESTABLISHED

    def rounds(self, since: int = 0) -> list[Event]:
        return [event for event in self.events[since:] if event["event"] == "round"]

    def wait_for_commit(
        self, members: int = 0, since: int = 0, after_round: int = -1, timeout_seconds: float = PATIENCE_SECONDS
    ) -> Event:
        """Its first committed round beyond ``after_round`` with so many members (0: any number)."""

        def fits(event: Event) -> bool:
            right_size = members in (0, event["members"])
            return bool(event["committed"]) and right_size and bool(event["round"] > after_round)

        return self.wait_for("round", fits, since, timeout_seconds)

    def order(self, word: str) -> None:
        self.tell(word)

    def signal_all(self, number: signal.Signals) -> None:
        """Send a signal to it and its daemon, as when the whole machine sleeps and wakes."""
        os.kill(self.daemon, number)
        self.process.send_signal(number)

    def signal(self, number: signal.Signals) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        """Ask it to leave in good order; kill it if it does not."""
        with contextlib.suppress(OSError, ValueError):
            self.order("leave")
        try:
            self.wait(30)
        except subprocess.TimeoutExpired:
            self.kill()


class Swarmlet:
    """Workers of one swarm; a context manager that ends them and checks that no process is left."""

    def __init__(self, directory: Path, **manifest: dict[str, Any]) -> None:
        self.directory = directory
        self.manifest = make_manifest(**manifest)
        self.workers: list[Worker] = []

    def start(self, name: str, link: str | None = None, *, prefix: Sequence[str] = (), **options: Any) -> Worker:
        """Start a worker. The first one makes the swarm; later ones join it through ``link`` or the first worker."""
        if link is None and self.workers:
            link = self.workers[0].link
        where = {"link": link} if link else {"manifest": self.manifest}
        worker = Worker(self.directory / name, {**where, "seed": len(self.workers) + 1, **options}, prefix)
        self.workers.append(worker)
        return worker

    def start_all(self, *names: str, **options: Any) -> list[Worker]:
        """Start workers together, and wait until all of them are in one group."""
        workers = [self.start(name, **options) for name in names]
        for worker in workers:
            worker.wait_for_commit(len(workers))
        return workers

    def __enter__(self) -> "Swarmlet":
        return self

    def __exit__(self, kind: object, error: BaseException | None, traceback: object) -> None:
        if error is not None:
            for worker in self.workers:
                error.add_note(f"{worker.name}: {worker.last_words()}")
        daemons = [e["daemon"] for worker in self.workers for e in worker.events if e["event"] == "joined"]
        for worker in self.workers:
            with contextlib.suppress(ProcessLookupError):
                worker.process.kill()
        for worker in self.workers:
            worker.wait()
        wait_until(lambda: not any(map(is_alive, daemons)))


def check_states(*workers: Worker, since: int = 0) -> None:
    """Each worker's state had its digest whenever it told, and holders of one certificate hold the same bits."""
    digests: dict[str, str] = {}
    for worker in workers:
        for event in worker.rounds(since):
            assert event["intact"], f"{worker.name}: {event}"
            assert digests.setdefault(event["lineage"], event["digest"]) == event["digest"], worker.name


def wait_for_agreement(*workers: Worker, after_round: int = -1) -> Event:
    """Wait until all workers committed one and the same round beyond ``after_round``; the first one's event."""

    def common() -> str | None:
        sets = [{e["lineage"] for e in w.rounds() if e["committed"] and e["round"] > after_round} for w in workers]
        return next(iter(set.intersection(*sets)), None)

    wait_until(lambda: common() is not None, PATIENCE_SECONDS)
    lineage = common()
    check_states(*workers)
    return next(event for event in workers[0].rounds() if event["lineage"] == lineage)


def wait_for_peace(*workers: Worker, timeout_seconds: float = PATIENCE_SECONDS) -> Event:
    """Wait until all of them are in one group, with one state, in a round that is over after this call began."""
    marks = [len(worker.events) for worker in workers]
    newest = max(
        worker.wait_for_commit(len(workers), since=mark, timeout_seconds=timeout_seconds)["round"]
        for worker, mark in zip(workers, marks, strict=True)
    )
    return wait_for_agreement(*workers, after_round=newest)


def command(*arguments: str | Path) -> list[str]:
    return [sys.executable, "-m", "p2ptrain", *map(str, arguments)]


SHOWN_CHARACTERS = 3000
"""Of a process's log, if its test fails."""
FORKED = ("checkpoint", "join", "peer")
"""Commands that import torch: a fork has their imports, and runs them. Others, and what `up` starts, are executed."""


def _start_command(
    arguments: Sequence[str | Path], stdout: IO[bytes], stderr: IO[bytes], program: str = COMMAND
) -> subprocess.Popen[Any]:
    if arguments[0] == "join":  # A guest yields to all else on these cores, and the tests' deadlines are not for that.
        arguments = [*arguments, "--nice", "0"]
    if arguments[0] in FORKED:
        return SERVER.fork_silent(program, [str(argument) for argument in arguments], stdout, stderr)
    return subprocess.Popen(
        command(*arguments), cwd=ROOT, stdin=subprocess.DEVNULL, stdout=stdout, stderr=stderr,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )  # fmt: skip


def run_command(
    *arguments: str | Path, timeout_seconds: float = 2 * PATIENCE_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Run a ``p2ptrain`` command to its end; its output and exit code. It is killed at the timeout."""
    with tempfile.TemporaryFile() as output, tempfile.TemporaryFile() as errors:
        process = _start_command(arguments, output, errors)
        try:
            code = process.wait(timeout_seconds)
        finally:
            process.kill()
            process.wait()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(process.args, code, output.read().decode(), errors.read().decode())


@contextlib.contextmanager
def background_command(log: Path, *arguments: str | Path, program: str = COMMAND) -> Iterator[subprocess.Popen[Any]]:
    """A ``p2ptrain`` command that runs meanwhile, its output in ``log``; killed at the end.

    A test that fails shows the end of the log. ``program`` runs ``join`` in its own way; see
    `tests.support.processes.preloaded`.
    """
    with log.open("ab") as output:
        process = _start_command(arguments, output, output, program)
    try:
        yield process
    except BaseException as error:
        ended = "runs" if process.poll() is None else f"ended with {process.returncode}"
        error.add_note(f"{log} ({ended}):\n{log.read_text(errors='replace')[-SHOWN_CHARACTERS:]}")
        raise
    finally:
        process.kill()
        process.wait()


@dataclass(frozen=True)
class Seed:
    directory: Path
    link: str
    process: subprocess.Popen[Any]


@contextlib.contextmanager
def seeding(directory: Path, listen: str = LOOPBACK) -> Iterator[Seed]:
    """The bootstrap peer of an organizer's folder, with its log there; killed at the end."""
    link_file = directory / "bootstrap" / "link.txt"
    link_file.unlink(missing_ok=True)  # An earlier seed's.
    with background_command(directory / "seed.log", "seed", directory, "--listen", listen) as process:
        wait_until(lambda: link_file.exists() or process.poll() is not None, PATIENCE_SECONDS)
        assert process.poll() is None, (directory / "seed.log").read_text()
        yield Seed(directory, link_file.read_text().strip(), process)


def init(directory: Path, *options: str | Path) -> Path:
    done = run_command("init", directory, *options)
    assert done.returncode == 0, done.stderr
    return directory


def descendants(but: Collection[psutil.Process] = ()) -> set[psutil.Process]:
    """All processes below this one, but for these and what is below them."""
    found = set(psutil.Process().children(recursive=True))
    for process in but:
        with contextlib.suppress(psutil.NoSuchProcess):
            found -= {process, *process.children(recursive=True)}
    return found


@contextlib.contextmanager
def nothing_left_behind() -> Iterator[None]:
    """Check that what was started inside has ended, daemons and other grandchildren included.

    What runs already when it begins may start further processes and keep them, as a browser does.
    """
    before = descendants()
    seen: set[psutil.Process] = set()  # Not by their numbers alone: Linux gives those to other processes again.
    over = threading.Event()

    def watch() -> None:
        while not over.wait(0.2):
            seen.update(descendants(but=before))

    watcher = threading.Thread(target=watch, daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join()

    def left() -> list[psutil.Process]:
        # The server may have started meanwhile, and its number is known a moment later than it is there.
        found = [process for process in seen if process.pid not in SERVER.process_ids]
        return [process for process in found if is_alive(process.pid) and process.is_running()]

    try:
        wait_until(lambda: not left())
    except AssertionError as error:
        error.add_note(f"left behind: {[process.as_dict(['pid', 'ppid', 'cmdline']) for process in left()]}")
        raise
