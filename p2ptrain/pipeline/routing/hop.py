"""Delivery of a microbatch to a stage and all later ones, by trainers and hosts alike.

The caller keeps its request until the reply arrives. If a host fails, the caller retries with another host of the
stage. It tells the substitute which later hosts were called, so that they count the microbatch once.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from p2ptrain.codecs.base import CodecError
from p2ptrain.errors import DeadlineError, P2PTrainError, PeerError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import NOT_SERVED, Rpc
from p2ptrain.network.schema import Message
from p2ptrain.pipeline.messages import (
    Arrived,
    BadMicrobatchError,
    FromHost,
    FullError,
    Hop,
    HopFailedError,
    Keepalive,
    MicrobatchId,
    News,
    OtherRoundError,
    OutputRequest,
    Payload,
    RefusalError,
    Refused,
    Reply,
    ReplyHead,
    TensorHead,
    check_values,
    pack,
    unpack,
)
from p2ptrain.pipeline.routing.router import NoHostError, Router
from p2ptrain.pipeline.routing.send_window import SendWindow
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Backoff, Tasks

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

KEEPALIVE_SECONDS = 1.0
"""Keepalive interval; < `HopLimits.quiet_seconds`."""
RECEIVE_SECONDS = 120.0
"""Timeout of a request's tensors, and of the receipt of a gradient."""
MAX_NEWS = 4096
"""Limit per microbatch and host: one for each later stage, with room for failovers."""
BAD_ANSWER = "bad answer"
"""Cause under which invalid answers of a host are counted."""

Tell = Callable[[int, str], Awaitable[None]]
"""Callback with a stage and a host: the host was called in place of the planned one, or finished its forward pass. A
last stage that computes the loss reports when it begins."""

OUTPUT = "pipeline.output"
"""RPC name under which trainers accept outputs."""


@dataclass(frozen=True)
class HopLimits:
    """Bounds of one hop. A host that sends nothing for ``quiet_seconds`` has failed."""

    attempts: int = 4
    """Maximum number of failed hosts."""
    refusals: int = 32
    """Maximum number of refusals by full hosts."""
    open_seconds: float = 8.0
    quiet_seconds: float = 4.0
    """Timeout between messages of a host; > `KEEPALIVE_SECONDS`."""
    longest_seconds: float = 300.0
    """Deadline of the reply at the first stage; half of it at the last. Later stages time out first, so the nearest
    caller can retry."""
    first_pause_seconds: float = 0.05
    longest_pause_seconds: float = 2.0


class ExpectedOutput:
    """The pending output of one microbatch, for a trainer that computes the loss itself.

    The last host sends the output, and waits for the gradient. If that host dies, a substitute sends the output again,
    and gets the same gradient. So the trainer sees each microbatch's output once.

    Attributes:
        output: Resolves with the output in fp32.
        held_seconds: From its arrival until the gradient was packed.
    """

    def __init__(self, shape: tuple[int, ...], runtime: Runtime) -> None:
        loop = asyncio.get_running_loop()
        self.output: asyncio.Future[torch.Tensor] = loop.create_future()
        self.held_seconds = 0.0
        self._gradient: asyncio.Future[torch.Tensor] = loop.create_future()
        self._shape = shape
        self._runtime = runtime

    def give(self, gradient: torch.Tensor) -> None:
        """Set the gradient of the loss with respect to the output: fp32, of the same shape."""
        if not self._gradient.done():
            self._gradient.set_result(gradient)

    def check(self, output: TensorHead | Payload) -> None:
        """Raise `BadMicrobatchError` if an output has another shape."""
        if output.shape != self._shape:
            raise BadMicrobatchError(f"an output of {list(output.shape)}, where {list(self._shape)} was to come")

    async def take(self, output: Payload, requires_grad: bool) -> Payload | None:
        """Accept the output; return its gradient, if required.

        Raises:
            BadMicrobatchError: The shape differs, or output or gradient cannot be encoded in the codec.
        """
        self.check(output)
        arrived = asyncio.get_running_loop().time()
        try:
            await self._runtime.offload(check_values, output)
            values = await self._runtime.offload(unpack, output)
            if not self.output.done():
                self.output.set_result(values)
            if not requires_grad:
                return None
            gradient = await self._runtime.offload(pack, await asyncio.shield(self._gradient), output.codec)
            self.held_seconds = asyncio.get_running_loop().time() - arrived
            return gradient
        except CodecError as error:
            raise BadMicrobatchError(f"an output, or its gradient, cannot be used: {error}") from error


@dataclass
class LocalPeer:
    """This peer's hosts, by stage, and expected outputs; its microbatches reach them within the process."""

    hosts: dict[int, Callable[[Hop, Tell], Awaitable[Reply]]] = field(default_factory=dict)
    outputs: dict[MicrobatchId, ExpectedOutput] = field(default_factory=dict)


