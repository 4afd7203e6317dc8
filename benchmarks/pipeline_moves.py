"""Hosts of a pipeline that come, go and move, in simulated time: what `benchmarks.pipeline_rebalancing` compares.

What p2ptrain's hosts know and decide is here as it is there: `placement.choose`, `placement.best_move` and
`placement.counted`, on records that take as long to be published and read, with the product's own times for all of it.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from p2ptrain.network.simulated.directory import PROPAGATION_SECONDS, REQUEST_SECONDS
from p2ptrain.node.presence import LEAST_PAUSE_SECONDS as PUBLISH_PAUSE_SECONDS
from p2ptrain.node.presence import PUBLISH_SECONDS, REFRESH_SECONDS
from p2ptrain.node.roles.hosting import CHOICE_SECONDS, MAX_CHOICES
from p2ptrain.pipeline.migration import CALL_SECONDS, LEAST_STAY_SECONDS, MAX_ASKED, NOTICE_SECONDS, PROMISE_SECONDS
from p2ptrain.pipeline.placement import Host, Move, StageNeed, best_move, choose, counted, rates
from p2ptrain.pipeline.view import LEAST_PAUSE_SECONDS, SILENT_SECONDS

DOWNLOAD_SECONDS = 60.0
"""Of a mover from its decision, of a newcomer from its arrival, until it takes part."""


@dataclass(frozen=True)
class Stay:
    """One host, from its arrival to its end.

    Attributes:
        peer: Its name.
        arrives: Seconds from the beginning; those that are there at 0 need no download.
        leaves: When it is killed.
        missed: When the others' placement does without it.
        speed: Its speed.
        chance: The stage that chance gives it.
    """

    peer: str
    arrives: float
    leaves: float
    missed: float
    speed: float
    chance: int

    @property
    def works_from(self) -> float:
        """When it has downloaded its first stage."""
        return self.arrives + DOWNLOAD_SECONDS if self.arrives else 0.0


@dataclass(frozen=True)
class Scene:
    """What is simulated.

    Attributes:
        hosts: How many there are on average.
        stages: How many, all with as much work.
        lifetime_hours: How long a host stays, on average.
        spread: How many times as fast as the slowest the fastest host is.
    """

    hosts: int
    stages: int
    lifetime_hours: float
    spread: float = 1.0

    def __str__(self) -> str:
        kind = "equal hosts" if self.spread == 1 else f"hosts, speeds differ {self.spread:g}x"
        return f"{self.hosts} {kind}, {self.stages} stages, {self.lifetime_hours:g} h"

    @property
    def needs(self) -> list[StageNeed]:
        """Of the stages."""
        return [StageNeed(1.0)] * self.stages

    def stays(self, seed: int, hours: float) -> list[Stay]:
        """Who comes and goes, in order of arrival."""
        random, lifetime = Random(f"stays {seed}"), 3600 * self.lifetime_hours
        found: list[Stay] = []
        arrives = 0.0
        while arrives < 3600 * hours:
            leaves = arrives + random.expovariate(1 / lifetime)
            unheard = SILENT_SECONDS - PUBLISH_SECONDS * random.random() + REFRESH_SECONDS * random.random()
            speed = self.spread ** random.random()
            chance = random.randrange(self.stages) if arrives else len(found) % self.stages
            found.append(Stay(f"peer{len(found)}", arrives, leaves, leaves + unheard, speed, chance))
            if len(found) >= self.hosts:
                arrives += random.expovariate(self.hosts / lifetime)
        return found

    def possible(self, speeds: Sequence[float]) -> float:
        """Of the best placement of hosts with these speeds; an upper bound where they differ."""
        return float(len(speeds) // self.stages) if self.spread == 1 else sum(speeds) / self.stages


@dataclass
class Peer:
    """A host that is there, or that is not missed yet."""

    stay: Stay
    stage: int
    works: bool
    target: int | None = None
    is_dead: bool = False


@dataclass
class Simulation:
    """Hosts come and go; a policy may move one of them now and then, and knows all at once."""

    scene: Scene
    policy: str
    random: Random
    peers: dict[str, Peer] = field(default_factory=dict)
    _queue: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _has_changed: bool = False
    """Whether other hosts work than before, or elsewhere."""

    def run(self, stays: Sequence[Stay], seconds: float) -> float:
        """The share of the possible throughput, over so many seconds."""
        for stay in stays:
            self._at(stay.arrives, lambda now, stay=stay: self._arrive(now, stay))  # type: ignore[misc]
        if self.policy.startswith("every"):
            every = float(self.policy.split()[1])
            for number in range(1, int(seconds / every) + 1):
                self._at(every * number, self._rebalance)
        done = possible = then = 0.0
        rate = best = 0.0
        while self._queue:
            now, _, do = heapq.heappop(self._queue)
            now = min(now, seconds)
            done += rate * (now - then)
            possible += best * (now - then)
            then = now
            if now == seconds:
                break
            do(now)
            if self._has_changed:
                self._has_changed = False
                alive = [peer for peer in self.peers.values() if not peer.is_dead]
                works = [Host(peer.stay.peer, peer.stage, peer.stay.speed) for peer in alive if peer.works]
                rate = min(rates(self.scene.needs, works))
                best = self.scene.possible([peer.stay.speed for peer in alive])
        return done / possible

    def _at(self, time: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), do))

    # What happens

    def _arrive(self, now: float, stay: Stay) -> None:
        self.peers[stay.peer] = peer = Peer(stay, stay.chance, not now)
        self._has_changed = True
        self._at(stay.works_from, lambda now: self._start(now, peer))
        self._at(stay.leaves, lambda now: self._leave(now, peer))
        self._at(stay.missed, lambda now: self._miss(now, peer))

    def _start(self, now: float, peer: Peer) -> None:
        peer.works = self._has_changed = True

    def _leave(self, now: float, peer: Peer) -> None:
        peer.is_dead = self._has_changed = True

    def _miss(self, now: float, peer: Peer) -> None:
        del self.peers[peer.stay.peer]

    def _go(self, now: float, peer: Peer, target: int) -> None:
        peer.target = target
        self._at(now + DOWNLOAD_SECONDS, lambda now: self._switch(now, peer))

    def _switch(self, now: float, peer: Peer) -> None:
        assert peer.target is not None
        peer.stage, peer.target, self._has_changed = peer.target, None, True

    def _rebalance(self, now: float) -> None:
        hosts = [
            Host(peer.stay.peer, peer.stage if peer.target is None else peer.target, peer.stay.speed)
            for peer in self.peers.values()
        ]
        working = rates(self.scene.needs, hosts)
        source, target = working.index(max(working)), working.index(min(working))
        here = [peer for peer in self.peers.values() if peer.stage == source and peer.works and peer.target is None]
        if len(here) > 1 and source != target:
            chosen = self.random.choice(here)
            if working[source] - chosen.stay.speed > working[target] and not chosen.is_dead:
                self._go(now, chosen, target)


@dataclass
class Mover(Peer):
    """A host that decides for itself; see `p2ptrain.pipeline.migration`.

    Attributes:
        bound_until: It may not move before, because it has moved, or promised to stay.
        has_decided: Whether it has, as a newcomer.
        is_leaving: Whether it moves; with a target alone it only wants to.
        looks_at: When it reads records next, if there is anything to see then.
        began: When it began to take on its target.
    """

    bound_until: float = 0.0
    has_decided: bool = True
    is_leaving: bool = False
    looks_at: float = -1.0
    began: float = 0.0

    def is_free(self, now: float) -> bool:
        """Whether nothing is against a move."""
        return self.works and not self.is_dead and now >= self.bound_until and not self.is_leaving

    def host(self, now: float) -> Host:
        """What its record says."""
        goes_to, leaves = (self.stage, None) if self.target is None else (self.target, self.stage)
        return Host(
            self.stay.peer, goes_to, self.stay.speed,
            stays=self.target is not None or not self.is_free(now), leaves=leaves,
        )  # fmt: skip


@dataclass
class Deciding(Simulation):
    """Hosts decide as the product's do: each by the records that it has read, with the times that these take.

    A record can be read some time after it has changed. A host reads when it does, so it may decide on what is no more;
    so may several at once. Who is not concerned by the best move of all that is on record, and has nothing else to say
    than its record, would do nothing: that is not simulated.

    Attributes:
        records: What can be read: the host, and whether it has decided, as a newcomer.
        moves: How many were made.
        withdrawn: How many hosts said that they would go, and did not.
    """

    records: dict[str, tuple[Host, bool]] = field(default_factory=dict)
    moves: int = 0
    withdrawn: int = 0
    _shown: dict[str, int] = field(default_factory=dict)
    _departures: dict[str, float] = field(default_factory=dict)

    # Records

    def _request(self) -> float:
        return self.random.uniform(*REQUEST_SECONDS)

    def _publish(self, now: float, peer: Mover) -> float:
        """Publish now; when that is done. It can be read soon afterwards."""
        number, record, until = next(self._order), (peer.host(now), peer.has_decided), now + self._request()

        def show(now: float) -> None:
            name = peer.stay.peer
            if name in self.peers and number > self._shown.get(name, -1):
                is_new = name not in self.records or self.records[name][0].leaves is None
                if record[0].leaves is not None and is_new:
                    self._departures[name] = now
                self._shown[name], self.records[name] = number, record
                self._changed(now)

        self._at(until + self.random.uniform(*PROPAGATION_SECONDS), show)
        return until

    def _say(self, now: float, peer: Mover) -> None:
        """Publish as soon as may be after the last time."""

        def say(now: float) -> None:
            if not peer.is_dead:
                self._publish(now, peer)

        self._at(now + PUBLISH_PAUSE_SECONDS * self.random.random(), say)

    def _others(self, peer: Mover) -> list[Host]:
        """What a host reads of the others; see `PipelineView.hosts`."""
        own = peer.stay.peer
        return [
            host
            for name, (host, has_decided) in self.records.items()
            if name != own and (has_decided or name < own)
        ]  # fmt: skip

    def _changed(self, now: float) -> None:
        """There is something new to read: who may have to move looks at it."""
        hosts = [host for host, _ in self.records.values()]
        decided = [host for host, has_decided in self.records.values() if has_decided]
        for known in (hosts, decided) if len(decided) < len(hosts) else (hosts,):
            move = best_move(self.scene.needs, known)
            if move is not None:
                self._look_soon(now, self._mover(move.peer))

    def _look_soon(self, now: float, peer: Mover) -> None:
        if peer.looks_at < now:
            peer.looks_at = now + REFRESH_SECONDS * self.random.random() + self._request()
            self._at(peer.looks_at, lambda now: self._look(now, peer))

    def _mover(self, name: str) -> Mover:
        peer = self.peers[name]
        assert isinstance(peer, Mover)
        return peer

    # Coming and going

    def _arrive(self, now: float, stay: Stay) -> None:
        peer = Mover(stay, stay.chance, not now, bound_until=stay.works_from + LEAST_STAY_SECONDS)
        self.peers[stay.peer] = peer
        self._has_changed = True
        self._at(stay.leaves, lambda now: self._leave(now, peer))
        self._at(stay.missed, lambda now: self._miss(now, peer))
        self._at(stay.works_from, lambda now: self._start(now, peer))
        self._at(peer.bound_until, lambda now: self._freed(now, peer))
        if now:
            peer.has_decided = False
            self._choose(now, peer, -1, MAX_CHOICES)
        else:
            self.records[stay.peer] = (peer.host(now), True)

    def _choose(self, now: float, peer: Mover, before: int, choices: int) -> None:
        """See `p2ptrain.node.roles.hosting`: a newcomer says what it wants, and looks whether it still does then."""
        if peer.is_dead:
            return
        choice = choose(self.scene.needs, self._others(peer), peer.stay.speed, 1 << 62)
        peer.stage, peer.has_decided = choice.stage, choice.stage == before or not choices
        until = self._publish(now, peer)
        if not peer.has_decided:
            waits = CHOICE_SECONDS * self.random.uniform(1.0, 1.5) + self._request()
            self._at(until + waits, lambda now: self._choose(now, peer, choice.stage, choices - 1))

    def _miss(self, now: float, peer: Peer) -> None:
        super()._miss(now, peer)
        self.records.pop(peer.stay.peer, None)
        self._departures.pop(peer.stay.peer, None)
        self._changed(now)

    def _freed(self, now: float, peer: Mover) -> None:
        """Its time is over, if it was not bound again."""
        if peer.is_free(now):
            self._say(now, peer)
            self._look_soon(now, peer)

    def _bind(self, now: float, peer: Mover, until: float) -> None:
        peer.bound_until = max(peer.bound_until, until)
        self._at(peer.bound_until, lambda now: self._freed(now, peer))
        self._say(now, peer)

    # Moves: `p2ptrain.pipeline.migration`

    def _best(self, now: float, peer: Mover, others: Sequence[Host]) -> Move | None:
        if not peer.is_free(now):
            return None
        move = best_move(self.scene.needs, [*others, Host(peer.stay.peer, peer.stage, peer.stay.speed)])
        return move if move is not None and move.peer == peer.stay.peer else None

    def _look(self, now: float, peer: Mover) -> None:
        if peer.target is not None:
            return
        departures = [seen for name, seen in self._departures.items() if name != peer.stay.peer]
        sure = max(departures, default=-math.inf) + REFRESH_SECONDS * self.random.random() + 2 * NOTICE_SECONDS
        if now < sure:
            self._look_soon(sure, peer)
            return
        before = self._others(peer)
        move = self._best(now, peer, before)
        if move is not None:
            peer.target, peer.began = move.target, now
            reads_at = self._publish(now, peer) + NOTICE_SECONDS + self._request()
            self._at(reads_at, lambda now: self._decide(now, peer, move, before))

    def _decide(self, now: float, peer: Mover, move: Move, before: Sequence[Host]) -> None:
        if peer.is_dead:
            return
        again = self._best(now, peer, counted(self._others(peer), before, peer.stay.peer))
        if peer.target is None or again is None or again.target != move.target:
            peer.target = None
            self.withdrawn += 1
            self._bind(now, peer, now + LEAST_PAUSE_SECONDS)
            return
        peer.is_leaving = True
        asked = [host.peer for host in self._others(peer) if peer.stage in (host.stage, host.leaves)]
        self.random.shuffle(asked)
        self._ask(now, peer, asked[:MAX_ASKED])

    def _ask(self, now: float, peer: Mover, asked: Sequence[str]) -> None:
        """Have one of these promise to stay, then go."""
        if peer.is_dead:
            return
        if not asked:
            peer.target, peer.is_leaving = None, False
            self.withdrawn += 1
            self._bind(now, peer, now + LEAST_STAY_SECONDS)
            return
        other = self.peers.get(asked[0])
        if not isinstance(other, Mover) or other.is_dead:
            self._at(now + CALL_SECONDS, lambda now: self._ask(now, peer, asked[1:]))
        elif other.works and not other.is_leaving and other.stage == peer.stage:
            other.target = None
            self._bind(now, other, now + PROMISE_SECONDS)
            self.moves += 1
            self._at(peer.began + DOWNLOAD_SECONDS, lambda now: self._switch(now, peer))
        else:
            self._ask(now, peer, asked[1:])

    def _switch(self, now: float, peer: Peer) -> None:
        super()._switch(now, peer)
        assert isinstance(peer, Mover)
        peer.is_leaving = False
        if not peer.is_dead:
            self._bind(now, peer, now + LEAST_STAY_SECONDS)
