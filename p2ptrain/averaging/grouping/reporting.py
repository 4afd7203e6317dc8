"""Reports to the round's leader: this peer's progress goes out, and advice when the round closes comes back.

A *trainer* decides how much it computes (`Pacing`; the leader's side is `p2ptrain.averaging.timing.goal`). With local
steps, a background task reports every few seconds. The training thread does not wait for it, but asks `Pacing.is_due`
after each step. A peer without advice, because it is alone or no leader answers, computes its own H steps.

A *host* of a stage computes for other peers (`Standby`). The leader grants samples, so that all hosts together admit
the global batch and no more. A host without samples in a round steps aside, and fetches the result.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping import messages
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.coordinator import Coordinator
from p2ptrain.averaging.grouping.leaders import MOST_PROBE_SECONDS, Leaders, probe, probe_seconds
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.averaging.timing.goal import (
    LONGEST_BATCH_SECONDS,
    MOST_ROUNDS,
    NO_PROGRESS_SECONDS,
    SILENT_SECONDS,
    WAIT_BATCHES,
    Goal,
)
from p2ptrain.errors import DeadlineError, PeerError, PeerRefusedError
from p2ptrain.tasks import Tasks, together

REPORT_SECONDS = 2.0
LEAST_PAUSE_SECONDS = 0.25
OVERLAP = 0.25  # fraction of a step that may exceed the end of the round, because steps differ in length
LEAST_WAIT_SECONDS = 1.0
CLOCK_SECONDS = 0.001  # resolution of waits
NEW_SHARE = 0.5  # weight of the last step in the mean length of steps
MOST_WAIT_BATCHES = 2 * WAIT_BATCHES
"""Longest wait for others, in own batches: they are predicted to take `WAIT_BATCHES`, and may be as late again."""
MAX_ASKED = 3
OnLoop = Callable[[Callable[[], None]], object]
"""Calls a function on the event loop."""


class Pacing:
    """One trainer's reports."""

    def __init__(self, context: PeerContext, leaders: Leaders, goal: Goal) -> None:
        self._context = context
        self._leaders = leaders
        self._position = leaders.position
        self._every = goal.steps
        self._most_samples = goal.samples
        self._reports_steps = goal.mean_steps > 0
        self._is_behind: Callable[[], bool] = lambda: False
        self._tasks = Tasks()
        self._task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._changed = asyncio.Event()
        self._steps = 0
        self._seconds = 0.0
        self._step_began = 0.0
        self._resting: int | None = None
        self._is_silent = False
        self._plan: tuple[Key, float, float] | None = None
        self._over: Key | None = None

    def start(self, is_behind: Callable[[], bool]) -> None:
        """Start to report local steps; call on the event loop.

        ``is_behind`` tells whether others are ahead, so that no peer joins this round.
        """
        self._is_behind = is_behind
        if self._reports_steps and self._task is None:
            self._loop = asyncio.get_running_loop()
            self._step_began = self._loop.time()
            self._task = self._tasks.keep(self._run, "pacing")

    def stop(self) -> None:
        """Stop to report, because this peer leaves."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        await self._tasks.close()

    # --- a global batch -------------------------------------------------------------------------------------------

    async def report_batch(self, samples: int, batch_samples: int, batch_seconds: float) -> bool:
        """Report progress towards the global batch, and wait while another local batch would be surplus.

        A leader decides neither that this peer waits for ever, nor that it computes more than the whole batch: a leader
        that lets it wait for longer than others can be predicted to take has had its turn.

        Args:
            samples: This peer's samples for the round.
            batch_samples: Those of its last local batch, which took ``batch_seconds``.

        Returns:
            True if the round closes, or is over elsewhere; False if this peer should compute another local batch.
        """
        position, key, rpc = self._position, self._position.key, self._context.rpc
        loop = asyncio.get_running_loop()
        seconds = min(batch_seconds, LONGEST_BATCH_SECONDS)
        if 0 < self._most_samples <= samples:
            position.close(key)
        waits_for, until = "", 0.0
        while key == position.key and not position.is_closing:
            leader = self._leaders.first(key)
            if leader != waits_for:
                waits_for, until = leader, loop.time() + MOST_WAIT_BATCHES * seconds + MOST_PROBE_SECONDS
            report = messages.BatchReport(position.head.without_proof(), samples, min(batch_samples, samples), seconds)
            try:
                advice = await rpc.call(
                    leader, messages.REPORT, report, messages.BatchAdvice, probe_seconds(self._context, leader)
                )
            except PeerRefusedError:
                return False
            except (PeerError, DeadlineError) as error:
                self._leaders.lost(leader, str(error))
                return False
            if advice.closing:
                position.close(key)
            if position.is_closing or not advice.wait:
                break
            if self._is_behind():
                return True
            if loop.time() > until:
                self._leaders.failed(key, leader)
                if self._leaders.first(key) == leader:  # Nobody else leads.
                    return False
        return position.is_closing

    # --- local steps ----------------------------------------------------------------------------------------------

    def is_due(self, steps: int) -> bool:
        """True if this peer should contribute now, with this many steps; safe from any thread."""
        plan, key = self._plan, self._position.key
        if self._over == key:
            return True
        if plan is None or plan[0] != key:
            return steps >= self._every
        return steps >= MOST_ROUNDS * self._every

    def note(self, steps: int, seconds: float = 0.0, call_soon: OnLoop = lambda wake: wake()) -> None:
        """Record the steps done in the round, and the seconds of the last one; 0 at the start of a round.

        Another thread gives ``call_soon``. Each call makes it wait for the loop, so there is one only before a report.
        """
        if self._loop is None:
            return
        if seconds:
            mean = (1 - NEW_SHARE) * self._seconds + NEW_SHARE * seconds if self._seconds else seconds
            self._seconds = min(mean, LONGEST_BATCH_SECONDS)
        self._steps, self._step_began = steps, self._loop.time()
        if self._resting is None and (self._is_silent or not seconds or steps == 1):
            self._is_silent = False
            call_soon(self._changed.set)

    @property
    def seconds_left(self) -> float | None:
        """Time until the round closes; None if unknown."""
        if self._plan is None or self._plan[0] != self._position.key:
            return None
        return max(0.0, self._plan[1] - asyncio.get_running_loop().time())

    @property
    def _shortest_seconds(self) -> float:
        """Minimum time for another step, which may end late by a part of the grace period."""
        return self._seconds - min(OVERLAP * self._seconds, self._context.spec.grace_seconds / 2)

    @property
    def has_time(self) -> bool:
        """True if another step fits into the round."""
        left = self.seconds_left
        if left is None or self._position.is_closing:
            return False
        return self._seconds > 0 and left > self._shortest_seconds

    @contextlib.contextmanager
    def handing_in(self) -> Iterator[None]:
        """Mark this peer as waiting for the end of the round; steps of this time count in the next one.

        Reports continue once the training thread has noted the steps for that round.
        """
        self._resting, self._is_silent = self._steps, True
        try:
            yield
        finally:
            self._resting = None

    async def refresh(self) -> None:
        """After a catch-up: ask when the round closes, but wait only shortly, because it may close soon."""
        self._resting = 0 if self._resting is not None else None
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(LEAST_WAIT_SECONDS, OVERLAP * self._seconds)):
                    await self._report()

    async def until_closing(self) -> None:
        """Wait until the round closes, at most for little more than one of this peer's steps."""
        if self._task is None or self._loop is None:
            return
        deadline = self._loop.time() + max(LEAST_WAIT_SECONDS, (1 + OVERLAP) * self._seconds)
        self._is_silent = False
        self._changed.set()
        try:
            while self.seconds_left and not self._position.is_closing:
                pause = min(self.seconds_left, deadline - self._loop.time(), LEAST_PAUSE_SECONDS)
                if pause <= 0:
                    return
                await asyncio.sleep(max(CLOCK_SECONDS, pause))
        finally:
            self._is_silent = True

    async def _run(self) -> None:
        assert self._loop is not None
        while True:
            self._changed.clear()
            if not self._is_silent:
                await self._report()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(self._pause()):
                    await self._changed.wait()
            self._check_clock()

    def _pause(self) -> float:
        """Return the time until the next report, or until no further step fits."""
        left = self.seconds_left
        if left is None:
            return REPORT_SECONDS
        last = left - self._shortest_seconds
        pause = min(REPORT_SECONDS, max(LEAST_PAUSE_SECONDS, left / 4))
        return max(CLOCK_SECONDS, min(pause, last)) if last > 0 else pause

    def _check_clock(self) -> None:
        """Update whether another step would end too late; drop the advice of a silent leader."""
        assert self._loop is not None
        if self._plan is not None and self._loop.time() - self._plan[2] > SILENT_SECONDS:
            self._plan = None
        left = self.seconds_left
        is_over = self._is_behind() or (left is not None and left <= self._shortest_seconds)
        self._over = self._position.key if is_over else None

    def _answer_seconds(self, leader: str) -> float:
        """Return the timeout of a report; training does not wait for it, and the link may be slow."""
        is_known = leader in self._context.rpc.dial_seconds
        return probe_seconds(self._context, leader) if is_known else MOST_PROBE_SECONDS

    async def _report(self) -> None:
        """Report the steps to the leader, and store when the round closes."""
        loop, key, position = asyncio.get_running_loop(), self._position.key, self._position
        head, asked_at, leader = position.head.without_proof(), loop.time(), self._leaders.first(key)
        steps, age = self._resting, 0.0
        if steps is None:
            steps, age = self._steps, min(max(0.0, asked_at - self._step_began), LONGEST_BATCH_SECONDS)
        report = messages.StepsReport(head, steps, self._seconds, age, is_stepping=self._resting is None)
        try:
            advice = await self._context.rpc.call(
                leader, messages.STEPS, report, messages.StepsAdvice, self._answer_seconds(leader)
            )
        except PeerRefusedError:
            self._leaders.failed(key, leader)
            return
        except (PeerError, DeadlineError) as error:
            self._leaders.lost(leader, str(error))
            return
        if advice.closing:
            position.close(key)
        if advice.closes_in is not None and key == position.key:
            # Early by the answer's way back, which a ticket takes, too.
            self._plan = (key, asked_at + advice.closes_in, loop.time())
        self._check_clock()


