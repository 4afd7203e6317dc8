"""Periodic observation of a swarm: snapshots, events, and points of the history."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import P2PTrainError, ResourceError
from p2ptrain.monitor.store import Store
from p2ptrain.network.records.record import Look
from p2ptrain.status.snapshot import build_snapshot
from p2ptrain.status.tracker import SwarmTracker
from p2ptrain.status.views import Alert, Event, Snapshot
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
POINT_SECONDS = 10.0
PRUNE_SECONDS = 300.0
LAST_WORDS_SECONDS = 2.0
"""Timeout of pending notifications at the end."""
MAX_UNKNOWN = 2
"""Consecutive fetches without proof of the majority lineage; one more, and it is adopted unproven."""
HOLD_SECONDS = 6.0
"""An alert begins after it held this long; a peer between two rounds causes shorter ones."""
CLEAR_SECONDS = 20.0
"""An alert ends after it was absent this long."""
MAX_LASTING = 200


class Source(Protocol):
    """A source of records: `p2ptrain.node.observe.Observer`, or a synthetic swarm."""

    async def look(self) -> Look: ...
    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]: ...


@dataclass
class _Lasting:
    alert: Alert
    since: float
    last: float
    told: bool = False


class AlertBook:
    """Begin and end of alerts, with hysteresis against flickering ones."""

    def __init__(self) -> None:
        self._lasting: dict[tuple[str, str], _Lasting] = {}

    def update(self, alerts: Sequence[Alert], now: float) -> list[Event]:
        """Take in the current alerts; return an event for each alert that begins or ends."""
        events = []
        for lasting in self._lasting.values():  # The clock may have been set back.
            lasting.since, lasting.last = min(lasting.since, now), min(lasting.last, now)
        current = {(alert.rule, alert.subject) for alert in alerts}
        for alert in alerts:
            key = (alert.rule, alert.subject)
            known = self._lasting.get(key)
            if known is None:
                if len(self._lasting) >= MAX_LASTING:
                    continue
                known = self._lasting[key] = _Lasting(alert, now, now)
            known.alert, known.last = alert, now
            if not known.told and now - known.since >= HOLD_SECONDS:
                known.told = True
                events.append(Event(now, "alert", alert.subject, alert.text))
        for key, known in list(self._lasting.items()):
            # An unreported alert must hold without a gap; a reported one ends only after `CLEAR_SECONDS`.
            if key not in current and (not known.told or now - known.last >= CLEAR_SECONDS):
                del self._lasting[key]
                if known.told:
                    events.append(Event(now, "cleared", known.alert.subject, f"over: {known.alert.text}"))
        return events


class Watch:
    """The observation of one swarm; ``snapshot`` is the newest one, None before the first look."""

    def __init__(
        self,
        source: Source,
        tracker: SwarmTracker,
        store: Store,
        notify: Callable[[Sequence[Event]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """Observe ``source``; ``notify``, such as `Webhook.send`, receives the events of alerts that begin and end."""
        self.snapshot: Snapshot | None = None
        self._source = source
        self._tracker = tracker
        self._store = store
        self._notify = notify
        self._alerts = AlertBook()
        self._lineage = b""
        self._unknown = 0
        self._fetching, self._telling = Tasks(), Tasks()
        self._next_point = self._next_prune = 0.0
        self._aborted_before = 0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        try:
            while True:
                try:
                    await self.look()
                except P2PTrainError as error:
                    logger.warning("a look at the swarm failed: %s", error)
                await asyncio.sleep(LOOK_SECONDS)
        finally:
            await self._telling.close(LAST_WORDS_SECONDS)
            await self._fetching.close()

    async def wait_for_change(self, seen: Snapshot | None) -> Snapshot:
        """Wait for a snapshot other than ``seen``, and return it."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.snapshot is not None and self.snapshot is not seen)
        assert self.snapshot is not None
        return self.snapshot

    async def look(self) -> Snapshot:
        """Read the records once, build a snapshot, and store events and history."""
        look = await self._source.look()
        events = self._tracker.take_in(look)
        if look.sightings is not None:
            self._follow(look.at)
        # In a thread: with thousands of peers it takes long, and requests must not wait for it.
        snapshot = await asyncio.to_thread(build_snapshot, self._tracker.observation(), look.at)
        alarms = self._alerts.update(snapshot.alerts, look.at)
        self._tell(alarms)
        self.snapshot = snapshot
        async with self._changed:
            self._changed.notify_all()
        try:
            await self._remember(snapshot, [*events, *alarms], look.at)
        except ResourceError as error:
            logger.warning("%s", error)  # The page works without its history.
        return snapshot

    def _follow(self, now: float) -> None:
        """Fetch the certificates of new rounds from a trainer, unless a fetch is in progress."""
        goal = self._tracker.majority_lineage
        if not goal or self._fetching:
            return
        if not self._lineage:
            self._lineage = goal
        if goal != self._lineage:
            holders = [record.peer for record in self._tracker.trainers if record.lineage == goal]
            self._fetching.start(self._fetch(random.choice(holders), goal, now), "certificates")

    async def _fetch(self, peer: str, goal: bytes, now: float) -> None:
        try:
            certificates = await self._source.certificates_after(peer, self._lineage)
        except P2PTrainError as error:
            logger.debug("peer %s tells no history: %s", peer[-8:], error)
            certificates = []
        # Any peer can sign results of a group of its own. Only a chain to the majority lineage is proven.
        lineages = [certificate.body.next_lineage for certificate in certificates]
        proven = certificates[: lineages.index(goal) + 1] if goal in lineages else []
        for certificate in proven:
            self._tracker.certify(certificate.body, now)
            self._lineage = certificate.body.next_lineage
        self._unknown = 0 if proven else self._unknown + 1
        if self._unknown > MAX_UNKNOWN:  # Too far behind, or the swarm left the old lineage.
            self._lineage, self._unknown = goal, 0

    def _tell(self, alarms: Sequence[Event]) -> None:
        for event in alarms:
            logger.log(logging.WARNING if event.kind == "alert" else logging.INFO, "%s: %s", event.kind, event.text)
        if alarms and self._notify is not None:
            self._telling.start(self._notify(alarms), "webhook")

    async def _remember(self, snapshot: Snapshot, events: Sequence[Event], now: float) -> None:
        await self._store.add_events(events)
        late = now - self._next_point
        if -POINT_SECONDS <= late < 0:
            return
        # None passed before the first point, and if the clock was set back.
        seconds = min(late + POINT_SECONDS, 2 * POINT_SECONDS) if self._next_point and late >= 0 else 0.0
        self._next_point = now + POINT_SECONDS
        serving = snapshot.serving
        served = self._tracker.serving.take_point(now, serving.sessions if serving.peers else None)
        points = self._points(snapshot)
        if not seconds:  # After one look no traffic is known, and a chart would fall to 0 at each start.
            del points["sent_per_second"], points["received_per_second"]
        await self._store.add_points(now, {**points, **served})
        await self._store.add_rounds(snapshot.rounds)
        await self._store.contribute(snapshot.peers, now, seconds)
        if now >= self._next_prune:
            self._next_prune = now + PRUNE_SECONDS
            await self._store.prune(now)

    def _points(self, snapshot: Snapshot) -> dict[str, float]:
        headline = snapshot.headline
        last = next((view for view in snapshot.rounds if view.committed), None)
        aborted, self._aborted_before = headline.aborted - self._aborted_before, headline.aborted
        values = {
            "loss": headline.loss,
            "tokens_per_second": headline.tokens_per_second,
            "peers": headline.peers,
            "training": headline.training,
            "compute_seconds": last.compute_seconds if last else None,
            "matchmaking_seconds": last.matchmaking_seconds if last else None,
            "transfer_seconds": last.transfer_seconds if last else None,
            "aborted": aborted,
            "sent_per_second": sum(peer.rates.sent_per_second for peer in snapshot.peers),
            "received_per_second": sum(peer.rates.received_per_second for peer in snapshot.peers),
        }
        return {name: float(value) for name, value in values.items() if value is not None}


@contextlib.asynccontextmanager
async def watching(watch: Watch) -> AsyncIterator[asyncio.Task[None]]:
    """Run a watch during the body, after its first look; yield its task, which ends only by a failure."""
    await watch.look()
    tasks = Tasks()
    try:
        yield tasks.start(watch.run(), "watch")
    finally:
        await tasks.close()
