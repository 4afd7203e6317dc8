"""RPC service of a stage host: hops on channels, and trainers' calls about their microbatches.

The service refuses a hop before it receives the tensors, if it can. It checks that the trainer of each hop that arrives
is in the swarm and signed it; hops within the process are the peer's own, or have been checked.
"""

from __future__ import annotations

import asyncio
import contextlib
from dataclasses import replace

from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.messages import (
    Answers,
    BadMicrobatchError,
    DoneRequest,
    HopRequest,
    MicrobatchId,
    News,
    Payload,
    Reply,
    RoundReply,
    RoundRequest,
    SettleReply,
    SettleRequest,
)
from p2ptrain.pipeline.routing.hop import answer, refusing, service
from p2ptrain.pipeline.routing.send_window import SendWindow
from p2ptrain.pipeline.signatures import MicrobatchVerifier, NotSignedError
from p2ptrain.pipeline.stage.budget import Amounts, Budget
from p2ptrain.pipeline.stage.host import StageHost
from p2ptrain.signing import Signer


class HostService:
    """Serves a stage host, from construction on."""

    def __init__(self, host: StageHost, rpc: Rpc, verifier: Signer) -> None:
        self._host = host
        self._rpc = rpc
        self._stage = host.worker.number
        self._name = service(self._stage)
        self._verifier = MicrobatchVerifier(verifier, rpc.swarm, rpc.runtime)
        limits = host.worker.limits
        # Of senders: a host could otherwise use up a trainer's share, with one signature again and again.
        most = Amounts(limits.max_early, 0, limits.max_bytes)
        self._received = Budget(most, limits.max_share, "are on their way here")
        self._window = SendWindow()
        rpc.serve_channel(self._name, HopRequest, self._serve)
        rpc.serve(f"{self._name}.settle", SettleRequest, self._settle)
        rpc.serve(f"{self._name}.round", RoundRequest, self._round)
        rpc.serve(f"{self._name}.done", DoneRequest, self._done)

    def close(self) -> None:
        """Stop serving, except for trainers' queries of done microbatches."""
        for name in (self._name, f"{self._name}.settle", f"{self._name}.round"):
            self._rpc.withdraw(name)

    async def _serve(self, channel: Channel, request: HopRequest) -> None:
        """Serve one caller's hop, or refuse it."""
        sender = channel.remote
        if self._stage == 0 and request.id.trainer != sender:
            raise NotSignedError(sender, "sent a microbatch in another's name")

        async def tell(stage: int, host: str) -> None:
            await channel.send(News(stage, host))

        async with refusing(self._rpc, channel):
            hop = request.to_hop(self._stage)
            self._host.expect(hop)
            await self._verifier.check(sender, request)
            self._check_admitted(request)
            num_bytes = request.inputs.num_bytes + request.targets.num_bytes
            with self._received.hold(sender, Amounts(1, 0, num_bytes)) as on_admitted:

                async def take(inputs: Payload, targets: Payload) -> Reply:
                    received = replace(hop, inputs=inputs, targets=targets)
                    await self._verifier.check_data(sender, received)
                    return await self._host.take(received, tell, on_admitted)

                await answer(channel, (request.inputs, request.targets), take, self._window)

    def _check_admitted(self, request: HopRequest) -> None:
        """Raise `BadMicrobatchError` if the trainer is not in the swarm; its caller may not know that yet."""
        trainer, gate = request.id.trainer, self._rpc.gate
        # The newest known credential counts: the one that travels along is as old as the trainer's process.
        if gate.admitted(trainer) and (reason := gate.admitted(trainer, request.signature.credential)):
            raise BadMicrobatchError(f"{request.id} is of no trainer of this swarm: {reason}")

    async def _settle(self, peer: str, request: SettleRequest) -> SettleReply:
        for id in request.abandoned:
            self._host.abandon(MicrobatchId(peer, *id))
        return SettleReply(tuple(self._host.settle(MicrobatchId(peer, *id)) for id in request.settled))

    async def _round(self, peer: str, request: RoundRequest) -> RoundReply:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.seconds):
                return RoundReply(await self._host.round_after(request.after))
        return RoundReply(self._host.ledger.round)

    async def _done(self, peer: str, request: DoneRequest) -> Answers:
        return Answers(tuple(self._host.is_done([MicrobatchId(peer, *id) for id in request.ids])))
