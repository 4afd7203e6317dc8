"""Pipelines of simulated peers for tests: hosts of a small model's stages, trainers, and what must hold among them."""

import asyncio
from collections.abc import Awaitable, Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.nn import functional

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import PROBE, Probe, ProbeReply
from p2ptrain.errors import TemporaryError
from p2ptrain.manifest import AveragingSpec, LoraSpec, Manifest, ModelSpec, PipelineSpec, TrainingSpec
from p2ptrain.models import build_model
from p2ptrain.models.adapters import add_adapters
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.node.presence import Presence
from p2ptrain.node.roles.training import find_the_others, step_in
from p2ptrain.pipeline.client.sender import Accepted, LostError, MicrobatchSender, Opened
from p2ptrain.pipeline.messages import MicrobatchId, Payload, pack
from p2ptrain.pipeline.migration import StageMigrator
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.routing.hop import HopLimits
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device, Pass
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.pipeline.stage.units import HostingOptions
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.training.sync.synchronizer import RoundResult
from tests.support.coroutines import at_end
from tests.support.records import record_of
from tests.support.sim.seed import SimulatedSeed

SAMPLES = 2
HOP_LIMITS = HopLimits(open_seconds=2.0, quiet_seconds=4.0)


def make_manifest(
    num_stages: int = 2,
    *,
    tied: bool = False,
    codec: str = "fp32",
    layers: int = 3,
    quant: str = "",
    moments: str = "fp32",
    lora: LoraSpec | None = None,
    **training: Any,
) -> Manifest:
    """A small Llama in so many stages."""
    return Manifest(
        name="simulated",
        model=ModelSpec(
            layers=layers, hidden=16, heads=2, kv_heads=2, intermediate=24, context=8, vocabulary=20,
            tied_embeddings=tied,
        ),
        training=TrainingSpec.model_validate(
            {"every": 1, "global_batch": 12, "local_batch": SAMPLES, "warmup_steps": 0, "clip_norm": 0.0, **training}
        ),
        averaging=AveragingSpec(
            codec="fp32", aggregation="mean", max_weight_ratio=1e9, grace_seconds=2.0, matchmaking_seconds=10.0,
            round_seconds=15.0, late_decay=1.0,
        ),
        pipeline=PipelineSpec.model_validate(
            {"stages": num_stages, "codec": codec, "quant": quant, "moments": moments}
        ),
        lora=lora,
    )  # fmt: skip


