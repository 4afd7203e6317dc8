"""A member's side of matchmaking: send a ticket to the round's leader, and check the roster that it returns.

Every trainer runs a `Matchmaker`. A leader that fails, refuses, or holds the ticket for too long has had its turn, and
the ticket goes to the next one (`p2ptrain.averaging.grouping.leaders.Leaders`). Before the founding round no member
table says who leads; then views of the present peers may differ, so that two peers both claim to lead. Followers are
redirected to the leader of smaller rank, and leaders that probe each other's followers merge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable
from typing import Any

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping import messages
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.coordinator import CONVICTED, Coordinator
from p2ptrain.averaging.grouping.leaders import Leaders, RoundPosition, probe, probe_seconds
from p2ptrain.averaging.grouping.pending_group import group_spec, may_reduce
from p2ptrain.averaging.grouping.reporting import Pacing, Standby
from p2ptrain.averaging.protocol.certificate import Head, Roster, Ticket
from p2ptrain.averaging.timing.deadlines import (
    AnswerTimeouts,
    leader_allowance_seconds,
    leader_dial_seconds,
    receive_answer,
    silence_seconds,
)
from p2ptrain.averaging.timing.goal import NO_GOAL, Goal
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, TemporaryError
from p2ptrain.tasks import Backoff, Tasks, together

logger = logging.getLogger(__name__)

OPEN_TIMEOUT_SECONDS = 8.0
MAX_GREETED = 64
RETRY_SECONDS, LONGEST_RETRY_SECONDS = 0.25, 4.0
TICK_SECONDS = 0.5
MAX_ROSTER_BYTES = 1 << 20


class BehindError(TemporaryError):
    """The swarm is ahead of this peer, or on a lineage that wins over its own.

    Args:
        source: A peer that holds the better head, or knows a holder.
    """

    def __init__(self, source: str) -> None:
        super().__init__("the swarm is ahead of this peer: catching up")
        self.source = source


class MismatchError(TemporaryError):
    """This peer's state or layout differs from that of the others at the same lineage."""


class NoGroupError(TemporaryError):
    """No group formed; the message says why."""


