"""Stage hosts on a simulated network, without rounds: real stages, real hops, and sums that can be compared exactly."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import torch

from p2ptrain.models import build_stage
from p2ptrain.models.stage import Stage
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import to_wire
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.pipeline.messages import Hop, HopRequest, MicrobatchId, Reply, SettleReply, SettleRequest, pack
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.routing.hop import Caller, HopLimits, service
from p2ptrain.pipeline.routing.router import Router
from p2ptrain.pipeline.signatures import MicrobatchSigner
from p2ptrain.pipeline.stage.budget import Limits
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.gradients import GradientSum
from p2ptrain.pipeline.stage.host import AdmissionQueue, StageHost
from p2ptrain.pipeline.stage.service import HostService
from p2ptrain.pipeline.stage.worker import StageWorker
from tests.support.sim.peers import SWARM, Member, end_members, start_member
from tests.support.sim.pipelines import SAMPLES, SlowDevice, make_manifest, sample

GRID = 1024.0
PASS_SECONDS = 0.05
HOP_LIMITS = HopLimits(open_seconds=2.0, quiet_seconds=4.0, longest_seconds=60.0)


async def no_news(stage: int, host: str) -> None:
    """Nobody wants to know."""


class ExactSum(GradientSum):
    """Adds multiples of 1/1024, so that no addition rounds, and what is taken out leaves no trace; counts gradients."""

    passes = 0

    def add(self, gradients: Sequence[torch.Tensor | None], weight: float) -> None:
        total, self.values = self.values, torch.zeros_like(self.values)
        super().add(gradients, weight)
        self.values = total.add_((self.values * GRID).round() / GRID)
        self.passes += 1


class OpenRound(AdmissionQueue):
    """A round that has room for everything."""

    async def admit(self, samples: int) -> bool:
        return True


@cache
def stage_of(plan: PipelinePlan, stage: int) -> Stage:
    return build_stage(plan.manifest.model, plan.spans[stage])


@cache
def plan_of(num_stages: int) -> PipelinePlan:
    return PipelinePlan(make_manifest(num_stages))


@dataclass
class HostPeer:
    """A simulated peer with one stage, and the router of its host."""

    peer: SimulatedPeer
    rpc: Rpc
    host: StageHost
    sum: ExactSum
    router: Router

    @property
    def id(self) -> str:
        return self.rpc.peer_id

    @property
    def service(self) -> str:
        return service(self.stage)

    @property
    def stage(self) -> int:
        return self.host.worker.number


@dataclass
class Hosts:
    """Hosts of a small model's stages, and trainers, none of which does more than it is told."""

    network: SimulatedNetwork
    plan: PipelinePlan
    limits: Limits
    hosts: list[HostPeer]
    trainers: list[Member]
    gate: AdmissionQueue
    signers: dict[str, MicrobatchSigner] = field(default_factory=dict)

    @property
    def codec(self) -> str:
        return self.plan.manifest.pipeline.codec

    async def add_host(self, name: str, stage: int) -> HostPeer:
        """A host in round 0; all others know of it."""
        plan, peer = self.plan, self.network.add_peer(name)
        rpc = Rpc(peer.transport, peer.runtime, SWARM)
        router = Router(plan.num_stages, peer.runtime.random)
        compute, device = StageCompute(stage_of(plan, stage)), SlowDevice(peer.runtime, PASS_SECONDS)
        worker, total = StageWorker(plan, stage, compute, device, self.limits), ExactSum(compute.parameters)
        host = StageHost(worker, Caller(rpc, router, limits=HOP_LIMITS), 0, self.gate, total)
        HostService(host, rpc, peer.signer)
        await rpc.start()
        made = HostPeer(peer, rpc, host, total, router)
        self.hosts.append(made)
        self.introduce()
        return made

    async def add_trainer(self, name: str) -> Member:
        self.trainers.append(await start_member(self.network.add_peer(name)))
        return self.trainers[-1]

    def introduce(self, sequence: int = 1, **liars: int) -> None:
        """Let all hosts know who hosts what; of peers that only say so, too."""
        states = self._states(sequence)
        for name, stage in liars.items():
            states[stage][self.network.peers[name].peer_id] = sequence
        for each in self.hosts:
            each.router.update(states)

    def router(self, member: Member) -> Router:
        router = Router(self.plan.num_stages, member.peer.runtime.random)
        router.update(self._states(1))
        return router

    def _states(self, sequence: int) -> list[dict[str, int]]:
        states: list[dict[str, int]] = [{} for _ in range(self.plan.num_stages)]
        for each in self.hosts:
            states[each.stage][each.id] = sequence
        return states

    def sign(self, trainer: Member, hop: Hop) -> Hop:
        """The same with its trainer's signature."""
        peer = trainer.peer
        if peer.peer_id not in self.signers:
            self.signers[peer.peer_id] = MicrobatchSigner(peer.signer, SWARM)
        return self.signers[peer.peer_id].sign(hop, None)

    def hop(self, trainer: Member, number: int, *route: HostPeer, round: int = 0, requires_grad: bool = True) -> Hop:
        """A microbatch for the first stage; the data follow from its number."""
        tokens = sample(self.plan.manifest, number)
        inputs, targets = pack(tokens[:, :-1], self.codec), pack(tokens[:, 1:], self.codec)
        id, names = MicrobatchId(trainer.rpc.peer_id, round, number), tuple(each.id for each in route)
        return self.sign(trainer, Hop(id, 0, SAMPLES, tokens[:, 1:].numel(), names, inputs, targets, requires_grad))

    def hidden(self, trainer: Member, number: int, *route: HostPeer, round: int = 0, requires_grad: bool = True) -> Hop:
        """The same as it comes to the second stage."""
        hop = self.hop(trainer, number, *route, round=round, requires_grad=requires_grad)
        values = StageCompute(stage_of(self.plan, 0))
        output = values.forward(sample(self.plan.manifest, number)[:, :-1])
        return replace(hop, stage=1, inputs=pack(output, self.codec))

    async def send(self, trainer: Member, hop: Hop, planned: HostPeer) -> Reply:
        caller = Caller(trainer.rpc, self.router(trainer), limits=HOP_LIMITS)
        return await trainer.peer.spawn(caller.send(hop, planned.id, no_news))

    async def settle(
        self, trainer: Member, host: HostPeer, *numbers: int, abandoned: tuple[int, ...] = ()
    ) -> list[bool]:
        """Tell a host what is settled and what is given up; whether it counted the former."""
        request = SettleRequest(tuple((0, each) for each in numbers), tuple((0, each) for each in abandoned))
        reply = await trainer.rpc.call(host.id, f"{host.service}.settle", request, SettleReply, 5.0)
        return [times is not None for times in reply.counted]


