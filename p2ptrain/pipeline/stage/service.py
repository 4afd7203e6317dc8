"""What a stage host answers over the network: hops on channels, and a trainer's questions about its microbatches.

`HostService` is behind the names that `p2ptrain.pipeline.routing.hop.service` makes; all that it is asked it asks its
host. What can be refused is refused before a hop's tensors are received.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from p2ptrain.errors import P2PTrainError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.pipeline.messages import Hop, HopHead, Reply
from p2ptrain.pipeline.routing.fair_queue import Turns
from p2ptrain.pipeline.routing.hop import (
    ARRIVED,
    BEAT_SECONDS,
    BEYOND,
    EARLY,
    FULL,
    LATE,
    HopFailedError,
    News,
    OtherRoundError,
    service,
)
from p2ptrain.pipeline.routing.router import NoHostError
from p2ptrain.pipeline.stage.ledger import FullError, Limits, MicrobatchId, WrongRoundError
from p2ptrain.pipeline.stage.passes import BadMicrobatchError
from p2ptrain.pipeline.stage.receive_buffer import Intake
from p2ptrain.tasks import Tasks

RECEIVE_SECONDS = 120.0
MAX_WAIT_SECONDS = 60.0
MAX_IDS = 4096


class Host(Protocol):
    """What is behind the service: `p2ptrain.pipeline.stage.host.StageHost`."""

    @property
    def stage(self) -> int:
        """Its number."""

    def expect(self, hop: Hop) -> None:
        """Refuse what shows to be wrong, or too much, before its tensors are here."""

    async def take(self, hop: Hop, news: News, on_admitted: Callable[[], None] = ...) -> Reply:
        """Take a microbatch through this stage and all after it."""

    def settle(self, id: MicrobatchId) -> bool:
        """The trainer has its whole trail; whether it was counted here."""

    def abandon(self, id: MicrobatchId) -> None:
        """The trainer gave it up."""

    async def round_after(self, round: int) -> int:
        """The round in progress, once it is a later one."""

    @property
    def round(self) -> int:
        """The round in progress."""

    def is_done(self, ids: Sequence[MicrobatchId]) -> list[bool]:
        """Which of these are in the average of a round."""


class HostService:
    """Answers for a stage host.

    Args:
        host: What it answers for.
        limits: What the host takes on at a time.
    """

    def __init__(self, host: Host, limits: Limits) -> None:
        self._host = host
        self._limits = limits
        self._intake = Intake(limits)
        self._turns = Turns()

    def listen(self, rpc: Rpc) -> None:
        """Answer from now on."""
        name = service(self._host.stage)
        rpc.serve_channel(name, dict, self._serve)
        rpc.serve(f"{name}.settle", dict, self._serve_settle)
        rpc.serve(f"{name}.round", dict, self._serve_round)
        rpc.serve(f"{name}.done", dict, self._serve_done)

    async def _serve(self, channel: Channel, request: dict[str, Any]) -> None:
        """One caller's hop."""
        head, sender = HopHead.from_wire(request, channel.remote, self._limits.max_bytes), channel.remote
        if head.learns and self._host.stage == 0 and head.id.trainer != sender:
            raise ProtocolError(sender, "sent a microbatch in another's name")
        with contextlib.ExitStack() as room:
            try:
                self._host.expect(head.to_hop(self._host.stage, b"", b""))
                release = room.enter_context(self._intake.hold(sender, head.num_bytes))
            except P2PTrainError as error:
                raise _told(error) from error
            await self._receive(channel, head, release)

    async def _receive(self, channel: Channel, head: HopHead, on_admitted: Callable[[], None]) -> None:
        """Receive a hop's tensors, and answer it."""
        async with Tasks() as tasks:
            beating = tasks.start(self._beat(channel), "beat")
            inputs, targets = [
                await channel.receive_bytes(length, RECEIVE_SECONDS) for _, _, length in (head.inputs, head.targets)
            ]
            await channel.send({ARRIVED: True})
            hop = head.to_hop(self._host.stage, inputs, targets)

            async def news(number: int, host: str) -> None:
                await channel.send({"stage": number, "host": host})

            taking = tasks.call(self._host.take(hop, news, on_admitted), "take")
            waiting: set[asyncio.Future[Any]] = {taking, channel.lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if not taking.done():
                return  # The caller is gone.
            try:
                reply = taking.result()
            except P2PTrainError as error:
                raise _told(error) from error
            size = 0 if reply.gradient is None else len(reply.gradient.data)
            async with self._turns.to(channel.remote, size):
                beating.cancel()
                await channel.send(reply.to_wire())
                if reply.gradient is not None:
                    await channel.send_bytes(reply.gradient.data)
                    await asyncio.wait({channel.lost}, timeout=RECEIVE_SECONDS)  # The caller ends it when it has all.

    async def _beat(self, channel: Channel) -> None:
        with contextlib.suppress(P2PTrainError):
            while True:
                await asyncio.sleep(BEAT_SECONDS)
                await channel.send({"beat": True})

    async def _serve_settle(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        """A trainer tells which of its microbatches are settled, and which are given up."""
        settled, abandoned = _ids(peer, request.get("settled")), _ids(peer, request.get("abandoned"))
        for id in abandoned:
            self._host.abandon(id)
        return {"counted": [self._host.settle(id) for id in settled]}

    async def _serve_round(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        """A trainer waits for the round after the one that it knows."""
        after, seconds = request.get("after"), request.get("seconds")
        if type(after) is not int or type(seconds) is not float or not 0.0 <= seconds <= MAX_WAIT_SECONDS:
            raise ProtocolError(peer, "asked for no round")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                return {"round": await self._host.round_after(after)}
        return {"round": self._host.round}

    async def _serve_done(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        """A trainer asks which of its microbatches are in the average of a round."""
        return {"done": self._host.is_done(_ids(peer, request.get("ids")))}


async def take_here(host: Host, own_id: str, hop: Hop, news: News) -> Reply:
    """`Host.take` for a caller of this process.

    Raises:
        PeerRefusedError: As a caller elsewhere gets it.
    """
    try:
        return await host.take(hop, news)
    except P2PTrainError as error:
        raise PeerRefusedError(own_id, _refusal(error)) from error


def _told(error: P2PTrainError) -> P2PTrainError:
    """What a caller is told, of the kind that it is counted as."""
    kinds = (kind for kind in (BadMicrobatchError, FullError) if isinstance(error, kind))
    return next(kinds, P2PTrainError)(_refusal(error))


def _refusal(error: P2PTrainError) -> str:
    """What a caller is told; it knows by how that begins what is no failure of this host."""
    if isinstance(error, FullError):
        return f"{FULL}{error}"
    if isinstance(error, (WrongRoundError, OtherRoundError)):
        return f"{LATE if error.is_late else EARLY}{error}"
    if isinstance(error, (HopFailedError, NoHostError)):
        return f"{BEYOND}{error}"
    return str(error)


def _ids(peer: str, values: Any) -> list[MicrobatchId]:
    """A list of a trainer's own microbatches."""
    good = isinstance(values, list) and len(values) <= MAX_IDS
    if not good or not all(isinstance(each, list) and [type(v) for v in each] == [int, int] for each in values):
        raise ProtocolError(peer, "sent a malformed list of microbatches")
    return [MicrobatchId(peer, *each) for each in values]
