"""``p2ptrain status LINK``

Show whether a swarm is healthy, and its peers: what they do, which round they are in, how fast they are and whether
their state agrees. Of a model that is cut into stages also who hosts each, which one is the slowest, and what losing a
host would break. With --watch also who covers the model, how far the round in progress is, and traffic.
It reads the swarm's directory only, and takes no part.
With --mine it shows what a peer of yours gave over all of its runs, and whether it rests, and why.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict
from pathlib import Path

from p2ptrain.cli.commands.guest.runs import RUNS, given
from p2ptrain.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", nargs="?", help="the swarm link, 'p2ptrain://…', in quotes")
    parser.add_argument(
        "--mine", type=Path, nargs="?", const=RUNS, metavar="FOLDER",
        help="show what the peers below a folder gave (default: ./runs)",
    )  # fmt: skip
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--watch", action="store_true", help="keep showing it until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    if (arguments.link is None) == (arguments.mine is None):
        raise UsageError("give a link, or --mine for your own peers; see 'p2ptrain status --help'")
    if arguments.mine is not None:
        if arguments.watch:
            raise UsageError("--mine looks once: leave out --watch")
        return show_mine(arguments.mine, as_json=arguments.json)
    from p2ptrain.network.link import SwarmLink

    link = SwarmLink.parse(arguments.link)
    from p2ptrain.cli.running import run_async
    from p2ptrain.cli.screen.swarm_view import show_swarm

    run_async(show_swarm(link, as_json=arguments.json, watch=arguments.watch))
    return 0


def show_mine(run_dir: Path, *, as_json: bool) -> int:
    """Print what peers of this machine gave, and what they do now; raise `ConfigError` if there are none."""
    from p2ptrain.status.formats import human_bytes, human_count

    found = []
    for folder, totals, answer in given(run_dir):
        now = {"state": answer.state if answer else "not running", "paused": answer.paused if answer else ""}
        found.append({"run_dir": str(folder), **asdict(totals), **now})
        if not as_json:
            rests = f", paused: {now['paused']}" if now["paused"] else ""
            print(f"{folder} ({totals.name}): {now['state']}{rests}")
            print(
                f"  gave {human_count(totals.tokens)} tokens in {totals.rounds} rounds, {totals.seconds / 3600:.1f} h,"
                f" {human_bytes(totals.bytes_sent)} sent, in {totals.runs} runs"
            )
    if as_json:
        print(json.dumps(found, indent=2))
    return 0
