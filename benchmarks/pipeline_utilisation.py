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
import contextlib
import itertools
import math
import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar
from unittest import mock

import torch

from benchmarks.findings import Finding, Section
from benchmarks.harness import progress
from p2ptrain.manifest import Manifest
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer, simulate
from p2ptrain.pipeline.compute import LossPass
from p2ptrain.pipeline.device import Device, Pass
from p2ptrain.pipeline.messages import IDS, Payload, pack, payload_bytes
from p2ptrain.training.hosted_stage import HostedStage
from tests.support.counting import CountingCompute, CountingPlan, CountingStage
from tests.support.pipelines import Pipeline, PipelinePeer, make_manifest
from tests.support.simulation import until

T = TypeVar("T")

TOKENS = 512
STAGES = 4
CODEC = "int8"
BITS_PER_SECOND = (500e6, 100e6)
ROUND_TRIPS = (0.0, 0.010, 0.050, 0.100, 0.200)
PUBLISHED_BITS_PER_SECOND = 500e6
GOAL = 0.95
WINDOW = 100
"""Microbatches that pass the slowest part of a middle stage while it is watched."""
TRAINERS = 2
MAX_IN_FLIGHT = 60
"""A host takes on 64, at most half of them of one trainer."""
BUFFER_BYTES = 4 << 20
"""What a connection holds that was written and not read: as much as Linux lets a TCP socket's send buffer grow to."""
QUANTUM_BYTES = 256 * 1024
"""Streams take turns on a link in units of this size; one frame."""


