"""Matchmaking of peers that compute for others: hosts of a stage.

A trainer decides how much it computes, and tells the leader (`Matchmaker.report`). A host is asked to take on
microbatches, and has to know whether they belong to the round in progress or to the next. The round's leader grants
them, so that all hosts together take on the global batch and no more. A host may get nothing in a round, because others
were asked: then nobody should wait for it, and it needs the result all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.coordinator import Coordinator
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import MOVED, PASS, TAKE_ON, Ahead, AwaitMove, Grant, Pass, TakeOn
from p2ptrain.averaging.grouping.round_position import RoundPosition, probe, probe_seconds
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import DeadlineError, PeerError
from p2ptrain.tasks import Tasks, together

MAX_ASKED = 3


class Standby:
    """One host's side of it; `p2ptrain.averaging.grouping.matchmaker.Matchmaker` makes it of its own parts."""

    def __init__(
        self,
        context: PeerContext,
        membership: Membership,
        leaders: Leaders,
        coordinator: Coordinator,
        position: RoundPosition,
    ) -> None:
        self._context = context
        self._membership = membership
        self._leaders = leaders
        self._coordinator = coordinator
        self._position = position
        self._moved = asyncio.Event()
        context.rpc.serve(MOVED, AwaitMove, self._serve_moved)

    def moved(self) -> None:
        """Wake the peers that wait for this one to have another head."""
        self._moved.set()
        self._moved = asyncio.Event()

    def on_closing(self, told: Callable[[], None]) -> None:
        """Have ``told`` called whenever another peer says that the round in progress is to be closed."""
        self._position.on_close = told

    async def take_on(self, samples: int, held: int, wanted: int) -> int:
        """Tell the round's leader how far this peer is, and ask for more.

        Args:
            samples: Samples that this peer has done for the round.
            held: Samples that it has taken on for it, done or not.
            wanted: Samples that others would like it to take on.

        Returns:
            How many of these there is room for in the round. Whether to close it: `Matchmaker.is_closing`.
        """
        context, key = self._context, self._position.key
        for _ in range(MAX_ASKED):
            leader = self._leaders.first(key)
            request = TakeOn(self._position.head.without_proof(), samples, held, wanted)
            try:
                reply = await context.rpc.call(leader, TAKE_ON, request, Grant, probe_seconds(context.spec))
            except (PeerError, DeadlineError) as error:
                if leader == context.peer_id:  # It is leaving.
                    return 0
                self._leaders.unanswered(key, leader, error)  # Also if it refuses: it has left, to host another stage.
                continue
            if reply.closing:
                self._position.close(key)
            return min(reply.granted, wanted)
        return 0

    async def sit_out(self, seconds: float) -> str:
        """Have nobody wait for this peer in the round in progress, for which it has nothing, and wait for its end.

        Args:
            seconds: For how long.

        Returns:
            A peer that is further on; empty when none was found.
        """
        context, key, head = self._context, self._position.key, self._position.head.without_proof()
        leader = self._leaders.first(key)
        try:
            if (await context.rpc.call(leader, PASS, Pass(head), Ahead, probe_seconds(context.spec))).is_ahead:
                return leader
        except (PeerError, DeadlineError) as error:
            self._leaders.unanswered(key, leader, error)
        others = [peer for peer in self._membership.expected() if peer != leader]
        asked = context.runtime.random.sample(others, min(len(others), MAX_ASKED))
        asked = [peer for peer in [leader, *asked] if peer != context.peer_id]
        return await self._first_to_move(asked, head, seconds)

    def reopen(self) -> None:
        """Take on more for the round in progress although it was to be closed: the peers with work for it are gone."""
        self._position.closing = None
        self._coordinator.reopen(self._position.key)

    async def hurry(self) -> None:
        """Tell all peers that are there to close the round in progress with what they have.

        A leader does so once the batch is full, or half of them came. A peer that learns otherwise that nothing more
        comes for the round may be the only one, and the others would wait for ever.
        """
        key = self._position.key
        peers = [peer for peer in self._membership.expected() if self._position.cells.includes(key, peer)]
        await together("hurry", (self._hurry(peer, key) for peer in peers))

    async def _hurry(self, peer: str, key: Key) -> None:
        try:
            await probe(self._context.rpc, peer, key, probe_seconds(self._context.spec), closing=True)
        except (PeerError, DeadlineError) as error:
            self._leaders.unanswered(key, peer, error)

    async def _first_to_move(self, peers: Sequence[str], head: Head, seconds: float) -> str:
        async def ask(peer: str) -> str:
            request = AwaitMove(head, seconds)
            with contextlib.suppress(PeerError, DeadlineError):
                if (await self._context.rpc.call(peer, MOVED, request, Ahead, 2 * seconds + 1)).is_ahead:
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

    async def _serve_moved(self, peer: str, question: AwaitMove) -> Ahead:
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(question.seconds):
                while not self._position.is_ahead_of(question.head):
                    await self._moved.wait()
        return Ahead(self._position.is_ahead_of(question.head))
