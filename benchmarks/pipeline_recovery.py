"""How soon a pipeline goes on when one of its hosts is killed or stopped while microbatches are under way.

Each schedule draws stages, hosts, latencies of 5 to 50 ms one way, the victim and the moment from its seed. Hosts,
feeder and protocol are the product's own, in virtual time; a pass sleeps. A trainer keeps the hosts busy. A killed
host's streams end; of a stopped one nothing is heard, but it can be dialled (SIGSTOP). Counted from that moment:

* *next*: until another microbatch is accepted;
* *all*: until every microbatch that was under way is accepted, or given up as lost;
* *full*: until, for `WINDOW_SECONDS` on, as many are accepted as the hosts that are left can do (less `SHORT`).

Part of `benchmarks.bench_pipeline`.
"""

from __future__ import annotations

import asyncio
import itertools
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from random import Random
from unittest import mock

import torch

from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, progress
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.pipeline.client.sender import LostError
from p2ptrain.pipeline.routing.hop import HopLimits
from tests.support.sim.counting import PLACES, CountedPipeline
from tests.support.sim.peers import until
from tests.support.sim.pipelines import PipelinePeer, make_manifest

KINDS = ("killed", "stopped")
LATENCY_SECONDS = (0.005, 0.050)
PASS_SECONDS = 0.15
WARM_UP_SECONDS = 20.0
AFTER_SECONDS = 18.0
WINDOW_SECONDS = 4.0
SHORT = 0.1
QUIET_SECONDS = HopLimits().quiet_seconds
NEXT_GOAL = {"killed": 1.0, "stopped": QUIET_SECONDS + 1.0}
FULL_GOAL = {"killed": 5.0, "stopped": QUIET_SECONDS + 5.0}


@dataclass(frozen=True)
class Outcome:
    """What one schedule gave.

    Attributes:
        seed, kind: Which.
        stages, replicas: How many, and hosts of each.
        stage: The victim's.
        possible: Microbatches per second that the hosts that are left can do.
        before: Of what all hosts could do: what was done before.
        next_seconds, all_seconds, full_seconds: See the module; infinite if it never came.
        lost: Microbatches that came through and could not be settled.
        most_silent_seconds: Between two that were accepted.
    """

    seed: int
    kind: str
    stages: int
    replicas: int
    stage: int
    possible: float
    before: float
    next_seconds: float
    all_seconds: float
    full_seconds: float
    lost: int
    most_silent_seconds: float


@dataclass
class Sent:
    """One microbatch, in virtual time."""

    began: float
    ended: float = math.inf
    is_accepted: bool = False


def possible(hosts: Sequence[PipelinePeer], num_stages: int) -> float:
    """Microbatches per second of the slowest stage: all but the last make two passes."""
    rates = [0.0] * num_stages
    for host in hosts:
        assert host.stage is not None
        rates[host.stage] += 1 / (PASS_SECONDS * (1 if host.stage == num_stages - 1 else 2))
    return min(rates)


def full_after(accepted: Sequence[float], begin: float, rate: float, end: float) -> float:
    """Seconds until the first window from ``begin`` on in which enough was accepted."""
    wanted = math.floor((1 - SHORT) * rate * WINDOW_SECONDS)
    for start in (begin, *(time for time in accepted if time > begin)):
        if start + WINDOW_SECONDS <= end and sum(start < time <= start + WINDOW_SECONDS for time in accepted) >= wanted:
            return start - begin
    return math.inf


