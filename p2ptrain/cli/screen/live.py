"""The output of ``p2ptrain up``: a live table on a terminal, a line for new rounds elsewhere."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TextIO

from rich.text import Text

from p2ptrain.cli.screen.lines import swarm_lines, title_line
from p2ptrain.cli.screen.screen import Screen
from p2ptrain.cli.screen.table import COLUMNS, human_time, peer_row, present_state, rounds_line, table_lines
from p2ptrain.cli.supervise import Child
from p2ptrain.errors import TemporaryError
from p2ptrain.network.link import SwarmLink
from p2ptrain.status.views import Snapshot

_REFRESH_SECONDS = 1.0
_METRICS_TAIL_BYTES = 64 * 1024
_STATE = COLUMNS.index("state")
_DRAINING = "draining: trainers finish their step and save their state"
_FOOTER = "Ctrl-C ends it in good order, twice at once"


def stop_on_signals(end_at_once: Callable[[], object]) -> asyncio.Event:
    """Handle SIGINT and SIGTERM: the first signal sets the returned event, later ones call ``end_at_once``."""
    stop = asyncio.Event()

    def on_signal() -> None:
        if stop.is_set():
            end_at_once()
        stop.set()

    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, on_signal)
    return stop


@dataclass(frozen=True)
class Goal:
    """The limits of a run in minutes and committed rounds; 0 for no limit."""

    minutes: float = 0.0
    rounds: int = 0


class SwarmScreen:
    """A context manager that shows a swarm on a stream."""

    def __init__(self, stream: TextIO, goal: Goal, draws: bool = True) -> None:
        """Without ``draws`` it writes lines also on a terminal."""
        self._stream = stream
        self._draws = draws
        self._goal = goal
        self._screen: Screen | None = None
        self._swarm: list[Text] = []
        self._started = time.monotonic()
        self._draining = False
        self._shown_rounds = 0
        self._held_out: float | None = None
        self._others: list[tuple[str, ...]] = []
        self._ours: dict[str, tuple[str, ...]] = {}
        self._ended: dict[str, float] = {}

    def __enter__(self) -> SwarmScreen:
        if self._draws and Screen.can_draw(self._stream):
            self._screen = Screen(self._stream).__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        if self._screen is not None:
            self._screen.leave()

    def say(self, text: str) -> None:
        """Print a line, above the live table if there is one."""
        if self._screen is not None:
            self._screen.say(text)
        else:
            print(text, file=self._stream, flush=True)

    def drain(self, trainers: list[Child]) -> None:
        """Show running trainers as draining from now on."""
        self._draining = True
        if self._screen is None and any(child.exit_code is None for child in trainers):
            self.say(_DRAINING)

    async def follow(self, link: SwarmLink, run_dir: Path, trainers: list[Child]) -> None:
        """Show the swarm until cancelled, and retry while the directory does not answer; starts the shown time."""
        self._started = time.monotonic()
        if self._screen is None:
            kind = "trainer" if self._draws else "host"
            self.say(f"starting {len(trainers)} {kind}{'s' if len(trainers) != 1 else ''}")
        self.show(None, trainers)
        # Imports take seconds: in a thread they leave the event loop to signals.
        for module in ("p2ptrain.node.observe", "p2ptrain.status.tracker"):
            await asyncio.to_thread(import_module, module)
        from p2ptrain.node.observe import observing
        from p2ptrain.status.tracker import Looking

        async with observing(link) as observer:
            looking = Looking(observer.look, observer.peer.signed, link)
            trouble = ""
            while True:
                said, trouble = trouble, ""
                try:
                    snapshot = await looking.look()
                    self._held_out = newest_held_out_loss(run_dir, trainers) or self._held_out
                    self.show(snapshot, trainers)
                    if self._screen is None and not snapshot.directory_answers:
                        trouble = "the swarm's directory does not answer"
                except TemporaryError as error:
                    trouble = str(error)
                if trouble not in ("", said):
                    self.say(f"no news: {trouble}")
                await asyncio.sleep(_REFRESH_SECONDS)

    def show(self, snapshot: Snapshot | None, trainers: list[Child]) -> None:
        """Show a snapshot (None before the first one), and report the end of each trainer once."""
        for child in trainers:
            if child.exit_code is not None and child.name not in self._ended:
                self._ended[child.name] = time.time()
                if child.exit_code != 0 or not self._draining:
                    self.say(f"{child.name} {child.ending}")
        done = [view for view in reversed(snapshot.rounds) if view.committed] if snapshot is not None else []
        new = [view for view in done if view.round >= self._shown_rounds]
        if new:
            self._shown_rounds = new[-1].round + 1
        if self._screen is not None:
            self._draw(self._screen, snapshot, trainers)
        elif snapshot is not None and new:
            state = present_state(snapshot.headline, self._held_out)
            self.say(f"{self._elapsed()}  {rounds_line(new, snapshot.peers, state)}")

    def _draw(self, screen: Screen, snapshot: Snapshot | None, trainers: list[Child]) -> None:
        if snapshot is not None:
            self._swarm = [*swarm_lines(snapshot, screen.width), Text()]
        held_out = f"held-out {self._held_out:.2f}" if self._held_out is not None else ""
        lines = [title_line(["p2ptrain up", self._progress(), held_out], screen.width), *self._swarm]
        room = max(2, screen.height - len(lines) - 3)
        over = all(child.exit_code is not None for child in trainers)
        footer = "" if over else _DRAINING if self._draining else _FOOTER
        screen.draw([*lines, *table_lines(self._table_rows(snapshot, trainers), screen.width, room)], footer)

    def _elapsed(self) -> str:
        return human_time(time.monotonic() - self._started)

    def _progress(self) -> str:
        minutes = f" of {human_time(self._goal.minutes * 60)}" if self._goal.minutes else ""
        rounds = f" of {self._goal.rounds}" if self._goal.rounds else ""
        return f"{self._elapsed()}{minutes}  round {self._shown_rounds}{rounds}"

    def _table_rows(self, snapshot: Snapshot | None, trainers: list[Child]) -> list[tuple[str, ...]]:
        """Return the rows of other peers, then of the children; an ended one keeps its numbers until a new start."""
        children, back = {child.name: child for child in trainers}, set()
        if snapshot is not None and snapshot.peers:
            rows = [(peer.record.name, peer_row(peer, len(snapshot.stages))) for peer in snapshot.peers]
            self._others = [row for name, row in rows if name not in children]
            self._ours |= {name: row for name, row in rows if name in children}
            started = {peer.record.name: peer.record.started_at for peer in snapshot.peers}
            back = {name for name, ended in self._ended.items() if started.get(name, 0) > ended}
        shown = sorted(self._others)
        for name, child in children.items():
            row = self._ours.get(name, (name, "starting", *[""] * (len(COLUMNS) - 2)))
            state = row[_STATE] if name in back else self._child_state(child, row[_STATE])
            shown.append((*row[:_STATE], state, *row[_STATE + 1 :]))
        return shown

    def _child_state(self, child: Child, state: str) -> str:
        code = child.exit_code
        if code is None:
            return "draining" if self._draining else state
        return "ended" if code == 0 else "killed" if code < 0 else f"ended ({code})"


def newest_held_out_loss(run_dir: Path, trainers: Iterable[Child]) -> float | None:
    """Return the newest held-out loss of the running trainers, in nats; None without a measurement.

    Trainers that have ended may be far behind and are ignored.
    """
    running = [child.name for child in trainers if child.exit_code is None]
    found = [_held_out_loss(run_dir / name / "metrics.jsonl") for name in running]
    return max((known for known in found if known is not None), default=(0, None))[1]


def _held_out_loss(path: Path) -> tuple[int, float] | None:
    """Return the round and loss of the newest measurement in the tail of a metrics file."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - _METRICS_TAIL_BYTES))
            lines = file.read().splitlines()
    except OSError:
        return None
    for line in reversed(lines):
        if b'"held_out"' in line:
            try:
                values = json.loads(line)
                return int(values["round"]), float(values["loss"])
            except (ValueError, KeyError, TypeError):
                continue  # The line is cut off by the tail or by a write in progress, or not finite.
    return None
