"""A swarm over time: rates, rounds, trends, arrivals and departures; without any I/O of its own."""

from __future__ import annotations

import asyncio
import statistics
from collections import Counter, defaultdict, deque
from collections.abc import Awaitable, Callable, Mapping, Sequence

from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.manifest import SignedManifest
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.records.record import Look, PeerRecord, Sighting
from p2ptrain.status.agreed import bootstraps, swarm_view
from p2ptrain.status.observation import Observation
from p2ptrain.status.rounds import SwarmRounds
from p2ptrain.status.serving import NONE, ServingBook, growth
from p2ptrain.status.sites import SiteCurves
from p2ptrain.status.snapshot import build_snapshot
from p2ptrain.status.stages import TRAINING_ROLES, positions
from p2ptrain.status.views import Event, Rates, Snapshot, SwarmView

RATE_SECONDS = 15.0
STALL_SECONDS = 600.0
TREND_SECONDS = 600.0
"""Window of the loss trend; the loss is compared with the window before."""
MIN_TREND_POINTS = 20
GATHER_SECONDS = 10.0
"""Window that merges failovers into one event; > the publication interval, so that all senders have reported."""

JUMP_ROUNDS, MAX_ROUNDS_PER_SECOND = 64, 10
"""Rounds that a head may advance between two looks: these, and so many for each second between them."""
JUMP_SECONDS = 600.0
"""A jump of the head is shown this long."""
Heads = Mapping[int, tuple[int, int]]
"""By stage: the median round, and the median tokens of the lineages."""