def run(case: tuple[str, int]) -> Outcome:
    """One schedule."""
    torch.set_num_threads(1)
    kind, seed = case
    random = Random(f"recovery {seed}")
    num_stages, replicas = random.choice((2, 3, 4)), random.choice((2, 3))

    async def main(network: SimulatedNetwork) -> Outcome:
        loop = network.loop
        manifest = make_manifest(num_stages, layers=6, global_batch=1 << 20, local_batch=1)
        pipeline = CountedPipeline(network, manifest)
        for stage in range(num_stages):
            for number in range(replicas):
                await pipeline.add(f"host{stage}.{number}", stage, PASS_SECONDS)
        await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
        trainer = await pipeline.add("trainer", None)
        rate = possible(pipeline.hosts, num_stages)
        way = num_stages * (2 * PASS_SECONDS + 4 * LATENCY_SECONDS[1]) + 4 * LATENCY_SECONDS[1]
        sent: list[Sent] = []
        numbers, enough = itertools.count(), asyncio.Event()

        async def feed() -> None:
            while not enough.is_set():
                one = Sent(loop.time())
                sent.append(one)
                try:
                    await trainer.send(next(numbers) % PLACES)
                    one.is_accepted = True
                except LostError:
                    pass
                one.ended = loop.time()

        feeding = [trainer.peer.spawn(feed()) for _ in range(min(32, math.ceil(1.5 * rate * way)))]
        await asyncio.sleep(WARM_UP_SECONDS + 5 * random.random())
        victim = random.choice(pipeline.hosts)
        assert victim.stage is not None
        begin = loop.time()
        if kind == "killed":
            network.crash(victim.peer)
        else:
            network.stall(victim.peer)
        left = possible([host for host in pipeline.hosts if host is not victim], num_stages)
        await asyncio.sleep(AFTER_SECONDS)
        end = loop.time()
        enough.set()
        if kind == "stopped":
            network.crash(victim.peer)
        await asyncio.gather(*feeding)
        await pipeline.close()
        accepted = sorted(one.ended for one in sent if one.is_accepted and one.ended <= end)
        after = [time for time in accepted if time > begin]
        before = sum(begin - 8 < time <= begin for time in accepted) / 8
        return Outcome(
            seed, kind, num_stages, replicas, victim.stage, left, before / rate,
            (after[0] if after else math.inf) - begin,
            max(one.ended for one in sent if one.began <= begin < one.ended) - begin,
            full_after(accepted, begin, left, end),
            sum(not one.is_accepted for one in sent if one.began <= end),
            max(later - time for time, later in itertools.pairwise([begin, *after, end])),
        )  # fmt: skip

    with (
        mock.patch("tests.support.sim.pipelines.HOP_LIMITS", HopLimits()),
        mock.patch("tests.support.sim.counting.HOP_LIMITS", HopLimits()),
    ):
        return simulate(main, seed, model=LinkModel(LATENCY_SECONDS))


def compare(schedules: int = 100, first: int = 0, workers: int = 2) -> Section:
    """Run all schedules with both faults."""
    section = Section(
        f"A host killed or stopped under load, {schedules} schedules each: seconds, median / 95 % (most)",
        ("fault", "next accepted", "all that were under way", "full throughput", "longest silence", "lost"),
        results={"outcomes": []},
    )
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        for kind in KINDS:
            progress(f"{schedules} schedules in which a host is {kind}")
            cases = [(kind, seed) for seed in range(first, first + schedules)]
            found = list(pool.map(run, cases))
            section.results["outcomes"] += [asdict(one) for one in found]
            following = Measured(tuple(one.next_seconds for one in found))
            everything = Measured(tuple(one.all_seconds for one in found))
            full = Measured(tuple(one.full_seconds for one in found))
            silent = Measured(tuple(one.most_silent_seconds for one in found))
            lost = sum(one.lost for one in found)
            section.rows.append((kind, *(_cell(each) for each in (following, everything, full, silent)), lost))
            for what, measured, goal in (
                ("next accepted", following, NEXT_GOAL[kind]),
                ("full throughput", full, FULL_GOAL[kind]),
            ):
                section.findings.append(
                    Finding(f"{kind}: {what}, 95 %", measured.quantile(0.95), "seconds", goal, note=_cell(measured))
                )
            before = Measured(tuple(one.before for one in found))
            section.notes.append(
                f"Before a host was {kind}, {100 * before.median:.0f} % of what all could do was done"
                f" (least {100 * min(before.values):.0f} %)."
            )
    return section


def _cell(measured: Measured) -> str:
    return f"{measured.median:.2f} / {measured.quantile(0.95):.2f} ({max(measured.values):.2f})"
