"""``p2ptrain members LINK``

Show the peers that a swarm admits, by their records: how each came in, its role, its round and since when it runs. Then
those that say that they belong to it and are not admitted, and why not.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from p2ptrain.network.link import SwarmLink


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.running import run_async
    from p2ptrain.network.link import SwarmLink

    print(run_async(_table(SwarmLink.parse(arguments.link))))
    return 0


async def _table(link: SwarmLink) -> str:
    from p2ptrain.node.observe import observing

    async with observing(link) as observer:
        members = await observer.peers()
        admission, strangers = observer.peer.admission, observer.peer.presence.book.strangers
        found = [(record, admission.way_in(record.peer)) for record in members]
        found += [(record, f"not admitted: {reason}") for record, reason in strangers.values()]
    from p2ptrain.status.formats import LAST_SECOND

    rows = [("peer", "name", "role", "round", "since", "admitted by")]
    for record, words in found:
        since = time.strftime("%Y-%m-%d %H:%M", time.localtime(min(record.started_at, LAST_SECOND)))
        rows.append((record.peer, record.name, record.role, str(record.round), since, words))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
