"""Sending a microbatch through a stage and all after it: the caller's side, of trainers and of hosts alike.

The caller keeps what it sent until the reply is there, and sends it to another host of the stage when one fails. The
substitute is told whom its predecessor called, so that those count the microbatch once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from p2ptrain.codecs.base import CodecError
from p2ptrain.errors import DeadlineError, P2PTrainError, PeerError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import NOT_SERVED, Rpc
from p2ptrain.network.schema import Message
from p2ptrain.pipeline.messages import (
    Arrived,
    Beat,
    FromHost,
    HomeRequest,
    Hop,
    HopFailedError,
    MicrobatchId,
    News,
    OtherRoundError,
    Payload,
    Refusal,
    RefusalError,
    Refused,
    Reply,
    ReplyHead,
    TensorHead,
    check_values,
)
from p2ptrain.pipeline.routing.fair_queue import SendWindow
from p2ptrain.pipeline.routing.router import NoHostError, Router
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.pipeline.client.outputs import ExpectedOutput

logger = logging.getLogger(__name__)

BEAT_SECONDS = 1.0
"""Interval of a host's beats; < HopLimits.quiet_seconds."""
MAX_NEWS = 4096
"""Of one microbatch, from one host: of all stages after it, and some more where hosts fail."""
BAD_ANSWER = "bad answer"
"""Cause under which a host's answer that no honest one sends is counted."""

Tell = Callable[[int, str], Awaitable[None]]
"""Called with a stage and a host, when it is given the microbatch there though another one was planned, and when it
is through with its forward; on the last stage, when it begins."""

HOME = "pipeline.home"
"""The name under which trainers take outputs."""


@dataclass(frozen=True)
class HopLimits:
    """Bounds of one hop."""

    attempts: int = 4
    """Hosts that fail, at most."""
    refusals: int = 32
    """Hosts that are full, at most; the next is asked after a pause."""
    open_seconds: float = 8.0
    quiet_seconds: float = 4.0
    """Nothing heard from a host for so long, and it has failed."""
    longest_seconds: float = 300.0
    """From the input to the reply, at the first stage; half of it at the last: later stages time out first, so the
    nearest caller can retry."""
    first_pause_seconds: float = 0.05
    longest_pause_seconds: float = 2.0


@dataclass
class Here:
    """The hosts and outputs of this peer itself, which microbatches reach within the process.

    Attributes:
        hosts: Take hops, by stage.
        outputs: Which this peer's own microbatches are to bring home, where it makes the loss.
    """

    hosts: dict[int, Callable[[Hop, Tell], Awaitable[Reply]]] = field(default_factory=dict)
    outputs: dict[MicrobatchId, ExpectedOutput] = field(default_factory=dict)


def service(stage: int) -> str:
    """The name under which hosts of a stage take hops."""
    return f"pipeline.{stage}"


