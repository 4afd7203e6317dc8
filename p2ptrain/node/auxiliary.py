"""Run an auxiliary: help with rounds until it is told to stop, and say how it goes."""

from __future__ import annotations

import asyncio
import json
import logging
import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

from p2ptrain.config import PeerConfig
from p2ptrain.node.draining import RESCUE, Drain
from p2ptrain.node.peer import Peer
from p2ptrain.node.signals import StopSignals
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.averaging.lending import Lender

logger = logging.getLogger(__name__)

MEGABYTE = 1e6


@dataclass(frozen=True)
class LendingSummary:
    """How one auxiliary's run went; written to ``summary.json`` in its run directory."""

    peer: str
    name: str
    rounds_helped: int
    rounds_broken: int
    bytes_sent: int
    bytes_received: int
    seconds: float
    round: int
    exit_reason: str


async def lend_bandwidth(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Help with one round after the other until told to stop, or as long as the config says; then finish the last.

    Raises:
        ManifestError: The swarm takes no auxiliaries.
    """
    if config.resources.threads:
        import torch

        torch.set_num_threads(config.resources.threads)
    lender, started = peer.lend(), time.monotonic()
    limit = _Limit(config)

    def publish() -> None:
        if lender.head is not None and limit.is_reached(lender.head.round):
            signals.stop("rounds")
        peer.status.note = _note(lender)
        peer.presence.changed()

    lender.on_change = publish
    lender.on_helped = lambda: logger.info(
        "helped with %d rounds, the last one %d; sent %.1f MB, received %.1f MB",
        lender.rounds_helped, lender.head.round if lender.head else 0, peer.rpc.bytes_sent / MEGABYTE,
        peer.rpc.bytes_received / MEGABYTE,
    )  # fmt: skip
    peer.set_state("lending")
    async with Tasks() as tasks:
        work = tasks.call(lender.run(), "lend")
        wanted = tasks.call(signals.requested.wait(), "stop")
        timeout = config.stop_after.minutes * 60 if config.stop_after.minutes else None
        await asyncio.wait({work, wanted}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        lender.stop()
        await asyncio.wait({work}, timeout=Drain(config.drain_seconds).left(RESCUE))
    error = None if work.cancelled() else work.exception()
    reason = signals.reason or "minutes"
    await asyncio.to_thread(_write_summary, peer, lender, config, time.monotonic() - started, reason)
    if error is not None:
        raise error


class _Limit:
    """The round at which to leave, if the config says so."""

    def __init__(self, config: PeerConfig) -> None:
        self._stop = config.stop_after
        self._first: int | None = None

    def is_reached(self, round_: int) -> bool:
        """Whether the swarm has come so far."""
        self._first = round_ if self._first is None else self._first
        limits = [self._stop.at_round, self._first + self._stop.rounds if self._stop.rounds else 0]
        return any(0 < limit <= round_ for limit in limits)


def _note(lender: Lender) -> str:
    """What the status shows; empty where it should rather say why nobody can reach this peer."""
    if not lender.is_reachable() or not (lender.rounds_helped or lender.rounds_broken):
        return ""
    broken = f", {lender.rounds_broken} came to nothing" if lender.rounds_broken else ""
    return f"helped with {lender.rounds_helped} rounds{broken}"


def _write_summary(peer: Peer, lender: Lender, config: PeerConfig, seconds: float, reason: str) -> None:
    summary = LendingSummary(
        peer=peer.identity.peer_id,
        name=peer.options.name,
        rounds_helped=lender.rounds_helped,
        rounds_broken=lender.rounds_broken,
        bytes_sent=peer.rpc.bytes_sent,
        bytes_received=peer.rpc.bytes_received,
        seconds=seconds,
        round=lender.head.round if lender.head is not None else 0,
        exit_reason=reason,
    )
    text = json.dumps(asdict(summary), indent=2) + "\n"
    for path in (config.run_dir / "summary.json", *([config.summary] if config.summary else [])):
        try:
            path.write_text(text)
        except OSError as error:
            logger.error("cannot write the summary to %s: %s", path, error.strerror)
