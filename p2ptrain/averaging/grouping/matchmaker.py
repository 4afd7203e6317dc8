"""Forming a group, a member's side over the network: who leads, who follows, who is too late or ahead.

Every trainer runs a `Matchmaker`. `find_group` hands a ticket to the round's leader (possibly itself) and returns the
roster. Views of who is there may differ, so two peers may both think they lead: a follower is redirected to a leader of
smaller rank, and leaders that probe each other's followers merge into the one of smaller rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.coordinator import CONVICTED, MAX_HOPS, Conductor
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.pacing import Pacing
from p2ptrain.averaging.grouping.pending_group import Answer, agrees_with_itself, roster_from_wire
from p2ptrain.averaging.grouping.round_position import Place, nudge, probe_seconds
from p2ptrain.averaging.grouping.standby import Standby
from p2ptrain.averaging.protocol.certificate import Roster, Ticket
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.timing.deadlines import leader_allowance_seconds, leader_dial_seconds, silence_seconds
from p2ptrain.averaging.timing.global_batch import LONGEST_BATCH_SECONDS, NO_GOAL, Goal
from p2ptrain.averaging.timing.keepalive import answer_after_beats
from p2ptrain.errors import (
    DeadlineError,
    IntegrityError,
    PeerError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
    TemporaryError,
)
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 8.0
MAX_GREETED = 64
MAX_EXCLUDED = 8
RETRY_SECONDS = 0.25
MAX_ROSTER_BYTES = 1 << 20


class BehindError(TemporaryError):
    """The swarm is ahead of this peer, or on a lineage that wins over its own.

    Args:
        source: A peer that holds the better head, or knows who does.
    """

    def __init__(self, source: str) -> None:
        super().__init__("the swarm is ahead of this peer: catching up")
        self.source = source


class MismatchError(TemporaryError):
    """This peer's state or layout differs from that of the others at the same lineage."""


class NoGroupError(TemporaryError):
    """No group could be formed; the message says why."""


