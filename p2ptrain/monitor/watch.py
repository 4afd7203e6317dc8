"""Keeps looking at a swarm: each look makes a snapshot, what changed becomes events, and the store gets its points."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import statistics
from collections import Counter, deque
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import P2PTrainError, ResourceError
from p2ptrain.monitor.alert_book import AlertBook
from p2ptrain.monitor.store import Event, Store
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.alerts import Facts
from p2ptrain.status.rate import TokenRate
from p2ptrain.status.serving import NONE, ServingBook, growth, told
from p2ptrain.status.snapshot import EMPTY, Observation, Rates, Sighting, build_snapshot
from p2ptrain.status.stage_rounds import SwarmRounds
from p2ptrain.status.stages import TRAINING_ROLES, standings
from p2ptrain.status.views import Snapshot, SwarmView
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

LOOK_SECONDS = 2.0
POINT_SECONDS = 10.0
PRUNE_SECONDS = 300.0
TREND_SECONDS = 600.0
"""The loss of the last ten minutes is compared with that of the ten before."""
MIN_TREND_POINTS = 20
LAST_WORDS_SECONDS = 2.0
"""How long the end waits for alerts that are on their way to somebody."""
GATHER_SECONDS = 10.0
"""Peers publish every five seconds: so long after the first one all have told of a host that failed."""
MAX_UNKNOWN = 2
"""Peers that do not know a lineage, one after the other, before it is given up."""


class Source(Protocol):
    """Where records come from: `p2ptrain.node.observe.Observer`, or a made-up swarm."""

    @property
    def rejected(self) -> int:
        """Records that were dropped for what they say."""

    def now(self) -> float:
        """Wall-clock second by the swarm's clock."""

    async def look(self) -> Sequence[tuple[PeerRecord, float]] | None:
        """All records and when each was published; None when nobody can be asked."""

    async def certificates_after(self, peer: str, lineage: bytes) -> Sequence[Certificate]:
        """Verified results that follow on a lineage, oldest first."""


