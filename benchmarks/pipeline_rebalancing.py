"""How much of the possible throughput a pipeline keeps while its hosts come and go: placement and moves, simulated.

Hosts arrive at random (Poisson) and stay for an exponential time; there are as many on average as a scene says. Whoever
leaves was killed: it is missed when nothing new was heard of it for as long as placement waits (`SILENT_SECONDS`). A
newcomer or mover downloads its stage for `DOWNLOAD_SECONDS` before it counts there, and a mover goes on in its old
stage until then. Throughput is that of the slowest stage. What is *possible*: the best placement of the hosts that are
there, at once. All policies see the same hosts come and go.

* *random*: newcomers choose a stage by chance, and nobody moves.
* *every 300 s*, *every 60 s*: the same, and at these times one host moves to the slowest stage from the fastest, if
  that helps (SWARM parallelism's rule).
* *p2ptrain*: `placement.choose` and `placement.best_move`, one host after another, with the times that
  `p2ptrain.training.moving` takes to look, to wait and to stay.
* *limit*: whoever learns of a host's end as late as these, and whose newcomers and movers take as long, cannot do
  better, whatever they decide. At each moment all hosts that were known `DOWNLOAD_SECONDS` before are dealt out anew,
  as evenly as can be; those that died meanwhile are missing where chance has put them. Nobody can know who is next, so
  a host's stage has nothing to do with its end, and of all ways to deal equal hosts out an even one keeps the slowest
  stage's mean highest.

Published for traces of real preemptions over 32 h (Ryabinin et al., *SWARM parallelism*, arXiv 2301.11913): 82.7 %
without moves, 95.8 % and 97.6 % with moves every 300 and 60 s. The traces are not public, so these are other ones.

Part of `benchmarks.bench_pipeline`; by itself, and with other seeds:

    python -m benchmarks.pipeline_rebalancing --first-seed 100
"""

from __future__ import annotations

import argparse
import heapq
import itertools
import multiprocessing
import sys
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from random import Random

from benchmarks.findings import Finding, Section, goal_table
from benchmarks.harness import Measured, progress
from p2ptrain.node.presence import PUBLISH_SECONDS, REFRESH_SECONDS
from p2ptrain.pipeline.placement import Host, Move, StageNeed, best_move, choose, rates
from p2ptrain.training.moving import LEAST_STAY_SECONDS, LONGEST_WAIT_SECONDS, LOOK_SECONDS, PROMISE_SECONDS
from p2ptrain.training.pipeline_view import SILENT_SECONDS

HOURS = 32.0
DOWNLOAD_SECONDS = 60.0
PUBLISHED = {"random": 82.7, "every 300 s": 95.8, "every 60 s": 97.6}
OURS, LIMIT = "p2ptrain", "limit"
POLICIES = (*PUBLISHED, OURS, LIMIT)
GOAL = 0.985


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


SCENES = (Scene(64, 4, 3.0), Scene(32, 3, 6.0), Scene(32, 4, 6.0, spread=4.0), Scene(200, 8, 3.0))


@dataclass
class Peer:
    """A host that is there, or that is not missed yet."""

    stay: Stay
    stage: int
    works: bool
    target: int | None = None
    bound_until: float = 0.0
    """It may not move before, because it has moved, or promised to stay."""
    is_dead: bool = False


@dataclass
class Simulation:
    """One policy, as time goes by."""

    scene: Scene
    policy: str
    random: Random
    peers: dict[str, Peer] = field(default_factory=dict)
    _queue: list[tuple[float, int, Callable[[float], None]]] = field(default_factory=list)
    _order: itertools.count[int] = field(default_factory=itertools.count)
    _is_deciding: bool = False

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
        while self._queue and then < seconds:
            now, _, do = heapq.heappop(self._queue)
            now = min(now, seconds)
            done += rate * (now - then)
            possible += best * (now - then)
            then = now
            do(now)
            alive = [peer for peer in self.peers.values() if not peer.is_dead]
            works = [Host(peer.stay.peer, peer.stage, peer.stay.speed) for peer in alive if peer.works]
            rate = min(rates(self.scene.needs, works))
            best = self.scene.possible([peer.stay.speed for peer in alive])
        return done / possible

    def _at(self, time: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._queue, (time, next(self._order), do))

    def _seen(self, now: float) -> list[Host]:
        """Hosts as their records say: where they are, or will be; the dead that are not missed among them."""
        return [
            Host(
                peer.stay.peer, peer.stage if peer.target is None else peer.target, peer.stay.speed,
                stays=peer.target is not None or not peer.works or now < peer.bound_until,
            )
            for peer in self.peers.values()
        ]  # fmt: skip

    # What happens

    def _arrive(self, now: float, stay: Stay) -> None:
        stage = stay.chance
        if self.policy == OURS and now:
            stage = choose(self.scene.needs, self._seen(now), stay.speed, 1 << 62).stage
        self.peers[stay.peer] = peer = Peer(stay, stage, not now, bound_until=stay.works_from + LEAST_STAY_SECONDS)
        self._at(stay.works_from, lambda now: self._start(now, peer))
        self._at(stay.leaves, lambda now: self._leave(now, peer))
        self._at(stay.missed, lambda now: self._miss(now, peer))
        self._changed(now)

    def _start(self, now: float, peer: Peer) -> None:
        peer.works = True

    def _leave(self, now: float, peer: Peer) -> None:
        peer.is_dead = True

    def _miss(self, now: float, peer: Peer) -> None:
        del self.peers[peer.stay.peer]
        self._changed(now)

    # Moves

    def _changed(self, now: float) -> None:
        """The one whom the best move concerns looks some time later, and waits before it looks again."""
        if self.policy == OURS and not self._is_deciding:
            self._is_deciding = True
            waits = LOOK_SECONDS * self.random.uniform(0.0, 1.0) + LONGEST_WAIT_SECONDS * self.random.random()
            self._at(now + waits, self._decide)

    def _decide(self, now: float) -> None:
        self._is_deciding = False
        move = best_move(self.scene.needs, self._seen(now))
        if move is not None:
            self._prepare(now, move)
            self._changed(now)
        elif ends := [peer.bound_until for peer in self.peers.values() if peer.bound_until > now]:
            self._at(min(ends), self._changed)

    def _prepare(self, now: float, move: Move) -> None:
        peer = self.peers[move.peer]
        if peer.is_dead:
            return
        others = [
            each
            for each in self.peers.values()
            if each is not peer
            and each.stage == move.source
            and each.works
            and each.target is None
            and not each.is_dead
        ]
        if not others:
            return
        self.random.choice(others).bound_until = now + PROMISE_SECONDS
        peer.target = move.target
        self._at(now + DOWNLOAD_SECONDS, lambda now: self._switch(now, peer))

    def _switch(self, now: float, peer: Peer) -> None:
        assert peer.target is not None
        peer.stage, peer.target, peer.bound_until = peer.target, None, now + LEAST_STAY_SECONDS
        self._changed(now)

    def _rebalance(self, now: float) -> None:
        working = rates(self.scene.needs, self._seen(now))
        source, target = working.index(max(working)), working.index(min(working))
        candidates = [p for p in self.peers.values() if p.stage == source and p.works and p.target is None]
        if len(candidates) > 1 and source != target:
            chosen = self.random.choice(candidates)
            if working[source] - chosen.stay.speed > working[target]:
                self._prepare(now, Move(chosen.stay.peer, source, target, ""))