class Matchmaker:
    """Finds groups for this peer; its `Conductor` leads rallies for others when it is its turn."""

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        spec: AveragingSpec,
        membership: Membership,
        head: Head,
        goal: Goal = NO_GOAL,
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._membership = membership
        self.cells = Cells(spec.group_size)
        """Who averages where."""
        self._place = Place(head, rpc.peer_id, self.cells)
        self._last_leader: tuple[Key, str] | None = None
        self._leaders = Leaders(rpc.peer_id, membership, self.cells)
        self._conductor = Conductor(rpc, signer, swarm, spec, membership, self._leaders, self._place, goal)
        self._tasks = Tasks()
        self._asking: tuple[str, asyncio.Task[Answer]] | None = None
        self.standby = Standby(rpc, runtime, spec, membership, self._leaders, self._conductor, self._place)
        """For who computes what others bring."""
        self.pacing = Pacing(rpc, spec, self.standby, self._conductor, self._place, goal.steps)
        """For who does local steps."""
        rpc.serve("rally.nudge", dict, self._serve_nudge)

    @property
    def head(self) -> Head:
        """This peer's head; its owner keeps it current with `move`."""
        return self._place.head

    def on_misled(self, show: Callable[[str, str], None]) -> None:
        """Have ``show`` called with a peer of this peer's rally that follows a leader which is convicted here."""
        self._conductor.on_misled = show

    def abandon(self, leader: str) -> None:
        """Follow a peer no longer: it was proved to have falsified a mean."""
        if self._asking is not None and self._asking[0] == leader:
            self._asking[1].cancel()

    @property
    def participates(self) -> bool:
        """Whether this peer trains: a leader then waits for itself too."""
        return self._place.participates

    @participates.setter
    def participates(self, value: bool) -> None:
        self._place.participates = value
        (self.pacing.start if value else self.pacing.stop)()

    @property
    def last_leader(self) -> str:
        """Who led the group found last; empty before the first."""
        return self._last_leader[1] if self._last_leader is not None else ""

    def is_closing(self) -> bool:
        """Whether the round in progress should be closed with what this peer has."""
        return self._place.closing == self._place.key

    def move(self, head: Head) -> None:
        """Go on to another head, with those that were in its last round, of whom no record may have told yet."""
        self._place.head = head
        self._place.running = None
        self.standby.moved()
        for peer in head.members:
            here = self.cells.includes(self._place.key, peer)
            if here and peer != self._rpc.peer_id and self._membership.is_news(peer):
                self._leaders.nudged_by(self._place.key, peer)

    async def close(self) -> None:
        """Stop leading; followers move on to the next leader."""
        await self.pacing.close()
        await self._tasks.close()
        await self._conductor.close()

    def announce_soon(self, head: Head) -> None:
        """`announce`, while this peer is still on its way to ``head``: the others wait a grace period for it."""
        self._tasks.start(self.announce(head), "announce")

    async def announce(self, head: Head | None = None) -> None:
        """Tell all of its cell that train, or are about to, that this peer takes part in the round after a head.

        Records spread with a delay; without this, two peers that start together would each end their first round alone.

        Args:
            head: None for the head of this peer.
        """
        key = self.cells.key_of(head or self._place.head, self._rpc.peer_id)
        peers = [peer for peer in self._membership.present() if self.cells.includes(key, peer)][:MAX_GREETED]
        await together("greet", (self._greet(peer, key) for peer in peers))

    async def check_alone(self) -> None:
        """Ask the others once more before a round is ended alone that took so long that their answers are old news.

        A peer that was stopped in the middle of it would end a round that the others have ended meanwhile.

        Raises:
            BehindError: They have.
        """
        key, ahead = self._place.key, list[str]()

        async def ask(peer: str) -> None:
            with contextlib.suppress(PeerError, DeadlineError, IntegrityError):
                said = await nudge(self._rpc, peer, key, closing=False, timeout_seconds=probe_seconds(self._spec))
                if said.head.lineage != self.head.lineage and said.head.outranks(self.head):
                    ahead.append(peer)

        trainers = {*self._membership.trainers(), *self.head.members} - {self._rpc.peer_id}
        there = [peer for peer in sorted(trainers) if self.cells.includes(key, peer)]
        await together("ask", (ask(peer) for peer in there[:MAX_GREETED]))
        if ahead:
            raise BehindError(ahead[0])

    def _ask_absentees(self, key: Key, members: tuple[str, ...]) -> None:
        """Find out in the background which expected peers did not come because they do not live.

        The leader asked them before it formed the group. The next round has another leader, which would wait again.
        """
        absent = set(self._membership.expected()).difference(members) if key.level == 0 else set()
        for peer in sorted(peer for peer in absent if self.cells.includes(key, peer))[:MAX_GREETED]:
            self._tasks.start(self._ask_absentee(peer, key), "absentee")

    async def _ask_absentee(self, peer: str, key: Key) -> None:
        timeout_seconds = silence_seconds(self._spec.grace_seconds)
        try:
            await nudge(self._rpc, peer, key, closing=False, timeout_seconds=timeout_seconds)
        except PeerRefusedError:
            return
        except (PeerError, DeadlineError, IntegrityError) as error:
            self._membership.suspect(peer, str(error))
            self._leaders.lost(peer)

    async def _greet(self, peer: str, key: Key) -> None:
        try:
            said = await nudge(self._rpc, peer, key, closing=False, timeout_seconds=probe_seconds(self._spec))
            if key == self._place.key:
                self._leaders.learn(key, said.failed)
        except PeerRefusedError as error:
            logger.debug("peer %s takes no part: %s", peer[-8:], error)
        except (PeerError, DeadlineError, IntegrityError) as error:
            self._leaders.lost(peer)  # It may have said that it takes part, and died since.
            logger.debug("peer %s was not told that this one takes part: %s", peer[-8:], error)

    async def _serve_nudge(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        key = self.cells.check(request.get("key"))
        if self._membership.is_convicted(peer):
            raise PeerRefusedError(self._rpc.peer_id, CONVICTED)
        self._conductor.heard_from(peer)
        if request.get("closing") is True:
            self._place.close(key)
        if key == self._place.key and self.cells.includes(key, peer):
            self._leaders.nudged_by(key, peer)
        followed = self._place.following
        following = followed[1] if followed is not None and followed[0] == key else ""
        if following == self._rpc.peer_id and self._conductor.give_way(key, peer, request.get("closing") is True):
            following = peer
        running = self._place.running
        return {
            "head": self.head.without_proof().to_dict(),
            "leader": following,
            "failed": self._leaders.told(key),
            "averaging": running is not None and running[0] == key,
        }

    def lost(self, peer: str) -> None:
        """Note that a peer did not do its part in a group: it is not asked to lead until it shows itself again."""
        self._leaders.lost(peer)

    # --- following -----------------------------------------------------------------------------------------------

    def group_broke(self) -> None:
        """Note that the group found last came to nothing: another peer leads the next attempt."""
        self._place.running = None
        if self._last_leader is not None:
            self._leaders.failed(*self._last_leader)

    async def find_group(self, ticket: Ticket) -> Roster:
        """Hand in a ticket and wait for the roster.

        Raises:
            BehindError: The swarm is ahead, or on a better lineage.
            MismatchError: This peer's digest or layout is not the group's.
            NoGroupError: The deadline passed, or too few peers are there.
        """
        loop = asyncio.get_running_loop()
        grace = (1 + ticket.level) * self._spec.grace_seconds
        deadline = loop.time() + self._spec.matchmaking_seconds + grace + probe_seconds(self._spec)
        key = self.cells.key_of(ticket, ticket.peer, ticket.level)
        tried: list[str] = []
        target, hops = "", 0
        try:
            while (remaining := deadline - loop.time()) > 0:
                if self._conductor.closed:
                    raise NoGroupError("this peer is leaving")
                excluded = [*tried, *sorted(self._leaders.unreachable(key))]
                leader = self._conductor.settle_on(key, target or self._leaders.candidates(key, excluded)[0])
                self._place.following = self._last_leader = (key, leader)
                answer = await self._hand_in(leader, ticket, [*self._suspects(key), *excluded], hops, remaining)
                if answer is not None and answer["kind"] != "redirect":
                    roster = self._accept(answer, ticket, leader)
                    self._place.running = (key, leader, roster.members)
                    if leader != self._rpc.peer_id:
                        self._ask_absentees(key, roster.members)
                    return roster
                hops += answer is not None
                target = self._next_leader(key, leader, answer, tried, hops) if answer else ""
                worse = not target or self._leaders.order(key, target) > self._leaders.order(key, leader)
                if worse and leader not in self._leaders.unreachable(key):
                    # It failed, leads no more, or leads in circles; nor must this peer send others there.
                    tried.append(leader)
                    (self._leaders.led_astray if answer else self._leaders.failed)(key, leader)
                if hops > MAX_HOPS:
                    await asyncio.sleep(RETRY_SECONDS)
        except TemporaryError:
            self.group_broke()
            raise
        finally:
            self._place.following = None
        self.group_broke()
        raise NoGroupError("no group was found before the matchmaking deadline")

    def _suspects(self, key: Key) -> list[str]:
        """Whom this peer would not follow now, the first in line last; a leader must not send it there."""
        there = [peer for peer in self._membership.suspects() if self.cells.includes(key, peer)]
        return sorted(there, key=lambda peer: self._leaders.order(key, peer), reverse=True)

    def _next_leader(self, key: Key, leader: str, answer: Answer, tried: list[str], hops: int) -> str:
        """Where a leader's redirection leads; empty when it is of no use."""
        wanted = answer.get("peer")
        if not isinstance(wanted, str) or wanted in self._leaders.unreachable(key):
            return ""
        if leader == self._rpc.peer_id:  # Its own conductor heard from the other that it leads now.
            return wanted
        useless = hops > MAX_HOPS or wanted in tried or self._membership.is_suspect(wanted)
        return "" if useless else wanted

    async def _hand_in(
        self, leader: str, ticket: Ticket, excluded: list[str], hops: int, timeout_seconds: float
    ) -> Answer | None:
        """One leader's answer; None when it failed and the next should be asked."""
        try:
            if leader == self._rpc.peer_id:
                async with asyncio.timeout(timeout_seconds):
                    return await self._conductor.enlist(
                        ticket, self.head, excluded, MAX_HOPS, self._membership.avoided()
                    )
            request = {
                "ticket": ticket.to_wire(),
                "head": self.head.without_proof().to_dict(),
                "tried": excluded[-MAX_EXCLUDED:],
                "hops": hops,
                "avoid": self._membership.avoided(),
            }
            try:
                async with Tasks() as tasks:
                    asking = tasks.call(self._ask(leader, request, timeout_seconds), f"join-{leader[-8:]}")
                    self._asking = leader, asking
                    await asyncio.wait({asking})
                    if asking.cancelled():
                        return None
                    answer = asking.result()
            finally:
                self._asking = None
            if answer.get("kind") not in ("roster", "redirect", "behind", "refused"):
                raise ProtocolError(leader, "answered a ticket with nonsense")
            return answer
        except PeerRefusedError as error:
            logger.info("peer %s does not lead round %d: %s", leader[-8:], ticket.round, error.reason)
        except (PeerError, DeadlineError) as error:
            self._membership.suspect(leader, str(error))
            self._leaders.lost(leader)
            if isinstance(error, PeerUnreachableError):
                self._leaders.not_reached(self.cells.key_of(ticket, ticket.peer, ticket.level), leader)
            logger.info("leader %s of round %d failed: %s", leader[-8:], ticket.round, error)
        except TimeoutError:
            logger.info("no group for round %d within the deadline", ticket.round)
        return None

    async def _ask(self, leader: str, request: dict[str, Any], timeout_seconds: float) -> Answer:
        """Another peer's answer to a ticket, which it may take long to give as long as it says that it is at it."""
        began, grace = asyncio.get_running_loop().time(), self._spec.grace_seconds
        dial_seconds = leader_dial_seconds(grace, self._rpc.dial_seconds(leader), OPEN_TIMEOUT_SECONDS)
        async with self._rpc.open(leader, "rally.join", request, dial_seconds) as channel:
            opened = asyncio.get_running_loop().time()
            return await answer_after_beats(
                channel,
                began + timeout_seconds - opened,
                grace,
                leader_allowance_seconds(grace),
                opened - began,
                MAX_ROSTER_BYTES,
            )

    def _accept(self, answer: Answer, ticket: Ticket, leader: str) -> Roster:
        """Turn a leader's final answer into a roster or a typed error; nothing in it is trusted."""
        kind = answer["kind"]
        reason = str(answer.get("reason", ""))[:200]
        if kind == "behind":
            source = answer.get("peer")
            raise BehindError(source if isinstance(source, str) and source else leader)
        if kind == "refused":
            if leader == self._rpc.peer_id and answer.get("alone") is True:
                self._last_leader = None  # Nobody came to this peer: that says nothing against it.
            raise MismatchError(reason) if answer.get("mismatch") else NoGroupError(reason)
        try:
            roster = roster_from_wire(answer, ticket, self._spec, self._swarm, self._signer)
        except IntegrityError as error:
            self._membership.suspect(leader, str(error))
            raise NoGroupError(f"the leader sent a roster with {error}") from error
        if ticket not in roster.tickets or not agrees_with_itself(roster, self.cells):
            raise NoGroupError("the leader sent a roster that does not agree with itself")
        if any(self._membership.is_convicted(peer) for peer in roster.members):
            raise NoGroupError("the leader sent a roster with a peer that was proved to have falsified a mean")
        key = self.cells.key_of(ticket, ticket.peer, ticket.level)
        peers, is_last = sum(t.peers for t in roster.tickets), key.level == self.cells.num_levels(key.present) - 1
        if is_last and peers < self._spec.min_peers:
            raise NoGroupError(f"{peers} of at least {self._spec.min_peers} peers are ready")
        return roster

    async def report(
        self, samples: int, batch_samples: int, batch_seconds: float, is_behind: Callable[[], bool]
    ) -> bool:
        """Tell the round's leader how far this peer is, and wait while another local batch would be too much.

        Args:
            samples: Samples that this peer has for the round.
            batch_samples: Of which in its last local batch.
            batch_seconds: How long that took.
            is_behind: True if others are known to be ahead: then nobody comes to fill the batch of this round.

        Returns:
            True when the round should be closed now, or is over elsewhere; False when this peer should compute another
            local batch.
        """
        key = self._place.key
        seconds = min(batch_seconds, LONGEST_BATCH_SECONDS)
        while key == self._place.key:
            leader = self.standby.leader(key)
            try:
                if leader == self._rpc.peer_id:
                    reply = await self._conductor.take_report(leader, self.head, (samples, batch_samples, seconds))
                else:
                    head = self.head.without_proof().to_dict()
                    request = {"head": head, "samples": samples, "batch": batch_samples, "seconds": seconds}
                    reply = await self._rpc.call(leader, "rally.report", request, dict, probe_seconds(self._spec))
            except PeerRefusedError:
                return False
            except (PeerError, DeadlineError) as error:
                self.standby.leader_failed(key, leader, error)
                return False
            if reply.get("closing") is True:
                self._place.close(key)
            if self.is_closing() or reply.get("wait") is not True:
                break
            if is_behind():
                return True
        return self.is_closing()
