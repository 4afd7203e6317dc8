"""How far a trainer goes in a round of local steps (``every = H``): it reports, and learns when the round closes.

A background task tells the round's leader every few seconds how many steps this peer has done. The answer says in how
many seconds the round closes (`p2ptrain.averaging.timing.local_steps`). The training thread never waits for it: after
each step it asks `Pacing.is_due`, which is true once another step would end after that instant. A peer that knows of no
such instant, because it is alone or no leader answers, does its own H steps.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.messages import STEPS, StepsAdvice, StepsReport
from p2ptrain.averaging.grouping.round_position import MOST_PROBE_SECONDS, RoundPosition, probe_seconds
from p2ptrain.averaging.timing.global_batch import LONGEST_BATCH_SECONDS
from p2ptrain.averaging.timing.local_steps import MOST_ROUNDS, SILENT_SECONDS
from p2ptrain.errors import DeadlineError, PeerError, PeerRefusedError
from p2ptrain.tasks import Tasks

REPORT_SECONDS = 2.0
LEAST_PAUSE_SECONDS = 0.25
OVERLAP = 0.25
"""The part of a step that may lie beyond the end of the round: steps differ in length."""
LEAST_WAIT_SECONDS = 1.0
CLOCK_SECONDS = 0.001
"""Time is no finer than that."""
DIALS = 2.0
"""A report takes as long as so many dials: it opens a stream, then asks."""
NEW_SHARE = 0.5
"""Of the last step, in the mean length of steps."""


class Pacing:
    """One trainer's side of it; `p2ptrain.averaging.grouping.matchmaker.Matchmaker` makes it of its own parts.

    Attributes:
        is_behind: True if others are known to be ahead: then nobody comes to close this round.

    Args:
        steps: H, the steps of a round; 0 without local steps.
    """

    def __init__(self, context: PeerContext, leaders: Leaders, position: RoundPosition, steps: int) -> None:
        self._context = context
        self._leaders = leaders
        self._position = position
        self._every = steps
        self.is_behind: Callable[[], bool] = lambda: False
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

    def start(self) -> None:
        """Begin to report; on the event loop."""
        if self._every and self._task is None:
            self._loop = asyncio.get_running_loop()
            self._step_began = self._loop.time()
            self._task = self._tasks.keep(self._run, "pacing")

    def stop(self) -> None:
        """Report no more: this peer leaves."""
        if self._task is not None:
            self._task.cancel()
            self._task = None

    async def close(self) -> None:
        """End everything that was started."""
        await self._tasks.close()

    def is_due(self, steps: int) -> bool:
        """Return True if this peer should hand in what it has rather than begin another step; from any thread."""
        plan, key = self._plan, self._position.key
        if self._over == key:
            return True
        if plan is None or plan[0] != key:
            return steps >= self._every
        return steps >= MOST_ROUNDS * self._every

    def note(self, steps: int, seconds: float = 0.0) -> None:
        """Note the steps done for the round in progress.

        Args:
            steps: How many.
            seconds: How long the last one took; 0 at the start of a round.
        """
        if self._loop is None:
            return
        if seconds:
            mean = (1 - NEW_SHARE) * self._seconds + NEW_SHARE * seconds if self._seconds else seconds
            self._seconds = min(mean, LONGEST_BATCH_SECONDS)
        self._steps, self._step_began = steps, self._loop.time()
        if self._resting is None and (self._is_silent or not seconds or steps == 1):
            self._is_silent = False
            self._changed.set()

    @property
    def seconds_left(self) -> float | None:
        """Until the round in progress closes; None where that is not known."""
        if self._plan is None or self._plan[0] != self._position.key:
            return None
        return max(0.0, self._plan[1] - asyncio.get_running_loop().time())

    @property
    def _shortest_seconds(self) -> float:
        """What has to be left for another step: it may end a little late, within what the others wait for it."""
        return self._seconds - min(OVERLAP * self._seconds, self._context.spec.grace_seconds / 2)

    @property
    def has_time(self) -> bool:
        """Whether another step fits into the round in progress, as far as that is known."""
        left = self.seconds_left
        return (
            not self._position.is_closing and left is not None and self._seconds > 0 and left > self._shortest_seconds
        )

    @contextlib.contextmanager
    def handing_in(self) -> Iterator[None]:
        """While this peer's contribution is under way: what it does meanwhile is for the next round.

        It reports again once the training thread has said what it has for that one.
        """
        self._resting, self._is_silent = self._steps, True
        try:
            yield
        finally:
            self._resting = None

    async def refresh(self) -> None:
        """Ask at once when the round in progress closes, after this peer caught up.

        An answer that takes long is not waited for: the others may be about to close the round without this peer.
        """
        self._resting = 0 if self._resting is not None else None
        if self._task is not None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(max(LEAST_WAIT_SECONDS, OVERLAP * self._seconds)):
                    await self._report()

    async def until_closing(self) -> None:
        """Wait until the round in progress closes, but not for much longer than a step of this peer takes."""
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
            self._look_at_clock()

    def _pause(self) -> float:
        """Until the next report, or until no further step fits."""
        left = self.seconds_left
        if left is None:
            return REPORT_SECONDS
        last = left - self._shortest_seconds
        pause = min(REPORT_SECONDS, max(LEAST_PAUSE_SECONDS, left / 4))
        return max(CLOCK_SECONDS, min(pause, last)) if last > 0 else pause

    def _look_at_clock(self) -> None:
        """Note whether a step that begins now would be in vain or end too late; forget what a silent leader said."""
        assert self._loop is not None
        if self._plan is not None and self._loop.time() - self._plan[2] > SILENT_SECONDS:
            self._plan = None
        left = self.seconds_left
        is_over = self.is_behind() or (left is not None and left <= self._shortest_seconds)
        self._over = self._position.key if is_over else None

    def _answer_seconds(self, leader: str) -> float:
        """Return the timeout of a report: nobody waits for its answer, and the link to the leader may be slow."""
        dial_seconds = self._context.rpc.dial_seconds.get(leader)
        if dial_seconds is None:
            return MOST_PROBE_SECONDS
        return min(MOST_PROBE_SECONDS, probe_seconds(self._context.spec) + DIALS * dial_seconds)

    async def _report(self) -> None:
        """Tell the leader how far this peer is, and take in when the round closes."""
        loop, key, position = asyncio.get_running_loop(), self._position.key, self._position
        head, asked_at, leader = position.head.without_proof(), loop.time(), self._leaders.first(key)
        if self._resting is None:
            age = min(max(0.0, asked_at - self._step_began), LONGEST_BATCH_SECONDS)
            report = StepsReport(head, self._steps, self._seconds, age, is_stepping=True)
        else:
            report = StepsReport(head, self._resting, self._seconds, 0.0, is_stepping=False)
        try:
            advice = await self._context.rpc.call(leader, STEPS, report, StepsAdvice, self._answer_seconds(leader))
        except PeerRefusedError:
            self._leaders.redirect_loop(key, leader)
            return
        except (PeerError, DeadlineError) as error:
            self._leaders.unanswered(key, leader, error)
            return
        if advice.closing:
            position.close(key)
        if advice.closes_in is not None and key == position.key:
            # Early by the way of the answer, which a ticket takes too.
            self._plan = (key, asked_at + advice.closes_in, loop.time())
        self._look_at_clock()
