"""What ``p2ptrain up`` shows while it runs: a live table on a terminal, one line a round elsewhere."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, TextIO

from p2ptrain.cli.table import COLUMNS, peer_row, peer_table, round_lines
from p2ptrain.errors import TemporaryError

if TYPE_CHECKING:
    from rich.live import Live

    from p2ptrain.cli.supervise import Child
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.network.records import PeerRecord

_REFRESH_SECONDS = 1.0


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


class View:
    """Shows a swarm on a stream; a context manager, so that a terminal is left as it was."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._live: Live | None = None
        self._shown_round = 0
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

    async def follow(self, link: SwarmLink, run_dir: Path, trainers: list[Child]) -> None:
        """Keep showing the swarm's records until cancelled; a directory that does not answer is asked again."""
        from p2ptrain.node.observe import Observer

        async with Observer(link, run_dir) as observer:
            while True:
                try:
                    self.show(await observer.peers(), trainers)
                except TemporaryError as error:
                    self.say(f"no news: {error}")
                await asyncio.sleep(_REFRESH_SECONDS)

    def show(self, records: list[PeerRecord], trainers: list[Child]) -> None:
        """Show these records, and say once of each trainer that it has ended."""
        for child in trainers:
            if child.exit_code is not None and child.name not in self._ended:
                self._ended.add(child.name)
                self.say(f"{child.name} ended with code {child.exit_code}")
        if self._live is not None:
            self._live.update(peer_table(self._rows(records, trainers), "p2ptrain up"), refresh=True)
            return
        for number, line in round_lines(records, self._shown_round):
            self._shown_round = number
            self.say(line)

    def _rows(self, records: list[PeerRecord], trainers: list[Child]) -> list[tuple[str, ...]]:
        ordered = sorted(records, key=lambda record: (record.role != "bootstrap", record.name, record.peer))
        rows = [peer_row(record) for record in ordered if record.name not in self._ended]
        known = {record.name for record in records}
        for child in trainers:
            if child.name in self._ended or child.name not in known:
                state = "starting" if child.exit_code is None else f"ended ({child.exit_code})"
                rows.append((child.name, state, *[""] * (len(COLUMNS) - 2)))
        return rows
