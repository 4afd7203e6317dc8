"""Forming a group, a member's side over the network: who leads, who follows, who is too late or ahead.

Every trainer runs a `Matchmaker`. `find_group` hands a ticket to the round's leader (possibly itself) and returns the
roster. Views of who is there may differ, so two peers may both think that they lead: a follower is redirected to a
leader of smaller rank, and leaders that probe each other's followers merge into the one of smaller rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.coordinator import CONVICTED, MAX_HOPS, Coordinator
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import (
    JOIN,
    MAX_TRIED,
    PROBE,
    REPORT,
    Answer,
    BatchAdvice,
    BatchReport,
    Behind,
    Formed,
    Join,
    Probe,
    ProbeReply,
    Redirected,
    Refused,
)
from p2ptrain.averaging.grouping.pacing import Pacing
from p2ptrain.averaging.grouping.pending_group import agrees_with_itself
from p2ptrain.averaging.grouping.round_position import RoundPosition, is_ahead, probe, probe_seconds
from p2ptrain.averaging.grouping.standby import Standby
from p2ptrain.averaging.protocol.certificate import Roster, Ticket
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.timing.deadlines import leader_allowance_seconds, leader_dial_seconds, silence_seconds
from p2ptrain.averaging.timing.global_batch import LONGEST_BATCH_SECONDS, NO_GOAL, Goal
from p2ptrain.averaging.timing.keepalive import Patience, answer_after_beats
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, TemporaryError
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 8.0
MAX_GREETED = 64
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
    """Finds groups for this peer; its `Coordinator` leads groups when it is its turn."""

    def __init__(self, context: PeerContext, membership: Membership, head: Head, goal: Goal = NO_GOAL) -> None:
        self._context = context
        self._spec = context.spec
        self._membership = membership
        self.cells = Cells(context.spec.group_size)
        self._position = RoundPosition(head, context.peer_id, self.cells)
        self._last_leader: tuple[Key, str] | None = None
        self._leaders = Leaders(context.peer_id, membership, self.cells)
        self._coordinator = Coordinator(context, membership, self._leaders, self._position, goal)
        self._tasks = Tasks()
        self._asking: tuple[str, asyncio.Task[Answer]] | None = None
        self.standby = Standby(context, membership, self._leaders, self._coordinator, self._position)
        self.pacing = Pacing(context, self._leaders, self._position, goal.steps)
        context.rpc.serve(PROBE, Probe, self._serve_probe)

    @property
    def head(self) -> Head:
        """This peer's head; its owner keeps it current with `move`."""
        return self._position.head

    def on_misled(self, show: Callable[[str, str], None]) -> None:
        """Have ``show`` called with each peer that follows a leader which is convicted here, and that leader."""
        self._coordinator.on_misled = show

    def abandon(self, leader: str) -> None:
        """Follow a peer no longer: it was proved to have falsified a mean."""
        if self._asking is not None and self._asking[0] == leader:
            self._asking[1].cancel()

    @property
    def participates(self) -> bool:
        """Whether this peer trains: a leader then waits for itself too."""
        return self._position.participates

    @participates.setter
    def participates(self, value: bool) -> None:
        self._position.participates = value
        (self.pacing.start if value else self.pacing.stop)()

    @property
    def last_leader(self) -> str:
        """Who led the group found last; empty before the first."""
        return self._last_leader[1] if self._last_leader is not None else ""

    def is_closing(self) -> bool:
        """Return True if the round in progress should be closed with what this peer has."""
        return self._position.is_closing

    def move(self, head: Head) -> None:
        """Go on to another head, with the members of its last round, even if no record says so yet."""
        self._position.head = head
        self._position.running = None
        self.standby.moved()
        for peer in head.members:
            here = self.cells.includes(self._position.key, peer)
            if here and peer != self._context.peer_id and self._membership.is_news(peer):
                self._leaders.probed_by(self._position.key, peer)

    async def close(self) -> None:
        """Stop leading; followers move on to the next leader."""
        await self.pacing.close()
        await self._tasks.close()
        await self._coordinator.close()

    def announce_soon(self, head: Head) -> None:
        """`announce`, while this peer is still on its way to ``head``: the others wait a grace period for it."""
        self._tasks.start(self.announce(head), "announce")

    async def announce(self, head: Head | None = None) -> None:
        """Tell all of its cell that train, or are about to, that this peer takes part in the round after a head.

        Records spread with a delay; without this, two peers that start together would each end their first round alone.

        Args:
            head: None for the head of this peer.
        """
        key = self.cells.key_of(head or self._position.head, self._context.peer_id)
        peers = [peer for peer in self._membership.present() if self.cells.includes(key, peer)][:MAX_GREETED]
        await together("greet", (self._greet(peer, key) for peer in peers))

    async def check_alone(self) -> None:
        """Ask the others once more before a round is ended alone that took so long that their answers are old news.

        A peer that was stopped in the middle of it would end a round that the others have ended meanwhile.

        Raises:
            BehindError: They have.
        """
        key, ahead, seconds = self._position.key, list[str](), probe_seconds(self._spec)

        async def ask(peer: str) -> None:
            with contextlib.suppress(PeerError, DeadlineError):
                if is_ahead((await probe(self._context.rpc, peer, key, seconds)).head, self.head):
                    ahead.append(peer)

        trainers = {*self._membership.trainers(), *self.head.members} - {self._context.peer_id}
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
        try:
            await probe(self._context.rpc, peer, key, silence_seconds(self._spec.grace_seconds))
        except PeerRefusedError:
            return
        except (PeerError, DeadlineError) as error:
            self._membership.suspect(peer, str(error))
            self._leaders.lost(peer)

    async def _greet(self, peer: str, key: Key) -> None:
        try:
            said = await probe(self._context.rpc, peer, key, probe_seconds(self._spec))
            if key == self._position.key:
                self._leaders.learn(key, said.failures)
        except PeerRefusedError as error:
            logger.debug("peer %s takes no part: %s", peer[-8:], error)
        except (PeerError, DeadlineError) as error:
            self._leaders.lost(peer)  # It may have said that it takes part, and died since.
            logger.debug("peer %s was not told that this one takes part: %s", peer[-8:], error)

    async def _serve_probe(self, peer: str, question: Probe) -> ProbeReply:
        key, closing = question.key, question.closing
        self.cells.check(key)
        if self._membership.is_convicted(peer):
            raise PeerRefusedError(self._context.peer_id, CONVICTED)
        self._coordinator.heard_from(peer)
        if closing:
            self._position.close(key)
        if key == self._position.key and self.cells.includes(key, peer):
            self._leaders.probed_by(key, peer)
        followed, running = self._position.following, self._position.running
        leader = followed[1] if followed is not None and followed[0] == key else ""
        if leader == self._context.peer_id and self._coordinator.give_way(key, peer, closing):
            leader = peer
        is_averaging = running is not None and running[0] == key
        return ProbeReply(self.head.without_proof(), leader, self._leaders.gossip(key), is_averaging)

    def lost(self, peer: str) -> None:
        """Note that a peer did not do its part in a group: it is not asked to lead until it shows itself again."""
        self._leaders.lost(peer)

    # --- following -----------------------------------------------------------------------------------------------

    def group_broke(self) -> None:
        """Note that the group found last broke: another peer leads the next attempt."""
        self._position.running = None
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
                if self._coordinator.closed:
                    raise NoGroupError("this peer is leaving")
                excluded = [*tried, *sorted(self._leaders.unreachable(key))]
                leader = self._coordinator.settle_on(key, target or self._leaders.candidates(key, excluded)[0])
                self._position.following = self._last_leader = (key, leader)
                answer = await self._hand_in(leader, ticket, [*self._suspects(key), *excluded], hops, remaining)
                if answer is not None and not isinstance(answer, Redirected):
                    roster = self._accept(answer, ticket, leader)
                    self._position.running = (key, leader, roster.members)
                    if leader != self._context.peer_id:
                        self._ask_absentees(key, roster.members)
                    return roster
                hops += answer is not None
                target = self._next_leader(key, leader, answer.peer, tried, hops) if answer else ""
                worse = not target or self._leaders.order(key, target) > self._leaders.order(key, leader)
                if worse and leader not in self._leaders.unreachable(key):
                    # It failed, leads no more, or leads in circles; nor must this peer send others there.
                    tried.append(leader)
                    (self._leaders.redirect_loop if answer else self._leaders.failed)(key, leader)
                if hops > MAX_HOPS:
                    await asyncio.sleep(RETRY_SECONDS)
        except TemporaryError:
            self.group_broke()
            raise
        finally:
            self._position.following = None
        self.group_broke()
        raise NoGroupError("no group was found before the matchmaking deadline")

    def _suspects(self, key: Key) -> list[str]:
        """Return the peers that this one would not follow now, the first in line last."""
        there = [peer for peer in self._membership.suspects() if self.cells.includes(key, peer)]
        return sorted(there, key=lambda peer: self._leaders.order(key, peer), reverse=True)

    def _next_leader(self, key: Key, leader: str, wanted: str, tried: list[str], hops: int) -> str:
        """Return the peer to which a leader redirected; empty if that is of no use."""
        if wanted in self._leaders.unreachable(key):
            return ""
        if leader == self._context.peer_id:  # Its own coordinator heard from the other that it leads now.
            return wanted
        useless = hops > MAX_HOPS or wanted in tried or self._membership.is_suspect(wanted)
        return "" if useless else wanted

    async def _hand_in(
        self, leader: str, ticket: Ticket, excluded: list[str], hops: int, timeout_seconds: float
    ) -> Answer | None:
        """Return one leader's answer; None when it failed and the next should be asked."""
        avoid = self._membership.avoided()
        try:
            if leader == self._context.peer_id:
                async with asyncio.timeout(timeout_seconds):
                    return await self._coordinator.enlist(ticket, self.head, excluded, MAX_HOPS, avoid)
            request = Join(ticket, self.head.without_proof(), tuple(excluded[-MAX_TRIED:]), hops, tuple(avoid))
            try:
                async with Tasks() as tasks:
                    asking = tasks.call(self._ask(leader, request, timeout_seconds), f"join-{leader[-8:]}")
                    self._asking = leader, asking
                    await asyncio.wait({asking})
                    return None if asking.cancelled() else asking.result()
            finally:
                self._asking = None
        except PeerRefusedError as error:
            logger.info("peer %s does not lead round %d: %s", leader[-8:], ticket.round, error.reason)
        except (PeerError, DeadlineError) as error:
            self._leaders.unanswered(self.cells.key_of(ticket, ticket.peer, ticket.level), leader, error)
            logger.info("leader %s of round %d failed: %s", leader[-8:], ticket.round, error)
        except TimeoutError:
            logger.info("no group for round %d within the deadline", ticket.round)
        return None

    async def _ask(self, leader: str, request: Join, timeout_seconds: float) -> Answer:
        """Return another peer's answer to a ticket; keepalives extend the wait."""
        loop, rpc, grace = asyncio.get_running_loop(), self._context.rpc, self._spec.grace_seconds
        began = loop.time()
        dial_seconds = leader_dial_seconds(grace, rpc.dial_seconds.get(leader), OPEN_TIMEOUT_SECONDS)
        async with rpc.open(leader, JOIN, request, dial_seconds) as channel:
            dialled = loop.time() - began
            patience = Patience(timeout_seconds - dialled, grace, leader_allowance_seconds(grace), dialled)
            return await answer_after_beats(channel, Answer, patience, MAX_ROSTER_BYTES)

    def _accept(self, answer: Answer, ticket: Ticket, leader: str) -> Roster:
        """Turn a leader's final answer into a roster or a typed error; nothing in it is trusted."""
        match answer:
            case Formed(tickets):
                return self._check_roster(Roster(tickets), ticket, leader)
            case Refused(reason, mismatch, alone):
                if leader == self._context.peer_id and alone:
                    self._last_leader = None  # Nobody came to this peer: that says nothing against it.
                raise MismatchError(reason) if mismatch else NoGroupError(reason)
            case Behind(peer):
                raise BehindError(peer or leader)
        raise AssertionError(f"{answer} is no final answer")

    def _check_roster(self, roster: Roster, own: Ticket, leader: str) -> Roster:
        """Return a roster if this peer may take part in it.

        Raises:
            NoGroupError: It must not.
        """
        context, spec = self._context, self._spec
        try:
            if len(roster.tickets) > spec.group_size:
                raise IntegrityError("more members than a group may have")
            for ticket in roster.tickets:
                if ticket != own:
                    ticket.verify(context.swarm, context.signer)
                    ticket.check_weight(spec.max_weight)
        except IntegrityError as error:
            self._membership.suspect(leader, str(error))
            raise NoGroupError(f"the leader sent a roster with {error}") from error
        if own not in roster.tickets or not agrees_with_itself(roster, self.cells):
            raise NoGroupError("the leader sent a roster that does not agree with itself")
        if any(self._membership.is_convicted(peer) for peer in roster.members):
            raise NoGroupError("the leader sent a roster with a peer that was proved to have falsified a mean")
        key = self.cells.key_of(own, own.peer, own.level)
        peers, is_last = sum(t.peers for t in roster.tickets), key.level == self.cells.num_levels(key.present) - 1
        if is_last and peers < spec.min_peers:
            raise NoGroupError(f"{peers} of at least {spec.min_peers} peers are ready")
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
        key, rpc = self._position.key, self._context.rpc
        seconds = min(batch_seconds, LONGEST_BATCH_SECONDS)
        while key == self._position.key:
            leader = self._leaders.first(key)
            report = BatchReport(self.head.without_proof(), samples, min(batch_samples, samples), seconds)
            try:
                advice = await rpc.call(leader, REPORT, report, BatchAdvice, probe_seconds(self._spec))
            except PeerRefusedError:
                return False
            except (PeerError, DeadlineError) as error:
                self._leaders.unanswered(key, leader, error)
                return False
            if advice.closing:
                self._position.close(key)
            if self.is_closing() or not advice.wait:
                break
            if is_behind():
                return True
        return self.is_closing()
