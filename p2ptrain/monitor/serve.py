"""`p2ptrain monitor`: an observer, a watch, a store and a web server, started and ended together."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import shlex
import signal
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import IncompatibleError, TemporaryError, UsageError
from p2ptrain.manifest import MAX_PIPELINE_STAGES, Manifest, SignedManifest
from p2ptrain.monitor.store import Store
from p2ptrain.monitor.views import SwarmView
from p2ptrain.monitor.watch import Watch, watching
from p2ptrain.monitor.web import make_app
from p2ptrain.monitor.webhook import Webhook
from p2ptrain.network.http_server import listen, serving, url_of
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records import PeerRecord
from p2ptrain.node.observe import Observer
from p2ptrain.node.service_manager import notify

logger = logging.getLogger(__name__)

TURN_SECONDS = 0.0005
"""How long a thread may compute while others wait; Python's own 5 ms, several times for each answer, add up."""


@dataclass(frozen=True)
class Settings:
    """What `serve` is to do.

    Attributes:
        db: Where history is kept; None for in memory.
        webhook: Gets alerts; empty for nobody.
        stall_seconds: So long without a committed round is too long.
    """

    link: SwarmLink
    host: str
    port: int
    db: Path | None
    webhook: str
    stall_seconds: float


async def serve(settings: Settings, on_ready: Callable[[str], None]) -> None:
    """Watch a swarm and serve its page until SIGINT or SIGTERM.

    Args:
        settings: What to watch, and where to serve.
        on_ready: Called with the page's URL once it answers.

    Raises:
        BootstrapError: Nobody that the link names answers.
        ResourceError: The port is taken, or the file cannot be written.
        TemporaryError: The network daemon ended.
    """
    answer_first()
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    async with contextlib.AsyncExitStack() as stack:
        listener = stack.enter_context(listen(settings.host, settings.port, "--port"))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-monitor-")))
        observer = await stack.enter_async_context(Observer(settings.link, folder))
        records = await observer.peers() if what_is_missing(observer.manifest) else []
        swarm = swarm_view(observer.signed, settings.link, records)
        lost: list[str] = []

        def on_lost(reason: str) -> None:
            lost.append(reason)
            stop.set()

        observer.on_network_lost(on_lost)
        store = await Store.open(settings.db, swarm.digest, observer.now())
        stack.push_async_callback(store.close)
        webhook = Webhook(settings.webhook, swarm.name) if settings.webhook else None
        watch = Watch(
            observer, swarm, store, bootstraps=bootstraps(settings.link), stall_seconds=settings.stall_seconds,
            notify=webhook.send if webhook else None,
        )  # fmt: skip
        looking = await stack.enter_async_context(watching(watch))
        web = await stack.enter_async_context(serving(make_app(watch, store, observer.now), listener))
        on_ready(url_of(listener))
        notify("READY=1")
        stopping = asyncio.create_task(stop.wait())
        await asyncio.wait({web, looking, stopping}, return_when=asyncio.FIRST_COMPLETED)
        stopping.cancel()
        notify("STOPPING=1")
        for task in (web, looking):
            if task.done():
                task.result()
        if lost:
            raise TemporaryError(f"the network daemon ended: {lost[0]}; start the monitor again")


def answer_first() -> None:
    """Let the threads of this process take short turns: snapshots of thousands of peers and pages are made in threads,
    and whoever asks for less should not wait for them."""
    sys.setswitchinterval(TURN_SECONDS)


def swarm_view(signed: SignedManifest, link: SwarmLink, records: Sequence[PeerRecord] = ()) -> SwarmView:
    """What a swarm agreed on, for the page; arguments and errors are those of `stage_spans`."""
    manifest = signed.manifest
    spans = stage_spans(manifest, records)
    return SwarmView(
        name=manifest.name,
        digest=manifest.digest.hex(),
        link=str(link),
        command=f"p2ptrain join {shlex.quote(str(link))}",
        signer=signed.organizer,
        manifest=manifest.model_dump(mode="json"),
        protocol=manifest.protocol,
        num_blocks=spans[-1][1],
        group_size=manifest.averaging.group_size,
        spans=spans,
        missing=what_is_missing(manifest),
    )


def stage_spans(manifest: Manifest, records: Sequence[PeerRecord] = ()) -> tuple[tuple[int, int], ...]:
    """Of each stage of a swarm's model: its first block and the one after its last. One stage, if it is not cut.

    Whoever looks need not know the model: of one that this machine does not, stages have no blocks, (0, 0).

    Args:
        manifest: What the swarm agreed on.
        records: What peers say now. Where the manifest leaves the number of stages to the model, and this machine does
            not know that, there are as many as they host.

    Raises:
        ManifestError: The model cannot be cut as the manifest says.
    """
    pipeline = manifest.pipeline
    if not manifest.in_stages:
        return ((0, manifest.model.layers),)
    if not what_is_missing(manifest):
        from p2ptrain.pipeline.plan import PipelinePlan

        return tuple((span.start, span.stop) for span in PipelinePlan(manifest).spans)
    hosted = max((record.stages[0].unit + 1 for record in records if record.stages), default=0)
    number = min(max(2, hosted), MAX_PIPELINE_STAGES) if pipeline.stages == "auto" else pipeline.stages
    if pipeline.cuts:
        number = len(pipeline.cuts) + 1
    return ((0, 0),) * number if number > 1 else ((0, manifest.model.layers),)


def what_is_missing(manifest: Manifest) -> str:
    """Why a model's stages are shown without their blocks, and what to do, for people; empty where they need not be."""
    if not manifest.in_stages:
        return ""
    from p2ptrain.models import get_family

    try:
        get_family(manifest.model)
    except (IncompatibleError, UsageError) as error:
        return f"stages are shown without their blocks: {error}"
    return ""


def bootstraps(link: SwarmLink) -> list[str]:
    """Ids of the peers that a link names, each once."""
    return list(dict.fromkeys(address.rpartition("/p2p/")[2] for address in link.addresses))
