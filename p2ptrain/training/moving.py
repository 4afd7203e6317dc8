"""A host that moves to another stage when that helps the pipeline more.

All hosts see the same records and find the same best move (`p2ptrain.pipeline.placement.best_move`); whom it concerns
waits a random time, looks again, and says in its record where it goes. So one host after another decides, and the next
one does while the first still downloads. It takes on the other stage while it serves its own, and leaves only with the
promise of another host of that stage to stay, which gives none while it is leaving itself. So no stage loses its last
host by a move, whatever two hosts do at once. Who cannot move for now says so, too: the others choose another one.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import Any

from p2ptrain.errors import DeadlineError, P2PTrainError, PeerError, ProtocolError
from p2ptrain.network.rpc import Rpc
from p2ptrain.pipeline.hops import service
from p2ptrain.pipeline.placement import Host, Move, best_move
from p2ptrain.runtime import Runtime
from p2ptrain.training.hosted_stage import HostedStage
from p2ptrain.training.pipeline_view import PipelineView

logger = logging.getLogger(__name__)

LOOK_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 5.0
"""The random wait before a move: as long as a record takes to be published, and read by all."""
LEAST_STAY_SECONDS = 90.0
"""Between two moves of one host: what a stage gains by it has to show first."""
PROMISE_SECONDS = 120.0
HAND_OVER_SECONDS = 10.0
"""How long a host that leaves waits until another one has the last round's result."""
MAX_ASKED = 4
CALL_SECONDS = 5.0


