"""The output of ``status``: JSON or text; with ``--watch`` a live view, or a block of text per change in a pipe."""

from __future__ import annotations

import asyncio
import json
import shutil
import sys
from typing import NoReturn

from rich.text import Text

from p2ptrain.cli.screen.lines import (
    counted,
    health,
    held_out_parts,
    privacy_parts,
    reasons,
    serving_parts,
    swarm_lines,
    title_line,
)
from p2ptrain.cli.screen.screen import Screen
from p2ptrain.cli.screen.table import peer_row, plain_table, printable, risk_lines, stage_lines, table_lines
from p2ptrain.errors import BootstrapError, P2PTrainError
from p2ptrain.network.link import SwarmLink
from p2ptrain.status.formats import utc
from p2ptrain.status.serving import serving_view, since_their_start
from p2ptrain.status.stages import state_of, urgency
from p2ptrain.status.tracker import Looking
from p2ptrain.status.views import Snapshot, plain

WATCH_SECONDS = 2.0
PLAIN_WIDTH = 120
ANY_WIDTH = 10_000
"""Line width without a terminal; wide enough that no line is wrapped."""
FOOTER = "Ctrl-C ends this"


async def show_swarm(link: SwarmLink, *, as_json: bool, watch: bool) -> None:
    """Show a swarm on standard output; raise if its directory does not answer."""
    from p2ptrain.node.observe import observing

    async with observing(link) as observer:
        await observer.peers()
        looking = Looking(observer.look, observer.peer.signed, link)
        if watch:
            await _watch(looking)
        snapshot = await looking.look()
        print(json_of(snapshot) if as_json else rendered(snapshot))


async def look_once(link: SwarmLink, seconds: float) -> Snapshot:
    """Return a swarm as it is now; raise `BootstrapError` if it does not answer within this time."""
    from p2ptrain.node.observe import observing

    try:
        async with asyncio.timeout(seconds), observing(link) as observer:
            await observer.peers()
            return await Looking(observer.look, observer.peer.signed, link).look()
    except TimeoutError as error:
        raise BootstrapError(
            f"the swarm does not answer within {seconds:.0f} s: does its bootstrap peer run?"
        ) from error


def json_of(snapshot: Snapshot) -> str:
    """Return the output of ``status --json``: parts of ``/api/v1/snapshot``, with the peers' addresses."""
    headline = snapshot.headline
    values = {
        "swarm": snapshot.swarm.name,
        "digest": snapshot.swarm.digest,
        "health": headline.health,
        "summary": headline.summary,
        "reasons": headline.reasons,
        "stages": snapshot.stages,
        "missing": snapshot.swarm.missing,
        "evaluation": headline.evaluation,
        "peers": [{**plain(peer.record), "addresses": peer.record.addresses} for peer in snapshot.peers],
    }
    return json.dumps(values, indent=2, default=plain)


def rendered(snapshot: Snapshot, width: int | None = None) -> str:
    """Return the output of ``status``; a ``width`` of None takes the terminal's, or no limit without one."""
    stages, headline, missing = snapshot.stages, snapshot.headline, snapshot.swarm.missing
    if width is None and sys.stdout.isatty():
        width = shutil.get_terminal_size().columns
    lines = [f"swarm {snapshot.swarm.name}: {counted(len(snapshot.peers), 'peer')}", health(headline).plain]
    lines += [line.plain for line in reasons(headline, width or ANY_WIDTH, len(headline.reasons))]
    if len(stages) > 1:
        lines += [line.plain for line in stage_lines(stages, width)]
        if not any(stage.risk for stage in stages):  # Risks are among the reasons already.
            lines += risk_lines(stages, width)
        lines += [*([printable(missing)] if missing else []), ""]
    records = [peer.record for peer in snapshot.peers]
    # A single snapshot has no rates: these are totals and percentiles since each peer's start.
    if served := serving_parts(serving_view(records, since_their_start(records))):
        lines.append("serving: " + ", ".join(served))
    if found := held_out_parts(snapshot):
        lines.append("held out: " + ", ".join(found))
    if found := privacy_parts(snapshot):
        lines.append("privacy: " + ", ".join(found))
    return "\n".join([*lines, plain_table([peer_row(peer, len(stages)) for peer in snapshot.peers], width)])


async def _watch(looking: Looking) -> NoReturn:
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
    peers = snapshot.peers if len(snapshot.peers) <= room else sorted(snapshot.peers, key=urgency)
    return [peer_row(peer, len(snapshot.stages), state_of(peer)) for peer in peers]


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
