"""A trainer's side of the pipeline: sends microbatches, and settles the completed ones.

A microbatch is *accepted* once every host on its trail knows that the reply arrived. It is *done* once the committed
round of every stage contains it; the trainer asks those hosts after the round. A failed microbatch is given up at all
hosts that know it, and resent under a new number. A number counts at most once per stage.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeVar

from p2ptrain.errors import DeadlineError, PeerError, TemporaryError
from p2ptrain.models.blocks import Shape
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.messages import (
    IDS,
    Answers,
    BadMicrobatchError,
    DoneRequest,
    Hop,
    Leg,
    MicrobatchId,
    OtherRoundError,
    OutputRequest,
    Payload,
    Reply,
    RoundReply,
    RoundRequest,
    SettleReply,
    SettleRequest,
    Times,
)
from p2ptrain.pipeline.routing.hop import OUTPUT, Caller, ExpectedOutput, answer, refusing, service
from p2ptrain.pipeline.routing.router import NoHostError
from p2ptrain.pipeline.routing.send_window import SendWindow
from p2ptrain.pipeline.signatures import MicrobatchSigner
from p2ptrain.signing import Signer
from p2ptrain.tasks import Backoff, Tasks, together

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

MAX_SENDS = 8
FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS = 0.1, 5.0
WATCH_SECONDS = 10.0
TELL_SECONDS = 8.0
LOOK_SECONDS = 0.25
FULL_SECONDS = 3.0
"""Timeout of the next round, after which the full one is retried: it may have room again."""
ROOM_SECONDS = 12.0
"""Timeout for a substitute first host to find room in a full round; >
`p2ptrain.averaging.timing.goal.HOLD_SECONDS`."""
NO_HOST_SECONDS = 120.0
"""Timeout of a stage without a host, and of the first round."""
DONE_PAUSES_SECONDS = (0.0, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
"""Backoff before each query for done microbatches; > `p2ptrain.pipeline.stage.rounds.CONFIRM_SECONDS` in all."""
STUCK_SECONDS = 900.0
"""Timeout of a round that takes no more samples; > the duration of averaging with usual manifests."""

T = TypeVar("T")


class LostError(TemporaryError):
    """A microbatch completed, but a host was lost before it settled there; its data are not resent."""


@dataclass(frozen=True)
class Accepted:
    """A microbatch that every stage has counted; ``loss`` is the mean over its targets in nats."""

    id: MicrobatchId
    loss: float
    legs: tuple[Leg, ...]


@dataclass(frozen=True)
class Opened:
    """A microbatch after its forward pass: ``waiting`` holds the output, ``task`` ends when it is accepted."""

    id: MicrobatchId
    waiting: ExpectedOutput
    task: asyncio.Task[Accepted]

    async def backward(self, gradient: torch.Tensor) -> Accepted:
        """Send the gradient of the loss with respect to the output back through all stages.

        Raises:
            TemporaryError: It failed; nothing of it counts, or (`LostError`) not in all stages.
        """
        self.waiting.give(gradient)
        return await self.task


class MicrobatchSender:
    """Sends a trainer's microbatches, and follows the rounds.

    Args:
        signer: Vouches for the key that signs the microbatches.
        first_number: First microbatch number; above all that this peer used in the round before a restart.
        on_done: Called with each microbatch that the committed rounds of all stages contain.

    Attributes:
        round: The round in progress; -1 before it is known.
        lost: Number of microbatches lost before they settled; ``resent``: number of repetitions.
        tasks: The caller closes them.
    """

    def __init__(
        self,
        caller: Caller,
        signer: Signer,
        first_number: int = 0,
        on_done: Callable[[Accepted], None] | None = None,
    ) -> None:
        self.round = -1
        self.lost = self.resent = 0
        self.peer_id = caller.rpc.peer_id
        self._caller = caller
        self._rpc = caller.rpc
        self._router = caller.router
        self._signer = MicrobatchSigner(signer, caller.rpc.swarm, caller.rpc.credential)
        self._on_done = on_done
        self._next = first_number
        self._full = -1
        self._moved = asyncio.Event()
        self._accepted: dict[int, list[Accepted]] = defaultdict(list)
        serve_outputs(self._rpc, caller.local.outputs)
        self.tasks = Tasks()
        self.tasks.keep(self._watch, "watch-round")

    # Sending

    async def send(
        self, inputs: Payload, targets: Payload, samples: int, tokens: int, position: int | None = None
    ) -> Accepted:
        """Send a microbatch through all stages, in the round in progress or, if that is full, a later one.

        ``position`` is where its data begin in this trainer's order; None for other data.

        Raises:
            TemporaryError: All retries failed, or a stage has no host.
            LostError: A host was lost before the microbatch settled there.
        """

        async def attempt(id: MicrobatchId) -> Accepted:
            return await self._send_once(await self._signed(Hop(id, 0, samples, tokens, (), inputs, targets), position))

        return await self._until_through(attempt)

    async def open(self, inputs: Payload, samples: int, tokens: int, shape: Shape, *, requires_grad: bool) -> Opened:
        """Run a microbatch forward; return its output, for a loss that the caller computes.

        With ``requires_grad`` the caller must call `Opened.backward`, or hosts give the microbatch up. ``tokens`` is
        its weight.

        Raises:
            TemporaryError: All retries failed, or a stage has no host.
        """
        targets = Payload(IDS, (samples, tokens // samples), bytes(4 * tokens))  # Hosts use only their shape.

        async def attempt(id: MicrobatchId) -> Opened:
            waiting = ExpectedOutput(shape, self._rpc.runtime)
            hop = Hop(id, 0, samples, tokens, (), inputs, targets, requires_grad, returns_output=True)
            task = self.tasks.call(self._send_once(await self._signed(hop), waiting), f"opened-{id.number}")
            task.add_done_callback(lambda task: task.cancelled() or task.exception())  # Backward may never be called.
            try:
                either: set[asyncio.Future[Any]] = {waiting.output, task}
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
                if not waiting.output.done():
                    await task
                    raise TemporaryError(f"{id} came through, and its output did not")
                return Opened(id, waiting, task)
            except asyncio.CancelledError:
                task.cancel()
                raise

        return await self._until_through(attempt)

    async def evaluate(self, inputs: Payload, targets: Payload, samples: int, tokens: int) -> float:
        """Return the mean loss over a microbatch's targets, in nats, without training on it.

        Raises:
            TemporaryError: The microbatch failed, or a stage has no host.
        """
        await self._until_hosted()
        id = self._new_id(await self._known_round())
        hop = Hop(id, 0, samples, tokens, (), inputs, targets, requires_grad=False)
        return (await self._send_once(await self._signed(hop))).loss

    async def _until_through(self, attempt: Callable[[MicrobatchId], Awaitable[T]]) -> T:
        """Call ``attempt`` with new ids until it succeeds; a wait for a full round is no failure.

        Raise `TemporaryError` after `MAX_SENDS` failures, or after `STUCK_SECONDS` of one full round.
        """
        loop = asyncio.get_running_loop()
        backoff = Backoff(FIRST_PAUSE_SECONDS, LONGEST_PAUSE_SECONDS, self._rpc.runtime.random)
        sends, full_round, full_since = 1, -1, 0.0
        while True:
            await self._until_hosted()
            round = await self._open_round()
            try:
                return await attempt(self._new_id(round))
            except OtherRoundError as error:
                if round > full_round:
                    full_round, full_since = round, loop.time()
                elif loop.time() - full_since > STUCK_SECONDS:
                    raise TemporaryError(
                        f"round {round} takes no more samples, and has not ended for {STUCK_SECONDS:.0f} s: look at"
                        " `p2ptrain status` for the stage that does not average, and try again"
                    ) from error
                self._full = max(self._full, round)
                logger.debug("%s", error)
            except LostError:
                raise
            except TemporaryError as error:
                if sends == MAX_SENDS:
                    raise TemporaryError(
                        f"a microbatch did not come through, and was sent {MAX_SENDS} times: {error}"
                    ) from error
                sends += 1
                self.resent += 1
                logger.info("a microbatch is sent again: %s", error)
                await asyncio.sleep(backoff.next())

    async def _send_once(self, hop: Hop, waiting: ExpectedOutput | None = None) -> Accepted:
        """Send a microbatch and settle it; after a failure, give it up at all hosts that know it."""
        told: set[tuple[int, str]] = set()

        async def tell(stage: int, host: str) -> None:
            told.add((stage, host))

        work = float(hop.tokens) if hop.requires_grad or waiting is not None else 0.0
        route = self._router.draw(work)
        try:
            if waiting is not None:
                self._caller.local.outputs[hop.id] = waiting
            with self._router.sending(route, work):
                keeps = self._keeps_its_round(hop.id, waiting)
                reply = await self._caller.send(replace(hop, route=tuple(route[1:])), route[0], tell, keeps)
            return await self._settle(hop, reply, waiting.held_seconds if waiting is not None else 0.0)
        except LostError:
            self.lost += 1
            raise
        except BaseException:
            if hop.requires_grad:
                self.tasks.start(self._give_up(hop.id, told), "give-up")
            raise
        finally:
            self._caller.local.outputs.pop(hop.id, None)

    def _keeps_its_round(self, id: MicrobatchId, waiting: ExpectedOutput | None) -> Callable[[], bool]:
        """Return a predicate: True while a microbatch must wait for room in its own round.

        A microbatch whose output has arrived cannot be resent under a new number. If its first host dies, a substitute
        must admit it to the same round. That round has room once the dead host's reservation expires.
        """
        loop, deadline = asyncio.get_running_loop(), math.inf

        def keeps() -> bool:
            nonlocal deadline
            deadline = min(deadline, loop.time() + ROOM_SECONDS)
            is_home = waiting is not None and waiting.output.done()
            return is_home and self.round <= id.round and loop.time() < deadline

        return keeps

    async def _signed(self, hop: Hop, position: int | None = None) -> Hop:
        return await self._rpc.runtime.offload(self._signer.sign, hop, position)

    def _new_id(self, round: int) -> MicrobatchId:
        self._next += 1
        return MicrobatchId(self.peer_id, round, self._next - 1)

    async def _until_hosted(self) -> None:
        """Wait until every stage has a host; raise `NoHostError` after `NO_HOST_SECONDS`."""
        deadline, is_told = asyncio.get_running_loop().time() + NO_HOST_SECONDS, False
        while True:
            try:
                self._router.draw(0.0)
                return
            except NoHostError as error:
                if asyncio.get_running_loop().time() > deadline:
                    raise
                if not is_told:
                    logger.info("waiting: %s", error)
                is_told = True
            await asyncio.sleep(LOOK_SECONDS)

    async def _known_round(self) -> int:
        """Return the round in progress; wait up to `NO_HOST_SECONDS` for a host that tells it."""
        try:
            async with asyncio.timeout(NO_HOST_SECONDS):
                return await self.round_after(-1)
        except TimeoutError:
            raise TemporaryError("no host of stage 0 tells the round in progress: try again later") from None

    async def _open_round(self) -> int:
        """Return the round in progress; if it is full, wait up to `FULL_SECONDS` for the next."""
        await self._known_round()
        while self.round <= self._full:
            try:
                async with asyncio.timeout(FULL_SECONDS):
                    await self._moved.wait()
            except TimeoutError:  # The full round may have lost samples.
                self._full = self.round - 1
        return self.round

    # Settling

    async def _settle(self, hop: Hop, reply: Reply, held_seconds: float) -> Accepted:
        """Settle a microbatch at all hosts of its trail; ``held_seconds`` its output waited here for its gradient."""
        id, accepted = hop.id, Accepted(hop.id, reply.loss, reply.legs)
        if not hop.requires_grad:
            return accepted
        told = await together("settle", (self._report(leg.stage, leg.host, settled=[id]) for leg in reply.legs))
        times = [each[0] for each in told if each]
        if len(times) < len(told):
            missing = [leg for leg, each in zip(reply.legs, told, strict=True) if not each]
            where = ", ".join(f"host {leg.host[-8:]} of stage {leg.stage}" for leg in missing)
            raise LostError(f"{id} was lost at {where}")
        self._measure(hop, reply, times, held_seconds)
        self._accepted[id.round].append(accepted)
        self._account_before(self.round)  # The round may have ended meanwhile.
        return accepted

    def _measure(self, hop: Hop, reply: Reply, times: Sequence[Times], held_seconds: float) -> None:
        """Measure each host of a trail by others' clocks: its caller's, without the time that its callee held it.

        A host that lies about its neighbours harms all hosts of their stages alike: it meets them by chance.
        """
        called = [reply.seconds, *(each.next for each in times)]
        held = [*(each.held for each in times[1:]), held_seconds]
        for leg, own, since_call, later in zip(reply.legs, times, called, held, strict=False):
            self._router.stages[leg.stage].measured(leg.host, hop.tokens, since_call - later, own.busy)

    async def _give_up(self, id: MicrobatchId, told: set[tuple[int, str]]) -> None:
        await together("give-up", (self._report(stage, host, abandoned=[id]) for stage, host in told if host))

    async def _report(
        self, stage: int, host: str, settled: Sequence[MicrobatchId] = (), abandoned: Sequence[MicrobatchId] = ()
    ) -> list[Times]:
        """Report settled and given-up microbatches; return the times of the settled ones, or [] if one is missing."""
        request = SettleRequest(_numbers(settled), _numbers(abandoned))
        try:
            reply = await self._rpc.call(host, f"{service(stage)}.settle", request, SettleReply, TELL_SECONDS)
        except (PeerError, DeadlineError) as error:
            self._router.failed(host, str(error))
            return []
        times = [each for each in reply.counted if each is not None]
        return times if len(times) == len(reply.counted) == len(settled) else []

    # Rounds

    async def round_after(self, round: int) -> int:
        """Wait for a round later than ``round``, and return it."""
        while self.round <= round:
            await self._moved.wait()
        return self.round

    async def _watch(self) -> None:
        """Follow the rounds of the first stage by long polls."""
        while True:
            try:
                host = self._router.stages[0].draw(0.0)
                request = RoundRequest(self.round, WATCH_SECONDS)
                reply = await self._rpc.call(host, f"{service(0)}.round", request, RoundReply, WATCH_SECONDS + 5.0)
            except NoHostError:
                await asyncio.sleep(0.5)
                continue
            except (PeerError, DeadlineError) as error:
                logger.info("host %s does not tell the round: %s", host[-8:], error)
                self._router.failed(host, str(error))
                await asyncio.sleep(0.1)
                continue
            if reply.round > self.round:
                self.round = reply.round
                self._moved.set()
                self._moved = asyncio.Event()
                self._account_before(reply.round)

    def _account_before(self, round: int) -> None:
        for old in [old for old in self._accepted if old < round]:
            self.tasks.start(self._account(self._accepted.pop(old)), "account")

    async def _account(self, accepted: list[Accepted]) -> None:
        """Tell which of a round's microbatches are done, and log those that were dropped, by their hosts' answers."""
        places: dict[tuple[int, str], list[MicrobatchId]] = defaultdict(list)
        for each in accepted:
            for leg in each.legs:
                places[leg.stage, leg.host].append(each.id)
        answers = await together("ask-done", (self._not_done(*place, ids) for place, ids in places.items()))
        missing = {id for ids in answers for id in ids}
        for each in accepted:
            if each.id in missing:
                logger.info("%s was dropped: a host died, or was late, before the round was averaged", each.id)
            elif self._on_done is not None:
                self._on_done(each)

    async def _not_done(self, stage: int, host: str, ids: list[MicrobatchId]) -> list[MicrobatchId]:
        """Return the microbatches that a host did not bring into a round; retry while they may be averaged."""
        missing = ids
        for seconds in DONE_PAUSES_SECONDS:
            await asyncio.sleep(seconds)
            try:
                request = DoneRequest(_numbers(missing))
                reply = await self._rpc.call(host, f"{service(stage)}.done", request, Answers, TELL_SECONDS)
            except (PeerError, DeadlineError):
                break
            if len(reply.answers) != len(missing):
                break
            missing = [id for id, is_done in zip(missing, reply.answers, strict=True) if not is_done]
            if not missing:
                break
        return missing


def _numbers(ids: Sequence[MicrobatchId]) -> tuple[tuple[int, int], ...]:
    return tuple((id.round, id.number) for id in ids)


def serve_outputs(rpc: Rpc, expected: Mapping[MicrobatchId, ExpectedOutput]) -> None:
    """Accept the expected outputs that hosts send to this trainer, and return their gradients."""

    window = SendWindow()

    async def serve(channel: Channel, request: OutputRequest) -> None:
        async with refusing(rpc, channel):
            if request.id not in expected:
                raise BadMicrobatchError(f"nobody waits for {request.id} any more")
            output = expected[request.id]
            output.check(request.output)

            async def take(values: Payload) -> Reply:
                return Reply(0.0, (), await output.take(values, request.requires_grad))

            await answer(channel, (request.output,), take, window)

    rpc.serve_channel(OUTPUT, OutputRequest, serve)
