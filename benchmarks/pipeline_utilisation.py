"""How busy a pipeline keeps its devices while round trips grow, for the layers that SWARM's authors measured.

All of the protocol is real, and so is every byte on the links; the links are simulated, a pass sleeps in virtual time
instead of computing, and a payload is zeros of the right length. Four stages of one layer with one host each, two
trainers, int8 activations. Counted is how long the device of a middle stage was busy in a window in which as many
microbatches are under way all the time as the table says. A round does not end in that window.

Published (Ryabinin et al., *SWARM parallelism*, arXiv 2301.11913, section 4.1): one layer a stage, sequences of 512
tokens, 500 Mbit/s. How long a pass took on their V100s is taken from their figures without latency: what a link of 500
Mbit/s leaves to do with 16-bit activations, if all of it overlaps, gives 7, 20 and 23 TFLOP/s for the three widths
(small matrices do not fill a V100). ``--tflops`` sets one speed for all instead (the square-cube law by itself).

The bound is that of a middle stage: the lesser of its device and its uplink, over which an output and a gradient go
for each microbatch, with nothing else. Part of `benchmarks.bench_pipeline`.
"""

from __future__ import annotations

import asyncio
import math
import multiprocessing
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, progress
from benchmarks.pipeline_shapes import (
    CODEC,
    PUBLISHED_BITS_PER_SECOND,
    TOKENS,
    Shape,
    ShapedPeer,
    ShapedPlan,
    lengths_alone,
)
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from tests.support.sim.peers import until
from tests.support.sim.pipelines import Pipeline, PipelinePeer, make_manifest

STAGES = 4
BITS_PER_SECOND = (500e6, 100e6)
ROUND_TRIPS = (0.0, 0.010, 0.050, 0.100, 0.200)
GOAL = 0.95
KEPT_GOAL = 0.9
WINDOW = 200
"""Microbatches that pass the slowest part of a middle stage while it is watched."""
TRAINERS = 2
MAX_IN_FLIGHT = 48
"""A host takes on 64, at most half of them of one trainer."""
SEEDS = (1, 2, 3)
BUFFER_BYTES = 4 << 20
"""What a connection holds that was written and not read: as much as Linux lets a TCP socket's send buffer grow to."""


SHAPES = (
    Shape("base, 768", 768, 8, 1, 18.0, (18.0, 11.8, 4.9, 2.8, 1.5)),
    Shape("xxlarge, 4096", 4096, 2, 1, 32.1, (32.1, 28.9, 20.1, 14.9, 10.1)),
    Shape("GPT-3, 12288", 12288, 1, 1, 82.1, (82.1, 79.3, 70.3, 60.2, 48.5)),
    Shape("3 shared layers, 4096", 4096, 2, 3, 32.1, (89.5, 87.2, 79.5, 71.5, 59.2)),
)


@dataclass(frozen=True)
class Case:
    """One measurement.

    Attributes:
        shape: Of the stages.
        bits_per_second: Of each peer's link, up and down.
        round_trip_seconds: Between any two peers.
        tflops: Of each device; None: as published.
        in_flight: Microbatches under way; 0: as many as it takes.
        window: Microbatches to watch.
        seed: Of the simulation.
    """

    shape: Shape
    bits_per_second: float
    round_trip_seconds: float
    tflops: float | None = None
    in_flight: int = 0
    window: int = WINDOW
    seed: int = 1

    @property
    def pass_seconds(self) -> float:
        """Of the device of a middle stage, for one microbatch."""
        return self.shape.flops / (1e12 * self.tflops) if self.tflops else self.shape.seconds

    @property
    def link_seconds(self) -> float:
        """Of a middle stage's uplink, for one microbatch."""
        return 8 * self.shape.link_bytes / self.bits_per_second

    @property
    def interval_seconds(self) -> float:
        """Between two microbatches, at best."""
        return max(self.pass_seconds, self.link_seconds)

    @property
    def bound(self) -> float:
        """Share of the time that a middle stage's device can be busy."""
        return self.pass_seconds / self.interval_seconds

    @property
    def way_seconds(self) -> float:
        """How long a microbatch takes alone: at each hop a dial, the way there and back; then it is settled."""
        return STAGES * (2 * self.round_trip_seconds + self.pass_seconds + self.link_seconds) + (
            2 * self.round_trip_seconds
        )

    @property
    def num_in_flight(self) -> int:
        """Twice as many as pass the slowest part in the time that one takes alone, and some that wait everywhere."""
        enough = math.ceil(2 * self.way_seconds / self.interval_seconds) + 4 * STAGES
        return self.in_flight or min(MAX_IN_FLIGHT, enough)


