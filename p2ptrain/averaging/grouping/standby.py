"""Matchmaking for peers that compute what others bring: hosts of a stage.

A trainer decides how much it computes, and tells the leader (`Matchmaker.report`). A host is asked to take on
microbatches, and has to know whether they belong to the round in progress or to the next: the round's leader grants
them, so that all hosts together take on the global batch and no more. And a host may come out of a round with nothing,
because others were asked; then nobody should wait for it, and it needs the result all the same.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from typing import Any

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.coordinator import Conductor
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.round_position import Place, nudge, probe_seconds
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, PeerUnreachableError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.tasks import Tasks, together

LONGEST_WAIT_SECONDS = 60.0
MAX_ASKED = 3


class Standby:
    """One peer's side of it; `p2ptrain.averaging.grouping.matchmaker.Matchmaker` makes it of its own parts."""

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        spec: AveragingSpec,
        membership: Membership,
        leaders: Leaders,
        conductor: Conductor,
        place: Place,
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._spec = spec
        self._membership = membership
        self._leaders = leaders
        self._conductor = conductor
        self._place = place
        self._moved = asyncio.Event()
        rpc.serve("rally.moved", dict, self._serve_moved)

    def moved(self) -> None:
        """Tell those that wait for it that this peer has another head."""
        self._moved.set()
        self._moved = asyncio.Event()

    def on_closing(self, told: Callable[[], None]) -> None:
        """Have ``told`` called whenever somebody says that the round in progress is to be closed."""
        self._place.on_close = told

    async def take_on(self, samples: int, held: int, wanted: int) -> int:
        """Tell the round's leader how far this peer is, and ask for more.

        Args:
            samples: Samples that this peer has done for the round.
            held: Samples that it has taken on for it, done or not.
            wanted: Samples that others would like it to take on.

        Returns:
            How many of these there is room for in the round. Whether to close it: `Matchmaker.is_closing`.
        """
        key = self._place.key
        for _ in range(MAX_ASKED):
            leader = self.leader(key)
            try:
                if leader == self._rpc.peer_id:
                    reply = await self._conductor.take_report(leader, self._place.head, (samples, 0, 0.0), held, wanted)
                else:
                    head = self._place.head.without_proof().to_dict()
                    request = {
                        "head": head, "samples": samples, "batch": 0, "seconds": 0.0, "held": held, "wanted": wanted
                    }  # fmt: skip
                    reply = await self._rpc.call(leader, "rally.report", request, dict, probe_seconds(self._spec))
            except (PeerError, DeadlineError) as error:
                if leader == self._rpc.peer_id:  # It is leaving.
                    return 0
                self.leader_failed(key, leader, error)  # Also if it refuses: it has left, to host another stage.
                continue
            if reply.get("closing") is True:
                self._place.close(key)
            granted = reply.get("granted", 0)
            return min(granted, wanted) if type(granted) is int and granted > 0 else 0
        return 0

    async def sit_out(self, seconds: float) -> str:
        """Have nobody wait for this peer in the round in progress, for which it has nothing, and wait for its end.

        Args:
            seconds: For how long.

        Returns:
            A peer that is further on; empty when none was found.
        """
        key = self._place.key
        leader = self.leader(key)
        head = self._place.head.without_proof().to_dict()
        if leader == self._rpc.peer_id:
            with contextlib.suppress(PeerRefusedError):  # It is leaving.
                self._conductor.take_pass(leader, self._place.head)
        else:
            try:
                reply = await self._rpc.call(leader, "rally.pass", {"head": head}, dict, probe_seconds(self._spec))
                if reply.get("behind") is True:
                    return leader
            except (PeerError, DeadlineError) as error:
                self.leader_failed(key, leader, error)
        others = [peer for peer in self._membership.expected() if peer != leader]
        asked = self._runtime.random.sample(others, min(len(others), MAX_ASKED))
        asked = [peer for peer in [leader, *asked] if peer != self._rpc.peer_id]
        return await self._first_to_move(asked, head, seconds)

    def reopen(self) -> None:
        """Take on more for the round in progress although it was to be closed: whoever had something for it is gone."""
        self._place.closing = None
        self._conductor.reopen(self._place.key)

    async def hurry(self) -> None:
        """Tell all that are there to close the round in progress with what they have.

        A leader does so once the batch is full, or half of them came. Who learns otherwise that nothing more comes for
        the round may be alone with that, and the others would wait for ever.
        """
        key = self._place.key
        peers = [peer for peer in self._membership.expected() if self._place.cells.includes(key, peer)]
        await together("hurry", (self._hurry(peer, key) for peer in peers))

    async def _hurry(self, peer: str, key: Key) -> None:
        try:
            await nudge(self._rpc, peer, key, closing=True, timeout_seconds=probe_seconds(self._spec))
        except (PeerError, DeadlineError, IntegrityError) as error:
            self.leader_failed(key, peer, error)

    def leader(self, key: Key) -> str:
        """Return the peer to report to: the first in line that could be asked so far."""
        return self._leaders.candidates(key, sorted(self._leaders.unreachable(key)))[0]

    def leader_failed(self, key: Key, leader: str, error: Exception) -> None:
        """Note that a leader did not answer a report: the next report goes to another."""
        self._membership.suspect(leader, str(error))
        self._leaders.lost(leader)
        if isinstance(error, PeerUnreachableError):
            self._leaders.not_reached(key, leader)

    def led_astray(self, key: Key, leader: str) -> None:
        """Note that a leader takes no reports: the next report goes to another."""
        self._leaders.led_astray(key, leader)

    async def _first_to_move(self, peers: Sequence[str], head: dict[str, Any], seconds: float) -> str:
        async def ask(peer: str) -> str:
            try:
                reply = await self._rpc.call(
                    peer, "rally.moved", {"head": head, "seconds": seconds}, dict, 2 * seconds + 1
                )
            except (PeerError, DeadlineError):
                reply = {}
            if reply.get("moved") is not True:
                await asyncio.sleep(seconds)
                return ""
            return peer

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

    async def _serve_moved(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        head, seconds = Head.from_dict(request.get("head")), request.get("seconds")
        if type(seconds) is not float or not 0.0 <= seconds <= LONGEST_WAIT_SECONDS:
            raise IntegrityError("a malformed question")
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                while head.lineage == self._place.head.lineage or not self._place.head.outranks(head):
                    await self._moved.wait()
        return {"moved": self._place.head.lineage != head.lineage and self._place.head.outranks(head)}
