"""The output of ``status --watch``: a live view on a terminal, one block of text per change elsewhere."""

from __future__ import annotations

import asyncio
import sys
from typing import TYPE_CHECKING

from rich.text import Text

from p2ptrain.cli.screen.lines import counted, swarm_lines, title_line
from p2ptrain.cli.screen.looking import Looking
from p2ptrain.cli.screen.screen import Screen
from p2ptrain.cli.screen.table import COLUMNS, peer_row, plain_table, table_lines
from p2ptrain.errors import P2PTrainError
from p2ptrain.network.link import SwarmLink
from p2ptrain.status.coverage import state_of, urgency
from p2ptrain.status.formats import utc
from p2ptrain.status.views import Snapshot

if TYPE_CHECKING:
    from p2ptrain.node.observe import Observer

WATCH_SECONDS = 2.0
PLAIN_WIDTH = 120
FOOTER = "Ctrl-C ends this"
_STATE = COLUMNS.index("state")


async def watch_swarm(observer: Observer, link: SwarmLink) -> None:
    """Show a swarm on standard output until cancelled; raise if the directory does not answer the first query."""
    await observer.peers()
    looking = Looking(observer.look, observer.peer.signed, link)
    if not Screen.can_draw(sys.stdout):
        before = ""
        while True:
            snapshot = await looking.look()
            if (now := what_changes(snapshot)) != before:
                print(block(snapshot), flush=True)
                before = now
            await asyncio.sleep(WATCH_SECONDS)
    with Screen(sys.stdout) as screen:
        while True:
            try:
                snapshot = await looking.look()
                screen.draw(frame(snapshot, screen.width, screen.height), FOOTER)
            except P2PTrainError as error:
                screen.say(f"no news: {error}")
            await asyncio.sleep(WATCH_SECONDS)


def frame(snapshot: Snapshot, width: int, height: int) -> list[Text]:
    """Return the lines of a terminal, with one line left for a footer."""
    lines = [title_line([f"swarm {snapshot.swarm.name}", counted(len(snapshot.peers), "peer")], width)]
    lines += swarm_lines(snapshot, width)
    room = max(2, height - len(lines) - len(("blank", "header", "rule", "footer")))
    return [*lines, Text(), *table_lines(peer_rows(snapshot, room), width, room)]


def peer_rows(snapshot: Snapshot, room: int) -> list[tuple[str, ...]]:
    """Return a row for each peer, by name; the most urgent first if there are more than ``room``."""
    rows = []
    for peer in snapshot.peers if len(snapshot.peers) <= room else sorted(snapshot.peers, key=urgency):
        row = peer_row(peer, len(snapshot.stages))
        rows.append((*row[:_STATE], state_of(peer), *row[_STATE + 1 :]))
    return rows


def block(snapshot: Snapshot) -> str:
    """Return a snapshot as plain text, with all peers, the time, and an empty line at the end."""
    lines = [line.plain for line in swarm_lines(snapshot, PLAIN_WIDTH, with_progress=False)]
    title = f"swarm {snapshot.swarm.name}: {counted(len(snapshot.peers), 'peer')}, {utc(snapshot.at)}"
    return "\n".join([title, *lines, plain_table(peer_rows(snapshot, len(snapshot.peers))), ""])


def what_changes(snapshot: Snapshot) -> str:
    """Return a key that changes with health, hosts, peers, states and rounds, but not with traffic and speed."""
    headline = snapshot.headline
    stages = [(stage.hosts, stage.syncing) for stage in snapshot.stages]
    peers = [(peer.record.peer, peer.record.state, peer.record.round) for peer in snapshot.peers]
    return repr((headline.health, headline.summary, headline.reasons, stages, sorted(peers)))
