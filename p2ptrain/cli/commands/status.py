"""``p2ptrain status LINK``

Show whether a swarm is healthy, and its peers: what they do, which round they are in, how fast they are and whether
their state agrees. Of a model that is cut into stages also who hosts each, which one is the slowest, and what losing a
host would break. With --watch also who covers the model, how far the round in progress is, and traffic.
It reads the swarm's directory only, and takes no part.
"""

from __future__ import annotations

import argparse


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="print JSON")
    form.add_argument("--watch", action="store_true", help="keep showing it until Ctrl-C")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.network.link import SwarmLink

    link = SwarmLink.parse(arguments.link)
    from p2ptrain.cli.running import run_async
    from p2ptrain.cli.screen.swarm_view import show_swarm

    run_async(show_swarm(link, as_json=arguments.json, watch=arguments.watch))
    return 0