def service(stage: int) -> str:
    """Return the RPC name under which hosts of a stage accept hops."""
    return f"pipeline.{stage}"


class Caller:
    """Sends hops to hosts that its router selects, with failover."""

    def __init__(
        self, rpc: Rpc, router: Router, local: LocalPeer | None = None, limits: HopLimits | None = None
    ) -> None:
        self.rpc = rpc
        self.router = router
        self.local = local or LocalPeer()
        self._num_stages = len(router.stages)
        self._limits = limits or HopLimits()
        self._window = SendWindow()

    async def send(self, hop: Hop, planned: str, tell: Tell, keeps_round: Callable[[], bool] = lambda: False) -> Reply:
        """Send a microbatch through a stage and all later ones; return the reply.

        Args:
            planned: The first host to try; empty to draw one.
            tell: Called with the progress at every stage.
            keeps_round: True while the caller waits for room in the microbatch's round; by default it does not.

        Raises:
            HopFailedError: No host completed it.
            OtherRoundError: The stage is in another round.
            NoHostError: The stage has no host left.
        """
        limits, stage = self._limits, self.router.stages[hop.stage]
        failures: dict[str, str] = {}
        refused: set[str] = set()
        route = list(hop.route)
        backoff = Backoff(limits.first_pause_seconds, limits.longest_pause_seconds, self.rpc.runtime.random)
        told, num_told, num_full = planned, 0, 0

        async def heard(number: int, host: str) -> None:
            nonlocal num_told
            num_told += 1
            if num_told >= MAX_NEWS:  # The caller accepts that many, this host's own included.
                return
            # A substitute must call the same later hosts.
            if hop.stage < number <= hop.stage + len(route):
                route[number - hop.stage - 1] = host
            await tell(number, host)

        while len(failures) < limits.attempts and num_full <= limits.refusals:
            try:
                if planned and not stage.has_failed(planned):  # Perhaps a host whose record has not arrived here.
                    host = planned
                else:
                    host = stage.draw(hop.tokens, {*failures, *refused})
            except NoHostError:
                if not refused:
                    if not failures:
                        raise
                    break
                refused.clear()  # All are full: retry after a pause.
                await asyncio.sleep(backoff.next())
                continue
            planned, asked = "", asyncio.get_running_loop().time()
            if host != told:  # A substitute of this peer has to know the host.
                told = host
                await heard(hop.stage, host)
            try:
                reply = await self._send_to(host, replace(hop, route=tuple(route)), heard)
            except HopFailedError:  # Another host of this stage would fail, too.
                raise
            except OtherRoundError:
                if not keeps_round():
                    raise
                refused.add(host)
                continue
            except FullError:
                refused.add(host)
                num_full += 1
                continue
            except BadMicrobatchError as error:
                failures[host] = str(error)
            except PeerRefusedError as error:
                failures[host] = error.reason
                if error.reason.endswith(NOT_SERVED):  # It hosts another stage now.
                    stage.failed(host, error.reason)
            except (PeerError, DeadlineError) as error:
                failures[host] = str(error)
                self.router.failed(host, str(error))
                if isinstance(error, ProtocolError):
                    self.rpc.count_refusal(host, BAD_ANSWER)
            else:
                return replace(reply, seconds=asyncio.get_running_loop().time() - asked)
            logger.info("stage %d: host %s failed %s: %s", hop.stage, host[-8:], hop.id, failures[host])
            await asyncio.sleep(backoff.next())
        reasons = "; ".join(f"{host[-8:]}: {reason}" for host, reason in failures.items()) or "all of them are full"
        raise HopFailedError(f"{hop.id} did not get through stage {hop.stage} ({reasons}): it is tried again later")

    async def return_output(self, hop: Hop, output: Payload) -> Reply:
        """Send the model's output to the trainer; return the gradient, if required.

        Raises:
            HopFailedError: The trainer did not answer with a valid gradient, and no other peer can.
        """
        trainer = hop.id.trainer
        if trainer == self.rpc.peer_id:
            if hop.id not in self.local.outputs:
                raise HopFailedError(f"{hop.id} came home, and nobody waits for it there any more")
            return Reply(0.0, (), await self.local.outputs[hop.id].take(output, hop.requires_grad))
        request = OutputRequest(hop.id, hop.requires_grad, output.head)
        try:
            reply = await self._ask(trainer, request, [output], hop, None)
            if reply.legs:
                raise ProtocolError(trainer, "sent a trail, and is no host")
        except (RefusalError, PeerError, DeadlineError) as error:
            raise HopFailedError(f"{hop.id} did not come home to its trainer: {error}") from error
        return reply

    async def _send_to(self, host: str, hop: Hop, tell: Tell) -> Reply:
        """Send a hop to one host, remote or local; return its reply, or raise its refusal."""
        stage = hop.stage
        if host == self.rpc.peer_id:
            if stage not in self.local.hosts:  # The planned route is stale, or malicious.
                raise PeerRefusedError(host, f"{service(stage)!r} {NOT_SERVED}")
            return await self.local.hosts[stage](hop, tell)
        reply = await self._ask(host, hop.request, [hop.inputs, hop.targets], hop, tell)
        trail = [leg.stage for leg in reply.legs]
        if trail != list(range(stage, self._num_stages)) or reply.legs[0].host != host:
            raise ProtocolError(host, "sent a trail that is not its own")
        return reply

    async def _ask(self, peer: str, request: Message, tensors: Sequence[Payload], hop: Hop, tell: Tell | None) -> Reply:
        """Send a request with its tensors, and relay news until the reply; news arrives while sending, too.

        The first tensor's gradient comes back, except from the first stage. A trainer (``tell`` is None) sends no news.
        """
        name, wants = (OUTPUT, True) if tell is None else (service(hop.stage), hop.stage > 0)
        wanted = tensors[0] if wants and hop.requires_grad else None
        expected = sum(len(each.data) for each in tensors) + (len(wanted.data) if wanted is not None else 0)
        opening = self.rpc.open(peer, name, request, self._limits.open_seconds, expected_bytes=expected)
        async with opening as channel, Tasks() as tasks:
            arrived = asyncio.Event()
            # A send error ends the channel, and so the wait for an answer.
            tasks.call(self._hand_over(channel, tensors, arrived), "hand-over")
            answer = await self._await_answer(channel, hop, wanted, arrived, tell)
        if isinstance(answer, Refused):  # Raised in the block, it would abort the channel, and the stream end with it.
            raise answer.error()
        return answer

    async def _await_answer(
        self, channel: Channel, hop: Hop, wanted: Payload | None, arrived: asyncio.Event, tell: Tell | None
    ) -> Reply | Refused:
        """Wait for a reply, with the gradient of ``wanted``, or for a refusal."""
        limits, loop, num_news = self._limits, asyncio.get_running_loop(), 0
        # Later stages time out first, so the nearest caller can retry.
        seconds = limits.longest_seconds * (1.0 - 0.5 * hop.stage / max(self._num_stages - 1, 1))
        deadline = loop.time() + seconds
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
                        raise ProtocolError(channel.remote, "sent news of no stage, or without end")
                    await tell(stage, host)
        raise DeadlineError(f"peer {channel.remote[-8:]} took longer than {seconds:g} s")

    async def _hand_over(self, channel: Channel, tensors: Sequence[Payload], arrived: asyncio.Event) -> None:
        """Send the tensors in their turn, which lasts until they have arrived."""
        async with self._window.to(channel.remote, len(tensors[0].data)):
            for each in tensors:
                await channel.send_bytes(each.data)
            await arrived.wait()

    async def _gradient(
        self, channel: Channel, head: TensorHead | None, wanted: Payload | None, seconds: float
    ) -> Payload | None:
        """Receive a gradient; raise `ProtocolError` unless it is valid and has the required codec and shape."""
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


