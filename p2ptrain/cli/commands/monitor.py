"""``p2ptrain monitor LINK``

Serve a web page that shows how a swarm is doing, now and over time: health, peers, rounds, groups, alerts, and how to
join. It reads what peers publish, takes no part, and can change nothing. JSON is under /api/v1 (described by
/api/v1/openapi.json), Prometheus metrics under /metrics.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from urllib.parse import urlsplit

from p2ptrain.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    parser.add_argument("--host", default="127.0.0.1", help="where to serve at (default 127.0.0.1: this machine only)")
    parser.add_argument(
        "--host-name", action="append", default=[], metavar="NAME",
        help="answer also under this name, such as page.example.org (default: IP addresses, localhost); repeatable",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8080, help="port to serve at (default 8080; 0 takes a free one)")
    parser.add_argument("--db", type=Path, metavar="FILE", help="keep history here (default: in memory, until it ends)")
    parser.add_argument("--webhook", metavar="URL", help="send alerts there, as JSON, when they begin and end")
    parser.add_argument(
        "--stall-minutes", type=float, default=10.0, metavar="N",
        help="alert when no round was committed for so long (default 10)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.port < 65536:
        raise UsageError(f"--port {arguments.port}: give a number from 0 to 65535")
    if not arguments.stall_minutes > 0:
        raise UsageError(f"--stall-minutes {arguments.stall_minutes}: give a number above 0")
    if arguments.webhook and not _is_web_address(arguments.webhook):
        raise UsageError(f"--webhook {arguments.webhook}: give a URL that starts with http:// or https://")
    from p2ptrain.network.http_server import host_name
    from p2ptrain.network.link import SwarmLink

    for name in arguments.host_name:
        if not name or host_name(name) != name.lower():
            raise UsageError(f"--host-name {name}: give a name without http:// and port, such as page.example.org")
    link = SwarmLink.parse(arguments.link)
    from p2ptrain.cli.running import run_async
    from p2ptrain.monitor.serve import serve

    run_async(serve(
        link, arguments.host, arguments.port, names=arguments.host_name, db=arguments.db, webhook=arguments.webhook,
        stall_seconds=60 * arguments.stall_minutes,
        on_ready=lambda url: print(f"status page: {url}  (Ctrl-C ends it)", flush=True),
    ))  # fmt: skip
    return 0


def _is_web_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # The port is not a number, or an IPv6 address is incomplete.
        return False