class SwarmTracker:
    """One swarm over successive looks."""

    def __init__(
        self, swarm: SwarmView, since: float, bootstraps: Sequence[str] = (), stall_seconds: float = STALL_SECONDS
    ) -> None:
        """
        Args:
            since: Wall-clock second of now.
            bootstraps: Ids of the peers that the swarm link names.
            stall_seconds: Timeout without a committed round.
        """
        self.serving = ServingBook()
        self._swarm = swarm
        self._num_stages = len(swarm.spans)
        self._since = since
        self._bootstraps = tuple(bootstraps)
        self._stall_seconds = stall_seconds
        self._look = Look(since, None)
        self._has_looked = False
        self._sightings: dict[str, Sighting] = {}
        self._rates: dict[str, Rates] = {}
        self._rounds = SwarmRounds(swarm.group_size, self._num_stages)
        self._tokens = TokenRate()
        self._sites = SiteCurves()
        self._losses: deque[tuple[float, float]] = deque()
        self._last_commit: float | None = None
        self._forked_since: float | None = None
        self._heads: tuple[float, Heads, int] = (since, {}, 0)
        self._jump: tuple[float, tuple[int, int]] | None = None
        self._failovers: dict[str, str] = {}
        self._failovers_since = 0.0

    @property
    def trainers(self) -> list[PeerRecord]:
        """The newest records of peers that take part in training."""
        return [each.record for each in self._sightings.values() if each.record.role in TRAINING_ROLES]

    def take_in(self, look: Look) -> list[Event]:
        """Compare a look with the look before; return joins, departures and failovers.

        The first look that was answered yields no events.
        """
        self._look, now, before = look, look.at, self._sightings
        if look.sightings is None:
            return []
        is_first, self._has_looked = not self._has_looked, True
        records = [each.record for each in look.sightings]
        medians = median_positions(records, self._num_stages)
        rounds = {unit: round_ for unit, (round_, _) in medians.items()}
        for seen in look.sightings:
            if (known := before.get(seen.record.peer)) is not None and known.at < seen.at:
                self._rates[seen.record.peer] = _rates(known, seen)
            self._rounds.learn(seen.record, min(seen.at, now), rounds)
        if self._rounds.settle(rounds):
            self._last_commit = now
        self._sightings = {each.record.peer: each for each in look.sightings}
        self._rates = {peer: rates for peer, rates in self._rates.items() if peer in self._sightings}
        self._rounds.forget_peers(self._sightings)
        self.serving.learn(look.sightings, now)
        is_whole = len(medians) >= self._num_stages  # A token counts once all stages have counted it.
        self._tokens.update(now, min(tokens for _, tokens in medians.values()) if is_whole else None)
        self._follow_heads([each for each in self.trainers if each.state == "training"], now)
        self._sites.learn(self.trainers)
        losses = [each.loss for each in self.trainers if each.loss is not None and each.state == "training"]
        if losses:
            self._losses.append((now, statistics.median(losses)))
        if is_first:
            return []
        joined = [each.record for peer, each in self._sightings.items() if peer not in before]
        left = [each.record for peer, each in before.items() if peer not in self._sightings]
        return [
            *self._take_in_failovers(before, now),
            *(Event(now, "joined", each.peer, f"{each.label} joined") for each in joined),
            *(Event(now, "left", each.peer, f"{each.label} left") for each in left),
        ]

    def _take_in_failovers(self, before: Mapping[str, Sighting], now: float) -> list[Event]:
        """Return one event for all failovers within a window: each sender's next record reports a host's failure."""
        for peer, each in self._sightings.items():
            if (known := before.get(peer)) is None:
                continue
            is_same_life = known.record.started_at == each.record.started_at
            if each.record.failovers > (known.record.failovers if is_same_life else 0):
                self._failovers_since = self._failovers_since if self._failovers else now
                self._failovers[peer] = each.record.label
        if not self._failovers or now < self._failovers_since + GATHER_SECONDS:
            return []
        names, self._failovers = sorted(self._failovers.values()), {}
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        text = f"a host of a stage failed: {names[0]}{more} went on with others"
        return [Event(self._failovers_since, "failover", "", text)]

    @property
    def majority_lineage(self) -> bytes:
        """The lineage of most trainers; empty without any state, and in a pipeline, which has one for each stage."""
        if self._num_stages > 1:
            return b""
        lineages = Counter(record.lineage for record in self.trainers if any(record.digest))
        return lineages.most_common(1)[0][0] if lineages else b""

    def certify(self, body: Body, now: float) -> None:
        """Record a majority-signed result of the majority lineage."""
        if self._rounds.certify(body, now):
            self._last_commit = now

    def observation(self) -> Observation:
        trainers = self.trainers
        return Observation(
            swarm=self._swarm,
            sightings=list(self._sightings.values()),
            rates=self._rates,
            rounds=self._rounds.views(),
            proven=self._rounds.proven(),
            groups=self._rounds.groups([record.peer for record in trainers]),
            tokens_per_second=self._tokens.tokens_per_second,
            committed=self._rounds.committed,
            aborted=self._rounds.aborted,
            rejected=self._look.rejected + self.serving.rejected,
            since=self._since,
            stall_seconds=self._stall_seconds,
            last_commit=self._last_commit,
            losses=self._trend(self._look.at),
            bootstraps=self._bootstraps,
            forked_since=self._fork(trainers, self._look.at),
            jump=self._jump[1] if self._jump is not None and self._look.at < self._jump[0] + JUMP_SECONDS else None,
            directory_answers=self._look.sightings is not None,
            served=self.serving.served(),
            sites=self._sites.views(),
        )

    def _fork(self, trainers: Sequence[PeerRecord], now: float) -> float | None:
        """Return the second since which peers of one round follow different lineages; None if none do."""
        lineages: dict[tuple[int, int], set[bytes]] = defaultdict(set)
        for record in trainers:
            for unit, held in positions(record, self._num_stages):
                if record.state == "training" and any(held.digest):
                    lineages[unit, held.round].add(held.lineage)
        if not any(len(each) > 1 for each in lineages.values()):
            self._forked_since = None
        elif self._forked_since is None:
            self._forked_since = now
        return self._forked_since

    def _follow_heads(self, training: Sequence[PeerRecord], now: float) -> None:
        """Compare the heads of training peers with those of the last look that had any."""
        heads, (at, before, trained) = median_positions(training, self._num_stages), self._heads
        if heads:
            self._heads = now, heads, len(training)
            peers = max(trained, len(training))  # Some may have left since they contributed.
            jump = impossible_advance(before, heads, now - at, peers * self._swarm.max_weight)
            self._jump = (now, jump) if jump is not None else self._jump

    def _trend(self, now: float) -> tuple[float, float] | None:
        while self._losses and self._losses[0][0] < now - 2 * TREND_SECONDS:
            self._losses.popleft()
        border = now - TREND_SECONDS
        before = [loss for at, loss in self._losses if at < border]
        late = [loss for at, loss in self._losses if at >= border]
        if min(len(before), len(late)) < MIN_TREND_POINTS:
            return None
        return statistics.median(before), statistics.median(late)


