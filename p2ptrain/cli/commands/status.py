"""``p2ptrain status LINK``

Show whether a swarm is healthy, and its peers: what they do, which round they are in, how fast they are and whether
their state agrees. Of a model that is cut into stages also who hosts each, which one is the slowest, and what losing a
host would break. With --watch also who covers the model, how far the round in progress is, and traffic.
It reads the swarm's directory only, and takes no part.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.status.views import Snapshot

ANY_WIDTH = 10_000
"""Line width without a terminal; wide enough that no line is wrapped."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--watch", action="store_true", help="keep showing it until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.running import run_async
    from p2ptrain.network.link import SwarmLink

    run_async(_show(SwarmLink.parse(arguments.link), as_json=arguments.json, watch=arguments.watch))
    return 0


async def _show(link: SwarmLink, *, as_json: bool, watch: bool) -> None:
    from p2ptrain.cli.screen.looking import Looking
    from p2ptrain.node.observe import observing

    async with observing(link) as observer:
        if watch:
            from p2ptrain.cli.screen.swarm_view import watch_swarm

            await watch_swarm(observer, link)
            return
        await observer.peers()
        snapshot = await Looking(observer.look, observer.peer.signed, link).look()
        print(json_of(snapshot) if as_json else rendered(snapshot))


def json_of(snapshot: Snapshot) -> str:
    """Return the output of ``status --json``: parts of ``/api/v1/snapshot``, with the peers' addresses."""
    from p2ptrain.status.views import plain

    headline = snapshot.headline
    values = {
        "swarm": snapshot.swarm.name,
        "digest": snapshot.swarm.digest,
        "health": headline.health,
        "summary": headline.summary,
        "reasons": headline.reasons,
        "stages": snapshot.stages,
        "missing": snapshot.swarm.missing,
        "peers": [{**plain(peer.record), "addresses": peer.record.addresses} for peer in snapshot.peers],
    }
    return json.dumps(values, indent=2, default=plain)


def rendered(snapshot: Snapshot, width: int | None = None) -> str:
    """Return the output of ``status``; a ``width`` of None takes the terminal's, or no limit without one."""
    from p2ptrain.cli.screen.lines import counted, health, reasons, serving_parts
    from p2ptrain.cli.screen.table import peer_row, plain_table, printable, risk_lines, stage_lines
    from p2ptrain.status.serving import serving_view, since_their_start

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
    return "\n".join([*lines, plain_table([peer_row(peer, len(stages)) for peer in snapshot.peers], width)])
