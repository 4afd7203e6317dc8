"""Random schedules of faults in simulated pipelines: everything drawn from a seed, run, and what must hold afterwards.

Hosts and trainers are killed, stopped, cut off and started again, at any time or exactly in a phase of a microbatch, a
round or a move; the network is partitioned; hosts move, two at once. Some trainers make their own loss.

Checked while a schedule runs: no stage loses its last host by a move; whatever is sent comes to an end in time. Checked
at the end, when everything is mended: all hosts of each stage come to one lineage, and microbatches come through again;
each of them counts at most once at each stage, exactly once at all if it was reported done, nowhere if it failed
(`tests.support.sim.counting`); hosts keep nothing; no stream or task is left (`simulate`).

Run it with ``python -m tests.support.sim.schedules --pipelines``.
"""

import asyncio
import logging
import math
import random
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.network.simulated.network import SimulatedPeer
from p2ptrain.pipeline.client.sender import Accepted
from tests.support.sim.counting import PLACES, CountedPipeline, CountingPeer
from tests.support.sim.peers import until
from tests.support.sim.pipelines import PipelinePeer, make_manifest
from tests.support.sim.trainers import InvariantError

T = TypeVar("T")

logger = logging.getLogger(__name__)

FAULTS = (
    "crash", "crash in", "crash in", "stall", "stall in", "restart", "restart", "trainer", "trainer in", "partition",
    "cut", "heal", "move", "two moves",
)  # fmt: skip
PASSES = ("before forward", "in forward", "after forward", "before backward", "in backward", "after backward")
AT_HOME = "at home"
"""The output is with a trainer that makes its own loss: between the last stage's forward and backward."""
ROUND = ("matchmaking", "scatter", "reduce", "gather", "commit")
CLOSING = ("gather", "commit")
MOVE = ("taking on", "leaving")
PHASES = (*PASSES, AT_HOME, *ROUND, *MOVE)
FAULTS_IN = ("crash in", "stall in", "trainer in")
LOSSES = (0.0, 0.0, 0.0, 0.01, 0.05)
SPARE_PLACES = 600
"""For what is sent after the faults."""
RECOVERY_SECONDS = 300.0
"""Virtual time after the last fault within which all that was sent has come to its end, and all hosts are level."""


@dataclass(frozen=True)
class PipelineSchedule:
    """How a pipeline starts and what befalls it.

    Attributes:
        seed: What it was drawn from, and its simulation follows; ``bounds``: the other arguments of
            `draw_pipeline_schedule`.
        hosts: How many there are of each stage.
        own_losses: How many of the trainers make their own loss.
        is_both: Whether the first host trains, too.
        events: (seconds after the one before, fault, number that chooses whom), in order.
        pass_seconds: What a pass takes.
        loss: Of each piece of data on its way.
    """

    seed: int
    bounds: tuple[int, int, int]
    hosts: tuple[int, ...]
    trainers: int
    own_losses: int
    is_both: bool
    events: tuple[tuple[float, str, int], ...]
    pass_seconds: float = 0.05
    loss: float = 0.0

    @property
    def command(self) -> str:
        low, high, events = self.bounds
        options = f"--count 1 --min-peers {low} --max-peers {high} --max-events {events} --verbose"
        return f"python -m tests.support.sim.schedules --pipelines --first {self.seed} {options}"


