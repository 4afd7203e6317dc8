"""Stages of a given width that send all their bytes and compute nothing: what `benchmarks.pipeline_utilisation` runs.

A pass sleeps in virtual time, and a payload is zeros of the right length.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar
from unittest import mock

import torch

from p2ptrain.manifest import Manifest
from p2ptrain.models.stage import WHOLE, StageContext
from p2ptrain.network.simulated import SimulatedPeer
from p2ptrain.pipeline.messages import IDS, Payload, TensorHead, pack
from p2ptrain.pipeline.stage.compute import Gradients
from p2ptrain.pipeline.stage.device import Device, Pass
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from tests.support.sim.counting import CountingCompute, CountingPlan, CountingStage
from tests.support.sim.pipelines import PipelinePeer

T = TypeVar("T")

TOKENS = 512
CODEC = "int8"
PUBLISHED_BITS_PER_SECOND = 500e6
QUANTUM_BYTES = 256 * 1024
"""Streams take turns on a simulated link in units of this size; one frame."""


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
        return 2 * TensorHead(CODEC, (self.samples, TOKENS, self.width)).num_bytes


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

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        return self._activations

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        return Gradients((None,), None if self._is_first else self._activations)


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

    async def _compute(self, kind: Pass, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._seconds[kind])
        self.busy_seconds += self._seconds[kind]
        self.num_backward += kind is Pass.BACKWARD
        return await super()._compute(kind, work)


class ShapedPeer(PipelinePeer):
    """A host of such a stage, or the trainer."""

    def __init__(
        self, shape: Shape, forward_seconds: float, plan: ShapedPlan, peer: SimulatedPeer, stage: int | None, _: float
    ) -> None:
        self._shape = shape
        self._forward_seconds = forward_seconds
        super().__init__(peer, plan, stage)

    def _make_stage(self, stage: int, device: Device) -> HostedStage:
        module = CountingStage()
        self.device = TimedDevice(self.peer.runtime, self._forward_seconds)
        return self._put_together(stage, ShapedCompute(module, stage == 0, self._shape), self.device)

    def _payloads(self, number: int) -> tuple[Payload, Payload]:
        tokens = pack(torch.zeros(self._shape.samples, TOKENS, dtype=torch.int64), CODEC)
        return tokens, tokens


@contextlib.contextmanager
def lengths_alone() -> Iterator[None]:
    """Have hosts send payloads of the right length without encoding anything."""
    lengths: dict[int, bytes] = {}

    def pack_zeros(tensor: torch.Tensor, codec: str) -> Payload:
        length = TensorHead(codec, tuple(tensor.shape)).num_bytes
        return Payload(codec, tuple(tensor.shape), lengths.setdefault(length, bytes(length)))

    def unpack_zeros(payload: Payload) -> torch.Tensor:
        dtype = torch.int64 if payload.codec == IDS else torch.float32
        return torch.zeros(1, dtype=dtype).expand(payload.shape)

    with (
        mock.patch("p2ptrain.pipeline.stage.worker.pack", pack_zeros),
        mock.patch("p2ptrain.pipeline.stage.worker.unpack", unpack_zeros),
        mock.patch("p2ptrain.pipeline.stage.gradients.pack", pack_zeros),
        mock.patch("p2ptrain.pipeline.stage.gradients.unpack", unpack_zeros),
        mock.patch("p2ptrain.network.simulated.links.QUANTUM_BYTES", QUANTUM_BYTES),
    ):
        yield