@dataclass(frozen=True)
class Shape:
    """A stage.

    Attributes:
        name: For people.
        width: Of its layers.
        samples: In a microbatch; narrow layers need more of them, so that few enough are under way.
        layers: How many it has.
        like: The published row without latency that says how fast one layer is.
        published: Utilisation in % at `ROUND_TRIPS`; empty if nobody published any.
    """

    name: str
    width: int
    samples: int
    layers: int
    like: float
    published: tuple[float, ...]

    @property
    def flops(self) -> float:
        """Of one microbatch: forward, forward again, and backward, which is twice as much."""
        forward = 24 * self.width**2 + 4 * TOKENS * self.width
        return 4.0 * forward * TOKENS * self.samples * self.layers

    @property
    def seconds(self) -> float:
        """All passes of one microbatch in a middle stage."""
        sent_bytes = 2 * 2 * TOKENS * self.width * self.samples
        return self.layers * self.like / 100 * sent_bytes * 8 / PUBLISHED_BITS_PER_SECOND

    @property
    def link_bytes(self) -> int:
        """What goes over a middle stage's uplink for one microbatch."""
        return 2 * payload_bytes(CODEC, (self.samples, TOKENS, self.width))


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
    """

    shape: Shape
    bits_per_second: float
    round_trip_seconds: float
    tflops: float | None = None
    in_flight: int = 0
    window: int = WINDOW

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
        """Half as many again as pass the slowest part in the time that one takes if it is alone."""
        return self.in_flight or min(MAX_IN_FLIGHT, math.ceil(1.5 * self.way_seconds / self.interval_seconds) + STAGES)


class ShapedPlan(CountingPlan):
    """Stages that take activations of a width."""

    def __init__(self, manifest: Manifest, shape: Shape) -> None:
        super().__init__(manifest)
        self._shape = shape

    def check(self, stage: int, inputs: Payload, targets: Payload, samples: int, tokens: int) -> None:
        of_stage = (samples, TOKENS) if stage == 0 else (samples, TOKENS, self._shape.width)
        if inputs.shape != of_stage or targets.shape != (samples, TOKENS) or tokens != samples * TOKENS:
            raise ValueError("not of this pipeline")


class ShapedCompute(CountingCompute):
    """Passes that give zeros, which take no memory."""

    def __init__(self, stage: CountingStage, is_first: bool, shape: Shape) -> None:
        super().__init__(stage, is_first)
        self._activations = torch.zeros(1).expand(shape.samples, TOKENS, shape.width)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self._activations

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor, weight: float) -> torch.Tensor | None:
        return None if self._is_first else self._activations

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> LossPass:
        return LossPass(0.0, self._activations)


class TimedDevice(Device):
    """A device on which a backward takes three times as long as a forward, and the last stage's a quarter less.

    Attributes:
        busy_seconds: So far.
        num_backward: Passes so far.
    """

    def __init__(self, runtime: Any, forward_seconds: float) -> None:
        super().__init__(runtime)
        self.busy_seconds = 0.0
        self.num_backward = 0
        self._seconds = {Pass.FORWARD: forward_seconds, Pass.BACKWARD: 3 * forward_seconds}

    async def run(self, kind: Pass, work: Callable[[], T], on_begin: Callable[[], None] = lambda: None) -> T:
        return await super().run(kind, _Timed(work, self._seconds[kind], kind is Pass.BACKWARD), on_begin)

    async def _compute(self, work: Callable[[], Any]) -> Any:
        assert isinstance(work, _Timed)
        await asyncio.sleep(work.seconds)
        self.busy_seconds += work.seconds
        self.num_backward += work.is_backward
        return await super()._compute(work.work)


@dataclass(frozen=True)
class _Timed:
    work: Callable[[], Any]
    seconds: float
    is_backward: bool

    def __call__(self) -> Any:
        raise AssertionError("the device runs what is in it")


class ShapedPeer(PipelinePeer):
    """A host of such a stage, or the trainer."""

    def __init__(self, case: Case, plan: ShapedPlan, peer: SimulatedPeer, stage: int | None, _: float) -> None:
        self._case = case
        super().__init__(peer, plan, stage)

    def _make_stage(self, stage: int, device: Device) -> HostedStage:
        module = CountingStage()
        self.device = TimedDevice(self.peer.runtime, self._case.pass_seconds / 4)
        return HostedStage(
            self.view, stage, module, self.device, self.rpc, self.peer.runtime, self.peer.signer,  # type: ignore[arg-type]
            compute=ShapedCompute(module, stage == 0, self._case.shape),
        )  # fmt: skip

    def _payloads(self, number: int) -> tuple[Payload, Payload]:
        tokens = pack(torch.zeros(self._case.shape.samples, TOKENS, dtype=torch.int64), CODEC)
        return tokens, tokens


@contextlib.contextmanager
def lengths_alone() -> Iterator[None]:
    """Have hosts send payloads of the right length without encoding anything."""
    lengths: dict[int, bytes] = {}

    def pack_zeros(tensor: torch.Tensor, codec: str) -> Payload:
        length = payload_bytes(codec, tensor.shape)
        return Payload(codec, tuple(tensor.shape), lengths.setdefault(length, bytes(length)))

    def unpack_zeros(payload: Payload) -> torch.Tensor:
        dtype = torch.int64 if payload.codec == IDS else torch.float32
        return torch.zeros(1, dtype=dtype).expand(payload.shape)

    with (
        mock.patch("p2ptrain.pipeline.host.pack", pack_zeros),
        mock.patch("p2ptrain.pipeline.host.unpack", unpack_zeros),
        mock.patch("p2ptrain.network.simulated.streams.QUANTUM_BYTES", QUANTUM_BYTES),
    ):
        yield


@dataclass(frozen=True)
class Measured:
    """What came of a case.

    Attributes:
        utilisation: Share of the window that the device of the busiest middle stage computed.
        per_second: Microbatches through that stage.
        resent: Microbatches that had to be sent again.
    """

    utilisation: float
    per_second: float
    resent: int


def measure(case: Case, seed: int = 1) -> Measured:
    """Simulate one case."""
    manifest = make_manifest(STAGES, layers=2 * STAGES, codec=CODEC, global_batch=1 << 20, local_batch=1)
    rate = case.bits_per_second / 8
    latency = case.round_trip_seconds / 2
    model = LinkModel(
        (latency, latency), up_bytes_per_second=rate, down_bytes_per_second=rate, buffer_bytes=BUFFER_BYTES
    )

    async def main(network: SimulatedNetwork) -> Measured:
        plan = ShapedPlan(manifest, case.shape)
        pipeline = Pipeline(network, manifest, make=partial(ShapedPeer, case, plan))
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
        found = Measured(
            min(busy - was for (busy, _), (was, _) in zip(after, before, strict=True)) / seconds,
            min(count - was for (_, count), (_, was) in zip(after, before, strict=True)) / seconds,
            sum(feeder.tally.resent + feeder.tally.lost for feeder in feeders),
        )
        await pipeline.close()
        return found

    with lengths_alone():
        return simulate(main, seed, model=model)


def compare(
    shapes: Sequence[Shape] = SHAPES,
    rates: Sequence[float] = BITS_PER_SECOND,
    tflops: float | None = None,
    in_flight: int = 0,
    window: int = WINDOW,
    workers: int = 2,
) -> Section:
    """Measure all cases, beside the bound and what was published."""
    of = "as published" if tflops is None else f"{tflops:g} TFLOP/s"
    section = Section(
        f"Utilisation of a middle stage in %, {STAGES} stages of 1 host, {CODEC}, device speeds {of}",
        ("shape, rate, bound", *(f"{1000 * trip:g} ms" for trip in ROUND_TRIPS)),
        results={"cases": []},
    )
    of_bound: list[float] = []
    settings = list(itertools.product(shapes, rates))
    everything = [Case(*each, trip, tflops, in_flight, window) for each in settings for trip in ROUND_TRIPS]
    with ProcessPoolExecutor(workers, multiprocessing.get_context("fork")) as pool:
        measured = iter(zip(everything, pool.map(measure, everything), strict=True))
        for shape, rate in settings:
            progress(f"utilisation of {shape.name} at {rate / 1e6:g} Mbit/s")
            cases, found = zip(*itertools.islice(measured, len(ROUND_TRIPS)), strict=True)
            section.rows.append(
                (
                    f"{shape.name}, {rate / 1e6:g} Mbit/s, {100 * cases[0].bound:.1f}",
                    *(f"{100 * one.utilisation:.1f}" for one in found),
                )
            )
            section.rows.append(("  under way", *(str(case.num_in_flight) for case in cases)))
            is_comparable = rate == PUBLISHED_BITS_PER_SECOND and bool(shape.published)
            if is_comparable:
                section.rows.append(("  published", *(f"{value:.1f}" for value in shape.published)))
            for number, (case, one) in enumerate(zip(cases, found, strict=True)):
                of_bound.append(one.utilisation / case.bound)
                section.results["cases"].append(
                    {
                        "shape": shape.name, "bits_per_second": rate, "round_trip_seconds": case.round_trip_seconds,
                        "samples": shape.samples, "pass_seconds": case.pass_seconds, "bound": case.bound,
                        "link_seconds": case.link_seconds, "in_flight": case.num_in_flight,
                        "utilisation": one.utilisation, "per_second": one.per_second, "resent": one.resent,
                        "published": shape.published[number] / 100 if is_comparable else None,
                    }
                )  # fmt: skip
    section.findings.append(Finding("least utilisation", min(of_bound), "the bound", GOAL, at_least=True))
    beside = [one for one in section.results["cases"] if one["published"] is not None]
    if beside:
        worst = min(one["utilisation"] / one["published"] for one in beside)
        section.findings.append(Finding("least utilisation", worst, "SWARM's published", 1.0, at_least=True))
    resent = sum(one["resent"] for one in section.results["cases"])
    section.notes.append(
        f"A microbatch is {', '.join(f'{shape.samples} x {TOKENS} ({shape.name})' for shape in shapes)};"
        f" {resent} were sent again. Devices: "
        + ", ".join(f"{Case(shape, 1, 0, tflops).pass_seconds * 1000:.1f} ms ({shape.name})" for shape in shapes)
        + " for all passes of one."
    )
    return section