class Matchmaker:
    """Finds groups for this peer; its `Coordinator` leads groups.

    Attributes:
        backoff: Pauses after attempts at the round in progress that failed through no member's fault.
    """

    def __init__(
        self,
        context: PeerContext,
        head: Head,
        goal: Goal = NO_GOAL,
        on_misled: Callable[[str, str], None] = lambda peer, leader: None,
    ) -> None:
        self._context = context
        self._spec = context.spec
        self._membership = context.membership
        self.cells = Cells(context.spec.group_size)
        self.position = RoundPosition(head, context.rpc.peer_id, self.cells, context.spec.matchmaking_seconds)
        self._last_leader: tuple[Key, str] | None = None
        self.leaders = Leaders(self.position, context.membership, self._on_turn)
        self._on_misled = on_misled
        self._hurried_by, self._cried_wolf = set[str](), set[str]()
        self._begin_round()
        self._coordinator = Coordinator(context, self.leaders, goal, on_misled)
        self.backoff = Backoff(RETRY_SECONDS, LONGEST_RETRY_SECONDS)
        self._is_behind: Callable[[], bool] = lambda: False
        self._tasks = Tasks()
        self._clock: asyncio.TimerHandle | None = None
        self._asking: tuple[str, asyncio.Task[messages.Answer]] | None = None
        self.standby = Standby(context, self.leaders, self._coordinator)
        self.pacing = Pacing(context, self.leaders, goal)
        context.rpc.serve(messages.PROBE, messages.Probe, self._serve_probe)

    def abandon(self, leader: str) -> None:
        """Stop following a leader: it is convicted, or its turn is over."""
        if self._asking is not None and self._asking[0] == leader:
            self._asking[1].cancel()

    def participate(self, trains: bool, is_behind: Callable[[], bool] = lambda: False) -> None:
        """Set whether this peer trains; if so, it reports its steps (see `Pacing.start`), and may wait for itself."""
        self.position.participates, self._is_behind = trains, is_behind
        if trains:
            self.pacing.start(is_behind)
        else:
            self.pacing.stop()

    @property
    def last_leader(self) -> str:
        """Leader of the group found last; empty before the first."""
        return self._last_leader[1] if self._last_leader is not None else ""

    def set_head(self, head: Head) -> None:
        """Continue from another head, and expect the members of its last round even without records."""
        self.position.head = head
        self._begin_round()
        self.position.attempts, self.position.standstill, self.position.left = 0, 0.0, frozenset()
        self.backoff.reset()
        self._stop_clock()
        self.standby.moved()
        for peer in self._in_cell(self.position.key, head.members):
            if peer != self._context.rpc.peer_id and self._membership.is_unannounced(peer):
                self.leaders.probed_by(self.position.key, peer)

    def _begin_round(self) -> None:
        head = self.position.head
        self._hurried_by.clear()
        self._context.seen_votes.follow(head)
        for peer in head.table.banned:
            self._membership.convict(peer)

    def _in_cell(self, key: Key, peers: Iterable[str]) -> list[str]:
        return [peer for peer in peers if self.cells.includes(key, peer)]

    async def close(self) -> None:
        await self.pacing.close()
        await self._coordinator.close()
        await self._tasks.close()
        self._stop_clock()

    def announce_soon(self, head: Head) -> None:
        """Run `announce` while this peer still catches up with ``head``: the others wait a grace period for it."""
        self._tasks.start(self.announce(head), "announce")

    async def announce(self, head: Head | None = None) -> None:
        """Tell the present peers of its cell that this one takes part in the round after ``head``, by default its own.

        Records spread with a delay: without this, peers that start together would each end their first round alone.
        """
        key = self.cells.key_of(head or self.position.head, self._context.rpc.peer_id)
        peers = self._in_cell(key, self._membership.present())[:MAX_GREETED]
        await together("greet", (self._greet(peer, key) for peer in peers))

    def _ask_absentees(self, key: Key, members: tuple[str, ...]) -> None:
        """Probe the expected peers that did not join, in the background.

        The group's leader has probed them, but the next round's leader has not, and would wait for dead ones.
        """
        absent = set(self._membership.expected()).difference(members) if key.level == 0 else set()
        absent -= self._context.sitting_out(self.position.head)

        async def ask(peer: str) -> None:
            seconds = silence_seconds(self._spec.grace_seconds, self._context.rpc.dial_seconds.get(peer, 0.0))
            try:
                await probe(self._context, peer, key, seconds=seconds)
            except PeerRefusedError:
                return
            except (PeerError, DeadlineError) as error:
                self.leaders.lost(peer, str(error))

        for peer in self._in_cell(key, sorted(absent))[:MAX_GREETED]:
            self._tasks.start(ask(peer), "absentee")

    async def _greet(self, peer: str, key: Key) -> None:
        try:
            said = await probe(self._context, peer, key)
            self.leaders.heard(key, peer, said.turn)
        except PeerRefusedError as error:
            logger.debug("peer %s takes no part: %s", peer[-8:], error)
        except (PeerError, DeadlineError) as error:
            self.leaders.lost(peer)  # It may have announced itself, and died since.
            logger.debug("peer %s was not told that this one takes part: %s", peer[-8:], error)

    async def _serve_probe(self, peer: str, question: messages.Probe) -> messages.ProbeReply:
        key, closing = question.key, question.closing
        self.cells.check(key)
        if self._membership.is_convicted(peer):
            raise PeerRefusedError(self._context.rpc.peer_id, CONVICTED)
        table = self.position.head.table
        closing = closing and (not table.leading or table.row_of(peer) is not None) and self._is_believed(peer, key)
        if closing:
            self.position.close(key)
        if key == self.position.key and self.cells.includes(key, peer):
            self._membership.answered(peer)
            self.leaders.probed_by(key, peer)
        followed = self.position.following
        leader = followed[1] if followed is not None and followed[0] == key else ""
        if leader == self._context.rpc.peer_id and self._coordinator.give_way(key, peer, closing):
            leader = peer
        return messages.ProbeReply(self.position.head.without_proof(), leader, self.leaders.turn(key))

    def _is_believed(self, peer: str, key: Key) -> bool:
        """True if a round closes because a peer says so: who should lead it, or who has not said so falsely.

        Otherwise one member could end each round as soon as it has begun.
        """
        begins, is_other = not self.position.head.table.leading, key != self.position.key
        if begins or is_other or not self.position.participates or peer == self.leaders.first(key):
            return True
        self._hurried_by.add(peer)
        return peer not in self._cried_wolf

    # --- following

    def group_broke(self) -> None:
        """Record that the group found last broke: another peer leads the next attempt."""
        if self._last_leader is not None:
            self.leaders.failed(*self._last_leader)
            self._coordinator.turned(self._last_leader[0])

    def _on_turn(self, key: Key) -> None:
        """Take the own ticket back from the leader whose turn is over."""
        followed = self.position.following
        if followed is not None and followed[0] == key:
            self.abandon(followed[1])
        self._coordinator.turned(key)

    async def find_group(self, sign: Callable[[], Ticket]) -> Roster:
        """Send a ticket to the leader, and return the roster.

        Args:
            sign: Returns this peer's ticket as of now. It is called again once this peer has waited so long that it
                agrees to a reduced round.

        Raises:
            BehindError: The swarm is ahead, or on a better lineage.
            MismatchError: This peer's digest or layout is not the group's.
            NoGroupError: The deadline passed, or too few peers are present.
        """
        loop, ticket = asyncio.get_running_loop(), sign()
        grace = (1 + ticket.level) * self._spec.grace_seconds
        deadline = loop.time() + self._spec.matchmaking_seconds + grace + probe_seconds(self._context)
        key = self.cells.key_of(ticket, ticket.peer, ticket.level)
        own, tried, target = self._context.rpc.peer_id, list[str](), ""
        self.start_clock()
        try:
            while (remaining := deadline - loop.time()) > 0:
                if self._coordinator.closed:
                    raise NoGroupError("this peer is leaving")
                leader = target or self.leaders.first(key)
                may_lead = self.leaders.may_lead(key, own) or self.position.is_stalled
                if leader in tried or (leader == own and not may_lead):
                    await asyncio.sleep(RETRY_SECONDS)
                if leader == own and not may_lead:
                    raise NoGroupError("none of the members that may lead this round answers")
                if not target:
                    self.leaders.stand(key, leader)
                self.position.following = self._last_leader = (key, leader)
                self._coordinator.turned(key)
                turn, target = self.leaders.turn(key), ""
                try:
                    async with asyncio.timeout(None if ticket.stalled else self._seconds_until_stalled()):
                        answer = await self._hand_in(leader, ticket, turn, [*self._suspects(key), *tried], remaining)
                except TimeoutError:  # This peer agrees to a reduced round from now on.
                    ticket, target = sign(), leader
                    continue
                if answer is not None and not isinstance(answer, messages.Redirected | messages.Later):
                    roster = self._accept(answer, ticket, leader)
                    self.position.attempts += 1
                    self._cried_wolf |= self._hurried_by - {leader}
                    self._coordinator.note_roster(key, roster.members)
                    if leader != own:
                        self._ask_absentees(key, roster.members)
                    return roster
                if isinstance(answer, messages.Redirected):
                    target = self._next_leader(key, leader, answer.peer, tried)
                if self.leaders.turn(key) == turn and not self._is_better(key, target, leader):
                    tried.append(leader)
                    self.leaders.failed(key, leader)
        except TemporaryError:
            self.group_broke()
            raise
        finally:
            self.position.following = None
        self.group_broke()
        raise NoGroupError("no group was found before the matchmaking deadline")

    def _is_better(self, key: Key, target: str, leader: str) -> bool:
        """True if a leader did well to redirect this peer: it neither failed nor redirects in a loop."""
        by_table = self.leaders.is_agreed(key)
        return bool(target) and (by_table or self.leaders.order(key, target) < self.leaders.order(key, leader))

    def start_clock(self) -> None:
        """Count from now on for how long this peer has tried to end the round in progress; idempotent."""
        if self._clock is None and not self._coordinator.closed:
            loop = asyncio.get_running_loop()
            self._clock = loop.call_later(TICK_SECONDS, self._count_standstill, loop.time())

    def _count_standstill(self, since: float) -> None:
        """Count the seconds of the round in progress; those in which this process was suspended do not count."""
        loop = asyncio.get_running_loop()
        self.position.standstill += min(loop.time() - since, 2 * TICK_SECONDS)
        self._clock = loop.call_later(TICK_SECONDS, self._count_standstill, loop.time())

    def _seconds_until_stalled(self) -> float:
        """Return in how many seconds this peer agrees to a reduced round, if it stays awake."""
        return max(0.0, self._spec.matchmaking_seconds - self.position.standstill) + TICK_SECONDS

    def _stop_clock(self) -> None:
        if self._clock is not None:
            self._clock.cancel()
            self._clock = None

    def _suspects(self, key: Key) -> list[str]:
        """Return the suspects of the cell, the first candidate last."""
        there = self._in_cell(key, self._membership.suspects())
        return sorted(there, key=lambda peer: self.leaders.order(key, peer), reverse=True)

    def _next_leader(self, key: Key, leader: str, wanted: str, tried: list[str]) -> str:
        """Return the peer ``wanted`` to which a leader redirected; empty if this peer must not follow it.

        By the member table it only goes back to one that it has passed over, and which still leads for others.
        """
        if not self.leaders.may_lead(key, wanted):
            return ""
        if leader == self._context.rpc.peer_id:  # Its own coordinator yielded to the other.
            return wanted
        is_later = self.leaders.is_agreed(key) and not self.leaders.has_passed(key, wanted)
        useless = is_later or wanted in tried or self._membership.is_suspect(wanted)
        return "" if useless else wanted

    async def _hand_in(
        self, leader: str, ticket: Ticket, turn: int, tried: list[str], timeout_seconds: float
    ) -> messages.Answer | None:
        """Return one leader's answer; None if it failed."""
        avoid = self._membership.avoided()
        try:
            if leader == self._context.rpc.peer_id:
                async with asyncio.timeout(timeout_seconds):
                    asked = self._coordinator.enlist(ticket, self.position.head, turn, tried, avoid)
                    return await self._until_abandoned(leader, asked)
            head, latest = self.position.head.without_proof(), tuple(tried[-messages.MAX_TRIED :])
            request = messages.Join(ticket, head, latest, turn, tuple(avoid))
            return await self._until_abandoned(leader, self._ask(leader, request, timeout_seconds))
        except PeerRefusedError as error:
            logger.info("peer %s does not lead round %d: %s", leader[-8:], ticket.round, error.reason)
        except (PeerError, DeadlineError) as error:
            self.leaders.lost(leader, str(error))
            logger.info("leader %s of round %d failed: %s", leader[-8:], ticket.round, error)
        except TimeoutError:
            logger.info("no group for round %d within the deadline", ticket.round)
        return None

    async def _until_abandoned(
        self, leader: str, asked: Coroutine[Any, Any, messages.Answer]
    ) -> messages.Answer | None:
        """Return the leader's answer; None once this peer stops following it."""
        try:
            async with Tasks() as tasks:
                asking = tasks.call(asked, f"join-{leader[-8:]}")
                self._asking = leader, asking
                await asyncio.wait({asking})
                return None if asking.cancelled() else asking.result()
        finally:
            self._asking = None

    async def _ask(self, leader: str, request: messages.Join, timeout_seconds: float) -> messages.Answer:
        """Return another peer's answer to a ticket; keepalives extend the wait."""
        loop, rpc, grace = asyncio.get_running_loop(), self._context.rpc, self._spec.grace_seconds
        began = loop.time()
        dial_seconds = leader_dial_seconds(grace, rpc.dial_seconds.get(leader), OPEN_TIMEOUT_SECONDS)
        async with rpc.open(leader, messages.JOIN, request, dial_seconds) as channel:
            dialled = loop.time() - began
            round_trip = max(dialled, rpc.dial_seconds.get(leader, 0.0))
            timeouts = AnswerTimeouts(timeout_seconds - dialled, grace, leader_allowance_seconds(grace), round_trip)
            return await receive_answer(channel, messages.Answer, timeouts, MAX_ROSTER_BYTES)

    def _accept(self, answer: messages.Answer, ticket: Ticket, leader: str) -> Roster:
        """Return the roster of a leader's final answer, or raise the error that the answer means."""
        match answer:
            case messages.Formed(tickets, is_reduced):
                return self._check_roster(Roster(tickets, is_reduced, leader), ticket, leader)
            case messages.Refused(reason, mismatch, alone):
                if leader == self._context.rpc.peer_id and alone:
                    self._last_leader = None  # No other peer came: this is no failure of the leader.
                raise MismatchError(reason) if mismatch else NoGroupError(reason)
            case messages.Behind(peer):
                raise BehindError(peer or leader)
        raise AssertionError(f"{answer} is no final answer")

    def _check_roster(self, roster: Roster, own: Ticket, leader: str) -> Roster:
        """Return a roster; raise `NoGroupError` unless it is valid and this peer may take part in it."""
        context, spec = self._context, self._spec
        try:
            if len(roster.tickets) > spec.group_size:
                raise IntegrityError("more members than a group may have")
            for ticket in roster.tickets:
                if ticket != own:
                    ticket.verify(context.swarm, context.signer)
                    ticket.check(context.rpc.gate, spec.max_weight)
        except IntegrityError as error:
            self._membership.suspect(leader, str(error))
            raise NoGroupError(f"the leader sent a roster with {error}") from error
        if own not in roster.tickets or not self.cells.is_consistent(roster):
            raise NoGroupError("the leader sent a roster that does not agree with itself")
        if convicted := [peer for peer in roster.members if self._membership.is_convicted(peer)]:
            self._on_misled(leader, convicted[0])
            raise NoGroupError("the leader sent a roster with a peer against which there is evidence")
        if roster.is_reduced and not may_reduce(self.position.head.table, roster.tickets):
            raise NoGroupError("the leader would close the round without voters that may still come")
        if roster.is_reduced and self._is_behind():  # It waited for delegates of a round that others have ended.
            raise BehindError(leader)
        key, table = self.cells.key_of(own, own.peer, own.level), self.position.head.table
        most = table.most_guests(roster.members, group_spec(spec, self.cells, key).min_peers)
        if not own.level and len(table.guests(roster.members)) > most:
            raise NoGroupError("the leader sent a roster with more newcomers than members")
        undrawn = context.sitting_out(self.position.head, roster.members)
        if self.cells.num_levels(key.present) == 1 and not undrawn.isdisjoint(roster.members):
            raise NoGroupError("the leader sent a roster with a member that is not drawn for the round")
        peers, is_last = sum(t.peers for t in roster.tickets), key.level == self.cells.num_levels(key.present) - 1
        if is_last and peers < spec.min_peers:
            raise NoGroupError(f"{peers} of at least {spec.min_peers} peers are ready")
        return roster
