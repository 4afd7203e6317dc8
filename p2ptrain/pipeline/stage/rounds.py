"""The rounds of a stage on one of its hosts: fill, close, average, begin.

::

    fill ── the stage's hosts have settled the global batch ──▶ close ──▶ average each unit ──▶ begin the next round
             (the leader says so, or a microbatch of a later round comes)

`p2ptrain.pipeline.stage.host` admits microbatches; `p2ptrain.training.sync.synchronizer` averages them, as in
whole-model training. See "Rounds" in ``docs/explanation/pipeline.md`` for hosts without microbatches and lost work.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.pipeline.messages import MicrobatchId
from p2ptrain.pipeline.stage.host import AdmissionQueue, StageHost
from p2ptrain.pipeline.stage.units import HostedUnit
from p2ptrain.tasks import together
from p2ptrain.training.sync.synchronizer import RoundResult

logger = logging.getLogger(__name__)

TELL_SECONDS = 1.0
"""Interval of reports to the leader, and of checks whether the swarm is ahead, without other events.

With the timeout of a report (`LEAST_PROBE_SECONDS`), at most `HopLimits.quiet_seconds`: once a caller gives up a leader
that stopped, the other hosts have given it up, too, and the substitute's admission waits for nobody."""
UNSETTLED_SECONDS = 10.0
"""Age at which a counted, unsettled microbatch no longer takes others' room: its trainer may be dead."""
CONFIRM_SECONDS = 10.0
"""Time after a reduced round until its microbatches are done: a full one may win over it, and undo them."""
PAUSE_SECONDS = 0.25
SIT_OUT_SECONDS = 5.0
LEAVE_SECONDS = 2.0
"""Timeout for the others' result, at a leaving host without work for the round; < `SIT_OUT_SECONDS`."""