# The called side


@asynccontextmanager
async def refusing(rpc: Rpc, channel: Channel) -> AsyncIterator[None]:
    """Send a refusal that the block raises to the caller, unless the caller is gone."""
    try:
        yield
    except RefusalError as error:
        if not channel.lost.done():
            rpc.count_refusal(channel.remote, type(error).__name__)
            await channel.close(Refused.of(error))


async def answer(
    channel: Channel, heads: Sequence[TensorHead], take: Callable[..., Coroutine[Any, Any, Reply]], window: SendWindow
) -> None:
    """Receive a request's tensors, call ``take`` with them, and send its reply; keepalives until then.

    The task of ``take`` is cancelled if the caller is gone.
    """
    async with Tasks() as tasks:
        keeping_alive = tasks.start(_keep_alive(channel), "keepalive")
        tensors = [
            Payload(head.codec, head.shape, await channel.receive_bytes(head.num_bytes, RECEIVE_SECONDS))
            for head in heads
        ]
        await channel.send(Arrived())
        taking = tasks.call(take(*tensors), "take")
        waiting: set[asyncio.Future[Any]] = {taking, channel.lost}
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if not taking.done():
            return
        reply = taking.result()
        gradient = reply.gradient
        async with window.to(channel.remote, len(gradient.data) if gradient is not None else 0):
            keeping_alive.cancel()
            await channel.send(reply.head)
            if gradient is not None:
                await channel.send_bytes(gradient.data)
                await asyncio.wait({channel.lost}, timeout=RECEIVE_SECONDS)  # The caller closes it after receipt.


async def _keep_alive(channel: Channel) -> None:
    """Send keepalives until the channel ends."""
    with contextlib.suppress(P2PTrainError):
        while True:
            await asyncio.sleep(KEEPALIVE_SECONDS)
            await channel.send(Keepalive())
