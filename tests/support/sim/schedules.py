"""Random schedules of faults: everything drawn from a seed, run on a simulated swarm, and what must hold afterwards.

Checked while a schedule runs (`tests.support.sim.trainers`, `accounts`, `conservation`): equal digests for equal
lineages, nothing changed by a round that was not applied, every wait bounded, no token and no value in two places.
Checked at the end: all honest trainers, mended and resumed, get onto one chain of rounds and contribute to it; every
token and value that anybody made is contributed, waits, or was seen to decay or to be dropped; one certificate per
roster; nothing of a hostile member's broken parts in any mean; no stream or task left (`simulate`).

Run as a program, it tries as many seeds as there is time for: see `main`.
"""

import argparse
import asyncio
import itertools
import logging
import math
import random
import sys
import time
from collections import Counter
from dataclasses import dataclass, replace

from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.network import SimulatedPeer
from tests.support.sim.accounts import Accounts
from tests.support.sim.hostile import BROKEN_PARTS, HOSTILITIES
from tests.support.sim.mask_schedules import PHASES as MASK_PHASES
from tests.support.sim.mask_schedules import draw_mask_schedule, find_mask_problems
from tests.support.sim.pipeline_schedules import PHASES as PIPELINE_PHASES
from tests.support.sim.pipeline_schedules import draw_pipeline_schedule, find_pipeline_problems, problems_of
from tests.support.sim.serving_schedules import draw_serving_schedule, find_serving_problems
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

FAULTS = (
    "crash", "crash in", "restart", "stall", "stall in", "partition", "heal", "cut", "cut in", "mend", "join", "slow",
)  # fmt: skip
PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")
CODECS = ("fp32", "fp16", "bf16", "int8", "int4", "topk")
RULES = ("mean", "norm_clip", "centered_clip", "trimmed", "median")
LOSSES = (0.0, 0.0, 0.01, 0.05, 0.2)
SLOWDOWN = 10.0
SLOW_BYTES_PER_SECOND = 4_000.0
"""Times the number of peers that may be there in the end: a round's messages take seconds on such a link."""
MOST_JOINERS = 3
RECOVERY_SECONDS = 300.0
"""Virtual time after the last fault within which everybody is back and has contributed."""
HOSTILE_CELL_SECONDS = 600.0
"""The same where a hostile member sits in a small cell. With two of eight peers dead beside it, the quorum needs the
hostile vote: rounds are reduced ones, each after 20 s, until the dead sleep eight rounds later (seed 800607042: 330 s).
"""


@dataclass(frozen=True)
class Schedule:
    """How a swarm starts and what befalls it; ``codec`` to ``global_batch`` are of the manifest.

    Attributes:
        seed: What it was drawn from, and its simulation follows; ``bounds``: the other arguments of `draw_schedule`.
        events: (seconds after the one before, fault, number that chooses whom), in order.
        loss: Of each piece of data on its way.
        slow: How many of the trainers have a tenth of the speed, in computing and on the network.
        hostility: What the last trainer does; empty if it is honest.
        global_batch: Samples of a round in which gradients are averaged (``every = 1``); 0 for pseudo-gradients.
    """

    seed: int
    bounds: tuple[int, int, int]
    num_peers: int
    events: tuple[tuple[float, str, int], ...]
    codec: str = "int8"
    small_tensors: str = ""
    rule: str = "norm_clip"
    loss: float = 0.0
    slow: int = 0
    hostility: str = ""
    group_size: int = 64
    fragments: int = 1
    overlap_steps: int = 0
    spot_checks: int = 0
    global_batch: int = 0

    @property
    def training(self) -> dict[str, int]:
        if self.global_batch and self.fragments == 1 and not self.overlap_steps:
            return {"every": 1, "global_batch": self.global_batch, "local_batch": 1}
        every = max(4, 2 * self.fragments * self.overlap_steps)
        return {"every": every, "fragments": self.fragments, "overlap_steps": self.overlap_steps}

    @property
    def command(self) -> str:
        low, high, events = self.bounds
        options = f"--count 1 --min-peers {low} --max-peers {high} --max-events {events} --verbose"
        options += f" --fragments {self.fragments} --overlap-steps {self.overlap_steps} --group-size {self.group_size}"
        return f"python -m tests.support.sim.schedules --first {self.seed} {options}"


def draw_schedule(seed: int, min_peers: int = 2, max_peers: int = 8, max_events: int = 6) -> Schedule:
    """A schedule that follows from these numbers alone."""
    generator = random.Random(f"schedule {seed}")
    num_peers = generator.randint(min_peers, max_peers)
    events = tuple(
        (generator.expovariate(1 / 4.0), generator.choice(FAULTS), generator.randrange(1 << 30))
        for _ in range(generator.randint(1, max_events))
    )
    codec = generator.choice(CODECS)
    # `topk` leaves most values out, and rules by coordinate make zeros of that: manifests refuse it.
    rule = generator.choice(RULES[:3] if codec == "topk" else RULES)
    return Schedule(
        seed, (min_peers, max_peers, max_events), num_peers, events, codec, generator.choice(("", "", "fp32")), rule,
        generator.choice(LOSSES),
        slow=1 if num_peers > 2 and generator.random() < 0.2 else 0,
        hostility=generator.choice(tuple(HOSTILITIES)) if num_peers > 3 and generator.random() < 0.4 else "",
        group_size=generator.choice((3, 4)) if num_peers > 4 and generator.random() < 0.2 else 64,
        spot_checks=generator.choice((0, 4)),
        global_batch=4 * num_peers if generator.random() < 0.25 else 0,
    )  # fmt: skip