@dataclass(frozen=True)
class Pace:
    """What came of a case.

    Attributes:
        utilisation: Share of the window that the device of the busiest middle stage computed.
        per_second: Microbatches through that stage.
        resent: Microbatches that had to be sent again.
    """

    utilisation: float
    per_second: float
    resent: int


def measure(case: Case) -> Pace:
    """Simulate one case."""
    manifest = make_manifest(STAGES, layers=2 * STAGES, codec=CODEC, global_batch=1 << 20, local_batch=1)
    rate = case.bits_per_second / 8
    latency = case.round_trip_seconds / 2
    model = LinkModel(
        (latency, latency), up_bytes_per_second=rate, down_bytes_per_second=rate, buffer_bytes=BUFFER_BYTES
    )

    async def main(network: SimulatedNetwork) -> Pace:
        plan = ShapedPlan(manifest, case.shape)
        pipeline = Pipeline(network, manifest, make=partial(ShapedPeer, case.shape, case.pass_seconds / 4, plan))
        hosts = [await pipeline.add(f"host{stage}", stage) for stage in range(STAGES)]
        await until(lambda: all(host.status == "training" for host in hosts))
        trainers = [await pipeline.add(f"trainer{number}", None) for number in range(TRAINERS)]
        feeders = [trainer.feeder for trainer in trainers if trainer.feeder is not None]
        await until(lambda: all(feeder.round == 0 for feeder in feeders))
        enough = asyncio.Event()

        async def feed(trainer: PipelinePeer) -> None:
            while not enough.is_set():
                await trainer.send(0)

        fed = [trainers[number % TRAINERS] for number in range(case.num_in_flight)]
        feeding = [trainer.peer.spawn(feed(trainer)) for trainer in fed]
        devices = [host.device for host in hosts[1:-1] if isinstance(host, ShapedPeer)]
        warm_up = 2 * case.num_in_flight * case.interval_seconds + 2 * case.way_seconds
        await asyncio.sleep(warm_up)
        before = [(device.busy_seconds, device.num_backward) for device in devices]
        seconds = case.window * case.interval_seconds
        await asyncio.sleep(seconds)
        after = [(device.busy_seconds, device.num_backward) for device in devices]
        enough.set()
        await asyncio.gather(*feeding)
        found = Pace(
            min(busy - was for (busy, _), (was, _) in zip(after, before, strict=True)) / seconds,
            min(count - was for (_, count), (_, was) in zip(after, before, strict=True)) / seconds,
            sum(feeder.resent + feeder.lost for feeder in feeders),
        )
        await pipeline.close()
        return found

    with lengths_alone():
        return simulate(main, case.seed, model=model)


