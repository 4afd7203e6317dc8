"""Migration of a host to another stage.

All hosts see the same records and compute the same best move (`p2ptrain.pipeline.placement.best_move`). A host
announces its move, looks again, gets another host's promise to stay, starts on the target, and hands over the result of
its last round. See "Who hosts what" in ``docs/explanation/pipeline.md``.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import Protocol

from p2ptrain.errors import DeadlineError, P2PTrainError, PeerError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.messages import RoundReply, RoundRequest, StayReply, StayRequest
from p2ptrain.pipeline.placement import Host, Move, best_move, counted
from p2ptrain.pipeline.routing.hop import service
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.pipeline.view import LEAST_PAUSE_SECONDS, PipelineView
from p2ptrain.tasks import Tasks, until_ended

logger = logging.getLogger(__name__)

NOTICE_SECONDS = 2.0
"""Time between the announcement of a move and the decision. A host that takes over half of it to announce yields to the
others. For twice as long, no other host decides, since the move may be withdrawn."""
LEAST_STAY_SECONDS = 90.0
"""Minimum stay of a host, so that the gain from its last move shows first."""
PROMISE_SECONDS = 120.0
HAND_OVER_SECONDS = 10.0
"""Timeout for another host to take over a departing host's last result."""
MAX_ASKED = 4
CALL_SECONDS = 5.0


class Records(Protocol):
    """Access to the directory's records; see `p2ptrain.node.presence.Presence`."""

    def changed(self) -> None: ...
    async def publish(self) -> bool: ...
    async def refresh(self) -> bool: ...


class Stages(Protocol):
    """Preparation and release of this peer's stages."""

    async def take_on(self, number: int) -> HostedStage:
        """Prepare a stage with its state; after a failure or cancellation, nothing of it is left."""

    async def step_in(self, hosted: HostedStage) -> None:
        """Start to participate with a prepared stage."""

    async def give_up(self, hosted: HostedStage) -> None:
        """Close a prepared stage that is not needed."""

    def moved(self, hosted: HostedStage) -> None:
        """Record the new stage; the previous one is closed."""


