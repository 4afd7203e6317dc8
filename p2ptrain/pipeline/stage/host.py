"""A stage host: processes microbatches, sends them on, and counts each of them once.

The life of a microbatch here, from top to bottom::

    StageHost.take ── refuse it, or wait for its round ──▶ _learn ── check, admit, forward ──▶ _onward ──▶ backward
       join it in flight, or return the stored reply                                                         │ counted
    settle ── the trainer has the whole trail: keep it in the sum    close_round ── remove unsettled ones ◀──┘

A microbatch belongs to the host, not to the stream that brought it: a repeated request joins it, or gets its reply. It
is given up when no caller has waited for a while.

Related modules: `p2ptrain.pipeline.stage.service` (network), `worker` (arithmetic), `gradients` (sum) and `ledger`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import (
    MAX_SECONDS,
    BadMicrobatchError,
    FullError,
    Hop,
    Leg,
    MicrobatchId,
    OtherRoundError,
    Payload,
    Reply,
    Times,
)
from p2ptrain.pipeline.routing.hop import Caller, Tell
from p2ptrain.pipeline.routing.router import MEASURE_WEIGHT
from p2ptrain.pipeline.stage.budget import Amounts, Budget
from p2ptrain.pipeline.stage.gradients import Added, GradientSum, StageGradients
from p2ptrain.pipeline.stage.ledger import Ledger, State
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.tasks import Tasks, until_ended

logger = logging.getLogger(__name__)

FORGET_SECONDS = 120.0
"""Timeout of a counted microbatch, until its trainer settles it."""
ORPHAN_SECONDS = 15.0
"""Timeout of a microbatch in flight without a waiting caller; the caller's own caller may send a substitute."""
NEXT_ROUND_SECONDS = 120.0
"""Timeout of an early microbatch, until its round begins."""
STATE_SECONDS = 3.0
"""Timeout of a microbatch at a host without its stage's state; then the caller goes to another host."""
NOT_YET = -1
"""The round of a host without its stage's state."""
UNDO_SECONDS = 2.0
"""Timeout of pending removals from the sum when the host closes."""
MAX_REMEMBERED_ROUNDS = 8
SIGNED_TWICE = "another microbatch of the same number"
"""Cause under which a trainer's second claim with one id is counted."""