class Run:
    def __init__(self, schedule: Schedule, network: SimulatedNetwork) -> None:
        self.schedule = schedule
        self.network = network
        small = {"small_values": 12} if schedule.small_tensors else {}
        manifest = make_manifest(
            schedule.training, codec=schedule.codec, small_tensors=schedule.small_tensors, **small,
            aggregation=schedule.rule, group_size=schedule.group_size, spot_checks=schedule.spot_checks,
        )  # fmt: skip
        self.swarm = SimulatedSwarm(network, manifest, schedule.seed)
        self.accounts = Accounts(self.swarm)
        self._traps: list[tuple[str, str]] = []
        self._joined = 0
        launch = self.swarm._launch

        def launch_and_corrupt(*args: object) -> SimulatedTrainer:
            trainer: SimulatedTrainer = launch(*args)  # type: ignore[arg-type]
            if schedule.hostility and trainer.peer.name == f"t{schedule.num_peers - 1}":
                trainer.is_hostile = True
                self.accounts.values.hostile.add(trainer.peer.peer_id)
                HOSTILITIES[schedule.hostility](trainer)
            trainer.sync.averager.phase_listeners = [lambda phase, round_: self._spring(trainer.peer, phase)]
            return trainer

        self.swarm._launch = launch_and_corrupt  # type: ignore[method-assign, assignment]

    async def run(self) -> None:
        rate = SLOW_BYTES_PER_SECOND * (self.schedule.num_peers + MOST_JOINERS)
        for index in range(self.schedule.num_peers):
            if index < self.schedule.slow:
                self.swarm.start(f"t{index}", SLOWDOWN * 0.4, up_bytes_per_second=rate, down_bytes_per_second=rate)
            else:
                self.swarm.start(f"t{index}", step_seconds=0.4 + 0.1 * (index % 3))
        for delay, fault, choice in self.schedule.events:
            await asyncio.sleep(delay)
            self._befall(fault, choice)
        await asyncio.sleep(5)
        self._traps.clear()
        self.network.heal()
        for trainer in self.swarm.alive:
            self.network.mend(trainer.peer)
            self.network.resume(trainer.peer)
        await self._recover()
        self._check()
        await self.swarm.end()

    def _befall(self, fault: str, choice: int) -> None:
        network, swarm = self.network, self.swarm
        alive = [trainer.peer for trainer in swarm.alive]
        dead = [name for name, trainer in swarm.trainers.items() if not trainer.peer.alive]
        chosen = alive[choice % len(alive)]
        match fault:
            case "crash" if len(swarm.honest) > 1:
                network.crash(chosen)
            case "restart" if dead:
                swarm.restart(dead[choice % len(dead)])
            case "stall":
                network.stall(chosen, 2.0 + choice % 40)
            case "partition" if len(alive) > 2:
                network.partition(alive[: 1 + choice % (len(alive) - 1)])
            case "heal":
                network.heal()
            case "cut":
                network.cut(chosen)
            case "mend":
                network.mend(chosen)
            case "join" if self._joined < MOST_JOINERS:
                self._joined += 1
                swarm.start(f"late{self._joined}")
            case "slow":
                most = len(alive) + MOST_JOINERS - self._joined
                chosen.uplink.bytes_per_second = SLOW_BYTES_PER_SECOND * most
            case "crash in" | "stall in" | "cut in":
                self._traps.append((fault, PHASES[choice % len(PHASES)]))

    def _spring(self, peer: SimulatedPeer, phase: str) -> None:
        """Hit the first peer that enters a trap's phase, at that moment."""
        for trap in self._traps:
            fault, where = trap
            if not peer.alive:  # What was running when it was hit runs to where it waits next.
                return
            if where == phase and (fault != "crash in" or len(self.swarm.honest) > 1):
                self._traps.remove(trap)
                self.network.record("trap", fault, phase)
                if fault == "crash in":
                    self.network.crash(peer)
                elif fault == "stall in":
                    self.network.stall(peer, 30.0)
                else:
                    self.network.cut(peer)
                return

    async def _recover(self) -> None:
        """Nobody is stuck: all come two rounds beyond today's front, on one chain, and contribute to what follows."""
        swarm, front = self.swarm, max(trainer.sync.head.round for trainer in self.swarm.alive)
        told = dict(swarm.ledger.contributed)

        def recovered() -> bool:
            return self._liars_decide() or (
                all(trainer.sync.head.round >= front + 2 for trainer in swarm.honest)
                and self._on_one_chain()
                and all(swarm.ledger.contributed.get(t.peer.name, 0) > told.get(t.peer.name, 0) for t in swarm.honest)
            )

        is_hard = self.schedule.hostility and self.schedule.group_size < self.schedule.num_peers
        seconds = HOSTILE_CELL_SECONDS if is_hard else RECOVERY_SECONDS
        await swarm.until(recovered, seconds, "all are back on one chain and contribute")

    def _liars_decide(self) -> bool:
        """True if a liar is in every quorum: it began the swarm with the founder alone, and may stop it."""
        table = max((trainer.sync.head for trainer in self.swarm.alive), key=lambda head: head.round).table
        liars = {trainer.peer.peer_id for trainer in self.swarm.trainers.values() if trainer.is_hostile}
        return len(table.electorate - liars) < table.quorum

    def _on_one_chain(self) -> bool:
        heads = sorted((trainer.sync.head for trainer in self.swarm.honest), key=lambda head: head.round)
        return all(self.accounts.is_within(head.lineage, heads[-1].lineage) for head in heads)

    def _check(self) -> None:
        accounts = self.accounts
        for trainer in self.swarm.honest:
            accounts.check(trainer)
        accounts.check_conservation()
        if self.schedule.hostility in BROKEN_PARTS:
            accounts.check_left_out(accounts.values.hostile)