class StageMigrator:
    """Hosts a stage, and moves to a better one; ``hosted`` is the current stage.

    With a ``memory`` of 0, the owner has fixed the stage. Otherwise it is the limit for a stage in bytes.
    """

    def __init__(
        self, view: PipelineView, records: Records, rpc: Rpc, hosted: HostedStage, stages: Stages, memory: int
    ) -> None:
        self.hosted = hosted
        self._view = view
        self._records = records
        self._rpc = rpc
        self._runtime = rpc.runtime
        self._stages = stages
        self._memory = memory
        self._target: int | None = None
        self._is_leaving = False
        self._is_stopping = False
        loop = asyncio.get_running_loop()
        self._bound_until = loop.time() + LEAST_STAY_SECONDS
        self._announced: int | None = None
        self._has_news = asyncio.Event()
        self._tasks = Tasks()
        self._updated_at = loop.time()
        rpc.serve("pipeline.stay", StayRequest, self._serve_stay)

    @property
    def next_stage(self) -> int | None:
        """The target of a move; the current stage while it cannot move; None while it is free."""
        if self._target is not None:
            return self._target
        return None if self._is_free else self.hosted.number

    def stop(self) -> None:
        """End `run`; the round in progress is averaged as it is."""
        self._is_stopping = True
        self.hosted.rounds.stop()
        self._has_news.set()

    async def _follow_records(self) -> None:
        while True:
            await self._view.updated.wait()
            self._updated_at = asyncio.get_running_loop().time()
            self._has_news.set()

    async def run(self) -> None:
        """Host until stopped, or until the last round."""
        async with self._tasks:
            self._tasks.keep(self._follow_records, "follow-records")
            hosting = self._tasks.call(self.hosted.run(), f"stage-{self.hosted.number}")
            while True:
                await self._wait(hosting)
                if hosting.done() or self._is_stopping:
                    break
                self._announce()
                if not self._has_news.is_set():
                    continue
                self._has_news.clear()
                if 0.0 <= self._runtime.now() - self._view.last_departure < 2 * NOTICE_SECONDS:
                    continue
                others = self._view.hosts()
                move = self._best(others)
                if move is not None:
                    hosting = await self._move(move, hosting, others)
            await hosting
            if self._is_stopping:
                await self._hand_over(self.hosted)

    async def _wait(self, hosting: asyncio.Task[None]) -> None:
        """Wait for news, for the end of the minimum stay, or for the end of hosting."""
        bound_seconds = self._bound_until - asyncio.get_running_loop().time()
        timeout = bound_seconds if bound_seconds > 0 else None
        async with Tasks() as tasks:
            news = tasks.call(self._has_news.wait(), "news")
            await asyncio.wait({hosting, news}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)

    def _announce(self) -> None:
        """Publish the record if `next_stage` has changed; `Records` bounds how often."""
        if self.next_stage != self._announced:
            self._announced = self.next_stage
            self._records.changed()

    # Deciding

    def _bind(self, seconds: float) -> None:
        """Stay for at least ``seconds``, and announce it."""
        self._bound_until = max(self._bound_until, asyncio.get_running_loop().time() + seconds)
        self._announce()

    @property
    def _is_free(self) -> bool:
        is_bound = asyncio.get_running_loop().time() < self._bound_until
        if self.hosted.host.is_resting:
            return False
        return self._memory > 0 and not (is_bound or self._is_stopping or self.hosted.rounds.is_done)

    def _best(self, others: Sequence[Host]) -> Move | None:
        """Return the best of all moves, if it is this peer's and this peer is free."""
        if not self._is_free:
            return None
        needs, number = self._view.plan.needs, self.hosted.number
        speed = self._view.bounded(self.hosted.host.tokens_per_second * needs[number].work)
        own = Host(self._rpc.peer_id, number, speed, self._memory)
        move = best_move(needs, [*others, own])
        return move if move is not None and move.peer == own.peer else None

    async def _is_agreed(self, move: Move, before: Sequence[Host]) -> bool:
        """Announce a move, found with the hosts ``before``; True if it is still the best once all hosts know of it."""
        loop, updated_at = asyncio.get_running_loop(), self._updated_at
        self._announced = move.target
        if not await self._records.publish():
            return False
        is_late = loop.time() > updated_at + NOTICE_SECONDS / 2
        await asyncio.sleep(NOTICE_SECONDS)
        if not await self._records.refresh():
            return False
        others = self._view.hosts()
        again = self._best(others if is_late else counted(others, before, self._rpc.peer_id))
        return again is not None and again.target == move.target

    # Moving

    async def _move(self, move: Move, hosting: asyncio.Task[None], before: Sequence[Host]) -> asyncio.Task[None]:
        """Carry out a move, found with the hosts ``before``, if agreed; return the task that hosts afterwards."""
        self._target = move.target
        taking = self._tasks.call(self._stages.take_on(move.target), f"take-on-{move.target}")
        try:
            if not await self._is_agreed(move, before):
                logger.debug("staying with stage %d: a move to stage %d was not agreed on", move.source, move.target)
                return hosting
            self._is_leaving = True
            if not await self._promised():
                logger.info("staying with stage %d: no other host promises to stay", move.source)
                return hosting
            logger.info("moving from stage %d to stage %d: %s", move.source, move.target, move.reason)
            try:
                after = await taking
                await self._stages.step_in(after)
            except P2PTrainError as error:
                logger.warning("staying with stage %d: %s", move.source, error)
                return hosting
            return await self._change(after, hosting)
        finally:
            if self.hosted.number != move.target:
                await self._drop(taking)
            was_leaving, self._is_leaving, self._target = self._is_leaving, False, None
            self._bind(LEAST_STAY_SECONDS if was_leaving else LEAST_PAUSE_SECONDS)

    async def _change(self, after: HostedStage, hosting: asyncio.Task[None]) -> asyncio.Task[None]:
        """Switch from the current stage to the prepared one."""
        before = self.hosted
        following = self._tasks.call(after.run(), f"stage-{after.number}")
        try:
            before.rounds.stop()
            await asyncio.wait({hosting})
            await self._hand_over(before)
        except BaseException:  # This peer shuts down.
            following.cancel()
            await until_ended(following)
            raise
        self.hosted = after
        after.host.is_resting = before.host.is_resting
        await before.close()
        self._stages.moved(after)
        if self._is_stopping:
            after.rounds.stop()
        return following

    async def _drop(self, taking: asyncio.Task[HostedStage]) -> None:
        """Cancel a preparation, and close its stage."""
        taking.cancel()
        await until_ended(taking)
        if not taking.cancelled() and taking.exception() is None:
            await self._stages.give_up(taking.result())

    async def _promised(self) -> bool:
        """True if another host of the stage, as far as this one, promises to stay."""
        others = self._others_of(self.hosted)
        self._runtime.random.shuffle(others)
        for other in others[:MAX_ASKED]:
            if await self._promises(other, self.hosted):
                return True
        return False

    async def _promises(self, other: str, leaving: HostedStage) -> bool:
        """True if another host of a stage has reached this host's round, and promises to stay."""
        request = StayRequest(leaving.number, leaving.host.ledger.round)
        try:
            return (await self._rpc.call(other, "pipeline.stay", request, StayReply, CALL_SECONDS)).stays
        except (PeerError, DeadlineError) as error:
            logger.debug("host %s promises nothing: %s", other[-8:], error)
            return False

    def _others_of(self, hosted: HostedStage) -> list[str]:
        """Return a stage's other hosts, including departing ones, which may still stay."""
        return [host.peer for host in self._view.hosts() if hosted.number in (host.stage, host.leaves)]

    async def _hand_over(self, leaving: HostedStage) -> None:
        """Wait until a staying host of the stage has the last round's result.

        This host may have ended that round alone, or with other departing hosts.
        """
        name, round = f"{service(leaving.number)}.round", leaving.host.ledger.round
        request = RoundRequest(round - 1, HAND_OVER_SECONDS)

        async def ask(other: str) -> str:
            try:
                await self._rpc.call(other, name, request, RoundReply, HAND_OVER_SECONDS + CALL_SECONDS)
            except (PeerError, DeadlineError) as error:
                logger.debug("host %s takes nothing over: %s", other[-8:], error)
                return ""
            return other

        others = self._others_of(leaving)
        async with Tasks() as tasks:
            asking = [tasks.call(ask(other), f"hand-over-{other[-8:]}") for other in others]
            try:
                async with asyncio.timeout(HAND_OVER_SECONDS):
                    for answer in asyncio.as_completed(asking):
                        if (other := await answer) and await self._promises(other, leaving):
                            return
            except TimeoutError:
                logger.warning(
                    "stage %d: no other host took over what this one ended round %d with", leaving.number, round
                )

    async def _serve_stay(self, peer: str, request: StayRequest) -> StayReply:
        is_here = request.stage == self.hosted.number and self.hosted.host.ledger.round >= request.round
        stays = is_here and not (self._is_leaving or self._is_stopping or self.hosted.host.is_resting)
        if stays:
            self._target = None  # Withdraw its own pending move.
            self._bind(PROMISE_SECONDS)
        return StayReply(stays)