def limit(scene: Scene, stays: Sequence[Stay], seconds: float, random: Random) -> float:
    """What nobody can surpass who knows and moves no sooner; see the module. For hosts of one speed."""
    times = sorted({0.0, seconds, *(time for stay in stays for time in _turns(stay) if 0 < time < seconds)})
    done = possible = 0.0
    coming, near = deque(stays), list[Stay]()
    for now, until in itertools.pairwise(times):
        while coming and coming[0].arrives <= now:
            near.append(coming.popleft())
        near = [stay for stay in near if stay.missed > now - DOWNLOAD_SECONDS]
        there = [stay for stay in near if stay.leaves > now]
        known = [stay.leaves > now for stay in near if stay.works_from <= now]
        random.shuffle(known)
        done += min(sum(known[stage :: scene.stages]) for stage in range(scene.stages)) * (until - now)
        possible += scene.possible([stay.speed for stay in there]) * (until - now)
    return done / possible


def _turns(stay: Stay) -> tuple[float, ...]:
    """When something changes for the limit."""
    return stay.arrives, stay.works_from, stay.leaves, stay.missed + DOWNLOAD_SECONDS


# The comparison


@dataclass(frozen=True)
class Case:
    """One simulation.

    Attributes:
        scene: Who comes and goes.
        policy: One of `POLICIES`.
        seed: Of all chance.
        hours: How long.
    """

    scene: Scene
    policy: str
    seed: int
    hours: float


def percent(case: Case) -> float:
    """The share of the possible throughput."""
    stays, seconds = case.scene.stays(case.seed, case.hours), 3600 * case.hours
    random = Random(f"{case.policy} {case.seed}")
    if case.policy == LIMIT:
        return 100 * limit(case.scene, stays, seconds, random)
    return 100 * Simulation(case.scene, case.policy, random).run(stays, seconds)


def compare(seeds: Sequence[int] = range(10), hours: float = HOURS, workers: int = 2) -> Section:
    """All scenes under all policies."""
    section = Section(
        f"% of the possible throughput while hosts come and go, {hours:g} h: median of {len(seeds)} seeds (least)",
        ("hosts", *POLICIES),
        notes=[f"{LIMIT}: nobody can do better who learns of a host's end as late, and downloads for as long."],
    )
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for scene in SCENES:
            found: dict[str, Measured] = {}
            cells = dict.fromkeys(POLICIES, "")
            for policy in POLICIES if scene.spread == 1 else POLICIES[:-1]:
                cases = [Case(scene, policy, seed, hours) for seed in seeds]
                found[policy] = each = Measured(tuple(pool.map(percent, cases)))
                cells[policy] = f"{each.median:.2f} ({min(each.values):.2f})"
                progress(f"{scene}, {policy}: {cells[policy]}")
            section.results[str(scene)] = {policy: measured.to_json() for policy, measured in found.items()}
            section.rows.append((scene, *cells.values()))
            _add(section, scene, found)
    section.rows.append(("published, real traces", *(f"{value:.1f}" for value in PUBLISHED.values()), "", ""))
    return section


def _add(section: Section, scene: Scene, found: dict[str, Measured]) -> None:
    ours = found[OURS]
    goal = GOAL if scene.spread == 1 else None
    section.findings.append(
        Finding(
            str(scene), ours.median / 100, "the possible throughput", goal, True, note=f"least {min(ours.values):.2f} %"
        )
    )
    if LIMIT in found:
        ratio = Measured(tuple(one / most for one, most in zip(ours.values, found[LIMIT].values, strict=True)))
        section.findings.append(
            Finding(str(scene), ratio.median, "the limit", at_least=True, note=f"least {100 * min(ratio.values):.2f} %")
        )


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--hours", type=float, default=HOURS)
    parser.add_argument("--workers", type=int, default=2, help="processes that simulate at the same time")
    options = parser.parse_args()
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    section = compare(seeds, options.hours, options.workers)
    sys.stdout.write(f"{section}\n\n{goal_table(section.findings)}\n")


if __name__ == "__main__":
    main()
