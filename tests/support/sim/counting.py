"""Pipelines whose gradients are accounts: each microbatch adds to a place of its own, so what counted how often shows.

All of the protocol is real; only the arithmetic of a stage is replaced.
"""

import asyncio
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import nn

from p2ptrain.manifest import Manifest
from p2ptrain.models.stage import WHOLE, StageContext
from p2ptrain.network.simulated import SimulatedPeer
from p2ptrain.pipeline.client.sender import Accepted, Opened
from p2ptrain.pipeline.messages import Payload, pack
from p2ptrain.pipeline.migration import StageMigrator
from p2ptrain.pipeline.placement import Host, Move, StageNeed
from p2ptrain.pipeline.plan import PipelinePlan, Unit
from p2ptrain.pipeline.stage.compute import Gradients, StageCompute
from p2ptrain.pipeline.stage.device import Device, Pass, Timed
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.runtime import Runtime
from tests.support.sim.heads import watch_head
from tests.support.sim.pipelines import HOP_LIMITS, Pipeline, PipelinePeer, SlowDevice, no_harm

T = TypeVar("T")

PLACES = 4096
"""Microbatches that can be told apart."""
TOKENS = 4


class CountingPlan(PipelinePlan):
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
    def __init__(self) -> None:
        super().__init__()
        self.places = nn.Parameter(torch.zeros(PLACES))


class CountingCompute(StageCompute):
    """Passes on which microbatch it was, whose gradient is a one in its place."""

    def __init__(self, stage: CountingStage, is_first: bool) -> None:
        self.stage = stage  # type: ignore[assignment]
        self.parameters = (stage.places,)
        self._is_first = is_first

    def forward(self, inputs: torch.Tensor, context: StageContext = WHOLE) -> torch.Tensor:
        return inputs.float()

    def backward(self, inputs: torch.Tensor, gradient: torch.Tensor) -> Gradients:
        place = torch.zeros(PLACES)
        place[int(inputs.flatten()[0])] = 1.0
        return Gradients((place,), None if self._is_first else torch.zeros(inputs.shape))

    def loss(self, inputs: torch.Tensor, targets: torch.Tensor) -> Gradients:
        return self.backward(inputs, inputs)


def payloads(number: int) -> tuple[Payload, Payload]:
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
        state = synchronizer.state
        applied: list[tuple[bytes, int, torch.Tensor]] = []
        apply = state.apply

        def record(mean: torch.Tensor, round_: int, fragment: object = None) -> None:
            if round_ == state.head.round:  # Else a downloaded state is brought up to date, whose head is set later.
                applied.append((state.head.lineage, state.head.tokens, mean.clone()))
            apply(mean, round_, None)

        def moved() -> None:
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
        watch_head(synchronizer.replica, moved)

    def chain(self, hosted: HostedStage) -> list[bytes]:
        chain = [hosted.units[0].synchronizer.head.lineage]
        while (hosted.number, chain[-1]) in self.before:
            chain.append(self.before[hosted.number, chain[-1]])
        return chain

    def elsewhere(self, hosted: HostedStage) -> set[int]:
        """Places of microbatches in rounds that are not in what a host has: of lineages that lost."""
        chain = set(self.chain(hosted))
        lost = (
            total for (stage, lineage), total in self.counts.items() if stage == hosted.number and lineage not in chain
        )
        return {place for total in lost for place in total.nonzero().flatten().tolist()}

    def of(self, hosted: HostedStage) -> Mapping[int, int]:
        """How often each microbatch is in what a host has; by place."""
        total = torch.zeros(PLACES)
        for lineage in self.chain(hosted)[:-1]:
            total += self.counts[hosted.number, lineage]
        found: dict[int, int] = defaultdict(int)
        for place, count in enumerate(total.tolist()):
            assert abs(count - round(count)) < 0.01, f"microbatch {place} counts {count} times"
            if round(count):
                found[place] = round(count)
        return found


class WatchedDevice(SlowDevice):
    """A device that tells what it comes to: before, in and after each pass."""

    def __init__(self, runtime: Runtime, seconds: float, told: Callable[[str], None]) -> None:
        super().__init__(runtime, seconds)
        self._told = told

    async def run(self, kind: Pass, work: Callable[[], T]) -> Timed[T]:
        self._told(f"before {kind.name.lower()}")
        result = await super().run(kind, work)
        self._told(f"after {kind.name.lower()}")
        return result

    async def _compute(self, kind: Pass, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._seconds / 2)
        self._told(f"in {kind.name.lower()}")
        await asyncio.sleep(self._seconds / 2)
        return await self.runtime.compute(work)


