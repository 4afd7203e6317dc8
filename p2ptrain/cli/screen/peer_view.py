"""The output of ``join``, ``peer`` and ``seed`` on a terminal: the peer below, its log above."""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from dataclasses import replace
from typing import TYPE_CHECKING

from p2ptrain.cli.screen.lines import job_line, peer_lines
from p2ptrain.cli.screen.screen import Screen
from p2ptrain.errors import P2PTrainError
from p2ptrain.network.records.record import Look
from p2ptrain.node.process import StopSignals
from p2ptrain.node.reports.jobs import Job
from p2ptrain.status.progress import PeerProgress, progress_of
from p2ptrain.status.tracker import Looking
from p2ptrain.status.views import Snapshot
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer

logger = logging.getLogger(__name__)

REFRESH_SECONDS = 0.5
LOOK_SECONDS = 2.0
LOOK_SHARE = 50
"""The pause after a snapshot is at least this many times its duration."""
FOOTER, LAST_FOOTER = "Ctrl-C leaves, twice at once", "Ctrl-C ends it at once"


class PeerScreen:
    """An asynchronous context manager that shows one peer, from before its start until after its end.

    Attributes:
        signals: Stop signals for the peer; they restore the terminal before an immediate exit.
    """

    def __init__(self, name: str, screen: Screen) -> None:
        self.screen = screen
        self.signals = StopSignals(screen.leave)
        self._name = name
        self._began = time.monotonic()
        self._peer: Peer | None = None
        self._last: PeerProgress | None = None
        self._snapshot: Snapshot | None = None
        self._tasks = Tasks()

    def follow(self, peer: Peer) -> None:
        """Show this peer from now on; must run on the event loop."""
        self._peer = peer
        self._tasks.keep(lambda: self._look(peer), "the look at the swarm")

    async def __aenter__(self) -> PeerScreen:
        self.screen.__enter__()
        self._tasks.keep(self._refresh, "the live view")
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._tasks.close()
        self.draw(is_over=True)
        self.screen.leave()

    async def _refresh(self) -> None:
        while True:
            self.draw()
            await asyncio.sleep(REFRESH_SECONDS)

    async def _look(self, peer: Peer) -> None:
        from p2ptrain.node.observe import known_to

        async def own_records() -> Look:
            return known_to(peer, peer.presence.directory_answers)

        looking = Looking(own_records, peer.signed, peer.network.link, peer.identity.peer_id)
        while True:
            started = time.monotonic()
            try:
                self._snapshot = await looking.look()
            except P2PTrainError as error:
                logger.debug("a look at the swarm failed: %s", error)
            await asyncio.sleep(max(LOOK_SECONDS, LOOK_SHARE * (time.monotonic() - started)))

    def draw(self, is_over: bool = False) -> None:
        width, seconds = self.screen.width, time.monotonic() - self._began
        if self._peer is None:
            job = Job("meeting the swarm", "", 0, 0, seconds)
            self.screen.draw([] if is_over else [job_line(job, width)], "" if is_over else "Ctrl-C ends it")
            return
        if not is_over or self._last is None:
            self._last = progress_of(self._peer, self.signals.requested.is_set())
        if is_over:
            ended = replace(self._last.record, state="ended")
            self._last = replace(self._last, jobs=(), is_leaving=False, record=ended)
        lines = peer_lines(self._last, seconds, self._peer.manifest.name, self._snapshot, width)
        self.screen.draw(lines, "" if is_over else LAST_FOOTER if self._last.is_leaving else FOOTER)


def view_for(name: str, log_format: str) -> PeerScreen | None:
    """Return a view on standard error; None if it takes only log lines."""
    if log_format == "json" or not Screen.can_draw(sys.stderr):
        return None
    return PeerScreen(name, Screen(sys.stderr))