def compare(
    shapes: Sequence[Shape] = SHAPES,
    rates: Sequence[float] = BITS_PER_SECOND,
    tflops: float | None = None,
    in_flight: int = 0,
    workers: int = 2,
) -> Section:
    """Measure all cases, beside the bound and what was published."""
    of = "as published" if tflops is None else f"{tflops:g} TFLOP/s"
    section = Section(
        f"Utilisation of a middle stage in %, {STAGES} stages of 1 host, {CODEC}, device speeds {of},"
        f" medians of {len(SEEDS)}",
        ("shape, rate, bound", *(f"{1000 * trip:g} ms" for trip in ROUND_TRIPS)),
        results={"cases": []},
    )
    cases = [Case(shape, rate, trip, tflops, in_flight) for shape in shapes for rate in rates for trip in ROUND_TRIPS]
    seeded = [replace(case, seed=seed) for case in cases for seed in SEEDS]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        paces = pool.map(measure, seeded)
        for case in cases:
            progress(f"{case.shape.name}, {case.bits_per_second / 1e6:g} Mbit/s, {1000 * case.round_trip_seconds:g} ms")
            found = [next(paces) for _ in SEEDS]
            section.results["cases"].append(as_result(case, found))
    results = section.results["cases"]
    for start in range(0, len(cases), len(ROUND_TRIPS)):
        section.rows += rows(cases[start], results[start : start + len(ROUND_TRIPS)])
    worst = min(one["utilisation"]["median"] / one["bound"] for one in results)
    section.findings.append(Finding("least utilisation", worst, "the bound", GOAL, at_least=True))
    ratios = [one["utilisation"]["median"] / one["published"] for one in results if one["published"] is not None]
    if ratios:
        section.findings.append(Finding("least utilisation", min(ratios), "SWARM's published", 1.0, at_least=True))
    section.findings.append(
        Finding("least throughput at 100 ms", kept(results), "that at 0 ms", KEPT_GOAL, at_least=True)
    )
    section.notes += [
        f"{shape.name}: {shape.samples} x {TOKENS} tokens in a microbatch,"
        f" {1000 * Case(shape, 1, 0, tflops).pass_seconds:.1f} ms for all its passes"
        for shape in shapes
    ]
    section.notes.append(f"{sum(one['resent'] for one in results)} microbatches were sent again.")
    return section


def kept(results: Sequence[dict[str, Any]]) -> float:
    """The least throughput at a round trip of 100 ms, of that of the same shape and rate without latency."""
    paces: dict[tuple[str, float, float], float] = {
        (one["shape"], one["bits_per_second"], one["round_trip_seconds"]): one["per_second"]["median"]
        for one in results
    }
    return min(pace / paces[shape, rate, 0.0] for (shape, rate, trip), pace in paces.items() if trip == 0.100)


def as_result(case: Case, found: Sequence[Pace]) -> dict[str, Any]:
    """For JSON."""
    is_published = case.bits_per_second == PUBLISHED_BITS_PER_SECOND and case.tflops is None
    published = dict(zip(ROUND_TRIPS, case.shape.published, strict=True)) if is_published else {}
    return {
        "shape": case.shape.name,
        "samples": case.shape.samples,
        "bits_per_second": case.bits_per_second,
        "round_trip_seconds": case.round_trip_seconds,
        "in_flight": case.num_in_flight,
        "pass_seconds": case.pass_seconds,
        "link_seconds": case.link_seconds,
        "bound": case.bound,
        "utilisation": Measured(tuple(one.utilisation for one in found)).to_json(),
        "per_second": Measured(tuple(one.per_second for one in found)).to_json(),
        "resent": sum(one.resent for one in found),
        "published": published[case.round_trip_seconds] / 100 if published else None,
    }


def rows(case: Case, results: Sequence[dict[str, Any]]) -> list[Sequence[object]]:
    """One setting, for the table."""
    title = f"{case.shape.name}, {case.bits_per_second / 1e6:g} Mbit/s, {100 * case.bound:.1f}"
    found: list[Sequence[object]] = [
        (title, *(f"{100 * one['utilisation']['median']:.1f}" for one in results)),
        ("  least", *(f"{100 * min(one['utilisation']['values']):.1f}" for one in results)),
        ("  under way", *(one["in_flight"] for one in results)),
    ]
    if results[0]["published"] is not None:
        found.append(("  published", *(f"{100 * one['published']:.1f}" for one in results)))
    return found