class Caller:
    """Sends hops.

    Args:
        rpc: To reach hosts.
        router: Draws them.
        here: Hosts of this peer itself.
        limits: Bounds.
    """

    def __init__(self, rpc: Rpc, router: Router, here: Here | None = None, limits: HopLimits | None = None) -> None:
        self.rpc = rpc
        self.router = router
        self.here = here or Here()
        self._num_stages = len(router.stages)
        self._limits = limits or HopLimits()
        self._window = SendWindow()

    async def through(self, hop: Hop, planned: str, tell: Tell, keeps_round: Callable[[], bool] = bool) -> Reply:
        """Take a microbatch through a stage, and all after it.

        Args:
            hop: What is sent.
            planned: The host to begin with; empty to draw one.
            tell: Told of every stage that is through with its forward.
            keeps_round: True while it waits for room in its round; by default it does not.

        Raises:
            HopFailedError: No host did it.
            OtherRoundError: The stage is in another round.
            NoHostError: There is no host left to ask.
        """
        limits, stage = self._limits, self.router.stages[hop.stage]
        failures: dict[str, str] = {}
        refused: set[str] = set()
        route, pause = list(hop.route), limits.first_pause_seconds
        told, num_told, num_full = planned, 0, 0

        async def heard(number: int, host: str) -> None:
            nonlocal num_told
            num_told += 1
            if num_told >= MAX_NEWS:  # With its own, an honest host sends no more than that.
                return
            # The substitute of a host that fails is to call the same ones after it.
            if hop.stage < number <= hop.stage + len(route):
                route[number - hop.stage - 1] = host
            await tell(number, host)

        async def rest() -> None:
            nonlocal pause
            await asyncio.sleep(pause * (0.5 + self.rpc.runtime.random.random()))
            pause = min(2 * pause, limits.longest_pause_seconds)

        while len(failures) < limits.attempts and num_full <= limits.refusals:
            # Whoever planned the route may know hosts of which no record has come here yet.
            usable = planned and not (planned in refused or planned in failures or stage.has_failed(planned))
            try:
                host = planned if usable else stage.draw(hop.tokens, {*failures, *refused})
            except NoHostError:
                if not refused:
                    if not failures:
                        raise
                    break
                refused.clear()  # All are full: wait for one of them.
                await rest()
                continue
            planned = ""
            if host != told:  # If this peer dies meanwhile, its substitute has to know.
                told = host
                await heard(hop.stage, host)
            try:
                match await self._send(host, replace(hop, route=tuple(route)), heard):
                    case Reply() as reply:
                        if hop.requires_grad:
                            own = reply.legs[0]
                            stage.measured(host, hop.tokens, own.forward_seconds + own.backward_seconds)
                        return reply
                    case Refused(kind=Refusal.EARLY | Refusal.LATE) if keeps_round():
                        refused.add(host)
                        continue
                    case Refused(kind=Refusal.EARLY | Refusal.LATE as kind, reason=reason):
                        raise OtherRoundError(reason, is_late=kind is Refusal.LATE)
                    case Refused(kind=Refusal.BEYOND, reason=reason):  # Another host here would not get further.
                        raise HopFailedError(reason)
                    case Refused(kind=Refusal.FULL):
                        refused.add(host)
                        num_full += 1
                        continue
                    case Refused(kind=Refusal.BAD, reason=reason):
                        failures[host] = reason
            except PeerRefusedError as error:
                failures[host] = error.reason
                if error.reason.endswith(NOT_SERVED):  # It hosts another stage now.
                    stage.failed(host, error.reason)
            except (PeerError, DeadlineError) as error:
                failures[host] = str(error)
                self.router.failed(host, str(error))
                if isinstance(error, ProtocolError):
                    self.rpc.count_refusal(host, BAD_ANSWER)
            logger.info("stage %d: host %s failed %s: %s", hop.stage, host[-8:], hop.id, failures[host])
            await rest()
        reasons = "; ".join(f"{host[-8:]}: {reason}" for host, reason in failures.items()) or "all of them are full"
        raise HopFailedError(f"{hop.id} did not get through stage {hop.stage} ({reasons}): it is tried again later")

    async def home(self, hop: Hop, output: Payload) -> Reply:
        """Send the model's output to the trainer; return its gradient, if one is wanted.

        Raises:
            HopFailedError: It does not answer, or with what is no gradient; nobody else can.
        """
        trainer = hop.id.trainer
        if trainer == self.rpc.peer_id:
            if hop.id not in self.here.outputs:
                raise HopFailedError(f"{hop.id} came home, and nobody waits for it there any more")
            return Reply(0.0, (), await self.here.outputs[hop.id].take(output, hop.requires_grad))
        try:
            match await self._ask(trainer, HomeRequest(hop.id, hop.requires_grad, output.head), [output], hop, None):
                case Reply(legs=()) as reply:
                    return reply
                case Reply():
                    raise ProtocolError(trainer, "sent a trail, and is no host")
                case Refused(reason=reason):
                    raise HopFailedError(f"{hop.id} did not come home to its trainer: {reason}")
        except (PeerError, DeadlineError) as error:
            raise HopFailedError(f"{hop.id} did not come home to its trainer: {error}") from error

    async def _send(self, host: str, hop: Hop, tell: Tell) -> Reply | Refused:
        """One host's reply."""
        stage = hop.stage
        if host == self.rpc.peer_id:
            if stage not in self.here.hosts:  # Whoever planned the route is mistaken, or wants it so.
                raise PeerRefusedError(host, f"{service(stage)!r} {NOT_SERVED}")
            try:
                return await self.here.hosts[stage](hop, tell)
            except RefusalError as error:
                return Refused.of(error)
        reply = await self._ask(host, hop.request, [hop.inputs, hop.targets], hop, tell)
        if isinstance(reply, Reply):
            trail = [leg.stage for leg in reply.legs]
            if trail != list(range(stage, self._num_stages)) or reply.legs[0].host != host:
                raise ProtocolError(host, "sent a trail that is not its own")
        return reply

    async def _ask(
        self, peer: str, request: Message, tensors: Sequence[Payload], hop: Hop, tell: Tell | None
    ) -> Reply | Refused:
        """Ask a host, or a trainer, and follow what it says until its reply; it is heard of while it receives, too.

        Args:
            peer: Whom.
            request: What is sent first.
            tensors: What follows; the first one's gradient comes back, unless the stage is the first.
            hop: Which microbatch.
            tell: Told of all news of a host; None asks the trainer, which has none.
        """
        limits, loop, num_news = self._limits, asyncio.get_running_loop(), 0
        name, wants = (HOME, True) if tell is None else (service(hop.stage), hop.stage > 0)
        wanted = tensors[0] if wants and hop.requires_grad else None
        # Later stages give up first, so the nearest caller can retry.
        seconds = limits.longest_seconds * (1.0 - 0.5 * hop.stage / max(self._num_stages - 1, 1))
        expected = sum(len(each.data) for each in tensors) + (len(wanted.data) if wanted is not None else 0)
        async with self.rpc.open(peer, name, request, limits.open_seconds, expected_bytes=expected) as channel:
            arrived, deadline = asyncio.Event(), loop.time() + seconds
            async with Tasks() as tasks:
                # Its error ends the channel for both.
                tasks.call(self._hand_over(channel, tensors, arrived), "hand-over")
                while loop.time() < deadline:
                    match await channel.receive(FromHost, limits.quiet_seconds, 1 << 16):
                        case Refused() as refused:
                            return refused
                        case ReplyHead(loss=loss, legs=legs, gradient=head):
                            left = max(deadline - loop.time(), limits.quiet_seconds)
                            return Reply(loss, legs, await self._gradient(channel, head, wanted, left))
                        case Arrived():
                            arrived.set()
                        case News(stage=stage, host=host):
                            num_news += 1
                            if tell is None or not hop.stage <= stage < self._num_stages or num_news > MAX_NEWS:
                                raise ProtocolError(peer, "sent news of no stage, or without end")
                            await tell(stage, host)
                raise DeadlineError(f"peer {peer[-8:]} took longer than {seconds:g} s")

    async def _hand_over(self, channel: Channel, tensors: Sequence[Payload], arrived: asyncio.Event) -> None:
        """Send the tensors when it is their turn, which lasts until the other end has them."""
        async with self._window.to(channel.remote, len(tensors[0].data)):
            for each in tensors:
                await channel.send_bytes(each.data)
            await arrived.wait()

    async def _gradient(
        self, channel: Channel, head: TensorHead | None, wanted: Payload | None, seconds: float
    ) -> Payload | None:
        """Receive the gradient that a host, or the trainer, sends back.

        Raises:
            ProtocolError: It is not the one that is wanted.
        """
        host = channel.remote
        if head != (wanted.head if wanted is not None else None):
            raise ProtocolError(host, f"sent {head or 'no gradient'} where {wanted and wanted.head} is wanted")
        if head is None:
            return None
        gradient = Payload(head.codec, head.shape, await channel.receive_bytes(head.num_bytes, seconds))
        try:
            await self.rpc.runtime.offload(check_values, gradient)
        except CodecError as error:
            raise ProtocolError(host, f"sent a gradient that is none: {error}") from error
        return gradient


async def beat(channel: Channel) -> None:
    """Tell the caller again and again that its microbatch is not forgotten."""
    with contextlib.suppress(P2PTrainError):
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            await channel.send(Beat())


async def refuse(rpc: Rpc, channel: Channel, error: RefusalError) -> None:
    """Tell a caller that its microbatch is refused, unless the caller is gone."""
    if not channel.lost.done():
        rpc.count_refusal(channel.remote, type(error).__name__)
        await channel.close(Refused.of(error))
