"""What ``p2ptrain up`` shows while it runs: a live table on a terminal, one line for each new round elsewhere."""

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
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from p2ptrain.cli.table import (
    COLUMNS,
    committed_rounds,
    human_time,
    most_tokens,
    peer_row,
    peer_table,
    present_state,
    rounds_line,
    with_footer,
)
from p2ptrain.errors import TemporaryError
from p2ptrain.monitor.rate import TokenRate

if TYPE_CHECKING:
    from rich.live import Live

    from p2ptrain.cli.supervise import Child
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.network.records import PeerRecord

_REFRESH_SECONDS = 1.0
_METRICS_TAIL_BYTES = 64 * 1024
_STATE = COLUMNS.index("state")
_DRAINING = "draining: trainers finish their step and save their state"


def stop_on_signals(end_at_once: Callable[[], None]) -> asyncio.Event:
    """Take over SIGINT and SIGTERM: the first sets the event that is returned, the second calls ``end_at_once``."""
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
    """When a swarm is done: after so many minutes, or when it has committed so many rounds; 0 for no such limit."""

    minutes: float = 0.0
    rounds: int = 0


class View:
    """Shows a swarm on a stream; a context manager, so that a terminal is left as it was."""

    def __init__(self, stream: TextIO, goal: Goal) -> None:
        self._stream = stream
        self._goal = goal
        self._live: Live | None = None
        self._started = time.monotonic()
        self._draining = False
        self._shown_rounds = 0
        self._rate = TokenRate()
        self._state = ""
        self._held_out: float | None = None
        self._others: list[tuple[str, ...]] = []
        self._ours: dict[str, tuple[str, ...]] = {}
        self._ended: set[str] = set()

    def __enter__(self) -> View:
        if self._stream.isatty():
            from rich.console import Console
            from rich.live import Live

            self._live = Live(console=Console(file=self._stream), auto_refresh=False)
            self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._live is not None:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print a line, above the live table if there is one."""
        if self._live is not None:
            self._live.console.print(text, markup=False, highlight=False, soft_wrap=True)
        else:
            print(text, file=self._stream, flush=True)

    def drain(self, trainers: list[Child]) -> None:
        """From now on trainers that still run are on their way out."""
        self._draining = True
        if self._live is None and any(child.exit_code is None for child in trainers):
            self.say(_DRAINING)

    async def follow(self, link: SwarmLink, run_dir: Path, trainers: list[Child]) -> None:
        """Keep showing the swarm's records until cancelled; a directory that does not answer is asked again.

        The time that is shown counts from here.
        """
        self._started = time.monotonic()
        if self._live is None:
            self.say(f"starting {len(trainers)} trainer{'s' if len(trainers) != 1 else ''}")
        self.show([], trainers)
        # It takes seconds, in which signals have to be answered.
        await asyncio.to_thread(import_module, "p2ptrain.node.observe")
        from p2ptrain.node.observe import Observer

        async with Observer(link, run_dir) as observer:
            while True:
                try:
                    records = await observer.peers()
                    self._held_out = newest_held_out_loss(run_dir, trainers) or self._held_out
                    self.show(records, trainers)
                except TemporaryError as error:
                    self.say(f"no news: {error}")
                await asyncio.sleep(_REFRESH_SECONDS)

    def show(self, records: list[PeerRecord], trainers: list[Child]) -> None:
        """Show these records, and say once of each trainer that it has ended."""
        if (tokens := most_tokens(records)) is not None:
            self._rate.update(time.monotonic(), tokens)
        for child in trainers:
            if child.exit_code is not None and child.name not in self._ended:
                self._ended.add(child.name)
                if child.exit_code != 0 or not self._draining:
                    self.say(f"{child.name} {child.ending}")
        if records:
            self._state = present_state(records, self._rate.tokens_per_second, self._held_out)
        new = committed_rounds(records, self._shown_rounds)
        if new:
            self._shown_rounds = new[-1].round + 1
        if self._live is not None:
            title = "  ".join(filter(None, ["p2ptrain up", self._progress(), self._state]))
            table = peer_table(self._table_rows(records, trainers), self._live.console.width, title)
            over = all(child.exit_code is not None for child in trainers)
            footer = "" if over else _DRAINING if self._draining else "Ctrl-C ends it in good order, twice at once"
            self._live.update(with_footer(table, footer), refresh=True)
        elif new:
            self.say(f"{self._elapsed()}  {rounds_line(new, records, self._state)}")

    def _elapsed(self) -> str:
        return human_time(time.monotonic() - self._started)

    def _progress(self) -> str:
        minutes = f" of {human_time(self._goal.minutes * 60)}" if self._goal.minutes else ""
        rounds = f" of {self._goal.rounds}" if self._goal.rounds else ""
        return f"{self._elapsed()}{minutes}  round {self._shown_rounds}{rounds}"

    def _table_rows(self, records: list[PeerRecord], trainers: list[Child]) -> list[tuple[str, ...]]:
        """Peers that are not ours, then ours; a child keeps its last numbers when it has ended."""
        children = {child.name: child for child in trainers}
        if records:
            self._others = [peer_row(record) for record in records if record.name not in children]
        self._ours |= {record.name: peer_row(record) for record in records if record.name in children}
        rows = sorted(self._others)
        for name, child in children.items():
            row = self._ours.get(name, (name, "starting", *[""] * (len(COLUMNS) - 2)))
            rows.append((*row[:_STATE], self._child_state(child, row[_STATE]), *row[_STATE + 1 :]))
        return rows

    def _child_state(self, child: Child, state: str) -> str:
        if child.exit_code is not None:
            return (
                "ended" if child.exit_code == 0 else "killed" if child.exit_code < 0 else f"ended ({child.exit_code})"
            )
        return "draining" if self._draining else state


def newest_held_out_loss(run_dir: Path, trainers: Iterable[Child]) -> float | None:
    """What a trainer measured last on held-out text, in nats, and in the latest round; None if nothing new is known.

    Those that have ended do not count: they may be far behind.
    """
    running = [child.name for child in trainers if child.exit_code is None]
    found = [_held_out_loss(run_dir / name / "metrics.jsonl") for name in running]
    return max((known for known in found if known is not None), default=(0, None))[1]


def _held_out_loss(path: Path) -> tuple[int, float] | None:
    """The round and loss of the newest measurement near the end of a file of metrics."""
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
                continue  # cut off at the beginning of the tail or while it is written, or not finite
    return None
