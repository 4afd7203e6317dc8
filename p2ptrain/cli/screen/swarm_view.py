"""What ``status --watch`` shows: a swarm and its peers, drawn again as they change; one block a change elsewhere."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.text import Text

from p2ptrain.cli.screen.lines import swarm_lines, title_line
from p2ptrain.cli.screen.looking import Remembering, watch_over
from p2ptrain.cli.screen.screen import Screen
from p2ptrain.cli.screen.table import COLUMNS, peer_row, plain_table, table_lines
from p2ptrain.errors import P2PTrainError
from p2ptrain.manifest import Manifest
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.node.progress import round_goal, tokens_in_round
from p2ptrain.status.coverage import UNUSUAL
from p2ptrain.status.formats import utc
from p2ptrain.status.views import Snapshot

if TYPE_CHECKING:
    from p2ptrain.node.observe import Observer

WATCH_SECONDS = 2.0
ASTRAY = "astray"
PLAIN_WIDTH = 120
FOOTER = "Ctrl-C ends this"
_STATE = COLUMNS.index("state")


async def watch_swarm(observer: Observer, link: SwarmLink) -> None:
    """Keep showing a swarm on standard output until cancelled.

    Raises:
        BootstrapError: The swarm's directory does not answer at the first look.
    """
    await observer.peers()
    source = Remembering(observer)
    async with watch_over(source, observer, link) as watch:
        if not Screen.can_draw(sys.stdout):
            before = ""
            while True:
                snapshot = await watch.look()
                if (now := what_changes(snapshot, source.records)) != before:
                    print(block(snapshot, source.records), flush=True)
                    before = now
                await asyncio.sleep(WATCH_SECONDS)
        with Screen(sys.stdout) as screen:
            while True:
                try:
                    snapshot = await watch.look()
                    screen.draw(frame(snapshot, source.records, observer.manifest, screen.width, screen.height), FOOTER)
                except P2PTrainError as error:
                    screen.say(f"no news: {error}")
                await asyncio.sleep(WATCH_SECONDS)


def frame(snapshot: Snapshot, records: Sequence[PeerRecord], manifest: Manifest, width: int, height: int) -> list[Text]:
    """The lines of a terminal, one less than ``height``, for a footer."""
    in_round = tokens_in_round(records, snapshot.headline.round, round_goal(manifest))
    lines = [title_line([f"swarm {snapshot.swarm.name}", _num_peers(snapshot)], width)]
    lines += swarm_lines(snapshot, in_round, width)
    room = max(2, height - len(lines) - len(("blank", "header", "rule", "footer")))
    return [*lines, Text(), *table_lines(peer_rows(snapshot, records, room), width, room)]


def peer_rows(snapshot: Snapshot, records: Sequence[PeerRecord], room: int) -> list[tuple[str, ...]]:
    """A row for each peer by name; where there is not room for all, first those that deserve a look."""
    astray = {peer.peer for peer in snapshot.peers if peer.agrees is False}

    def by_name(record: PeerRecord) -> tuple[str, str]:
        return (record.name.casefold(), record.peer)

    def by_interest(record: PeerRecord) -> tuple[bool, bool, tuple[str, str]]:
        return (record.peer not in astray, record.state not in UNUSUAL, by_name(record))

    rows = []
    for record in sorted(records, key=by_name if len(records) <= room else by_interest):
        row = peer_row(record, len(snapshot.stages))
        rows.append((*row[:_STATE], ASTRAY, *row[_STATE + 1 :]) if record.peer in astray else row)
    return rows


def block(snapshot: Snapshot, records: Sequence[PeerRecord]) -> str:
    """The same as plain text, with all peers, the time, and an empty line at its end."""
    lines = [line.plain for line in swarm_lines(snapshot, (0, 0), PLAIN_WIDTH)]
    title = f"swarm {snapshot.swarm.name}: {_num_peers(snapshot)}, {utc(snapshot.at)}"
    return "\n".join([title, *lines, plain_table(peer_rows(snapshot, records, len(records))), ""])


def what_changes(snapshot: Snapshot, records: Sequence[PeerRecord]) -> str:
    """What a new block is worth: health, coverage, who is there, states, rounds. Traffic and speed always change."""
    headline = snapshot.headline
    stages = [(stage.hosts, stage.syncing) for stage in snapshot.stages]
    peers = sorted((record.peer, record.state, record.round) for record in records)
    return repr((headline.health, headline.summary, headline.reasons, stages, peers))


def _num_peers(snapshot: Snapshot) -> str:
    return f"{len(snapshot.peers)} peer{'s' if len(snapshot.peers) != 1 else ''}"
