"""Pipelines whose gradients are accounts: each microbatch adds to a place of its own, so what counted how often shows.

All of the protocol is real; only the arithmetic of a stage is replaced.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import nn

from p2ptrain.manifest import Manifest
from p2ptrain.network.simulated import SimulatedPeer
from p2ptrain.pipeline.compute import LossPass, StageCompute
from p2ptrain.pipeline.device import Device
from p2ptrain.pipeline.messages import Payload, pack
from p2ptrain.pipeline.placement import StageNeed
from p2ptrain.pipeline.plan import PipelinePlan, Unit
from p2ptrain.training.hosted_stage import HostedStage
from tests.support.pipelines import HOP_LIMITS, Pipeline, PipelinePeer

PLACES = 1024
"""Microbatches that can be told apart."""
TOKENS = 4


class CountingPlan(PipelinePlan):
    """Stages with nothing but places."""

    def __init__(self, manifest: Manifest) -> None:
        super().__init__(manifest)
        self.accounts = Accounts()

    @cached_property
    def needs(self) -> tuple[StageNeed, ...]:
        return tuple(StageNeed(1.0) for _ in self.spans)

    @cached_property
    def tied(self) -> Unit | None:
        return None

    def own(self, stage: int) -> Unit:
        return Unit(stage, (stage,), ("places",))

    def local_names(self, stage: int, unit: Unit) -> dict[str, str]:
        return {"places": "places"}

    def check(self, stage: int, inputs: Payload, targets: Payload, samples: int, tokens: int) -> None:
        if inputs.shape != (1, TOKENS) or targets.shape != (1, TOKENS) or tokens != TOKENS or samples != 1:
            raise ValueError("not of this pipeline")

    @property
    def num_classes(self) -> int:
        return PLACES

    @property
    def num_ids(self) -> int:
        return PLACES


class CountingStage(nn.Module):
    """A place for every microbatch."""

    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(PLACES))


class CountingCompute(StageCompute):
    """Passes on which microbatch it was, and counts it when it goes back."""

    def __init__(self, stage: CountingStage, is_first: bool) -> None:
        self.stage = stage  # type: ignore[assignment]
        self.sum = torch.zeros(PLACES)
        self._is_first = is_first

    def places(self) -> dict[int, slice]:
        return {id(self.stage.places): slice(0, PLACES)}

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs.float()

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor, weight: float) -> torch.Tensor | None:
        self.sum[int(inputs.flatten()[0])] += weight
        return None if self._is_first else torch.zeros(inputs.shape)

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor, weight: float) -> LossPass:
        return LossPass(0.0, self.backward(inputs, inputs, weight))


def payloads(number: int) -> tuple[Payload, Payload]:
    """Inputs and targets of a microbatch."""
    tokens = torch.full((1, TOKENS), number, dtype=torch.int64)
    return pack(tokens, "fp32"), pack(tokens, "fp32")


@dataclass
class Accounts:
    """What the committed rounds of all stages consist of."""

    before: dict[tuple[int, bytes], bytes] = field(default_factory=dict)
    counts: dict[tuple[int, bytes], torch.Tensor] = field(default_factory=dict)

    def watch(self, hosted: HostedStage) -> None:
        """Learn what is applied to a host's state."""
        synchronizer, number = hosted.units[0].synchronizer, hosted.number
        state, changed = synchronizer.state, synchronizer.on_change
        applied: list[tuple[bytes, int, torch.Tensor]] = []
        apply = state.apply

        def record(mean: torch.Tensor, fragment: object = None) -> None:
            applied.append((state.head.lineage, state.head.tokens, mean.clone()))
            apply(mean, None)

        def moved() -> None:
            changed()
            while applied:
                lineage, tokens, mean = applied.pop(0)
                if applied or state.head.lineage == lineage:
                    continue
                key = (number, state.head.lineage)
                total = mean * (state.head.tokens - tokens) / TOKENS
                self.before[key] = lineage
                if key in self.counts:
                    assert torch.allclose(self.counts[key], total), "two hosts applied different means"
                self.counts[key] = total

        state.apply = record  # type: ignore[method-assign]
        synchronizer.on_change = moved

    def of(self, hosted: HostedStage) -> Mapping[int, int]:
        """How often each microbatch is in what a host has; by place."""
        total, lineage = torch.zeros(PLACES), hosted.units[0].synchronizer.head.lineage
        while (hosted.number, lineage) in self.counts:
            total += self.counts[hosted.number, lineage]
            lineage = self.before[hosted.number, lineage]
        found: dict[int, int] = defaultdict(int)
        for place, count in enumerate(total.tolist()):
            assert abs(count - round(count)) < 0.01, f"microbatch {place} counts {count} times"
            if round(count):
                found[place] = round(count)
        return found


class CountingPeer(PipelinePeer):
    """A peer of such a pipeline."""

    plan: CountingPlan

    def _make_stage(self, stage: int, device: Device) -> HostedStage:
        module = CountingStage()
        hosted = HostedStage(
            self.view, stage, module, device, self.rpc, self.peer.runtime, self.peer.signer,  # type: ignore[arg-type]
            compute=CountingCompute(module, stage == 0), hop_limits=HOP_LIMITS,
        )  # fmt: skip
        self.plan.accounts.watch(hosted)
        return hosted

    def _payloads(self, number: int) -> tuple[Payload, Payload]:
        return payloads(number)


@dataclass
class CountedPipeline(Pipeline):
    """A pipeline with its accounts."""

    def __post_init__(self) -> None:
        self.plan = CountingPlan(self.manifest)
        self.make = self._make

    def _make(self, simulated: SimulatedPeer, stage: int | None, pass_seconds: float) -> PipelinePeer:
        return CountingPeer(simulated, self.plan, stage, pass_seconds)

    def is_level(self) -> bool:
        """Whether all hosts of each stage are at one head."""
        heads = {
            (peer.hosted.number, peer.hosted.units[0].synchronizer.head.lineage)
            for peer in self.alive
            if peer.hosted is not None
        }
        return len(heads) == self.plan.num_stages

    def check(self) -> None:
        """Each microbatch counts at most once at each stage, and once everywhere if it was reported done."""
        places = {id: place for id, place in self.sent.items()}
        for stage in range(self.plan.num_stages):
            heads = {
                peer.hosted.units[0].synchronizer.head.lineage: peer
                for peer in self.alive
                if peer.hosted is not None and peer.hosted.number == stage
            }
            assert len(heads) == 1, f"stage {stage} has {len(heads)} lineages"
            (peer,) = heads.values()
            assert peer.hosted is not None
            counts = self.plan.accounts.of(peer.hosted)
            assert set(counts.values()) <= {1}, f"stage {stage} counted more than once: {counts}"
            for trainer in self.peers:
                for id in trainer.done:
                    assert counts.get(places[id]) == 1, f"{id} was reported done, and stage {stage} has it not"
