"""``p2ptrain monitor``: runs an observer, a watch, a store and a web server together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from p2ptrain.errors import TemporaryError
from p2ptrain.monitor.store import Store
from p2ptrain.monitor.watch import Watch, watching
from p2ptrain.monitor.web import make_app
from p2ptrain.monitor.webhook import Webhook
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.observe import observing
from p2ptrain.node.process import notify
from p2ptrain.status.agreed import bootstraps, swarm_view, what_is_missing
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.0005
"""Switch interval of threads; Python's default of 5 ms, several times per request, adds up to visible latency."""


async def serve(
    link: SwarmLink, host: str, port: int, *, names: Sequence[str], db: Path | None, webhook: str | None,
    stall_seconds: float, on_ready: Callable[[str], None],
) -> None:  # fmt: skip
    """Watch a swarm and serve its page until SIGINT or SIGTERM.

    Args:
        names: Host names to answer under, beside ``host``, IP addresses and ``localhost``.
        db: File of the history; None keeps it in memory.
        webhook: URL for alerts; None for none.
        stall_seconds: Time without a committed round after which an alert is raised.
        on_ready: Called with the page's URL once it answers.

    Raises:
        BootstrapError: No bootstrap peer of the link answers.
        ResourceError: The port is taken, or the history cannot be written.
        TemporaryError: The network daemon ended.
    """
    answer_first()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(host, port, "--host or --port"))
        observer = await stack.enter_async_context(observing(link))
        signed, now = observer.peer.signed, observer.peer.runtime.now
        records = await observer.peers() if what_is_missing(signed.manifest) else []
        swarm = swarm_view(signed, link, records)
        lost = observer.peer.network.lost
        store = await Store.open(db, swarm.digest, now())
        stack.push_async_callback(store.close)
        notified = Webhook(webhook, swarm.name).send if webhook else None
        tracker = SwarmTracker(swarm, now(), bootstraps(link), stall_seconds)
        watch = Watch(observer, tracker, store, notified)
        looking = await stack.enter_async_context(watching(watch))
        web = await stack.enter_async_context(serving(make_app(watch, store, now), listener, [host, *names]))
        on_ready(url_of(listener))
        notify("READY=1")
        async with Tasks() as tasks:
            ends: set[asyncio.Future[Any]] = {web, looking, lost, tasks.call(stop.wait(), "stop")}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
        notify("STOPPING=1")
        for task in (web, looking):
            if task.done():
                task.result()
        if lost.done():
            raise TemporaryError(f"the network daemon ended: {lost.result()}; start the monitor again")


def answer_first() -> None:
    """Shorten the switch interval, so that requests do not wait for snapshots and pages built in threads."""
    sys.setswitchinterval(TURN_SECONDS)