def draw_pipeline_schedule(seed: int, min_peers: int = 2, max_peers: int = 16, max_events: int = 9) -> PipelineSchedule:
    """A schedule that follows from these numbers alone."""
    generator = random.Random(f"pipeline {seed}")
    num_peers = generator.randint(min_peers, max_peers)
    num_stages = generator.randint(2, max(2, min(8, num_peers // 2)))
    num_trainers = max(1, min(generator.randint(1, 3), num_peers - 2 * num_stages))
    is_both = num_peers <= num_stages or generator.random() < 0.2
    hosts = [0] * num_stages
    for number in range(max(num_stages, num_peers - num_trainers + is_both)):
        hosts[number % num_stages] += 1
    events = tuple(
        (
            generator.choice((0.2, 2.0, 10.0)) * generator.random(),
            generator.choice(FAULTS),
            generator.randrange(1 << 30),
        )
        for _ in range(generator.randint(1, max_events))
    )
    return PipelineSchedule(
        seed, (min_peers, max_peers, max_events), tuple(hosts), num_trainers, generator.choice((0, 0, 1, num_trainers)),
        is_both, events, generator.choice((0.02, 0.05, 0.2)), generator.choice(LOSSES),
    )  # fmt: skip


class PipelineRun:
    """One schedule, its pipeline, what befalls it, and how often who was hit in which phase."""

    def __init__(self, schedule: PipelineSchedule, network: SimulatedNetwork) -> None:
        self.schedule = schedule
        self.network = network
        self.hits: Counter[str] = Counter()
        self.batch = max(12, 2 * schedule.hosts[0])
        manifest = make_manifest(len(schedule.hosts), layers=8, global_batch=self.batch, local_batch=1)
        self.pipeline = CountedPipeline(network, manifest)
        self._random = random.Random(f"faults {schedule.seed}")
        self._traps: list[tuple[str, str]] = []
        self._gone: list[PipelinePeer] = []
        self._feeding: dict[PipelinePeer, asyncio.Task[object]] = {}
        self._places: Iterator[int] = iter(range(PLACES - SPARE_PLACES))
        self._may_fork = False
        self._closing: dict[PipelinePeer, bytes] = {}
        self._problems: list[str] = []
        make = self.pipeline.make
        assert make is not None

        def make_and_watch(simulated: SimulatedPeer, stage: int | None, pass_seconds: float) -> PipelinePeer:
            peer = make(simulated, stage, pass_seconds)
            assert isinstance(peer, CountingPeer)
            peer.told = self._comes_to
            return peer

        self.pipeline.make = make_and_watch

    async def run(self) -> None:
        schedule, pipeline = self.schedule, self.pipeline
        for stage, count in enumerate(schedule.hosts):
            for number in range(count):
                await pipeline.add(f"host{stage}.{number}", stage, schedule.pass_seconds)
        for number in range(schedule.trainers):
            if number == 0 and schedule.is_both:
                trainer = pipeline.peers[0]
                await trainer.peer.spawn(trainer.start_feeding())
            else:
                trainer = await pipeline.add(f"trainer{number}", None, schedule.pass_seconds)
            trainer.makes_loss = number < schedule.own_losses
            self._feed(trainer)
        for delay, fault, choice in schedule.events:
            await asyncio.sleep(delay)
            await self._befall(fault, choice)
        await asyncio.sleep(5.0)
        self._traps.clear()
        self._mend()
        pipeline.is_stopping = True
        await self._within(asyncio.gather(*self._feeding.values()), "all that was sent has come to its end")
        pipeline.is_stopping = False
        await self._recover()
        self._check()
        await pipeline.close()

    def _feed(self, trainer: PipelinePeer) -> None:
        feeding = self.pipeline.feed(trainer, self._places, at_once=8)
        self._feeding[trainer] = asyncio.create_task(feeding, name=f"feed-{trainer.peer.name}")

    # Faults

    def _mend(self) -> None:
        self.network.heal()
        for peer in self.pipeline.alive:
            self.network.mend(peer.peer)
            self.network.resume(peer.peer)

    async def _befall(self, fault: str, choice: int) -> None:
        network, pipeline = self.network, self.pipeline
        alive = pipeline.alive
        chosen = alive[choice % len(alive)]
        phase = PHASES[choice % len(PHASES)]
        match fault:
            case "crash" if chosen.hosted is not None and self._may_lose(chosen):
                self._crash(chosen)
            case "stall":
                self._stall(chosen, self._random.choice((0.3, 3.0, 20.0)))
            case "cut":
                self._may_fork = True
                network.cut(chosen.peer)
            case "partition" if len(alive) > 2:
                self._may_fork = True
                side = self._random.sample(alive, self._random.randrange(1, len(alive)))
                network.partition([peer.peer for peer in side])
            case "heal":
                network.heal()
                for peer in alive:
                    network.mend(peer.peer)
            case "restart" if self._gone:
                await self._restart(self._gone.pop(choice % len(self._gone)))
            case "trainer" if trainer := self._mortal_trainer():
                self._crash(trainer)
            case "move":
                self._move(1)
            case "two moves":
                self._move(2)
            case _ if fault in FAULTS_IN:
                self._traps.append((fault, phase))
                if phase in MOVE:
                    self._move(1)

    async def _restart(self, peer: PipelinePeer) -> None:
        pipeline, trains = self.pipeline, peer.feeder is not None
        pipeline.peers.remove(peer)
        pipeline.former.append(peer)
        again = await pipeline.begin(self.network.restart(peer.peer), peer.stage, self.schedule.pass_seconds)
        if again.stage is not None and trains:
            await again.peer.spawn(again.start_feeding())
        if trains:
            again.makes_loss = peer.makes_loss
            self._feed(again)

    def _stall(self, victim: PipelinePeer, seconds: float) -> None:
        """Stall a peer.

        Its stage may fork where the others go on without a round that it alone has, or completes of what they signed.
        """
        heads = [hosted.units[0].synchronizer.head for hosted in victim.all_hosted]
        is_closing = self._closing.get(victim) in [head.lineage for head in heads]
        self._may_fork |= is_closing or not self._may_lose(victim)
        self.network.stall(victim.peer, seconds)

    def _crash(self, peer: PipelinePeer) -> None:
        self.network.crash(peer.peer)
        self._gone.append(peer)

    def _mortal_trainer(self) -> PipelinePeer | None:
        """A trainer that may die, since there is another one."""
        trainers = [peer for peer in self._feeding if peer.peer.alive]
        alone = [peer for peer in trainers if peer.hosted is None]
        return self._random.choice(alone) if len(trainers) > 1 and alone else None

    def _may_lose(self, victim: PipelinePeer) -> bool:
        """Whether others have all that a host has, and are well: what only one has is lost with it."""
        accounts = self.pipeline.plan.accounts
        return all(
            any(
                hosted.units[0].synchronizer.head.lineage in accounts.chain(other.hosted)
                for other in self._well(hosted.number)
                if other is not victim and other.hosted is not None
            )
            for hosted in victim.all_hosted
        )

    def _well(self, stage: int) -> list[PipelinePeer]:
        """Return the hosts of a stage that train, are not leaving and do not stand still."""
        return [
            peer
            for peer in self.pipeline.alive
            if peer.stage == stage and peer.status == "training" and not self._is_leaving(peer)
            and not self.network.loop.is_frozen(peer.peer)
        ]  # fmt: skip

    def _is_leaving(self, peer: PipelinePeer) -> bool:
        return isinstance(peer, CountingPeer) and peer.is_leaving

    def _move(self, number: int) -> None:
        """Move so many hosts to other stages at the same time, from one stage if it has enough."""
        stages = range(len(self.schedule.hosts))
        staffed = [stage for stage in stages if len(self._well(stage)) > 1]
        if not staffed:
            return
        source = self._random.choice(staffed)
        movers = self._random.sample(self._well(source), min(number, len(self._well(source))))
        if number > 1 and self._random.random() < 0.5:  # From two stages, maybe to each other's.
            movers[1:] = [self._random.choice(self._well(self._random.choice(staffed)))]
        targets = [stage for stage in stages if stage != source]
        self.hits["two moves at once"] += len({mover.peer.name for mover in movers}) > 1
        for mover in movers:
            assert isinstance(mover, CountingPeer)
            mover.go(self._random.choice(targets if mover.stage == source else [source]))

    def _comes_to(self, peer: CountingPeer, phase: str) -> None:
        """Do to a host what the trap of this phase wants, at the moment when the host enters the phase."""
        if phase in CLOSING and peer.hosted is not None:
            self._closing[peer] = peer.hosted.units[0].synchronizer.head.lineage
        if phase == "moved":
            self.hits["moved"] += 1
            source, _ = peer.moves[-1]
            if not any(other.stage == source for other in self.pipeline.alive):
                self._problems.append(f"stage {source} lost its last host by the move of {peer.peer.name}")
        for trap in self._traps:
            fault, where = trap
            if not peer.peer.alive:  # What was running when it was hit runs to where it waits next.
                return
            victim = self._victim(fault, peer) if where == phase else None
            if victim is not None:
                self._traps.remove(trap)
                self.hits[f"{fault} {phase}"] += 1
                self.network.record("trap", fault, phase)
                if fault == "stall in":
                    self._stall(victim, 20.0)
                else:
                    self._crash(victim)
                return

    def _victim(self, fault: str, peer: CountingPeer) -> PipelinePeer | None:
        if fault == "trainer in":
            return self._mortal_trainer()
        if fault == "stall in":
            return peer
        if peer.hosted is not None:
            return peer if self._may_lose(peer) else None
        # An output is with a trainer: one of the hosts that wait for its gradient.
        waiting = [host for host in self.pipeline.alive if host.hosted and host.hosted.host.ledger.num_running]
        return next((host for host in self._random.sample(waiting, len(waiting)) if self._may_lose(host)), None)

    # What must hold

    async def _recover(self) -> None:
        """Nobody is stuck: all hosts of each stage become level, and all that is sent counts."""
        pipeline, spare = self.pipeline, iter(range(PLACES - SPARE_PLACES, PLACES))
        trainer = await pipeline.add("late trainer", None)
        await self._within(self._send(trainer, spare, self.batch), "microbatches come to their end again")
        await self._until(pipeline.is_level, "all hosts of each stage are level")
        done = len(trainer.done)
        results = await self._within(self._send(trainer, spare, 2 * self.batch), "microbatches come through again")
        if missing := sum(not result for result in results.values()):
            raise InvariantError(f"{missing} microbatches did not come through, though nothing fails any more")
        await self._until(lambda: len(trainer.done) >= done + self.batch, "microbatches are done")
        await self._until(pipeline.is_level, "all hosts of each stage are level again")
        await self._until(self._is_empty, "hosts keep nothing")

    def _is_empty(self) -> bool:
        ledgers = [hosted.host.ledger for peer in self.pipeline.alive for hosted in peer.all_hosted]
        return all(ledger.num_bytes == 0 == ledger.num_running for ledger in ledgers)

    async def _send(self, trainer: PipelinePeer, places: Iterator[int], number: int) -> dict[int, Accepted | None]:
        return await self.pipeline.feed(trainer, [next(places) for _ in range(number)], at_once=8)

    async def _until(self, condition: Callable[[], bool], what: str) -> None:
        await self._within(until(condition, math.inf, 0.1), what)

    async def _within(self, work: Awaitable[T], what: str) -> T:
        try:
            async with asyncio.timeout(RECOVERY_SECONDS):
                return await work
        except TimeoutError:
            raise InvariantError(f"not within {RECOVERY_SECONDS:g} s: {what}") from None

    def _check(self) -> None:
        if self._problems:
            raise InvariantError("; ".join(self._problems))
        self.pipeline.check(self._may_fork)


class Drawn(Protocol):
    @property
    def seed(self) -> int: ...
    @property
    def loss(self) -> float: ...
    @property
    def command(self) -> str: ...


def problems_of(schedule: Drawn, run: Callable[[SimulatedNetwork], Awaitable[None]]) -> list[str]:
    """Run one schedule to its end; what did not hold, with the schedule and how to see it again. Empty if all did."""
    try:
        simulate(run, schedule.seed, model=LinkModel(loss=schedule.loss))
    except Exception as error:
        logger.debug("seed %d failed", schedule.seed, exc_info=True)
        said = str(error) or type(error).__name__
        return [f"seed {schedule.seed}: {said}\n{schedule}\nto see it again: {schedule.command}"]
    return []


def find_pipeline_problems(schedule: PipelineSchedule, hits: Counter[str] | None = None) -> list[str]:
    """`problems_of` a schedule of a pipeline; ``hits`` is told how often who was hit in which phase."""

    async def main(network: SimulatedNetwork) -> None:
        run = PipelineRun(schedule, network)
        try:
            await run.run()
        finally:
            if hits is not None:
                hits.update(run.hits)

    return problems_of(schedule, main)