def expected_sums(plan: PipelinePlan, numbers: list[int]) -> list[torch.Tensor]:
    """Stage by stage: what hosts that counted these microbatches alone must have in their sums, bit by bit."""
    computes = [StageCompute(stage_of(plan, stage)) for stage in range(plan.num_stages)]
    sums = [ExactSum(compute.parameters) for compute in computes]
    for number in numbers:
        tokens = sample(plan.manifest, number)
        weight, inputs = float(tokens[:, 1:].numel()), [tokens[:, :-1]]
        for compute in computes[:-1]:
            inputs.append(compute.forward(inputs[-1]))
        found = computes[-1].loss(inputs[-1], tokens[:, 1:])
        sums[-1].add(found.parameters, weight)
        for compute, entry, total in zip(computes[-2::-1], inputs[-2::-1], sums[-2::-1], strict=True):
            assert found.inputs is not None
            found = compute.backward(entry, found.inputs)
            total.add(found.parameters, weight)
    return [total.values for total in sums]


def bits(each: HostPeer) -> bytes:
    return each.sum.values.numpy().tobytes()


def check_sums(swarm: Hosts, numbers: list[int]) -> None:
    """Each host's sum is, bit by bit, that of these microbatches and no others."""
    expected = expected_sums(swarm.plan, numbers)
    for each in swarm.hosts:
        assert torch.equal(each.sum.values, expected[each.stage]), f"stage {each.stage}"


def check_untouched(swarm: Hosts, *numbers: int) -> None:
    """What is in the sums is what was settled, and nothing is kept of anything else."""
    check_sums(swarm, list(numbers))
    for each in swarm.hosts:
        assert {id.number for id in each.host.ledger.settled()} == set(numbers)
        assert (each.host.ledger.num_bytes, each.host.ledger.num_unsettled) == (0, 0)


async def send_and_settle(swarm: Hosts, trainer: Member, number: int, route: list[HostPeer]) -> None:
    """An honest microbatch, from its way there to its settlement."""
    reply = await swarm.send(trainer, swarm.hop(trainer, number, *route[1:]), route[0])
    assert [leg.host for leg in reply.legs] == [each.id for each in route]
    for each in route:
        assert await swarm.settle(trainer, each, number) == [True]


def parts(hop: Hop) -> tuple[dict[str, Any], Any, Any]:
    """Return request, inputs and targets, as `send_raw` takes them."""
    return to_wire(hop.request), hop.inputs.data, hop.targets.data


@asynccontextmanager
async def hosts(
    network: SimulatedNetwork,
    stages: tuple[int, ...] = (0, 1),
    limits: Limits | None = None,
    num_trainers: int = 1,
    gate: AdmissionQueue | None = None,
) -> AsyncIterator[Hosts]:
    """One host for each of ``stages``, all of one pipeline, and trainers."""
    made = Hosts(network, plan_of(max(stages) + 1), limits or Limits(), [], [], gate or OpenRound())
    for number, stage in enumerate(stages):
        await made.add_host(f"host{number}", stage)
    for number in range(num_trainers):
        await made.add_trainer(f"trainer{number}")
    try:
        yield made
    finally:
        for each in made.hosts:
            if each.peer.alive:
                network.resume(each.peer)
                await each.host.close()
        await end_members(network, [*(Member(each.peer, each.rpc) for each in made.hosts), *made.trainers])


async def send_raw(
    rpc: Rpc, host: HostPeer, request: dict[str, Any], *data: bytes | bytearray | memoryview, seconds: float = 30.0
) -> dict[str, Any]:
    """Send a hop as nobody should; the first message that is not a heartbeat nor news.

    Raises RefusedError if the host refuses it, and PeerRefusedError if the host takes it for no hop at all.
    """
    async with rpc.open(host.id, host.service, request, 5.0) as channel:
        for each in data:
            await channel.send_bytes(each)
        while True:
            message = await channel.receive(dict, seconds)
            if message["type"] == "refused":
                raise RefusedError(message["kind"], message["reason"])
            if message["type"] == "reply":
                return message


class RefusedError(Exception):
    def __init__(self, kind: str, reason: str) -> None:
        super().__init__(f"{kind}: {reason}")
        self.reason = reason


def lie(member: Member, stage: int, answer: Callable[[Channel, HopRequest], Awaitable[None]]) -> None:
    """Have a peer take hops of a stage and answer as it likes; both payloads are received before."""

    async def serve(channel: Channel, request: HopRequest) -> None:
        for head in (request.inputs, request.targets):
            await channel.receive_bytes(head.num_bytes, 10.0)
        await answer(channel, request)

    member.rpc.serve_channel(service(stage), HopRequest, serve)


async def stay() -> None:
    await asyncio.sleep(3600.0)
