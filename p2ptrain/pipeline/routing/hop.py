"""Sending a microbatch through a stage and all after it: the caller's side, of trainers and of hosts alike.

The caller keeps what it sent until the reply is there, and sends it to another host of the stage when one fails. The
substitute is told whom its predecessor called, so that those count the microbatch once.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, replace
from random import Random

from p2ptrain.codecs.base import CodecError
from p2ptrain.errors import DeadlineError, PeerError, PeerRefusedError, ProtocolError, TemporaryError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import NOT_SERVED, Rpc
from p2ptrain.pipeline.messages import (
    Hop,
    Payload,
    Reply,
    check_values,
    head_from_wire,
    is_peer_id,
    legs_from_wire,
    loss_from_wire,
)
from p2ptrain.pipeline.routing.fair_queue import Turns
from p2ptrain.pipeline.routing.router import Router
from p2ptrain.pipeline.stage.ledger import MicrobatchId
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

FULL, EARLY, LATE, BEYOND = "full: ", "early: ", "late: ", "beyond: "
"""How a host begins a refusal that is no failure of its own: it has no room, the microbatch's round has not begun or is
over, or a stage after it failed."""
BEAT_SECONDS = 1.0
"""How often a host says that it is still at it."""
ARRIVED = "arrived"
"""What a host says when it has a hop's tensors."""
MAX_NEWS = 4096
"""Of one microbatch, from one host: of all stages after it, and some more where hosts fail."""
BAD_ANSWER = "bad answer"
"""What a host is counted for that sends what no honest one sends."""

News = Callable[[int, str], Awaitable[None]]
"""Called with a stage and a host, when it is given the microbatch there though another one was planned, and when it
is through with its forward; on the last stage, when it begins."""


AtHome = Callable[[MicrobatchId, Payload, bool], Awaitable[Payload | None]]
"""Given a microbatch, the model's output for it, and whether its gradient is wanted; gives that."""
HOME = "pipeline.home"
"""The name under which trainers take outputs."""


class HopFailedError(TemporaryError):
    """No host of a stage took a microbatch through. The message names the stage and the hosts."""


class OtherRoundError(TemporaryError):
    """A host is in another round than the microbatch.

    Attributes:
        is_late: Whether the microbatch's round is over there; else it has not begun.
    """

    def __init__(self, message: str, is_late: bool) -> None:
        super().__init__(message)
        self.is_late = is_late


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
    """From the input to the reply, at the first stage; half of it at the last. So who is next to the one that keeps all
    waiting gives up before the others, and has time to go elsewhere."""
    first_pause_seconds: float = 0.05
    longest_pause_seconds: float = 2.0


def service(stage: int) -> str:
    """The name under which hosts of a stage take hops."""
    return f"pipeline.{stage}"