class Standby:
    """One host's requests."""

    def __init__(self, context: PeerContext, leaders: Leaders, coordinator: Coordinator) -> None:
        self._context = context
        self._leaders = leaders
        self._coordinator = coordinator
        self._position = leaders.position
        self._moved = asyncio.Event()
        self._starved: tuple[Key, str, float] | None = None
        context.rpc.serve(messages.MOVED, messages.AwaitMove, self._serve_moved)

    def moved(self) -> None:
        """Wake the peers that wait for this one's next head."""
        self._moved.set()
        self._moved = asyncio.Event()

    def on_closing(self, callback: Callable[[], None]) -> None:
        """Call ``callback`` each time another peer says that the round in progress closes."""
        self._position.on_close = callback

    async def take_on(self, samples: int, held: int, wanted: int) -> int:
        """Report to the round's leader, and request samples; see `TakeOn`.

        Returns:
            How many of the ``wanted`` samples fit into the round. `RoundPosition.is_closing` tells whether it closes.
        """
        context, key = self._context, self._position.key
        for _ in range(MAX_ASKED):
            leader = self._leaders.first(key)
            request = messages.TakeOn(self._position.head.without_proof(), samples, held, wanted)
            try:
                reply = await context.rpc.call(
                    leader, messages.TAKE_ON, request, messages.Grant, probe_seconds(context, leader)
                )
            except (PeerError, DeadlineError) as error:
                if leader == context.rpc.peer_id:  # It is leaving.
                    return 0
                self._leaders.lost(leader, str(error))  # Also a refusal: the leader now hosts another stage.
                continue
            if reply.closing:
                self._position.close(key)
            elif self._is_starved(key, leader, wanted, reply.granted):
                self._leaders.failed(key, leader)
                continue
            return min(reply.granted, wanted)
        return 0

    def _is_starved(self, key: Key, leader: str, wanted: int, granted: int) -> bool:
        """True if a leader has granted nothing for so long that those who hold the rest should be done."""
        now = asyncio.get_running_loop().time()
        if granted or not wanted or self._starved is None or self._starved[:2] != (key, leader):
            self._starved = (key, leader, now) if wanted and not granted else None
            return False
        if now - self._starved[2] < NO_PROGRESS_SECONDS:
            return False
        self._starved = None
        return True

    async def sit_out(self, seconds: float, *, may_join: bool = False) -> str | None:
        """Tell the leader that this peer has no work for the round, and wait ``seconds`` for the round's end.

        Returns:
            A peer that is ahead; empty if none was found; None, at once, if this peer ``may_join``, and the leader says
            that the round needs it.
        """
        context, key, head = self._context, self._position.key, self._position.head.without_proof()
        leader = self._leaders.first(key)
        patience = probe_seconds(context, leader)
        try:
            request = messages.Pass(head, may_join)
            reply = await context.rpc.call(leader, messages.PASS, request, messages.Passed, patience)
            if reply.is_ahead:
                return leader
            if reply.is_needed and may_join:
                return None
        except (PeerError, DeadlineError) as error:
            self._leaders.lost(leader, str(error))
        others = sorted({*self._leaders.membership.expected()} - {leader} - context.sitting_out(self._position.head))
        asked = context.runtime.random.sample(others, min(len(others), MAX_ASKED))
        asked = [peer for peer in [leader, *asked] if peer != context.rpc.peer_id]
        return await self._first_to_move(asked, head, seconds)

    def reopen(self) -> None:
        """Admit samples again to a round that was closing: the peers with work for it are gone."""
        self._position.closing = None
        self._coordinator.reopen(self._position.key)

    async def hurry(self) -> None:
        """Tell all present peers to close the round with the work that they have.

        A leader does so once the batch is full, or a quorum came. A peer that learns elsewhere that the round gets no
        more work may be the only one, and the others would wait for ever.
        """
        key = self._position.key

        async def hurry(peer: str) -> None:
            try:
                await probe(self._context, peer, key, closing=True)
            except (PeerError, DeadlineError) as error:
                self._leaders.lost(peer, str(error))

        expected = self._leaders.membership.expected()
        await together("hurry", (hurry(peer) for peer in expected if self._position.cells.includes(key, peer)))

    async def _first_to_move(self, peers: Sequence[str], head: Head, seconds: float) -> str:
        """Return the first of ``peers`` with a head that wins over ``head``; empty if none has one in time."""

        async def ask(peer: str) -> str:
            request, rpc = messages.AwaitMove(head, seconds), self._context.rpc
            with contextlib.suppress(PeerError, DeadlineError):
                if (await rpc.call(peer, messages.MOVED, request, messages.Ahead, 2 * seconds + 1)).is_ahead:
                    return peer
            await asyncio.sleep(seconds)
            return ""

        if not peers:
            await asyncio.sleep(seconds)
            return ""
        async with Tasks() as tasks:
            asking = [tasks.call(ask(peer), f"moved-{peer[-8:]}") for peer in peers]
            with contextlib.suppress(TimeoutError):
                for answer in asyncio.as_completed(asking, timeout=seconds):
                    if peer := await answer:
                        return peer
        return ""

    async def _serve_moved(self, peer: str, question: messages.AwaitMove) -> messages.Ahead:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(question.seconds):
                while not self._position.is_ahead_of(question.head):
                    await self._moved.wait()
        return messages.Ahead(self._position.is_ahead_of(question.head))