class Watch:
    """One swarm under observation.

    Attributes:
        snapshot: The newest; None before the first look.
    """

    def __init__(
        self,
        source: Source,
        swarm: SwarmView,
        store: Store,
        *,
        bootstraps: Sequence[str] = (),
        stall_seconds: float = 600.0,
        notify: Callable[[Sequence[Event]], Coroutine[Any, Any, None]] | None = None,
    ) -> None:
        """
        Args:
            source: Where records come from.
            swarm: What it agreed on.
            store: Gets the past.
            bootstraps: Ids of the peers that the swarm link names.
            stall_seconds: So long without a committed round is too long.
            notify: Told of alerts that begin and end, such as a webhook.
        """
        self.snapshot: Snapshot | None = None
        self._source = source
        self._swarm = swarm
        self._store = store
        self._bootstraps = tuple(bootstraps)
        self._stall_seconds = stall_seconds
        self._notify = notify
        self._num_stages = len(swarm.spans)
        self._book = SwarmRounds(swarm.group_size, self._num_stages)
        self._alerts = AlertBook()
        self._rate = TokenRate()
        self._serving = ServingBook()
        self._since = source.now()
        self._last_commit: float | None = None
        self._forked_since: float | None = None
        self._losses: deque[tuple[float, float]] = deque()
        self._sightings: dict[str, Sighting] = {}
        self._rates: dict[str, Rates] = {}
        self._lineage = b""
        self._has_looked = False
        self._unknown = 0
        self._fetching = Tasks()
        self._telling = Tasks()
        self._next_point = 0.0
        self._next_prune = 0.0
        self._aborted_before = 0
        self._failovers: dict[str, str] = {}
        self._failovers_since = 0.0
        self._changed = asyncio.Condition()

    async def run(self) -> None:
        """Look again and again until cancelled."""
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
        """The next snapshot that is not ``seen``."""
        async with self._changed:
            await self._changed.wait_for(lambda: self.snapshot is not None and self.snapshot is not seen)
        assert self.snapshot is not None
        return self.snapshot

    async def look(self) -> Snapshot:
        """Look once: read, compare with the last time, remember."""
        records = await self._source.look()
        now = self._source.now()
        events = self._take_in(records, now) if records is not None else []
        trainers = [each.record for each in self._sightings.values() if each.record.role in TRAINING_ROLES]
        if records is not None and self._num_stages == 1:
            self._follow(trainers)  # Certificates of stages are those of other swarms.
        observation = Observation(
            swarm=self._swarm,
            sightings=list(self._sightings.values()),
            rates=self._rates,
            rounds=self._book.views(),
            groups=self._book.groups([record.peer for record in trainers]),
            tokens_per_second=self._rate.tokens_per_second,
            committed=self._book.committed,
            aborted=self._book.aborted,
            rejected=self._source.rejected + self._serving.rejected,
            directory_answers=records is not None,
            facts=self._facts(trainers, records is not None, now),
            served=self._serving.served(),
        )
        # Of thousands of peers it takes a while, in which viewers are answered.
        snapshot = await asyncio.to_thread(build_snapshot, observation, now)
        alarms = self._alerts.update(snapshot.alerts, now)
        self._tell(alarms)
        self.snapshot = snapshot
        async with self._changed:
            self._changed.notify_all()
        try:
            await self._remember(snapshot, [*events, *alarms], now)
        except ResourceError as error:
            logger.warning("%s", error)  # The present is shown all the same.
        return snapshot

    def _take_in(self, records: Sequence[tuple[PeerRecord, float]], now: float) -> list[Event]:
        """Compare what peers say now with what they said before; who joined and who left."""
        before, is_first = self._sightings, not self._has_looked
        self._has_looked = True
        places = usual_places([record for record, _ in records], self._num_stages)
        usual = {unit: round_ for unit, (round_, _) in places.items()}
        for record, at in records:
            if (known := before.get(record.peer)) is not None and known.at < at:
                self._rates[record.peer] = _rates(known, Sighting(record, at))
            self._book.learn(record, min(at, now), usual)
        if self._book.settle(usual):
            self._last_commit = now
        self._sightings = {record.peer: Sighting(record, at) for record, at in records}
        self._rates = {peer: rates for peer, rates in self._rates.items() if peer in self._sightings}
        self._book.forget_peers(self._sightings)
        self._serving.learn(records, now)
        if len(places) >= self._num_stages:  # A token counts when all stages have counted it.
            self._rate.update(now, min(tokens for _, tokens in places.values()))
        if is_first:
            return []
        failovers = self._take_in_failovers(before, now)
        joined = [each.record for peer, each in self._sightings.items() if peer not in before]
        left = [each.record for peer, each in before.items() if peer not in self._sightings]
        return [
            *failovers,
            *(Event(now, "joined", each.peer, f"{each.name or each.peer[-8:]} joined") for each in joined),
            *(Event(now, "left", each.peer, f"{each.name or each.peer[-8:]} left") for each in left),
        ]

    def _take_in_failovers(self, before: Mapping[str, Sighting], now: float) -> list[Event]:
        """One event for all who saw hosts fail within a while: of a death all tell, each with its next record."""
        for peer, each in self._sightings.items():
            if (known := before.get(peer)) is None:
                continue
            is_same_life = known.record.started_at == each.record.started_at
            if each.record.failovers > (known.record.failovers if is_same_life else 0):
                self._failovers_since = self._failovers_since if self._failovers else now
                self._failovers[peer] = each.record.name or peer[-8:]
        if not self._failovers or now < self._failovers_since + GATHER_SECONDS:
            return []
        names, self._failovers = sorted(self._failovers.values()), {}
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"a host of a stage failed: {names[0]}{more} went on with others"
        return [Event(self._failovers_since, "failover", "", text)]

    def _follow(self, trainers: Sequence[PeerRecord]) -> None:
        """Ask somebody for the certificates of what was committed since, unless that is under way."""
        lineages = Counter(record.lineage for record in trainers if record.digest != EMPTY)
        if not lineages or self._fetching:
            return
        usual, _ = lineages.most_common(1)[0]
        if not self._lineage:
            self._lineage = usual
        if usual != self._lineage:
            holders = [record.peer for record in trainers if record.lineage == usual]
            self._fetching.start(self._fetch(random.choice(holders), usual), "certificates")

    async def _fetch(self, peer: str, goal: bytes) -> None:
        try:
            certificates = await self._source.certificates_after(peer, self._lineage)
        except P2PTrainError as error:
            logger.debug("peer %s tells no history: %s", peer[-8:], error)
            certificates = []
        # Anybody can sign a result of a group of its own. Only what leads to the lineage that most follow is proven.
        lineages = [certificate.body.next_lineage for certificate in certificates]
        proven = certificates[: lineages.index(goal) + 1] if goal in lineages else []
        for certificate in proven:
            if self._book.certify(certificate.body, self._source.now()):
                self._last_commit = self._source.now()
            self._lineage = certificate.body.next_lineage
        self._unknown = 0 if proven else self._unknown + 1
        if self._unknown > MAX_UNKNOWN:  # Too far behind, or that lineage is given up.
            self._lineage, self._unknown = goal, 0

    def _facts(self, trainers: Sequence[PeerRecord], directory_answers: bool, now: float) -> Facts:
        losses = [record.loss for record in trainers if record.loss is not None and record.state == "training"]
        if losses and directory_answers:
            self._losses.append((now, statistics.median(losses)))
        while self._losses and self._losses[0][0] < now - 2 * TREND_SECONDS:
            self._losses.popleft()
        lineages: dict[tuple[int, int], set[bytes]] = {}
        for record in trainers:
            for unit, round_, lineage, digest, _ in standings(record, self._num_stages):
                if record.state == "training" and digest != EMPTY:
                    lineages.setdefault((unit, round_), set()).add(lineage)
        if not any(len(each) > 1 for each in lineages.values()):
            self._forked_since = None
        elif self._forked_since is None:
            self._forked_since = now
        return Facts(
            since=self._since,
            stall_seconds=self._stall_seconds,
            last_commit=self._last_commit,
            losses=self._trend(now),
            bootstraps=self._bootstraps,
            forked_since=self._forked_since,
            directory_answers=directory_answers,
        )

    def _trend(self, now: float) -> tuple[float, float] | None:
        border = now - TREND_SECONDS
        before = [loss for at, loss in self._losses if at < border]
        late = [loss for at, loss in self._losses if at >= border]
        if min(len(before), len(late)) < MIN_TREND_POINTS:
            return None
        return statistics.median(before), statistics.median(late)

    def _tell(self, alarms: Sequence[Event]) -> None:
        for event in alarms:
            logger.log(logging.WARNING if event.kind == "alert" else logging.INFO, "%s: %s", event.kind, event.text)
        if alarms and self._notify is not None:
            self._telling.start(self._notify(alarms), "webhook")

    async def _remember(self, snapshot: Snapshot, events: Sequence[Event], now: float) -> None:
        await self._store.add_events(events)
        if now < self._next_point:
            return
        seconds = min(now - self._next_point + POINT_SECONDS, 2 * POINT_SECONDS) if self._next_point else 0.0
        self._next_point = now + POINT_SECONDS
        serving = snapshot.serving
        served, latencies = self._serving.take_point(now, serving.sessions if serving.peers else None)
        await self._store.add_points(now, {**self._points(snapshot), **served})
        await self._store.add_latencies(now, latencies)
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
            "sent_per_second": sum(peer.sent_per_second for peer in snapshot.peers),
            "received_per_second": sum(peer.received_per_second for peer in snapshot.peers),
        }
        return {name: float(value) for name, value in values.items() if value is not None}