def impossible_advance(before: Heads, now: Heads, seconds: float, max_tokens: float) -> tuple[int, int] | None:
    """Return the rounds and tokens by which a head advanced, if its peers cannot have done them; else None.

    ``seconds`` passed in between. All peers together may contribute ``max_tokens`` to a round.
    """
    for stage in before.keys() & now.keys():
        rounds, tokens = (late - early for early, late in zip(before[stage], now[stage], strict=True))
        if rounds > JUMP_ROUNDS + MAX_ROUNDS_PER_SECOND * seconds or tokens > max_tokens * max(1, rounds):
            return rounds, tokens
    return None


class Looking:
    """Takes snapshots of a swarm through ``source``, such as `p2ptrain.node.observe.Observer.look`."""

    def __init__(
        self, source: Callable[[], Awaitable[Look]], signed: SignedManifest, link: SwarmLink, own: str = ""
    ) -> None:
        """``own`` is the id of the peer that looks, if it is in the swarm: it is not missed there."""
        self._source = source
        self._own = own
        self._signed = signed
        self._link = link
        self._tracker: SwarmTracker | None = None

    async def look(self) -> Snapshot:
        look = await self._source()
        tracker = self._tracker
        if tracker is None:
            swarm = swarm_view(self._signed, self._link, [each.record for each in look.sightings or ()])
            others = [peer for peer in bootstraps(self._link) if peer != self._own]
            tracker = SwarmTracker(swarm, look.at, others)
            self._tracker = tracker if look.sightings is not None else None  # The stages may come from the records.
        tracker.take_in(look)
        return await asyncio.to_thread(build_snapshot, tracker.observation(), look.at)


class TokenRate:
    """Tokens per second in committed rounds; each peer's tokens count once.

    The rate covers a whole number of rounds: at least one, and about `RATE_SECONDS` if rounds are shorter. So it
    neither jumps nor drops to 0 between rounds. It falls once no round ended for longer than that.
    """

    def __init__(self) -> None:
        self._commits: deque[tuple[float, int]] = deque()
        self._tokens: int | None = None
        self._now = 0.0

    def update(self, now: float, tokens: int | None) -> None:
        """Record the swarm's committed tokens, None if unknown, at time ``now``, in seconds of any clock."""
        self._now = now
        if tokens is None:
            return
        is_set_back = bool(self._commits) and now < self._commits[-1][0]  # The clock.
        if is_set_back or (self._tokens is not None and tokens < self._tokens):
            self._commits.clear()  # Else the leading lineage was lost.
        if tokens > self._tokens if self._tokens is not None else not tokens:
            self._commits.append((now, tokens))  # A first look at a later round may be in its middle.
        self._tokens = tokens
        while len(self._commits) > 2 and self._commits[-1][0] - self._commits[1][0] >= RATE_SECONDS:
            self._commits.popleft()

    @property
    def tokens_per_second(self) -> float | None:
        """The rate; None before one whole round was seen."""
        if len(self._commits) < 2:
            return None
        (first, before), (last, after) = self._commits[0], self._commits[-1]
        return (after - before) / max(last - first, self._now - last, 1e-9)


def median_positions(records: Sequence[PeerRecord], num_stages: int) -> Heads:
    """Return the median round of each stage's peers, and the median tokens of their lineages.

    Only training peers count if there are any, so that newcomers do not move the median.
    """
    places: dict[int, list[tuple[bool, int, int]]] = defaultdict(list)
    for record in records:
        for unit, held in positions(record, num_stages):
            if unit < num_stages:
                places[unit].append((record.state == "training", held.round, held.lineage_tokens))
    found = {}
    for unit, here in places.items():
        _, rounds, tokens = zip(*([each for each in here if each[0]] or here), strict=True)
        found[unit] = statistics.median_high(rounds), statistics.median_high(tokens)
    return found


def _rates(before: Sighting, now: Sighting) -> Rates:
    seconds, serves = max(now.at - before.at, 1e-3), now.record.serving is not None
    if now.record.started_at != before.record.started_at:
        return Rates(served_per_second=0.0 if serves else None)
    served = (growth(before, now) or NONE).generated_tokens
    return Rates(
        max(0, now.record.bytes_sent - before.record.bytes_sent) / seconds,
        max(0, now.record.bytes_received - before.record.bytes_received) / seconds,
        served / seconds if serves else None,
    )
