"""`visiting`: a peer's life as a guest, from its start to its end."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from p2ptrain.node.guest.control import Answer, Request, serving_control
from p2ptrain.node.guest.reasons import Watch, reasons_of
from p2ptrain.node.guest.totals import GivenBook
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.config import PeerConfig
    from p2ptrain.network.records.record import PeerRecord
    from p2ptrain.node.peer import Peer
    from p2ptrain.node.process import StopSignals

logger = logging.getLogger(__name__)

COUNT_SECONDS = 10.0
SAVE_COUNTS = 6
"""Counts after which the totals are saved; a crash loses that much."""
OWNER = "by its owner"


def _thermometer(config: PeerConfig) -> Callable[[], float] | None:
    """Return the reader of the temperature of this peer's GPU; None if none is asked for, or it uses its CPU."""
    if not config.guest.gpu_celsius:
        return None
    from p2ptrain.node.guest.gpu import celsius
    from p2ptrain.node.roles.materials import choose_device

    device = choose_device(config)
    return partial(celsius, device) if device.type == "cuda" else None


@contextlib.asynccontextmanager
async def visiting(peer: Peer, config: PeerConfig, signals: StopSignals) -> AsyncIterator[None]:
    """Answer the owner's requests, watch the machine, and count what the peer gives, for the block."""
    wishes, loop = signals.wishes, asyncio.get_running_loop()
    book, counted_at = GivenBook(config.run_dir, peer.record.describe()), loop.time()

    def describe(record: PeerRecord) -> PeerRecord:
        return replace(record, note=f"paused: {wishes.reason}") if wishes.reasons else record

    def handle(request: Request) -> Answer:
        logger.debug("the owner asks: %s", request.do)
        if request.do in ("pause", "resume") and config.role == "bootstrap":
            return Answer(error="it only answers newcomers, so there is nothing to pause")
        if request.do in ("pause", "resume"):
            wishes.set("owner", OWNER if request.do == "pause" else "")
            peer.presence.changed()
        if request.do == "finish" and wishes.finish():
            return told("after its round")
        if request.do in ("leave", "finish"):
            signals.stop("its owner")
            return told("now")
        if request.do == "look":
            count()
            book.save()
        return told()

    def told(leaves: str = "") -> Answer:
        record = peer.record.describe()
        return Answer("", record.name, record.state, record.round, wishes.reason, leaves)

    def count() -> None:
        nonlocal counted_at
        seconds, counted_at = loop.time() - counted_at, loop.time()
        book.add(peer.record.describe(), 0.0 if wishes.reasons else seconds)

    async def keep_counting() -> None:
        while True:
            for _ in range(SAVE_COUNTS):
                await asyncio.sleep(COUNT_SECONDS)
                count()
            book.save()

    peer.record.parts.append(describe)
    async with Tasks() as tasks, serving_control(config.run_dir, handle):
        if config.role != "bootstrap" and (reasons := reasons_of(config.guest, _thermometer(config))):
            watch = Watch(reasons, wishes)
            watch.start()
            tasks.keep(watch.run, "watch")
        tasks.keep(keep_counting, "count")
        try:
            yield
        finally:
            count()
            book.save()
            given = book.totals
            logger.info(
                "given in %d runs: %d tokens in %d rounds, %.1f h, %.1f MB sent", given.runs, given.tokens,
                given.rounds, given.seconds / 3600, given.bytes_sent / 1e6,
            )  # fmt: skip