class AdmissionQueue:
    """The first stage's microbatches that wait for admission to the round, and events of the round.

    `p2ptrain.pipeline.stage.rounds` answers them.

    Attributes:
        changed: Set on any change.
        waiting: For each microbatch, its samples and the future of its admission.
        is_over_elsewhere: True if another stage has ended the round in progress.
    """

    def __init__(self) -> None:
        self.changed = asyncio.Event()
        self.waiting: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self.is_over_elsewhere = False

    async def admit(self, samples: int) -> bool:
        """True if the round in progress has room for the samples."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self.waiting.append((samples, answer))
        self.changed.set()
        return await answer

    def note_over(self) -> None:
        """Signal that another stage has ended the round in progress."""
        self.is_over_elsewhere = True
        self.changed.set()


@dataclass(frozen=True)
class _Kept:
    """A counted, unsettled microbatch: the record for its removal from the sum, and for its trainer."""

    added: Added
    reply: Reply
    times: Times


class StageHost:
    """Hosts one stage, and adds to ``gradients``.

    Attributes:
        tokens_per_second: Its device's recent throughput; 0 before a measurement.
        is_resting: True to refuse new microbatches; those in flight complete.
    """

    def __init__(
        self, worker: StageWorker, caller: Caller, round: int, queue: AdmissionQueue, total: GradientSum | None = None
    ) -> None:
        self.worker = worker
        self.gradients = StageGradients(worker, total)
        self.ledger: Ledger[_Kept] = Ledger(worker.limits, round)
        self.tokens_per_second = 0.0
        self.is_resting = False
        self._caller = caller
        self._queue = queue
        self._tasks = Tasks()
        self._in_flight: dict[MicrobatchId, InFlight] = {}
        self._changed = asyncio.Event()
        limits = worker.limits
        self._early = Budget(Amounts(limits.max_early), limits.max_share, "wait for the next round")
        self._evaluated = Budget(Amounts(limits.max_evaluations), limits.max_share, "are being evaluated")
        self._done: dict[int, frozenset[MicrobatchId]] = {}
        self._asked_at = asyncio.get_running_loop().time()
        self._is_leaving = self._is_closed = False

    @property
    def seconds_idle(self) -> float:
        """Seconds since the last `take`."""
        return asyncio.get_running_loop().time() - self._asked_at

    def leave(self) -> None:
        """Refuse new microbatches; those in flight complete."""
        self._is_leaving = True
        self._notify()

    async def close(self) -> None:
        """Cancel all microbatches in flight."""
        self._is_closed = True
        await self._tasks.close()
        await self.gradients.undoing.close(UNDO_SECONDS)

    # Admission

    def expect(self, hop: Hop) -> None:
        """Raise what `take` would raise, as far as is known before the tensors arrive."""
        self._check_leaving(hop)
        self.worker.check_shapes(hop)
        if not hop.requires_grad:
            self._check_age(hop)
        elif hop.id.round <= self.ledger.round and self.ledger.find(hop.id) is None:
            self.ledger.check(hop.id, hop.samples, hop.num_bytes)

    async def take(self, hop: Hop, tell: Tell, on_admitted: Callable[[], None] = lambda: None) -> Reply:
        """Process a microbatch through this stage and all later ones; return the reply.

        Args:
            tell: Called with the progress at every stage.
            on_admitted: Called once the ledger accounts for its bytes.

        Raises:
            FullError: The host has no capacity now, or is leaving.
            OtherRoundError: This stage, or a later one, is in another round.
            BadMicrobatchError: It does not fit, or its values are not finite.
            HopFailedError: A later stage failed.
        """
        arrived = self._asked_at = asyncio.get_running_loop().time()
        self._check_leaving(hop)
        self.worker.check_shapes(hop)
        if not hop.requires_grad:
            return await self._evaluate(hop, tell)
        await self._in_its_round(hop)
        self._check_leaving(hop)
        known, in_flight = self.ledger.find(hop.id), self._in_flight.get(hop.id)
        if known is not None and known.signature != hop.signature.value:  # Its trainer signed both.
            self._caller.rpc.count_refusal(hop.id.trainer, SIGNED_TWICE)
            raise BadMicrobatchError(f"{hop.id} is another microbatch than the one that came before")
        if in_flight is None and known is not None:
            if known.kept is None:
                raise BadMicrobatchError(f"{hop.id} is settled already")
            return known.kept.reply
        if in_flight is None:
            self.ledger.admit(hop.id, hop.samples, hop.tokens, hop.num_bytes, hop.signature.value)
            on_admitted()
            task = self._tasks.call(self._learn(hop, arrived), f"microbatch-{hop.id.number}")
            in_flight = self._in_flight[hop.id] = InFlight(hop.id, task)
            task.add_done_callback(lambda task: self._ended(hop.id, task))
        return await in_flight.join(tell)

    def _check_leaving(self, hop: Hop) -> None:
        """Raise `FullError` for a new microbatch if this host is leaving; a known one still gets its reply."""
        if self._is_closed or (self._is_leaving and hop.requires_grad and self.ledger.find(hop.id) is None):
            raise FullError("this host leaves its stage: go to another one")
        if self.is_resting and self.ledger.find(hop.id) is None:
            raise FullError("this host is paused by its owner: go to another one")

    def _check_age(self, hop: Hop) -> None:
        """Raise `OtherRoundError` for an old evaluation; no ledger tells whether it is a replay."""
        if hop.id.round < self.ledger.round - 1:
            raise OtherRoundError(f"{hop.id} came too late: this host is in round {self.ledger.round}", is_late=True)

    async def _in_its_round(self, hop: Hop) -> None:
        """Wait up to `NEXT_ROUND_SECONDS` for the round of an early microbatch, but only briefly for any state."""
        if hop.id.round <= self.ledger.round:
            return
        with self._early.hold(hop.id.trainer, Amounts(1)):
            await self._with_state(hop, NOT_YET + 1)
            if hop.id.round > self.ledger.round:
                self._queue.note_over()
            if not await self._reaches(hop.id.round, hop, NEXT_ROUND_SECONDS):
                reason = f"{hop.id} came too early: this host is in round {self.ledger.round}"
                raise OtherRoundError(reason, is_late=False)

    async def _with_state(self, hop: Hop, oldest: int) -> None:
        """Raise `FullError` unless this host has a state of round ``oldest`` or later within `STATE_SECONDS`."""
        if not await self._reaches(oldest, hop, STATE_SECONDS):
            raise FullError("this host does not have its stage's state yet: go to another one")

    async def _reaches(self, round: int, hop: Hop, seconds: float) -> bool:
        """Wait for a round; return False if it does not begin in time."""
        try:
            async with asyncio.timeout(seconds):
                while self.ledger.round < round:
                    self._check_leaving(hop)
                    await self._changed.wait()
        except TimeoutError:
            return False
        return True

    # Forward, onward and back

    async def _learn(self, hop: Hop, arrived: float) -> Reply:
        """Process an admitted microbatch, and count it."""
        worker, tell = self.worker, self._in_flight[hop.id].tell
        await worker.check_values(hop)
        if worker.number == 0 and not await self._queue.admit(hop.samples):
            raise OtherRoundError(f"{hop.id} came too late: the round has its samples", is_late=True)
        if worker.ends(hop):
            await tell(worker.number, self._caller.rpc.peer_id)
            back = await self.gradients.add(hop, hop.targets)
            reply = Reply(back.result.loss, (self._leg(),), back.result.gradient)
            times = Times(_until_now(arrived), 0.0, min(back.seconds, MAX_SECONDS))
            return self._count(hop, reply, back.result.added, back.busy_seconds, times)
        output = await worker.forward(hop.inputs)
        await tell(worker.number, self._caller.rpc.peer_id)
        after = await self._onward(hop, output.result, tell)
        assert after.gradient is not None
        back = await self.gradients.add(hop, after.gradient)
        reply = Reply(after.loss, (self._leg(), *after.legs), back.result.gradient)
        busy = min(output.seconds + back.seconds, MAX_SECONDS)
        times = Times(_until_now(arrived), min(after.seconds, MAX_SECONDS), busy)
        return self._count(hop, reply, back.result.added, output.busy_seconds + back.busy_seconds, times)

    async def _evaluate(self, hop: Hop, tell: Tell) -> Reply:
        """Run a microbatch forward for its loss; nothing of it counts or is stored.

        A host without state, or with that of an earlier round than the last, would evaluate another model.
        """
        worker = self.worker
        self._check_age(hop)
        with self._evaluated.hold(hop.id.trainer, Amounts(1)):
            await self._with_state(hop, max(NOT_YET + 1, hop.id.round - 1))
            await worker.check_values(hop)
            if worker.ends(hop):
                loss = await worker.evaluate(hop)
                return Reply(loss.result, (self._leg(),), None)
            output = await worker.forward(hop.inputs)
            await tell(worker.number, self._caller.rpc.peer_id)
            after = await self._onward(hop, output.result, tell)
            return replace(after, legs=(self._leg(), *after.legs))

    async def _onward(self, hop: Hop, output: Payload, tell: Tell) -> Reply:
        """Return the reply of the later stages; after the last one, of the trainer."""
        if self.worker.is_last:
            return await self._caller.return_output(hop, output)
        onward = replace(hop, stage=self.worker.number + 1, inputs=output, route=hop.route[1:])
        try:
            reply = await self._caller.send(onward, hop.route[0] if hop.route else "", tell)
        except OtherRoundError as error:
            if error.is_late and hop.requires_grad and hop.id.round == self.ledger.round:
                self._queue.note_over()
            raise
        if hop.requires_grad:  # With the later stages' time, which is the same for all of its substitutes.
            stage = self._caller.router.stages[onward.stage]
            stage.measured(reply.legs[0].host, hop.tokens, reply.seconds, reply.seconds)
        return reply

    def _leg(self) -> Leg:
        return Leg(self.worker.number, self._caller.rpc.peer_id)

    # Counting and giving up

    def _count(self, hop: Hop, reply: Reply, added: Added, busy_seconds: float, times: Times) -> Reply:
        loop = asyncio.get_running_loop()
        now = loop.time()
        if busy_seconds > 0:
            rate, known = hop.tokens / busy_seconds, self.tokens_per_second
            self.tokens_per_second = known + MEASURE_WEIGHT * (rate - known) if known else rate
        self.ledger.counted(hop.id, _Kept(added, reply, times), now)
        loop.call_later(FORGET_SECONDS, self._forget, hop.id, now)
        return reply

    def _forget(self, id: MicrobatchId, since: float) -> None:
        """Give up a microbatch that was counted at ``since`` and is still not settled."""
        entry = self.ledger.find(id)
        if not self._is_closed and entry is not None and entry.state is State.COUNTED and entry.since == since:
            logger.info("%s is taken out again: its trainer fell silent", id)
            self.abandon(id)

    def _ended(self, id: MicrobatchId, task: asyncio.Task[Reply]) -> None:
        self._in_flight.pop(id, None)
        error = None if task.cancelled() else task.exception()
        if task.cancelled() or error is not None:
            self._give_up(id)
        if error is not None and not isinstance(error, P2PTrainError):
            logger.error("%s failed in stage %d", id, self.worker.number, exc_info=error)
        self._notify()

    def _give_up(self, id: MicrobatchId) -> None:
        kept = self.ledger.abandon(id)
        if kept is not None:
            self.gradients.take_out(kept.added)

    def settle(self, id: MicrobatchId) -> Times | None:
        """Settle a microbatch; return its times, or None if it was not counted here."""
        entry = self.ledger.find(id)
        times = entry.kept.times if entry is not None and entry.kept is not None else Times(0.0, 0.0, 0.0)
        is_here = self.ledger.settle(id)
        self._notify()
        return times if is_here else None

    def abandon(self, id: MicrobatchId) -> None:
        """Give up a microbatch that its trainer gave up, or that another host of this stage counted."""
        in_flight = self._in_flight.get(id)
        if in_flight is None or not in_flight.task.cancel():  # It may just have been counted.
            self._give_up(id)
            self._notify()

    # Rounds

    def _notify(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
        self._queue.changed.set()

    async def round_after(self, round: int) -> int:
        """Wait for a round later than ``round``, and return it."""
        while self.ledger.round <= round:
            await self._changed.wait()
        return self.ledger.round

    async def close_round(self, seconds: float) -> list[MicrobatchId]:
        """Close the round: wait ``seconds`` for microbatches in flight, and remove all unsettled ones from the sum.

        Return the settled microbatches.
        """
        self.ledger.is_closed = True
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while self.ledger.num_unsettled:
                    await self._changed.wait()
        in_flight = [each.task for each in self._in_flight.values()]
        for task in in_flight:
            task.cancel()
        await until_ended(*in_flight)
        for kept in self.ledger.close():
            self.gradients.take_out(kept.added)
        await self.gradients.until_taken_out()
        return self.ledger.settled()

    def begin_round(self, round: int) -> None:
        """Begin a round after `close_round`."""
        self.ledger.begin(round)
        self._notify()

    def remember_done(self, round: int, ids: Iterable[MicrobatchId]) -> None:
        """Record the microbatches in a round's committed average, for trainers' queries."""
        self._done[round] = self._done.get(round, frozenset()) | frozenset(ids)
        while len(self._done) > MAX_REMEMBERED_ROUNDS:
            del self._done[min(self._done)]

    def is_done(self, ids: Sequence[MicrobatchId]) -> list[bool]:
        """Return for each microbatch whether the committed average of a remembered round contains it."""
        return [any(id in done for done in self._done.values()) for id in ids]


class InFlight:
    """A microbatch in flight, shared by its caller and the caller's substitutes; ``task`` returns its reply."""

    def __init__(self, id: MicrobatchId, task: asyncio.Task[Reply]) -> None:
        self.task = task
        self._id = id
        self._callers: list[Tell] = []
        self._heard: list[tuple[int, str]] = []
        self._orphaned: asyncio.TimerHandle | None = None

    async def join(self, news: Tell) -> Reply:
        """Wait for the reply; `ORPHAN_SECONDS` after the last waiting caller has gone, the task is cancelled.

        ``news`` is called with the progress at every stage, past progress included.

        Raises:
            BadMicrobatchError: It was given up.
            P2PTrainError: The task's error.
        """
        if self._orphaned is not None:
            self._orphaned.cancel()
        self._callers.append(news)
        try:
            for stage, host in list(self._heard):
                await news(stage, host)
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            if self.task.cancelled():
                raise BadMicrobatchError(f"{self._id} was given up") from None
            raise
        finally:
            self._callers.remove(news)
            if not self._callers and not self.task.done():
                self._orphaned = asyncio.get_running_loop().call_later(ORPHAN_SECONDS, self.task.cancel)

    async def tell(self, stage: int, host: str) -> None:
        """Tell all waiting callers that a host finished a stage's forward pass, or was called."""
        self._heard.append((stage, host))
        for news in list(self._callers):
            with contextlib.suppress(P2PTrainError):  # A caller that is gone does not affect the others.
                await news(stage, host)


def _until_now(since: float) -> float:
    return min(asyncio.get_running_loop().time() - since, MAX_SECONDS)
