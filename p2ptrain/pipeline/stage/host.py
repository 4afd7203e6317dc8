"""A stage host: takes microbatches through its stage, sends them on, and counts each of them once.

`StageHost.take` is the life of a microbatch here, whoever asks and over whatever way. A microbatch belongs to the host,
not to the stream that brought it: a caller that comes again finds it under way or done. It is given up when nobody has
asked for it for a while.

What is behind a channel is in `p2ptrain.pipeline.stage.service`, who waits for a microbatch in `running`, what is done
with its tensors in `passes`, and what is owed to whom in `ledger`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import torch

from p2ptrain.codecs.base import CodecError
from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import (
    BadMicrobatchError,
    FullError,
    Hop,
    Leg,
    MicrobatchId,
    OtherRoundError,
    Payload,
    Reply,
)
from p2ptrain.pipeline.routing.hop import Caller, Tell
from p2ptrain.pipeline.stage.compute import NotFiniteError, StageCompute
from p2ptrain.pipeline.stage.device import Device
from p2ptrain.pipeline.stage.evaluations import Evaluations
from p2ptrain.pipeline.stage.inflight import Running
from p2ptrain.pipeline.stage.ledger import Ledger, Limits, State
from p2ptrain.pipeline.stage.passes import Added, Passed, Passes
from p2ptrain.tasks import Tasks, until_ended

logger = logging.getLogger(__name__)

FORGET_SECONDS = 120.0
"""How long what was counted waits to be settled."""
NEXT_ROUND_SECONDS = 120.0
"""How long one that came early waits for its round."""
MAX_EARLY = 256
MAX_REMEMBERED_ROUNDS = 8

Check = Callable[[Payload, Payload, int, int], None]
"""Given inputs, targets, samples and tokens; raises ValueError with what is wrong with their shapes."""


@dataclass(frozen=True)
class _Kept:
    """What answers for a counted microbatch until it is settled, and what takes it out of the sum again."""

    added: Added
    reply: Reply


class StageHost:
    """Hosts one stage.

    Args:
        peer_id: Of this peer.
        stage: The number of the stage.
        num_stages: How many there are.
        compute: Its arithmetic.
        device: Where passes run.
        caller: Sends microbatches on.
        codec: How activations and their gradients travel.
        limits: What it takes on at a time.
        round: The round in progress.
        check: Refuses shapes that are not the stage's.
        num_ids: On the first stage: what token ids are less than; 0 where inputs are no ids.
        num_classes: On the last stage: what targets are less than.

    Attributes:
        ledger: What counts.
        admit: On the first stage: asked whether so many samples more belong to the round in progress.
        on_change: Called when something was settled or given up.
        on_over: Called when another stage turns out to be through with the round in progress.
    """

    def __init__(
        self,
        peer_id: str,
        stage: int,
        num_stages: int,
        compute: StageCompute,
        device: Device,
        caller: Caller,
        codec: str,
        limits: Limits,
        round: int,
        check: Check,
        num_ids: int = 0,
        num_classes: int = 1 << 31,
    ) -> None:
        self.ledger: Ledger[_Kept] = Ledger(limits, round)
        self._peer_id = peer_id
        self._stage = stage
        self._num_after = num_stages - 1 - stage
        self._is_last = stage == num_stages - 1
        self._passes = Passes(stage, num_stages, compute, device, codec, num_ids, num_classes)
        self._evaluations = Evaluations(peer_id, stage, self._passes, self._onward, self._is_last)
        self._caller = caller
        self._check = check
        self._tasks = Tasks()
        self._running: dict[MicrobatchId, Running] = {}
        self._changed = asyncio.Event()
        self._num_early = 0
        self._done: dict[int, frozenset[MicrobatchId]] = {}
        self._asked_at = asyncio.get_running_loop().time()
        self._is_leaving = False
        self._is_closed = False
        self.admit: Callable[[int], Awaitable[bool]] | None = None
        self.on_change: Callable[[], None] = lambda: None
        self.on_over: Callable[[], None] = lambda: None

    @property
    def stage(self) -> int:
        """Its number."""
        return self._stage

    @property
    def round(self) -> int:
        """The round in progress."""
        return self.ledger.round

    @property
    def num_waiting(self) -> int:
        """Passes in the queue of its device."""
        return self._passes.num_waiting

    @property
    def tokens_per_second(self) -> float:
        """What its device does, forward and backward, of late; 0 before it was measured."""
        return self._passes.tokens_per_second

    @property
    def seconds_idle(self) -> float:
        """Since it was last asked for anything."""
        return asyncio.get_running_loop().time() - self._asked_at

    def leave(self) -> None:
        """Take on nothing new from now on: what is under way here comes to its end, all else goes elsewhere."""
        self._is_leaving = True
        self._stir()

    async def close(self) -> None:
        """Give up what is under way, and forget the rest."""
        self._is_closed = True
        await self._tasks.close()
        await self._passes.close()

    # A microbatch

    def expect(self, hop: Hop) -> None:
        """Refuse what `take` would refuse, as far as that shows before a microbatch's tensors are here.

        Raises:
            FullError, OtherRoundError, BadMicrobatchError: As `take`.
        """
        self._check_hop(hop)
        if hop.learns and hop.id.round <= self.ledger.round and self.ledger.find(hop.id) is None:
            self.ledger.check(hop.id, hop.num_bytes)

    def _check_leaving(self, hop: Hop) -> None:
        """Whoever comes again with what is under way here, or counted, still gets its reply.

        Raises:
            FullError: This host is about to leave, and has not taken that on.
        """
        if self._is_closed or (self._is_leaving and hop.learns and self.ledger.find(hop.id) is None):
            raise FullError("this host leaves its stage: go to another one")

    def _check_hop(self, hop: Hop) -> None:
        self._check_leaving(hop)
        try:
            self._check(hop.inputs, hop.targets, hop.samples, hop.tokens)
        except ValueError as error:
            raise BadMicrobatchError(str(error)) from error
        if len(hop.route) > self._num_after:
            raise BadMicrobatchError(f"a route of {len(hop.route)} hosts, where {self._num_after} stages are left")

    async def take(self, hop: Hop, news: Tell, on_admitted: Callable[[], None] = lambda: None) -> Reply:
        """Take a microbatch through this stage and all after it.

        Args:
            hop: Which.
            news: Told of every stage that is through with its forward.
            on_admitted: Called if the ledger has taken it on, and accounts for its bytes.

        Raises:
            FullError: There is no room for it now.
            OtherRoundError: It is for another round.
            BadMicrobatchError: It does not fit, or its values are not finite.
            HopFailedError, OtherRoundError, NoHostError: It did not get through the stages after this one.
        """
        self._asked_at = asyncio.get_running_loop().time()
        self._check_hop(hop)
        if not hop.learns:
            return await self._evaluations.take(hop, news)
        await self._in_its_round(hop)
        self._check_leaving(hop)
        known = self.ledger.find(hop.id)
        running = self._running.get(hop.id)
        if known is not None and (known.samples, known.tokens) != (hop.samples, hop.tokens):
            raise BadMicrobatchError(f"{hop.id} is another microbatch than the one that came before")
        if running is None and known is not None:
            if known.kept is None:
                raise BadMicrobatchError(f"{hop.id} is settled already")
            return known.kept.reply
        if running is None:
            self.ledger.admit(hop.id, hop.samples, hop.tokens, hop.num_bytes)
            on_admitted()
            running = self._begin(hop)
        return await running.join(news)

    def _begin(self, hop: Hop) -> Running:
        task = self._tasks.call(self._run(hop), f"microbatch-{hop.id.number}")
        task.add_done_callback(lambda task: self._ran(hop.id, task))
        running = self._running[hop.id] = Running(hop.id, task)
        return running

    async def _in_its_round(self, hop: Hop) -> None:
        """Let a microbatch that came early wait for its round.

        Raises:
            OtherRoundError: That has not begun in time.
            FullError: Too many wait, or this host is about to leave.
        """
        id = hop.id
        if id.round <= self.ledger.round:
            return
        self._over_elsewhere(self.ledger.round)
        if self._num_early >= MAX_EARLY:
            raise FullError(f"{MAX_EARLY} microbatches wait for the next round")
        self._num_early += 1
        try:
            async with asyncio.timeout(NEXT_ROUND_SECONDS):
                while id.round > self.ledger.round:
                    self._check_leaving(hop)
                    await self._changed.wait()
        except TimeoutError:
            reason = f"{id} came too early: this host is in round {self.ledger.round}"
            raise OtherRoundError(reason, is_late=False) from None
        finally:
            self._num_early -= 1

    def _over_elsewhere(self, round: int) -> None:
        """Another stage is through with a round: it would wait for this one."""
        if round == self.ledger.round:
            self.on_over()

    def _stir(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self.on_change()

    def _ran(self, id: MicrobatchId, task: asyncio.Task[Reply]) -> None:
        self._running.pop(id, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._give_up(id)
        if error is not None and not isinstance(error, P2PTrainError):
            logger.error("%s failed in stage %d", id, self._stage, exc_info=error)
        self._stir()

    def _give_up(self, id: MicrobatchId) -> None:
        kept = self.ledger.abandon(id)
        if kept is not None:
            self._passes.take_out(kept.added)

    async def _tell(self, id: MicrobatchId, stage: int, host: str) -> None:
        running = self._running.get(id)
        if running is not None:
            await running.tell(stage, host)

    async def _run(self, hop: Hop) -> Reply:
        try:
            inputs = await self._passes.inputs_of(hop)
            if self.admit is not None and not await self.admit(hop.samples):
                raise OtherRoundError(f"{hop.id} came too late: the round has its samples", is_late=True)
            ends_here = self._is_last and not hop.goes_home
            return await (self._last(hop, inputs) if ends_here else self._middle(hop, inputs))
        except (CodecError, NotFiniteError) as error:
            raise BadMicrobatchError(f"{hop.id} in stage {self._stage}: {error}") from error

    async def _last(self, hop: Hop, inputs: torch.Tensor) -> Reply:
        await self._tell(hop.id, self._stage, self._peer_id)
        passed = await self._passes.add_loss(hop, inputs)
        leg = Leg(self._stage, self._peer_id, 0.0, passed.seconds)
        return self._count(hop, passed, Reply(passed.loss, (leg,), passed.gradient))

    async def _middle(self, hop: Hop, inputs: torch.Tensor) -> Reply:
        output = await self._passes.forward(inputs)
        await self._tell(hop.id, self._stage, self._peer_id)

        async def news(number: int, host: str) -> None:
            await self._tell(hop.id, number, host)

        try:
            after = await self._onward(hop, output.payload, news)
        except OtherRoundError as error:
            if error.is_late:
                self._over_elsewhere(hop.id.round)
            raise
        assert after.gradient is not None
        passed = await self._passes.add_backward(hop, inputs, after.gradient, output.busy_seconds)
        leg = Leg(self._stage, self._peer_id, output.seconds, passed.seconds)
        return self._count(hop, passed, Reply(after.loss, (leg, *after.legs), passed.gradient))

    async def _onward(self, hop: Hop, output: Payload, news: Tell) -> Reply:
        """What the stages after this one make of its output; after the last one, the trainer."""
        if self._is_last:
            return await self._caller.home(hop, output)
        onward = replace(hop, stage=self._stage + 1, inputs=output, route=hop.route[1:])
        return await self._caller.through(onward, hop.route[0] if hop.route else "", news)

    def _count(self, hop: Hop, passed: Passed, reply: Reply) -> Reply:
        loop = asyncio.get_running_loop()
        now = loop.time()
        self.ledger.counted(hop.id, _Kept(passed.added, reply), now)
        loop.call_later(FORGET_SECONDS, self._forget, hop.id, now)
        return reply

    def _forget(self, id: MicrobatchId, since: float) -> None:
        """Give up a microbatch that was counted then, and whose trainer never said that it has the reply."""
        entry = self.ledger.find(id)
        if not self._is_closed and entry is not None and entry.state is State.COUNTED and entry.since == since:
            logger.info("%s is taken out again: its trainer fell silent", id)
            self.abandon(id)

    # The end of a round

    def settle(self, id: MicrobatchId) -> bool:
        """The trainer has its whole trail; whether it was counted here."""
        is_here = self.ledger.settle(id)
        self._stir()
        return is_here

    def abandon(self, id: MicrobatchId) -> None:
        """The trainer gave it up, or another host of this stage counted it."""
        running = self._running.get(id)
        if running is None or not running.task.cancel():  # It may just have counted.
            self._give_up(id)
            self._stir()

    async def round_after(self, round: int) -> int:
        """The round in progress, once it is a later one than ``round``."""
        while self.ledger.round <= round:
            await self._changed.wait()
        return self.ledger.round

    async def close_round(self, seconds: float) -> list[MicrobatchId]:
        """Take on nothing more, and leave in the sum what is settled alone.

        Args:
            seconds: How long to wait for what is under way.

        Returns:
            What is settled.
        """
        self.ledger.is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.ledger.num_unsettled:
                    await self._changed.wait()
        for running in list(self._running.values()):
            running.task.cancel()
        await until_ended(*(each.task for each in self._running.values()))
        for kept in self.ledger.close():
            self._passes.take_out(kept.added)
        await self._passes.until_taken_out()
        return self.ledger.settled()

    def begin_round(self, round: int) -> None:
        """Go on to another round after `close_round`."""
        self.ledger.begin(round)
        self._stir()

    def remember_done(self, round: int, ids: Iterable[MicrobatchId]) -> None:
        """Note what is in the committed average of a round, for the trainers that ask."""
        self._done[round] = self._done.get(round, frozenset()) | frozenset(ids)
        while len(self._done) > MAX_REMEMBERED_ROUNDS:
            del self._done[min(self._done)]

    def is_done(self, ids: Sequence[MicrobatchId]) -> list[bool]:
        """Which of these are in the committed average of a round, as far as it is remembered."""
        return [any(id in done for done in self._done.values()) for id in ids]