class StageRounds:
    """Runs the rounds of one hosted stage, until ``last_round`` begins (0 for no end).

    Args:
        queue: Admission requests and events of the host.
        units: Averaging units, the stage's own first.
        grace_seconds: Timeout of microbatches in flight when a round is closed.
        on_round: Called with the result of each synchronization of the stage's own unit.
        on_begun: Called when a round begins, with all units in it.
    """

    def __init__(
        self,
        host: StageHost,
        queue: AdmissionQueue,
        units: Sequence[HostedUnit],
        grace_seconds: float,
        on_round: Callable[[RoundResult], None],
        on_begun: Callable[[int], None],
    ) -> None:
        self.last_round = 0
        self._host = host
        self._queue = queue
        self._units = units
        self._grace_seconds = grace_seconds
        self._on_round = on_round
        self._on_begun = on_begun
        self._standby = units[0].synchronizer.averager.matchmaker.standby
        self._is_stopping = False
        self._limit: int | None = None
        self._uncounted: list[MicrobatchId] = []
        self._committed: list[tuple[float, Head, list[MicrobatchId]]] = []
        for unit in units:
            unit.synchronizer.averager.matchmaker.standby.on_closing(queue.changed.set)

    @property
    def is_done(self) -> bool:
        """True if `last_round` has begun."""
        return 0 < self.last_round <= self._host.ledger.round

    def finish(self) -> None:
        """End `run` after the next round that has this host's work, but not after ``last_round`` as it was."""
        self._limit = self.last_round if self._limit is None else self._limit
        last = max(1, self._host.ledger.round + 1)
        self.last_round = min(last, self._limit) if self._limit else last

    def stop(self) -> None:
        """End `run` after the round in progress is averaged as it is; admit nothing more."""
        self._is_stopping = True
        for unit in self._units:
            unit.synchronizer.leave()
        self._host.leave()

    async def run(self) -> None:
        """Run rounds until `stop`, or until `last_round`."""
        await self._host.close_round(0.0)
        await self._align_units()
        self._host.begin_round(self._units[0].state.head.round)
        while not self._is_stopping and not self.is_done:
            await self._fill()
            await self._close()

    # Filling a round

    async def _fill(self) -> None:
        """Report settled samples and request admissions, until the round is to be closed."""
        own, queue = self._units[0].synchronizer, self._queue
        queue.is_over_elsewhere = False
        while not (self._is_stopping or queue.is_over_elsewhere):
            queue.changed.clear()
            self._confirm()
            await self._report()
            if own.position.is_closing or any(unit.synchronizer.is_behind() for unit in self._units):
                break
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TELL_SECONDS):
                    await queue.changed.wait()
        for _, answer in queue.waiting:
            if not answer.done():
                answer.set_result(False)
        queue.waiting.clear()

    async def _report(self) -> None:
        ledger, waiting = self._host.ledger, self._queue.waiting
        while waiting and waiting[0][1].done():
            waiting.popleft()  # Given up.
        asked = list(waiting)
        wanted = sum(samples for samples, _ in asked)
        since = asyncio.get_running_loop().time() - UNSETTLED_SECONDS
        held = max(0, ledger.samples(since) - wanted) if self._host.worker.number == 0 else 0
        granted = await self._standby.take_on(ledger.settled_samples, held, wanted)
        for samples, answer in asked:
            if waiting and waiting[0][1] is answer:
                waiting.popleft()
            if not answer.done():
                answer.set_result(granted > 0)
                granted -= samples

    # Closing a round

    async def _close(self) -> None:
        before = self._host.ledger.round
        ids = await self._host.close_round(self._grace_seconds)
        self._uncounted += ids
        for unit in self._units:
            unit.work.add(self._host.ledger.settled_samples, self._host.ledger.settled_tokens)
        await together("advance", (self._advance(unit, before + 1) for unit in self._units))
        await self._align_units()
        rounds = [unit.state.head.round for unit in self._units]
        self._host.begin_round(rounds[0])
        if self._limit is not None and any(unit.work.tokens > 0 for unit in self._units):
            self.finish()  # The others ended the round without this host.
        if rounds[0] == before and not self._is_stopping:
            self._standby.reopen()
        elif len(set(rounds)) == 1:
            self._on_begun(rounds[0])

    async def _align_units(self) -> None:
        while not self._is_stopping:
            ahead = max(unit.state.head.round for unit in self._units)
            behind = [unit for unit in self._units if unit.state.head.round < ahead]
            if not behind:
                return
            await together("advance", (self._advance(unit, ahead) for unit in behind))

    async def _advance(self, unit: HostedUnit, until: int) -> None:
        """Average one unit until it reaches a round."""
        idle_since = asyncio.get_running_loop().time()
        unit.synchronizer.last_round = until  # Late work must not end the next round.
        while unit.state.head.round < until:
            was_stopping = self._is_stopping
            unit.synchronizer.stays = not self._is_stopping and not 0 < self.last_round <= until
            if unit.work.tokens > 0:
                await self._synchronize(unit)
                idle_since = asyncio.get_running_loop().time()
            elif await self._sit_out(unit, idle_since, LEAVE_SECONDS if was_stopping else SIT_OUT_SECONDS):
                return
            if was_stopping:
                return

    async def _synchronize(self, unit: HostedUnit) -> None:
        if self._queue.is_over_elsewhere:
            await unit.synchronizer.averager.matchmaker.standby.hurry()
        result = await unit.synchronizer.synchronize(unit.work)
        if unit is self._units[0]:
            if not unit.work.tokens:  # Committed, or dropped with a losing lineage.
                if result.committed and result.contributed:
                    at = asyncio.get_running_loop().time()
                    self._committed.append((at + CONFIRM_SECONDS, unit.state.head, self._uncounted))
                self._uncounted = []
                self._confirm()
            self._on_round(result)
        if not result.committed:
            await asyncio.sleep(PAUSE_SECONDS)

    def _confirm(self) -> None:
        """Tell which microbatches are done: those of full rounds, and of reduced ones that nobody replaced for long."""
        own, now, waiting = self._units[0], asyncio.get_running_loop().time(), self._committed
        head, log, self._committed = own.state.head, own.synchronizer.averager.round_log, []
        for at, committed, ids in waiting:
            if committed.lineage not in (head.lineage, log.lineage_at(head, committed.round)):
                continue  # Another lineage won.
            if head.full > committed.full or not committed.is_reduced or now >= at:
                self._host.remember_done(committed.round - 1, ids)
            else:
                self._committed.append((at, committed, ids))

    async def _sit_out(self, unit: HostedUnit, since: float, seconds: float) -> bool:
        """Wait for the others' result and apply it; True if no peer has one, and the round may reopen.

        If the round is over elsewhere, or the others are too few without this host, it joins with a gradient of zero.
        """
        synchronizer, round = unit.synchronizer, unit.state.head.round
        synchronizer.averager.matchmaker.start_clock()  # Else it would never follow a reduced lineage.
        may_join = not (self._is_stopping or self._host.is_resting)
        source = await synchronizer.averager.matchmaker.standby.sit_out(seconds, may_join=may_join)
        if source:
            await synchronizer.catch_up.follow(source, unit.work)
            return False
        if await synchronizer.follow_swarm(unit.work):
            return False
        if self._host.is_resting:
            return False  # It gives nothing, no gradient of zero either: its stage's other hosts end the round.
        if source is None:
            logger.debug("round %d: the others are too few without this host: it joins with a gradient of zero", round)
            unit.work.add(1, 1)
            return False
        if asyncio.get_running_loop().time() - since <= 2 * self._grace_seconds + SIT_OUT_SECONDS:
            return False
        if self._queue.is_over_elsewhere or any(other.state.head.round > round for other in self._units):
            logger.warning("round %d: nothing is left of it here: it ends with a gradient of zero", round)
            unit.work.add(1, 1)
            return False
        if any(other.work.tokens > 0 for other in self._units):
            return False
        logger.warning("round %d: nothing is left of it here: it goes on", round)
        return True