def find_problems(schedule: Schedule) -> list[str]:
    """Run one schedule to its end; what did not hold, with the schedule and how to see it again. Empty if all did."""

    return problems_of(schedule, lambda network: Run(schedule, network).run())


def main() -> int:
    """Try many seeds; name those that fail, and go on. The exit code tells whether there were any."""
    import torch

    parser = argparse.ArgumentParser(prog="python -m tests.support.sim.schedules", description=main.__doc__)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--count", type=int, default=1000, help="how many seeds")
    parser.add_argument("--minutes", type=float, help="as many seeds as begin within this time, in place of --count")
    parser.add_argument("--min-peers", type=int, default=2, help="trainers at the start, at least; of pipelines, peers")
    parser.add_argument("--max-peers", type=int, help="and at most: 6, with hosts of stages 16")
    parser.add_argument("--max-events", type=int, help="faults, at most: 6, in pipelines 9")
    parser.add_argument("--pipelines", action="store_true", help="of pipelines: peers are hosts of stages and trainers")
    parser.add_argument("--serving", action="store_true", help="of generations; takes neither peers nor events")
    parser.add_argument("--masks", action="store_true", help="of secure aggregation; takes neither peers nor events")
    parser.add_argument("--sessions", type=int, default=9, help="with --serving: generations of a schedule")
    parser.add_argument("--fragments", type=int, default=1, help="parts of the model that take turns")
    parser.add_argument("--overlap-steps", type=int, default=0, help="steps while a round is under way")
    parser.add_argument("--group-size", type=int, help="members of an averaging group, at most: drawn if not given")
    parser.add_argument("--verbose", action="store_true", help="log what the peers do")
    options = parser.parse_args()
    logging.basicConfig(level=logging.DEBUG if options.verbose else logging.CRITICAL)
    torch.set_num_threads(1)
    began, failed, hits, tried = time.process_time(), [], Counter[str](), 0
    until = time.monotonic() + 60 * options.minutes if options.minutes else math.inf
    for seed in itertools.count(options.first):
        if time.monotonic() >= until or (not options.minutes and seed >= options.first + options.count):
            break
        tried += 1
        most = options.max_peers or (16 if options.pipelines else 6)
        bounds = seed, options.min_peers, most, options.max_events or (9 if options.pipelines else 6)
        if options.serving:
            problems = find_serving_problems(draw_serving_schedule(seed, options.sessions), hits)
        elif options.masks:
            problems = find_mask_problems(draw_mask_schedule(seed), hits)
        elif options.pipelines:
            problems = find_pipeline_problems(draw_pipeline_schedule(*bounds), hits)
        else:
            schedule = draw_schedule(*bounds)
            schedule = replace(
                schedule, fragments=options.fragments, overlap_steps=options.overlap_steps,
                group_size=options.group_size or schedule.group_size,
            )  # fmt: skip
            problems = find_problems(schedule)
        for problem in problems:
            failed.append(seed)
            sys.stdout.write(f"{problem}\n")
            sys.stdout.flush()
    seconds = (time.process_time() - began) / max(1, tried)
    for what, number in sorted(hits.items()):
        sys.stdout.write(f"{number:6d} times: {what}\n")
    if phases := PIPELINE_PHASES if options.pipelines else tuple(MASK_PHASES) if options.masks else ():
        missed = [phase for phase in phases if not any(hit.endswith(f" in {phase}") for hit in hits)]
        sys.stdout.write(f"phases in which nobody was hit: {', '.join(missed) or 'none'}\n")
    sys.stdout.write(f"{tried} schedules, {seconds:.2f} s of CPU each; failed: {failed or 'none'}\n")
    return int(bool(failed))


if __name__ == "__main__":
    sys.exit(main())
