"""``p2ptrain serve LINK``

Serve OpenAI's API over a swarm's model: /v1/chat/completions, /v1/completions and /v1/models, with a page to chat at /,
Prometheus metrics under /metrics, and /health. This process computes nothing but a draft's guesses: the swarm's hosts
do.
"""

from __future__ import annotations

import argparse
import asyncio
from pathlib import Path
from typing import Any

from p2ptrain.cli.commands.serving.talking import add_model_arguments
from p2ptrain.errors import TemporaryError, UsageError

LOG_LEVEL = "info"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--host", default="127.0.0.1", help="where to serve at (default 127.0.0.1: this machine only)")
    parser.add_argument(
        "--host-name", action="append", default=[], metavar="NAME",
        help="answer also under this name, such as api.example.org (default: IP addresses, localhost); repeatable",
    )  # fmt: skip
    parser.add_argument("--port", type=int, default=8000, help="port to serve at (default 8000; 0 takes a free one)")
    parser.add_argument("--keys", type=Path, metavar="FILE", help="let in who has one of these API keys (default: all)")
    parser.add_argument(
        "--audit-share", type=float, default=0.02, metavar="SHARE",
        help="share of the answers that other hosts generate again, to find hosts that compute other tokens"
        " (default 0.02; they see the prompt, too)",
    )  # fmt: skip


def run(arguments: argparse.Namespace) -> int:
    if not 0 <= arguments.port < 65536:
        raise UsageError(f"--port {arguments.port}: give a number from 0 to 65535")
    if not 0 <= arguments.audit_share <= 1:
        raise UsageError(f"--audit-share {arguments.audit_share}: give a share from 0 to 1")
    from p2ptrain.network.link import SwarmLink

    link = SwarmLink.parse(arguments.link)
    from p2ptrain.cli.commands.serving.talking import text_of
    from p2ptrain.cli.running import run_async
    from p2ptrain.cli.screen.live import stop_on_signals
    from p2ptrain.node.serving.client import generating
    from p2ptrain.serving.http.serve import serving_http
    from p2ptrain.tasks import Tasks

    async def serve() -> None:
        task = asyncio.current_task()
        assert task is not None
        async with generating(link, arguments.wait, arguments.audit_share) as model:
            text, tokenizer, sampling = text_of(model, arguments)
            stop, lost = stop_on_signals(task.cancel), model.peer.network.lost
            opened = serving_http(
                model.generator, tokenizer, host=arguments.host, port=arguments.port, names=arguments.host_name,
                keys=arguments.keys, end_ids=text.end_ids, sampling=sampling,
            )  # fmt: skip
            async with opened as (url, web), Tasks() as tasks:
                print(f"API: {url}v1  chat: {url}  (Ctrl-C ends it, twice at once)", flush=True)
                ends: set[asyncio.Future[Any]] = {web, lost, tasks.call(stop.wait(), "stop")}
                await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
                if web.done():
                    web.result()
                if lost.done():
                    raise TemporaryError(f"{lost.result()}: start this command again")

    try:
        run_async(serve())
    except asyncio.CancelledError:
        return 130  # A second signal does not wait for the answers in progress.
    return 0