def usual_places(records: Sequence[PeerRecord], num_stages: int) -> dict[int, tuple[int, int]]:
    """Where most who train are: by stage (`WHOLE` where there is one), the round and the tokens of the lineage.

    However many newcomers there are, the swarm is where those are who train.
    """
    places: dict[int, list[tuple[bool, int, int]]] = {}
    for record in records:
        for each in standings(record, num_stages):
            if each.unit < num_stages:
                places.setdefault(each.unit, []).append((record.state == "training", each.round, each.tokens))
    found = {}
    for unit, stood in places.items():
        here = [each for each in stood if each[0]] or stood
        found[unit] = (
            statistics.median_high([round_ for _, round_, _ in here]),
            statistics.median_high([tokens for _, _, tokens in here]),
        )
    return found


def _rates(before: Sighting, now: Sighting) -> Rates:
    seconds = max(now.at - before.at, 1e-3)
    if now.record.started_at != before.record.started_at:
        return Rates()
    return Rates(
        max(0, now.record.bytes_sent - before.record.bytes_sent) / seconds,
        max(0, now.record.bytes_received - before.record.bytes_received) / seconds,
        _served_since(before, now) / seconds,
    )


def _served_since(before: Sighting, now: Sighting) -> int:
    """Tokens that a peer generated for others between two of its records."""
    return (growth(told(before.record, before.at), told(now.record, now.at)) or NONE).generated_tokens


@contextlib.asynccontextmanager
async def watching(watch: Watch) -> AsyncIterator[asyncio.Task[None]]:
    """Keep a watch running while the body does; its first look is done when the body begins.

    Yields:
        The task that looks, which ends only if it fails.
    """
    await watch.look()
    tasks = Tasks()
    try:
        yield tasks.start(watch.run(), "watch")
    finally:
        await tasks.close()
