"""RPC service of a stage host: hops on channels, and trainers' calls about their microbatches.

The service refuses a hop before it receives the tensors, if it can.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from typing import Any

from p2ptrain.errors import ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.pipeline.messages import (
    Answers,
    Arrived,
    DoneRequest,
    HopRequest,
    MicrobatchId,
    News,
    RefusalError,
    Reply,
    RoundReply,
    RoundRequest,
    SettleRequest,
)
from p2ptrain.pipeline.routing.hop import beat, refuse, service
from p2ptrain.pipeline.routing.send_window import SendWindow
from p2ptrain.pipeline.stage.host import StageHost
from p2ptrain.pipeline.stage.ledger import ReceiveBuffer
from p2ptrain.tasks import Tasks

RECEIVE_SECONDS = 120.0


class HostService:
    """Serves a stage host, from construction on."""

    def __init__(self, host: StageHost, rpc: Rpc) -> None:
        self._host = host
        self._rpc = rpc
        self._stage = host.worker.number
        self._name = service(self._stage)
        self._buffer = ReceiveBuffer(host.worker.limits)
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
        if request.requires_grad and self._stage == 0 and request.id.trainer != sender:
            raise ProtocolError(sender, "sent a microbatch in another's name")
        try:
            hop = request.to_hop(self._stage)
            self._host.expect(hop)
            with self._buffer.hold(sender, hop.inputs.num_bytes + hop.targets.num_bytes) as release:
                await self._take(channel, request, release)
        except RefusalError as error:
            await refuse(self._rpc, channel, error)

    async def _take(self, channel: Channel, request: HopRequest, on_admitted: Callable[[], None]) -> None:
        """Receive a hop's tensors, and answer it."""
        async with Tasks() as tasks:
            beating = tasks.start(beat(channel), "beat")
            inputs, targets = [
                await channel.receive_bytes(head.num_bytes, RECEIVE_SECONDS)
                for head in (request.inputs, request.targets)
            ]
            await channel.send(Arrived())

            async def tell(stage: int, host: str) -> None:
                await channel.send(News(stage, host))

            hop = request.to_hop(self._stage, inputs, targets)
            taking = tasks.call(self._host.take(hop, tell, on_admitted), "take")
            waiting: set[asyncio.Future[Any]] = {taking, channel.lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if taking.done():  # Otherwise the caller is gone.
                await self._answer(channel, taking.result(), beating)

    async def _answer(self, channel: Channel, reply: Reply, beating: asyncio.Task[None]) -> None:
        gradient = reply.gradient
        async with self._window.to(channel.remote, len(gradient.data) if gradient is not None else 0):
            beating.cancel()
            await channel.send(reply.head)
            if gradient is not None:
                await channel.send_bytes(gradient.data)
                await asyncio.wait({channel.lost}, timeout=RECEIVE_SECONDS)  # The caller closes it after receipt.

    async def _settle(self, peer: str, request: SettleRequest) -> Answers:
        for id in request.abandoned:
            self._host.abandon(MicrobatchId(peer, *id))
        return Answers(tuple(self._host.settle(MicrobatchId(peer, *id)) for id in request.settled))

    async def _round(self, peer: str, request: RoundRequest) -> RoundReply:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(request.seconds):
                return RoundReply(await self._host.round_after(request.after))
        return RoundReply(self._host.ledger.round)

    async def _done(self, peer: str, request: DoneRequest) -> Answers:
        return Answers(tuple(self._host.is_done([MicrobatchId(peer, *id) for id in request.ids])))