class Caller:
    """Sends hops.

    Args:
        rpc: To reach hosts.
        router: Draws them.
        random: Spreads retries in time.
        local: This peer's own hosts, by stage: what goes there never leaves the process.
        limits: Bounds.
        at_home: Where outputs of this peer's own microbatches go.
    """

    def __init__(
        self,
        rpc: Rpc,
        router: Router,
        random: Random,
        local: Mapping[int, Callable[[Hop, News], Awaitable[Reply]]],
        limits: HopLimits | None = None,
        at_home: AtHome | None = None,
    ) -> None:
        self._rpc = rpc
        self._router = router
        self._random = random
        self._local = local
        self._limits = limits or HopLimits()
        self._at_home = at_home
        self._turns = Turns()

    async def through(self, hop: Hop, planned: str, news: News) -> Reply:
        """Take a microbatch through a stage, and all after it.

        Args:
            hop: What is sent.
            planned: The host to begin with; empty to draw one.
            news: Told of every stage that is through with its forward.

        Raises:
            HopFailedError: No host did it.
            OtherRoundError: The stage is in another round.
            NoHostError: There is no host left to ask.
        """
        limits, stage = self._limits, self._router.stages[hop.stage]
        failures: dict[str, str] = {}
        refused: set[str] = set()
        pause, route = limits.first_pause_seconds, list(hop.route)

        told, num_told = planned, 0

        async def heard(number: int, host: str) -> None:
            nonlocal num_told
            num_told += 1
            if num_told >= MAX_NEWS:  # With its own, an honest host sends no more than that.
                return
            # The substitute of a host that fails is to call the same ones after it.
            if hop.stage < number <= hop.stage + len(route):
                route[number - hop.stage - 1] = host
            await news(number, host)

        for _ in range(limits.attempts + limits.refusals):
            # Whoever planned the route may know hosts of which no record has come here yet.
            usable = planned and not (planned in refused or planned in failures or stage.has_failed(planned))
            try:
                host = planned if usable else stage.draw(hop.tokens, {*failures, *refused})
            except TemporaryError:
                if not refused and not failures:
                    raise
                if not refused:
                    break
                refused.clear()  # All are full: wait for one of them.
                await self._rest(pause)
                pause = min(2 * pause, limits.longest_pause_seconds)
                continue
            planned = ""
            if host != told:  # If this peer dies meanwhile, its substitute has to know.
                told = host
                await heard(hop.stage, host)
            try:
                reply = await self._send(host, replace(hop, route=tuple(route)), heard)
                if hop.learns:
                    own = reply.legs[0]
                    stage.measured(host, hop.tokens, own.forward_seconds + own.backward_seconds)
                return reply
            except PeerRefusedError as error:
                for start in (EARLY, LATE):
                    if error.reason.startswith(start):
                        raise OtherRoundError(error.reason.removeprefix(start), start == LATE) from error
                if error.reason.startswith(BEYOND):  # Another host of this stage would not get further.
                    raise HopFailedError(error.reason.removeprefix(BEYOND)) from error
                if error.reason.startswith(FULL):
                    refused.add(host)
                    continue
                failures[host] = error.reason
                if error.reason.endswith(NOT_SERVED):  # It hosts another stage now.
                    stage.failed(host, error.reason)
            except (PeerError, DeadlineError) as error:
                failures[host] = str(error)
                self._router.failed(host, str(error))
                if isinstance(error, ProtocolError):
                    self._rpc.count_refusal(host, BAD_ANSWER)
            logger.info("stage %d: host %s failed %s: %s", hop.stage, host[-8:], hop.id, failures[host])
            if len(failures) >= limits.attempts:
                break
            await self._rest(pause)
            pause = min(2 * pause, limits.longest_pause_seconds)
        reasons = "; ".join(f"{host[-8:]}: {reason}" for host, reason in failures.items()) or "all of them are full"
        raise HopFailedError(f"{hop.id} did not get through stage {hop.stage} ({reasons}): it is tried again later")

    async def home(self, hop: Hop, output: Payload) -> Reply:
        """What the trainer makes of the model's output: its gradient, if one is wanted.

        Raises:
            HopFailedError: It does not answer, or with what is no gradient; nobody else can.
        """
        trainer, limits = hop.id.trainer, self._limits
        request = {"id": list(hop.id), "stage": hop.stage, "learns": hop.learns, "output": output.head()}
        if trainer == self._rpc.peer_id:
            if self._at_home is None:
                raise HopFailedError(f"{hop.id} is to go home, and nobody waits for it there")
            return Reply(0.0, (), await self._at_home(hop.id, output, hop.learns))
        try:
            opened = self._rpc.open(trainer, HOME, request, limits.open_seconds, expected_bytes=2 * output.num_bytes)
            async with opened as channel:
                await channel.send_bytes(output.data)
                deadline = asyncio.get_running_loop().time() + self._longest_seconds(hop.stage)
                while asyncio.get_running_loop().time() < deadline:
                    message = await channel.receive(dict, limits.quiet_seconds, 1 << 16)
                    if "beat" not in message:
                        return Reply(0.0, (), await self._gradient(channel, hop, output, message, deadline))
        except (PeerError, DeadlineError) as error:
            raise HopFailedError(f"{hop.id} did not come home to its trainer: {error}") from error
        raise HopFailedError(f"{hop.id} came home, and its trainer gave no gradient in time")

    async def _gradient(
        self, channel: Channel, hop: Hop, of: Payload, message: dict[str, object], deadline: float
    ) -> Payload | None:
        """The gradient in a payload that a host, or the trainer, sends back.

        Raises:
            ProtocolError: It is none.
        """
        host, head = channel.remote, message.get("gradient")
        if not hop.learns:
            if head is not None:
                raise ProtocolError(host, "sent a gradient that nobody asked for")
            return None
        codec, shape, length = head_from_wire(head, host, 4 * math.prod(of.shape) + 64)
        if shape != of.shape:
            raise ProtocolError(host, f"sent a gradient of shape {list(shape)} for {list(of.shape)}")
        if codec != of.codec:
            raise ProtocolError(host, f"sent a gradient in {codec} for {of.codec}")
        left = max(deadline - asyncio.get_running_loop().time(), self._limits.quiet_seconds)
        gradient = Payload(codec, shape, await channel.receive_bytes(length, left))
        try:
            await self._rpc.runtime.offload(check_values, gradient)
        except CodecError as error:
            raise ProtocolError(host, f"sent a gradient that is none: {error}") from error
        return gradient

    async def _rest(self, seconds: float) -> None:
        await asyncio.sleep(seconds * (0.5 + self._random.random()))

    async def _send(self, host: str, hop: Hop, news: News) -> Reply:
        """One host's reply."""
        if host == self._rpc.peer_id:
            if hop.stage not in self._local:  # Whoever planned the route is mistaken, or wants it so.
                raise PeerRefusedError(host, f"{service(hop.stage)!r} is not served by this peer")
            return await self._local[hop.stage](hop, news)
        expected, seconds = 2 * len(hop.inputs.data) + len(hop.targets.data), self._limits.open_seconds
        opened = self._rpc.open(host, service(hop.stage), hop.to_wire(), seconds, expected_bytes=expected)
        async with opened as channel:
            arrived = asyncio.Event()
            async with Tasks() as tasks:
                tasks.call(self._hand_over(channel, hop, arrived), "hand-over")  # Its error ends the channel for both.
                return await self._answer(channel, hop, news, arrived)

    async def _hand_over(self, channel: Channel, hop: Hop, arrived: asyncio.Event) -> None:
        """Send the tensors when it is their turn, which lasts until the host has them."""
        async with self._turns.to(channel.remote, len(hop.inputs.data)):
            await channel.send_bytes(hop.inputs.data)
            await channel.send_bytes(hop.targets.data)
            await arrived.wait()

    async def _answer(self, channel: Channel, hop: Hop, news: News, arrived: asyncio.Event) -> Reply:
        """Follow what a host says until its reply; it is heard of all the time, while it still receives, too."""
        host, num_news, loop = channel.remote, 0, asyncio.get_running_loop()
        deadline = loop.time() + self._longest_seconds(hop.stage)
        while loop.time() < deadline:
            message = await channel.receive(dict, self._limits.quiet_seconds, 1 << 16)
            if "loss" in message:
                return await self._reply(channel, hop, message, deadline)
            if "beat" in message:
                continue
            if ARRIVED in message:
                arrived.set()
                continue
            number, who = message.get("stage"), message.get("host")
            if type(number) is not int or not is_peer_id(who):
                raise ProtocolError(host, "sent malformed news")
            if not hop.stage <= number < len(self._router.stages):
                raise ProtocolError(host, "sent news of no stage")
            num_news += 1
            if num_news > MAX_NEWS:
                raise ProtocolError(host, "sent news without end")
            await news(number, str(who))
        raise DeadlineError(f"host {host[-8:]} took longer than {self._longest_seconds(hop.stage):g} s")

    def _longest_seconds(self, stage: int) -> float:
        """From the input of a stage to its reply."""
        return self._limits.longest_seconds * (1.0 - 0.5 * stage / max(len(self._router.stages) - 1, 1))

    async def _reply(self, channel: Channel, hop: Hop, message: dict[str, object], deadline: float) -> Reply:
        host = channel.remote
        legs = legs_from_wire(message.get("legs"), host, hop.stage)
        if legs[0].host != host or hop.stage + len(legs) != len(self._router.stages):
            raise ProtocolError(host, "sent a trail that is not its own")
        loss = loss_from_wire(message["loss"], host)
        if hop.stage > 0:
            return Reply(loss, legs, await self._gradient(channel, hop, hop.inputs, message, deadline))
        if message.get("gradient") is not None:
            raise ProtocolError(host, "sent a gradient that nobody asked for")
        return Reply(loss, legs, None)