class Mover:
    """Hosts a stage, and moves to another one when that is better.

    Args:
        view: Who hosts what.
        rpc: To ask for promises.
        runtime: Chance.
        hosted: What is hosted in the beginning; ready to run.
        take_on: Makes another stage ready to run: its state is taken on, and it takes part.
        memory: What this peer has for a stage, in bytes.
        may_move: Whether it may move at all; its owner may have chosen the stage.

    Attributes:
        hosted: What is hosted now.
        on_moved: Called when that is another stage; the one before is closed.
        on_leaving: Called when `next_stage` says that it is going to be.
    """

    def __init__(
        self,
        view: PipelineView,
        rpc: Rpc,
        runtime: Runtime,
        hosted: HostedStage,
        take_on: Callable[[int], Awaitable[HostedStage]],
        memory: int = 1 << 62,
        *,
        may_move: bool = True,
    ) -> None:
        self.hosted = hosted
        self.on_moved: Callable[[HostedStage], None] = lambda hosted: None
        self.on_leaving: Callable[[], None] = lambda: None
        self._view = view
        self._rpc = rpc
        self._runtime = runtime
        self._take_on = take_on
        self._memory = memory
        self._may_move = may_move
        self._target: int | None = None
        self._is_leaving = False
        self._is_stopping = False
        loop = asyncio.get_running_loop()
        self._promised_until = loop.time()
        self._since = loop.time()
        rpc.serve("pipeline.stay", self._serve_stay)

    @property
    def next_stage(self) -> int | None:
        """Where this peer goes; its own stage while it cannot move; None where that is open."""
        if self._target is not None:
            return self._target
        return None if self._is_free else self.hosted.number

    def stop(self) -> None:
        """Let `run` end with the round in progress averaged as it is."""
        self._is_stopping = True
        self.hosted.rounds.stop()

    async def run(self) -> None:
        """Host until stopped, or the last round."""
        hosting = asyncio.create_task(self.hosted.run(), name=f"stage-{self.hosted.number}")
        try:
            while True:
                done, _ = await asyncio.wait({hosting}, timeout=LOOK_SECONDS * self._runtime.random.uniform(0.7, 1.3))
                if done or self._is_stopping:
                    break
                move = await self._considered()
                if move is not None and not hosting.done():
                    hosting = await self._move(move, hosting)
            await hosting
            if self._is_stopping:
                await self._hand_over(self.hosted)
        finally:
            hosting.cancel()
            await asyncio.gather(hosting, return_exceptions=True)

    # Deciding

    @property
    def _is_free(self) -> bool:
        """Whether nothing is against a move."""
        now = asyncio.get_running_loop().time()
        bound_until = max(self._since + LEAST_STAY_SECONDS, self._promised_until)
        return self._may_move and now >= bound_until and not (self._is_stopping or self.hosted.rounds.is_done)

    def _best(self) -> Move | None:
        """The best move of all, if it is one of this peer's and nothing is against it."""
        if not self._is_free:
            return None
        needs, number = self._view.plan.needs, self.hosted.number
        speed = self.hosted.host.tokens_per_second * needs[number].work or self._view.medium_speed()
        own = Host(self._rpc.peer_id, number, speed, self._memory)
        move = best_move(needs, [*self._view.hosts(), own])
        return move if move is not None and move.peer == own.peer else None

    async def _considered(self) -> Move | None:
        """The best move, if it is one of this peer's still after a random wait."""
        first = self._best()
        if first is None:
            return None
        await asyncio.sleep(LONGEST_WAIT_SECONDS * self._runtime.random.random())
        again = self._best()
        return again if again is not None and again.target == first.target else None

    # Moving

    async def _move(self, move: Move, hosting: asyncio.Task[None]) -> asyncio.Task[None]:
        """Take on the other stage, then leave this one; what is hosted afterwards."""
        before = self.hosted
        self._is_leaving = True
        try:
            if not await self._promised(before):
                logger.info("staying with stage %d: no other host promises to stay", before.number)
                return hosting
            logger.info("moving from stage %d to stage %d: %s", move.source, move.target, move.reason)
            self._target = move.target
            self.on_leaving()
            try:
                after = await self._take_on(move.target)
            except P2PTrainError as error:
                logger.warning("staying with stage %d: %s", before.number, error)
                return hosting
            following = asyncio.create_task(after.run(), name=f"stage-{after.number}")
            try:
                before.rounds.stop()
                await asyncio.gather(hosting, return_exceptions=True)
                await self._hand_over(before)
            except BaseException:  # This peer ends meanwhile.
                following.cancel()
                await asyncio.gather(following, return_exceptions=True)
                await after.close()
                raise
            self.hosted = after
            await before.close()
            self.on_moved(after)
            if self._is_stopping:
                after.rounds.stop()
            return following
        finally:
            self._is_leaving, self._target = False, None
            self._since = asyncio.get_running_loop().time()

    async def _promised(self, leaving: HostedStage) -> bool:
        """Whether another host of the stage, that is as far as this one, promises to stay."""
        others = [host.peer for host in self._view.hosts() if host.stage == leaving.number]
        self._runtime.random.shuffle(others)
        request = {"stage": leaving.number, "round": leaving.host.ledger.round}
        for other in others[:MAX_ASKED]:
            try:
                reply = await self._rpc.call(other, "pipeline.stay", request, CALL_SECONDS)
            except (PeerError, DeadlineError) as error:
                logger.debug("host %s promises nothing: %s", other[-8:], error)
                continue
            if reply.get("stays") is True:
                return True
        return False

    async def _hand_over(self, leaving: HostedStage) -> None:
        """Wait until another host of the stage is as far as this one, which may have ended its last round alone."""
        round = leaving.host.ledger.round
        request = {"after": round - 1, "seconds": HAND_OVER_SECONDS}

        async def ask(other: str) -> bool:
            name = f"{service(leaving.number)}.round"
            try:
                reply = await self._rpc.call(other, name, request, HAND_OVER_SECONDS + CALL_SECONDS)
            except (PeerError, DeadlineError) as error:
                logger.debug("host %s takes nothing over: %s", other[-8:], error)
                return False
            now = reply.get("round")
            return type(now) is int and now >= round

        others = [host.peer for host in self._view.hosts() if host.stage == leaving.number]
        asking = [asyncio.create_task(ask(other), name=f"hand-over-{other[-8:]}") for other in others]
        try:
            async with asyncio.timeout(HAND_OVER_SECONDS):
                for answer in asyncio.as_completed(asking):
                    if await answer:
                        return
        except TimeoutError:
            logger.warning("stage %d: no other host took over what this one ended round %d with", leaving.number, round)
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _serve_stay(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        stage, round = request.get("stage"), request.get("round")
        if type(stage) is not int or type(round) is not int:
            raise ProtocolError(peer, "asked for no promise")
        ledger = self.hosted.host.ledger
        stays = stage == self.hosted.number and not (self._is_leaving or self._is_stopping) and ledger.round >= round
        if stays:
            self._promised_until = asyncio.get_running_loop().time() + PROMISE_SECONDS
        return {"stays": stays}
