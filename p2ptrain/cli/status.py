"""``p2ptrain status LINK``

Show the peers of a swarm: what they do, which round they are in, how fast they are and whether their state agrees.
With --watch also whether the swarm is healthy, who covers the model, how far the round in progress is, and traffic.
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
    from p2ptrain.network.records import PeerRecord


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of ``p2ptrain status``."""
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--watch", action="store_true", help="keep showing it, with its health, until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    """Print the swarm's peers."""
    from p2ptrain.cli.running import run_async
    from p2ptrain.network.link import SwarmLink

    run_async(_show(SwarmLink.parse(arguments.link), as_json=arguments.json, watch=arguments.watch))
    return 0


async def _show(link: SwarmLink, *, as_json: bool, watch: bool) -> None:
    import tempfile
    from pathlib import Path

    from p2ptrain.node.observe import Observer

    with tempfile.TemporaryDirectory(prefix="p2ptrain-status-") as folder:
        async with Observer(link, Path(folder)) as observer:
            if watch:
                from p2ptrain.cli.swarm_view import watch_swarm

                await watch_swarm(observer, link)
            else:
                print(_rendered(await observer.peers(), observer.manifest.name, link, as_json=as_json))


def _title(name: str, peers: int) -> str:
    return f"swarm {name}: {peers} peer{'s' if peers != 1 else ''}"


def _rendered(records: list[PeerRecord], name: str, link: SwarmLink, *, as_json: bool) -> str:
    from p2ptrain.cli.table import peer_row, plain_table, record_values

    if as_json:
        values = {"swarm": name, "digest": link.digest.hex(), "peers": [record_values(record) for record in records]}
        return json.dumps(values, indent=2)
    width = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return f"{_title(name, len(records))}\n{plain_table([peer_row(record) for record in records], width)}"