def sample(manifest: Manifest, number: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    return torch.randint(manifest.model.vocabulary, (SAMPLES, manifest.model.context + 1), generator=generator)


async def tell(by: "PipelinePeer", host: "PipelinePeer", closing: bool) -> None:
    """Tell a host that one is in its round, and whether to close that with what there is."""
    assert host.hosted is not None
    averager = host.hosted.units[0].synchronizer.averager
    key = averager.matchmaker.cells.key_of(averager.head, host.peer.peer_id)
    rpc = by.rpc.scoped(f"unit{host.hosted.number}")
    await by.peer.spawn(rpc.call(host.peer.peer_id, PROBE, Probe(key, closing), ProbeReply, 5.0))


async def no_harm(opened: Opened) -> None:
    """Leave a microbatch alone while its outputs are with the trainer."""


class PipelinePeer:
    """One simulated peer: it hosts a stage, or trains, or both."""

    def __init__(self, peer: SimulatedPeer, plan: PipelinePlan, stage: int | None, pass_seconds: float = 0.0) -> None:
        manifest = plan.manifest
        self.peer = peer
        self.manifest = manifest
        self.stage = stage
        self.pass_seconds = pass_seconds
        self.status = "starting"
        self.rpc = Rpc(peer.transport, peer.runtime, manifest.digest)
        self.plan = plan
        self.view = PipelineView(self.plan, peer.peer_id, peer.runtime)
        self.membership = Membership(peer.peer_id, peer.runtime)
        self.presence = Presence(lambda: peer.directory, self.rpc, peer.signer, self.membership, self.describe)
        self.presence.listeners.append(self.view.update)
        self.mover: StageMigrator | None = None
        self.may_move = False
        self.moves: list[tuple[int, int]] = []
        self._hosted: list[HostedStage] = []
        self.results: list[RoundResult] = []
        self.feeder: MicrobatchSender | None = None
        self.done: list[MicrobatchId] = []
        self.makes_loss = False
        if stage is not None:
            self._hosted = [self._make_stage(stage, self._make_device())]

    @property
    def is_moving(self) -> bool:
        return len(self._hosted) > 1

    @property
    def hosted(self) -> HostedStage | None:
        return self._hosted[0] if self._hosted else None

    @property
    def all_hosted(self) -> list[HostedStage]:
        return list(self._hosted)

    def _make_device(self) -> Device:
        return SlowDevice(self.peer.runtime, self.pass_seconds)

    def _make_mover(self, hosted: HostedStage) -> StageMigrator:
        return StageMigrator(self.view, self.presence, self.rpc, hosted, self, (1 << 62) if self.may_move else 0)

    def _make_stage(self, stage: int, device: Device) -> HostedStage:
        return self._put_together(stage, StageCompute(self.plan.build(stage)), device, HOP_LIMITS)

    def _put_together(
        self, stage: int, compute: StageCompute, device: Device, limits: HopLimits | None = None
    ) -> HostedStage:
        worker = StageWorker(self.plan, stage, compute, device)
        return HostedStage(self.view, worker, self.rpc, self.peer.signer, self, HostingOptions(hop_limits=limits))

    def _payloads(self, number: int) -> tuple[Payload, Payload]:
        tokens, codec = sample(self.manifest, number), self.manifest.pipeline.codec
        return pack(tokens[:, :-1], codec), pack(tokens[:, 1:], codec)

    def round_ended(self, hosted: HostedStage, result: RoundResult) -> None:
        self.results.append(result)
        self.presence.changed()

    def round_began(self, hosted: HostedStage, round: int) -> None:
        """See `StageObserver`."""

    def describe(self) -> PeerRecord:
        return record_of(
            self.peer.peer_id,
            name=self.peer.name,
            role="trainer" if self.hosted is None else "stage",
            state=self.status,
            stages=tuple(report for hosted in self._hosted for report in hosted.reports()),
            next_stage=self.mover.next_stage if self.mover is not None else None,
        )

    async def start(self) -> None:
        await self.rpc.start()
        await self.presence.start()

    async def host(self) -> None:
        """Take on the stage's state, then take part in its rounds, and move if that may be."""
        (hosted,) = self._hosted
        self.status = "syncing"
        await self._sync(hosted)
        self.status = "training"
        self.mover = self._make_mover(hosted)
        await self.step_in(hosted)
        await self.mover.run()

    async def _sync(self, hosted: HostedStage) -> None:
        for unit in hosted.units:
            await find_the_others(self.presence, unit.synchronizer, unit.work)

    async def take_on(self, number: int) -> HostedStage:
        made = self._make_stage(number, self._make_device())
        self._hosted.append(made)
        try:
            await self._sync(made)
        except BaseException:
            await self.give_up(made)
            raise
        return made

    async def step_in(self, hosted: HostedStage) -> None:
        hosted.participate()
        await asyncio.gather(*(step_in(self.presence, unit.synchronizer) for unit in hosted.units))

    async def give_up(self, hosted: HostedStage) -> None:
        self._hosted = [other for other in self._hosted if other is not hosted]
        await hosted.close()

    def moved(self, hosted: HostedStage) -> None:
        assert self.stage is not None
        self.moves.append((self.stage, hosted.number))
        self._hosted, self.stage = [hosted], hosted.number
        self.presence.changed()

    async def start_feeding(self) -> MicrobatchSender:
        caller = self.view.new_caller(self.rpc, HOP_LIMITS)
        first = self.peer.incarnation << 32
        self.feeder = MicrobatchSender(caller, self.peer.signer, first, lambda accepted: self.done.append(accepted.id))
        return self.feeder

    async def send(self, number: int) -> Accepted:
        assert self.feeder is not None
        inputs, targets = self._payloads(number)
        return await self.feeder.send(inputs, targets, targets.shape[0], targets.shape[0] * targets.shape[1])

    async def send_own(self, number: int, harm: Callable[[Opened], Awaitable[None]] = no_harm) -> Accepted:
        """Send a microbatch through, and make the loss here; ``harm`` happens between forward and backward."""
        assert self.feeder is not None
        tokens = sample(self.manifest, number)
        inputs, targets = self._payloads(number)
        shape = (*targets.shape, self.manifest.model.vocabulary)
        count = targets.shape[0] * targets.shape[1]
        opened = await self.feeder.open(inputs, targets.shape[0], count, shape, requires_grad=True)
        await harm(opened)
        output = opened.waiting.output.result().requires_grad_()
        loss = functional.cross_entropy(output.flatten(0, 1), tokens[:, 1:].flatten())
        (gradient,) = torch.autograd.grad(loss, output)
        return await opened.backward(gradient)

    async def close(self) -> None:
        if self.feeder is not None:
            await self.feeder.tasks.close()
        await self.presence.close(farewell=False)
        for hosted in self._hosted:
            await hosted.close()
        await self.rpc.close()
        await self.peer.close()


class SlowDevice(Device):
    def __init__(self, runtime: Any, seconds: float) -> None:
        super().__init__(runtime)
        self._seconds = seconds

    async def _compute(self, kind: Pass, work: Callable[[], Any]) -> Any:
        await asyncio.sleep(self._seconds)
        return await super()._compute(kind, work)


@dataclass
class Pipeline:
    """Simulated peers of one pipeline.

    ``sent`` says which accepted microbatch had which number, ``failed`` has the numbers of what is said not to have
    come through, and ``former`` peers that died and were started again.
    """

    network: SimulatedNetwork
    manifest: Manifest
    peers: list[PipelinePeer] = field(default_factory=list)
    sent: dict[MicrobatchId, int] = field(default_factory=dict)
    failed: set[int] = field(default_factory=set)
    former: list[PipelinePeer] = field(default_factory=list)
    tasks: list[asyncio.Task[Any]] = field(default_factory=list)
    may_move: bool = False
    is_stopping: bool = False
    make: Callable[[SimulatedPeer, int | None, float], PipelinePeer] | None = None

    def __post_init__(self) -> None:
        founder = self.founder = SimulatedSeed(self.network)
        self.manifest = self.manifest.model_copy(update={"founders": (founder.peer.peer_id,)})
        plan = PipelinePlan(self.manifest)
        units = {f"unit{number}": plan.swarm_of(number) for number in range(plan.num_stages + 1)}
        founder.peer.spawn(founder.serve(self.manifest.digest, self.manifest.averaging, units))
        at_end(self.close)

    async def add(self, name: str, stage: int | None, pass_seconds: float = 0.0) -> PipelinePeer:
        return await self.begin(self.network.add_peer(name), stage, pass_seconds)

    async def begin(self, simulated: SimulatedPeer, stage: int | None, pass_seconds: float = 0.0) -> PipelinePeer:
        if self.make is not None:
            peer = self.make(simulated, stage, pass_seconds)
        else:
            peer = PipelinePeer(simulated, PipelinePlan(self.manifest), stage, pass_seconds)
        self.peers.append(peer)
        await simulated.spawn(peer.start())
        peer.may_move = self.may_move
        if stage is None:
            peer.status = "training"
            await simulated.spawn(peer.start_feeding())
        else:
            self.tasks.append(simulated.spawn(peer.host()))
        return peer

    @property
    def hosts(self) -> list[PipelinePeer]:
        return [peer for peer in self.peers if peer.hosted is not None]

    def rounds(self) -> set[int]:
        return {peer.hosted.host.ledger.round for peer in self.alive if peer.hosted is not None}

    @property
    def alive(self) -> list[PipelinePeer]:
        return [peer for peer in self.peers if peer.peer.alive]

    async def feed(self, trainer: PipelinePeer, numbers: Iterable[int], at_once: int) -> dict[int, Accepted | None]:
        """Send microbatches, so many at once, while the trainer lives; what did not come through is None."""
        results: dict[int, Accepted | None] = {}
        waiting = iter(numbers)

        async def feed_one_after_another() -> None:
            for number in waiting:
                results[number] = None
                if not trainer.peer.alive or self.is_stopping:
                    return
                sending = trainer.peer.spawn(trainer.send_own(number) if trainer.makes_loss else trainer.send(number))
                while not sending.done() and trainer.peer.alive:
                    await asyncio.wait({sending}, timeout=1.0)
                if sending.done() and not sending.cancelled():
                    try:
                        results[number] = accepted = sending.result()
                        self.sent[accepted.id] = number
                    except LostError:
                        pass
                    except TemporaryError:
                        self.failed.add(number)

        await asyncio.gather(*(feed_one_after_another() for _ in range(at_once)))
        return results

    async def close(self) -> None:
        for peer in self.alive:
            self.network.resume(peer.peer)
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for peer in self.alive:
            await peer.peer.spawn(peer.close())
        self.peers.clear()


class WholeModel:
    """The same training in one process: what the stages' parameters must come to."""

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.model = build_model(manifest.model, quant=manifest.pipeline.quant or None)
        if manifest.lora is not None:
            add_adapters(self.model, manifest.model, manifest.lora)
        spec = manifest.training
        self.optimizer = torch.optim.AdamW(
            [parameter for parameter in self.model.parameters() if parameter.requires_grad],
            lr=spec.learning_rate, betas=(0.9, 0.95), weight_decay=spec.weight_decay,
        )  # fmt: skip

    def step(self, numbers: list[int]) -> None:
        tokens = torch.cat([sample(self.manifest, number) for number in numbers])
        self.optimizer.zero_grad()
        loss = functional.cross_entropy(self.model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
        torch.autograd.backward(loss)
        self.optimizer.step()

    @property
    def parameters(self) -> dict[str, torch.Tensor]:
        """The trained parameters, by the names that stages give them."""
        named = self.model.named_parameters()
        return {name: parameter.detach() for name, parameter in named if parameter.requires_grad}
