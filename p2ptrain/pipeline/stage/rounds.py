"""The rounds of a stage, seen from one of its hosts: fill, close, average, begin.

::

    fill ── the stage's hosts have settled the global batch ──▶ close ──▶ average each unit ──▶ begin the next round
             (the leader says so, or a microbatch of a later round comes)

Microbatches are taken on by `p2ptrain.pipeline.stage.host`; here is what makes rounds of them, with the averaging that
whole-model training has (`p2ptrain.training.sync.synchronizer`). Hosts of the first stage ask the round's leader for
each microbatch whether it belongs to the round, so all of them together take on the global batch and no more; who is
let in there is let through everywhere. So with no failures all stages average the same microbatches.

A host that nobody sent anything in a round tells the leader, waits for the others' result, and takes it from them.
Where nothing at all is left of a round, because those who had it died, a host takes on more for it. If other stages are
through with it, it ends the round with a gradient of zero: rounds are numbered alike in all stages.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from p2ptrain.pipeline.stage.gradients import StageWork
from p2ptrain.pipeline.stage.host import StageHost
from p2ptrain.pipeline.stage.ledger import MicrobatchId
from p2ptrain.tasks import together
from p2ptrain.training.sync.synchronizer import RoundResult, Synchronizer

logger = logging.getLogger(__name__)

TELL_SECONDS = 2.0
"""After so long without news a host reports again, and looks whether the swarm is ahead."""
UNSETTLED_SECONDS = 10.0
"""What is not settled so long after it was counted keeps no others out: its trainer may be dead."""
PAUSE_SECONDS = 0.25
SIT_OUT_SECONDS = 5.0
LEAVE_SECONDS = 2.0
"""How long a host that leaves, and has nothing for the round, waits for what others may be ending it with."""


@dataclass
class HostedUnit:
    """What a host averages with others, and how.

    Attributes:
        synchronizer: Of the unit's swarm.
        work: This host's part in it.
    """

    synchronizer: Synchronizer
    work: StageWork

    @property
    def round(self) -> int:
        """The round in progress."""
        return self.synchronizer.head.round


class StageRounds:
    """Takes one hosted stage through its rounds.

    Args:
        host: Takes on its microbatches.
        units: What is averaged; what is the stage's own first.
        grace_seconds: How long what is under way may take when a round is closed.

    Attributes:
        last_round: Stop when this round begins; 0 for never.
        on_round: Called with the result of each synchronisation of the stage's own unit.
        on_begun: Called when a round begins, and all units are at it.
    """

    def __init__(self, host: StageHost, units: Sequence[HostedUnit], grace_seconds: float) -> None:
        self._host = host
        self._units = units
        self._grace_seconds = grace_seconds
        self.last_round = 0
        self._standby = units[0].synchronizer.averager.matchmaker.standby
        self._stirred = asyncio.Event()
        self._wanted: deque[tuple[int, asyncio.Future[bool]]] = deque()
        self._held = 0
        self._is_over_elsewhere = False
        self._is_stopping = False
        self._uncounted: list[MicrobatchId] = []
        self.on_round: Callable[[RoundResult], None] = lambda result: None
        self.on_begun: Callable[[int], None] = lambda round: None
        host.on_change = self._stir
        host.on_over = self._over_elsewhere
        if host.stage == 0:
            host.admit = self._admit
        for unit in units:
            unit.synchronizer.averager.matchmaker.standby.on_closing(self._stir)

    @property
    def is_done(self) -> bool:
        """Whether the last round is over."""
        return 0 < self.last_round <= self._host.ledger.round

    def stop(self) -> None:
        """Let `run` end with the round in progress averaged as it is; nothing more is taken on."""
        self._is_stopping = True
        self._host.leave()
        self._stir()

    async def run(self) -> None:
        """Go from round to round until `stop`, or the last one."""
        await self._host.close_round(0.0)
        await self._level()
        self._host.begin_round(self._units[0].round)
        while not self._is_stopping and not self.is_done:
            await self._fill()
            await self._close()

    # Filling a round

    def _stir(self) -> None:
        self._stirred.set()

    def _over_elsewhere(self) -> None:
        self._is_over_elsewhere = True
        self._stir()

    async def _admit(self, samples: int) -> bool:
        """Whether so many samples more belong to the round in progress."""
        answer: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
        self._wanted.append((samples, answer))
        self._stir()
        return await answer

    async def _fill(self) -> None:
        """Report what is settled, and ask for what is wanted, until the round is to be closed."""
        own = self._units[0].synchronizer
        self._held, self._is_over_elsewhere = 0, False
        while not (self._is_stopping or self._is_over_elsewhere):
            self._stirred.clear()
            await self._tell()
            if own.is_closing() or any(unit.synchronizer.catch_up.is_behind() for unit in self._units):
                break
            try:
                async with asyncio.timeout(TELL_SECONDS):
                    await self._stirred.wait()
            except TimeoutError:
                continue
        for _, answer in self._wanted:
            if not answer.done():
                answer.set_result(False)
        self._wanted.clear()

    async def _tell(self) -> None:
        ledger = self._host.ledger
        while self._wanted and self._wanted[0][1].done():
            self._wanted.popleft()  # Given up.
        asked = list(self._wanted)
        wanted = sum(samples for samples, _ in asked)
        since = asyncio.get_running_loop().time() - UNSETTLED_SECONDS
        self._held = max(0, ledger.samples(since) - wanted) if self._host.stage == 0 else 0
        granted = await self._standby.take_on(ledger.settled_samples, self._held, wanted)
        for samples, answer in asked:
            if self._wanted and self._wanted[0][1] is answer:
                self._wanted.popleft()
            if not answer.done():
                answer.set_result(granted > 0)
                granted -= samples

    # Ending it

    async def _close(self) -> None:
        before = self._host.ledger.round
        ids = await self._host.close_round(self._grace_seconds)
        for unit in self._units:
            unit.work.add(self._host.ledger.settled_samples, self._host.ledger.settled_tokens)
        self._uncounted += ids
        await together("advance", (self._advance(unit, before + 1) for unit in self._units))
        await self._level()
        self._host.begin_round(self._units[0].round)
        if self._units[0].round == before and not self._is_stopping:
            self._standby.reopen()
        elif len({unit.round for unit in self._units}) == 1:
            self.on_begun(self._units[0].round)

    async def _level(self) -> None:
        """Bring all units to one round."""
        while not self._is_stopping:
            ahead = max(unit.round for unit in self._units)
            behind = [unit for unit in self._units if unit.round < ahead]
            if not behind:
                return
            await together("advance", (self._advance(unit, ahead) for unit in behind))

    async def _advance(self, unit: HostedUnit, until: int) -> None:
        """Average one unit until it has come to a round."""
        idle_since = asyncio.get_running_loop().time()
        unit.synchronizer.last_round = until  # What comes too late for this round is not to end the next one.
        while unit.round < until:
            was_stopping = self._is_stopping
            if unit.work.tokens > 0:
                await self._synchronize(unit)
                idle_since = asyncio.get_running_loop().time()
            elif await self._sit_out(unit, idle_since, LEAVE_SECONDS if was_stopping else SIT_OUT_SECONDS):
                return
            if was_stopping:
                return

    async def _synchronize(self, unit: HostedUnit) -> None:
        round = unit.round
        if self._is_over_elsewhere:
            await unit.synchronizer.averager.matchmaker.standby.hurry()
        result = await unit.synchronizer.synchronize(unit.work)
        if unit is self._units[0]:
            if not unit.work.tokens:  # It is in the round, or was dropped with a lineage that lost.
                if result.committed and result.contributed:
                    self._host.remember_done(round, self._uncounted)
                self._uncounted = []
            self.on_round(result)
        if not result.committed:
            await asyncio.sleep(PAUSE_SECONDS)

    async def _sit_out(self, unit: HostedUnit, since: float, seconds: float) -> bool:
        """Wait for the others' result, and take it over; whether nobody has any, and the round may go on.

        If it may not, because it is over for others, it ends with nothing.
        """
        synchronizer = unit.synchronizer
        source = await synchronizer.averager.matchmaker.standby.sit_out(seconds)
        if source:
            await synchronizer.catch_up.follow(source, unit.work)
            return False
        if await synchronizer.catch_up.follow_swarm(unit.work):
            return False
        patience = 2 * self._grace_seconds + SIT_OUT_SECONDS
        if asyncio.get_running_loop().time() - since <= patience:
            return False
        if self._is_over_elsewhere or any(other.round > unit.round for other in self._units):
            logger.warning("round %d: nothing is left of it here: it ends with a gradient of zero", unit.round)
            unit.work.add(1, 1)
            return False
        if any(other.work.tokens > 0 for other in self._units):
            return False
        logger.warning("round %d: nothing is left of it here: it goes on", unit.round)
        return True