class DirectedMover(StageMigrator):
    """Moves when it is told to, not when that helps; all else is as ever."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._told = asyncio.Event()
        self._destination = 0

    @property
    def is_leaving(self) -> bool:
        return self._is_leaving or self._told.is_set()

    def go(self, target: int) -> None:
        self._destination = target
        self._told.set()

    async def _is_agreed(self, move: Move, before: Sequence[Host]) -> bool:
        self._announce()
        return True

    async def run(self) -> None:
        hosting = asyncio.create_task(self.hosted.run(), name="hosting")
        told = asyncio.create_task(self._told.wait(), name="told")
        try:
            while not hosting.done():
                await asyncio.wait({hosting, told}, return_when=asyncio.FIRST_COMPLETED)
                if told.done():
                    move = Move(self._rpc.peer_id, self.hosted.number, self._destination, "it was told to")
                    hosting = await self._move(move, hosting, ())
                    self._told.clear()
                    told = asyncio.create_task(self._told.wait(), name="told")
            await hosting
        finally:
            hosting.cancel()
            told.cancel()
            await asyncio.gather(hosting, told, return_exceptions=True)


class CountingPeer(PipelinePeer):
    """A peer of such a pipeline.

    ``told`` is called with what it comes to: passes, phases of a round and of a move, outputs that came home.
    """

    plan: CountingPlan

    def __init__(self, *arguments: Any) -> None:
        self.told: Callable[[CountingPeer, str], None] = lambda peer, phase: None
        super().__init__(*arguments)

    def _comes_to(self, phase: str) -> None:
        self.told(self, phase)

    def _make_device(self) -> Device:
        return WatchedDevice(self.peer.runtime, self.pass_seconds, self._comes_to)

    def _make_mover(self, hosted: HostedStage) -> StageMigrator:
        if self.may_move:
            return super()._make_mover(hosted)
        return DirectedMover(self.view, self.presence, self.rpc, hosted, self, 0)

    @property
    def is_leaving(self) -> bool:
        return isinstance(self.mover, DirectedMover) and self.mover.is_leaving

    def go(self, target: int) -> None:
        assert isinstance(self.mover, DirectedMover)
        self.mover.go(target)

    def moved(self, hosted: HostedStage) -> None:
        super().moved(hosted)
        self._comes_to("moved")

    async def take_on(self, number: int) -> HostedStage:
        self._comes_to("taking on")
        return await super().take_on(number)

    async def step_in(self, hosted: HostedStage) -> None:
        await super().step_in(hosted)
        if self.is_moving:
            self._comes_to("leaving")

    async def send_own(self, number: int, harm: Callable[[Opened], Awaitable[None]] = no_harm) -> Accepted:
        """See `PipelinePeer.send_own`: the loss takes a moment here, and its gradient is nothing."""
        assert self.feeder is not None
        inputs, _ = self._payloads(number)
        opened = await self.feeder.open(inputs, 1, TOKENS, (1, TOKENS), requires_grad=True)
        self._comes_to("at home")
        await asyncio.sleep(self.pass_seconds)
        await harm(opened)
        return await opened.backward(torch.zeros(1, TOKENS))

    def _make_stage(self, stage: int, device: Device) -> HostedStage:
        module = CountingStage()
        hosted = self._put_together(stage, CountingCompute(module, stage == 0), device, HOP_LIMITS)
        self.plan.accounts.watch(hosted)
        hosted.units[0].synchronizer.averager.phase_listeners = [lambda phase, round: self._comes_to(phase)]
        return hosted

    def _payloads(self, number: int) -> tuple[Payload, Payload]:
        return payloads(number)


@dataclass
class CountedPipeline(Pipeline):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.plan = CountingPlan(self.manifest)
        self.make = self._make

    def _make(self, simulated: SimulatedPeer, stage: int | None, pass_seconds: float) -> PipelinePeer:
        return CountingPeer(simulated, self.plan, stage, pass_seconds)

    def is_level(self) -> bool:
        heads = {
            (peer.hosted.number, peer.hosted.units[0].synchronizer.head.lineage)
            for peer in self.alive
            if peer.hosted is not None
        }
        return len(heads) == self.plan.num_stages

    def check(self, may_fork: bool = False) -> None:
        """A microbatch counts at most once at each stage, exactly once if it was reported done, nowhere if it
        failed.

        With ``may_fork``, hosts of a stage could not reach each other for a while, or were stopped, so that it may have
        had two lineages. One of them lost, and what was done there is in the lost one.
        """
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
            failed = self.failed & counts.keys()
            assert not failed, f"stage {stage} counted {sorted(failed)}, which did not come through"
            lost = self.plan.accounts.elsewhere(peer.hosted) if may_fork else set()
            for id in (id for trainer in self.peers + self.former for id in trainer.done):
                is_there = counts.get(self.sent[id]) == 1 or self.sent[id] in lost
                assert is_there, f"{id} ({self.sent[id]}) was reported done, and stage {stage} has it not"
