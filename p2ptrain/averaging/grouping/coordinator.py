"""The leader's side of matchmaking: the pending groups of the rounds that this peer leads.

Every trainer runs a `Coordinator`. It accepts tickets and reports from the peers that follow this one. Each pending
group has a task, which follows the policy of `p2ptrain.averaging.grouping.pending_group.decide` while it is this peer's
turn to lead. The task probes missing peers: this asks them to hand in, and shows whether the swarm is ahead. A group
whose turn is yet to come only holds its tickets.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Sequence
from functools import partial

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping import messages
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.leaders import Leaders, is_ahead, probe
from p2ptrain.averaging.grouping.pending_group import PendingGroup, decide, group_spec, may_reduce
from p2ptrain.averaging.protocol.certificate import Head, Ticket
from p2ptrain.averaging.timing.deadlines import LEAST_QUIET_SECONDS, QUIET_GRACES, KeepaliveStatus, send_keepalives
from p2ptrain.averaging.timing.goal import (
    LONGEST_BATCH_SECONDS,
    NO_GOAL,
    BatchProgress,
    GlobalBatch,
    Goal,
    LocalSteps,
    StepProgress,
)
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
LAST_PROBES_SECONDS = 1.0
MIN_PAUSE_SECONDS = 0.05
REPORT_WAIT_SECONDS = 1.0
FORESIGHT_SECONDS = 0.25
IDLE_GROUP_SECONDS = 120.0
MAX_PENDING_GROUPS = 8
MAX_GUESTS = 16
PATIENT_ROUNDS, IMPATIENT_ROUNDS = 3, 64
"""Rounds that wait for newcomers in vain, and rounds after them in which none is waited for; then one waits again."""
ATTEMPTS_BEFORE_REDUCED = 3
CONVICTED = "there is evidence against you"


class Coordinator:
    """Leads groups when it is this peer's turn."""

    def __init__(
        self, context: PeerContext, leaders: Leaders, goal: Goal, on_misled: Callable[[str, str], None]
    ) -> None:
        """``on_misled`` is called with a peer of a pending group, and the convicted leader that it follows."""
        self._context = context
        self._spec = context.spec
        self._membership = leaders.membership
        self._leaders = leaders
        self._position = leaders.position
        self._goal = goal
        self._cells = leaders.position.cells
        self._on_misled = on_misled
        self._pace: dict[str, float] = {}
        self._waits_in_vain = 0
        self._patient_from = 0
        self._groups: dict[Key, PendingGroup] = {}
        self._tasks = Tasks()
        self.closed = False
        context.rpc.serve_channel(
            messages.JOIN, messages.Join, self._serve_join, max_request_bytes=messages.MAX_JOIN_BYTES
        )
        context.rpc.serve(messages.REPORT, messages.BatchReport, self._serve_report)
        context.rpc.serve(messages.TAKE_ON, messages.TakeOn, self._serve_take_on)
        context.rpc.serve(messages.STEPS, messages.StepsReport, self._serve_steps)
        context.rpc.serve(messages.PASS, messages.Pass, self._serve_pass)

    async def close(self) -> None:
        """Stop leading for good; followers turn to the next candidate."""
        self.closed = True
        await self._tasks.close()

    def give_way(self, key: Key, peer: str, closing: bool) -> bool:
        """If another peer leads the round rather than this one, redirect this group's members to it; return True.

        This peer yields to one that is ``closing`` if its own group is not, because that one's has a quorum; and, while
        no member table says whose turn it is, to any that goes before it. It yields to no suspect, and to no peer that
        may not lead.
        """
        group, own, position = self._groups.get(key), self._context.rpc.peer_id, self._position
        if group is None or group.over or self._membership.is_suspect(peer) or not self._leaders.may_lead(key, peer):
            return False
        is_founding = not self._leaders.is_agreed(key)
        goes_before = is_founding and self._leaders.order(key, peer) < self._leaders.order(key, own)
        outranks = is_founding and position.order(key, peer) < position.order(key, own)
        if not (goes_before or (closing and (outranks or not group.closing))):
            return False
        group.answer_all(messages.Redirected(peer))
        return True

    def turned(self, key: Key) -> None:
        """Go on once another turn has begun: lead, or send back the tickets of that turn and of earlier ones.

        If no member table says whose turn it is, all tickets go to the leader that this peer follows.
        """
        group, own = self._groups.get(key), self._context.rpc.peer_id
        follows, leader = self._position.following or (None, own)
        if group is None or group.over:
            return
        if not self._leaders.is_agreed(key):
            if follows == key and leader != own and group.members:
                group.answer_all(messages.Redirected(leader))
        elif self._leaders.first(key) != own:
            group.dismiss_until(self._leaders.turn(key))
        group.stir()

    def _is_leading(self, group: PendingGroup) -> bool:
        """True if this peer leads a group now, rather than holds its tickets.

        It leads a round that it has not reached itself: there it knows of no other leader.
        """
        key, own = group.key, self._context.rpc.peer_id
        return not self._position.is_of(key) or group.has(own) or self._leaders.first(key) == own

    def group(self, head: Head, key: Key) -> PendingGroup:
        """Return the pending group of the round after this head, a new one if necessary.

        Raises:
            PeerRefusedError: This peer leads no group any more.
        """
        if self.closed:
            raise PeerRefusedError(self._context.rpc.peer_id, "this peer is leaving")
        group = self._groups.get(key)
        if group is None or group.over:
            while len(self._groups) >= MAX_PENDING_GROUPS:
                # Tickets for invented rounds must not evict the real group.
                oldest = min(self._groups, key=lambda k: (self._position.is_of(k), self._groups[k].last_activity))
                self._groups.pop(oldest).answer_all(messages.Refused("too many groups at once"))
            now, goal = asyncio.get_running_loop().time(), NO_GOAL if key.level else self._goal
            target = -(-goal.samples // self._cells.num_cells(key))
            group = self._groups[key] = PendingGroup(
                head, key, group_spec(self._spec, self._cells, key), GlobalBatch(target, self._pace),
                lambda peer: self._cells.slot(key, peer), LocalSteps(goal.mean_steps, now, self._pace),
            )  # fmt: skip
            group.last_activity = now
            self._tasks.start(self._lead(group), f"group-{head.round}")
        return group

    async def _serve_join(self, channel: Channel, request: messages.Join) -> None:
        ticket, head = request.ticket, request.head
        same = (head.round, head.lineage, head.present) == (ticket.round, ticket.lineage, ticket.present)
        if ticket.peer != channel.remote or not same or ticket.level >= self._cells.num_levels(ticket.present):
            raise IntegrityError("this ticket is not yours, or not for your head")
        ticket.verify(self._context.swarm, self._context.signer)
        ticket.check(self._context.rpc.gate, self._spec.max_weight)
        if self._membership.is_convicted(ticket.peer):
            raise PeerRefusedError(self._context.rpc.peer_id, CONVICTED)
        self._membership.heard_from(ticket.peer)
        async with Tasks() as tasks:
            enlisting = self.enlist(ticket, head, request.turn, request.tried, request.avoid)
            answer = tasks.call(enlisting, "enlist")
            # Without keepalives from a leader that hangs, its followers turn to the next candidate.
            await send_keepalives(channel, answer, self._spec.grace_seconds, messages.Waiting, KeepaliveStatus())
            if answer.done():
                await channel.send(answer.result())

    async def enlist(
        self, ticket: Ticket, head: Head, turn: int, tried: Collection[str], avoid: Collection[str]
    ) -> messages.Answer:
        """Return the final answer to one ticket; see `Join`."""
        own = self._context.rpc.peer_id
        if self._position.is_ahead_of(head):
            return messages.Behind(own)
        key = self._cells.key_of(ticket, ticket.peer, ticket.level)
        self._leaders.heard(key, ticket.peer, turn)
        if ticket.peer != own and (elsewhere := self._elsewhere(key, ticket.peer, turn, tried)) is not None:
            return elsewhere
        await self._make_room(self.group(head, key), ticket.peer)
        group = self.group(head, key)
        apart = self._membership.conflicts(ticket.peer)
        answer = group.add(ticket, asyncio.get_running_loop().time(), apart.union(avoid), turn)
        try:
            return await answer
        finally:
            group.remove(ticket.peer, answer) if not group.over else None

    def _elsewhere(self, key: Key, peer: str, turn: int, tried: Collection[str]) -> messages.Answer | None:
        """Return the answer to a ticket that should go to another leader, as far as this peer knows; else None.

        A ticket of an earlier turn than this peer's goes on to the next leader. One of a later turn goes to the leader
        of this peer's turn; if its sender has ``tried`` that one, this peer holds it.
        """
        if not self._position.is_of(key):
            return None
        own, order, is_agreed = self._context.rpc.peer_id, self._position.order, self._leaders.is_agreed(key)
        follows, leader = self._position.following or (None, "")
        if follows != key:
            leader = self._leaders.candidates(key, tried)[0]
        if is_agreed and leader != own and turn < self._leaders.turn(key):
            return messages.Later()
        if leader == own or leader in tried:
            return None
        if leader == peer and (is_agreed or follows != key or order(key, own) < order(key, peer)):
            return None  # Without a table, tickets crossed if this peer's is there: the earlier leads.
        return messages.Redirected(leader)

    async def _make_room(self, group: PendingGroup, peer: str) -> None:
        """Probe another delegate of the peer's cell, if the group has one; dismiss it if it does not answer."""
        holder = group.holder(peer)
        if holder in ("", self._context.rpc.peer_id):
            return
        seconds = max(LEAST_QUIET_SECONDS, QUIET_GRACES * self._spec.grace_seconds)
        try:
            await probe(self._context, holder, group.key, closing=group.closing, seconds=seconds)
        except (PeerError, DeadlineError):
            group.dismiss(holder, "another delegate of your cell came when you did not answer")

    async def _serve_report(self, peer: str, report: messages.BatchReport) -> messages.BatchAdvice:
        """Record a trainer's progress, and answer once its next action is clear."""
        loop, group = asyncio.get_running_loop(), self._group_of_worker(peer, report.head)
        if group is None:
            return messages.BatchAdvice(closing=True)
        now = loop.time()
        group.report(peer, BatchProgress(report.samples, report.batch_samples, report.batch_seconds, now))
        deadline = now + REPORT_WAIT_SECONDS
        while not (group.closing or group.batch.is_full or group.over):
            if group.batch.should_begin(peer, self._working(group), loop.time()):
                return messages.BatchAdvice(closing=False)
            if loop.time() >= deadline:
                return messages.BatchAdvice(closing=False, wait=True)
            await group.wait_for_change(min(FORESIGHT_SECONDS, deadline - loop.time()))
        return messages.BatchAdvice(closing=True)

    async def _serve_take_on(self, peer: str, request: messages.TakeOn) -> messages.Grant:
        """Record a host's progress, and grant it samples (see `GlobalBatch.grant`)."""
        now, group = asyncio.get_running_loop().time(), self._group_of_worker(peer, request.head)
        if group is None:
            return messages.Grant(closing=True, granted=0)
        group.report(peer, BatchProgress(request.samples, 0, 0.0, now))
        closing, asks = group.closing or group.over, request.held or request.wanted
        granted = group.batch.grant(peer, request.held, request.wanted, now) if asks and not closing else 0
        return messages.Grant(closing or group.batch.is_full, granted)

    async def _serve_steps(self, peer: str, report: messages.StepsReport) -> messages.StepsAdvice:
        """Record a trainer's local steps, and return in how many seconds the round closes."""
        if self._position.is_ahead_of(report.head):
            return messages.StepsAdvice(closing=True)  # It lives, but lags behind: the round does not wait for it.
        self._membership.heard_from(peer)
        now = asyncio.get_running_loop().time()
        group = self._group_of(peer, report.head)
        if not group.has(peer):
            group.report_steps(peer, StepProgress(report.steps, report.seconds, report.age, now, report.is_stepping))
        group.steps.foresee(self._working(group), now)
        at = group.steps.at
        closes_in = None if at is None or at - now > LONGEST_BATCH_SECONDS else max(0.0, at - now)
        return messages.StepsAdvice(group.closing or group.over, closes_in)

    async def _serve_pass(self, peer: str, request: messages.Pass) -> messages.Passed:
        """Stop waiting for a peer that has no work for the round after its head, unless the round needs it."""
        if self._position.is_ahead_of(request.head):
            return messages.Passed(is_ahead=True)
        self._membership.heard_from(peer)
        group = self._group_of(peer, request.head)
        if request.may_join and self._is_needed(group, peer):
            group.passed.discard(peer)
            return messages.Passed(is_needed=True)
        group.passed.add(peer)
        group.stir()
        return messages.Passed()

    def _is_needed(self, group: PendingGroup, peer: str) -> bool:
        """True if others have work for a full round, and are too few without this peer; or if it is the first round.

        The voters of the first round wait for most of the peers that are there.
        """
        key, table, own = group.key, self._position.head.table, self._context.rpc.peer_id
        reports = group.batch.reports.items()
        has_work = bool(group.members) or any(each.samples for other, each in reports if other != peer)
        if not has_work or not self._position.is_of(key) or (table.leading and table.row_of(peer) is None):
            return False
        undrawn = self._context.undrawn(self._position.head)
        left = {row.peer for row in table.rows if row.peer == own or self._membership.may_answer(row.peer)}
        left -= group.passed | {peer}
        is_enough = table.is_led_by(left, undrawn) and not table.is_too_few(left, undrawn)
        return not (table.leading and is_enough)

    def _group_of(self, peer: str, head: Head) -> PendingGroup:
        return self.group(head, self._cells.key_of(head, peer))

    def _group_of_worker(self, peer: str, head: Head) -> PendingGroup | None:
        """Return the pending group of a peer that reports work for it; None if its round is over."""
        self._membership.heard_from(peer)
        if self._position.is_ahead_of(head):
            return None
        group = self._group_of(peer, head)
        group.passed.discard(peer)
        return group

    def reopen(self, key: Key) -> None:
        """Discard the reports for a group that was closing, unless it has a ticket."""
        group = self._groups.get(key)
        if group is not None and not group.members:
            group.answer_all(messages.Refused("nothing is left of the round: it begins again"))

    def _expected(self, group: PendingGroup) -> list[str]:
        """Return the slots of members that a group waits for."""
        active = {*group.batch.reports, *group.steps.reports, *self._leaders.probers(group.key)}
        peers = {*self._membership.expected(), *(peer for peer in active if not self._membership.is_suspect(peer))}
        peers = {peer for peer in peers if self._is_member(group.key, peer)}
        peers = {peer for peer in peers if self._membership.is_worth_waiting_for(peer, group.key.round)}
        peers.discard(self._context.rpc.peer_id)
        if self._position.participates and self._position.is_of(group.key):
            peers.add(self._context.rpc.peer_id)
        peers -= group.passed | self._sitting_out(group.key)
        return sorted({group.slot_of(peer) for peer in peers if self._cells.includes(group.key, peer)})

    def _sitting_out(self, key: Key, there: Collection[str] = ()) -> frozenset[str]:
        return self._context.sitting_out(self._position.head, there) if self._position.is_of(key) else frozenset()

    def _working(self, group: PendingGroup) -> list[str]:
        """Return the members and newcomers for which a round is closed."""
        return [*self._expected(group), *self._guests(group)]

    def _guests(self, group: PendingGroup) -> list[str]:
        """Return the newcomers that a round waits for: few, and none for a while after one was waited for in vain.

        They join without being waited for, too, if their tickets come in time.
        """
        if group.key.round < self._patient_from:
            return []
        able = [peer for peer in sorted(self._newcomers(group.key)) if not self._membership.is_suspect(peer)]
        return [peer for peer in able if peer not in group.passed][:MAX_GUESTS]

    def _newcomers(self, key: Key) -> set[str]:
        """Return the peers that are in a round by their own account, and not in the member table."""
        there, group = {*self._leaders.probers(key), *self._membership.expected()}, self._groups.get(key)
        if group is not None:
            there.update(group.batch.reports, group.steps.reports)
        return {peer for peer in there if self._cells.includes(key, peer) and not self._is_member(key, peer)}

    def note_roster(self, key: Key, members: Collection[str]) -> None:
        """Record whether the newcomers came of which this peer knew; each member does so, whoever led the round."""
        newcomers = self._newcomers(key)
        if not newcomers.isdisjoint(members):
            self._waits_in_vain = 0
        elif newcomers and key.round >= self._patient_from:
            self._waits_in_vain += 1
            self._patient_from = key.round + 1 + IMPATIENT_ROUNDS * (self._waits_in_vain >= PATIENT_ROUNDS)

    def _is_member(self, key: Key, peer: str) -> bool:
        """True if a peer is in the lineage's member table; all are before the first round, and in other rounds."""
        table = self._position.head.table
        return not table.leading or not self._position.is_of(key) or table.row_of(peer) is not None

    def _is_reduced(self, group: PendingGroup, tickets: Sequence[Ticket]) -> bool | None:
        """Return whether a round of these peers would be reduced; None if it has the voters for neither kind."""
        table, key = self._position.head.table, group.key
        if not self._position.is_of(key) or key.level < self._cells.num_levels(key.present) - 1:
            return False
        here = {ticket.peer for ticket in tickets}
        able = [each for each in table.electorate if each in here or self._membership.may_answer(each)]
        undrawn = self._context.undrawn(self._position.head)
        can_be_full = len(able) >= table.quorum and not table.leaves_out_most(table.census(tickets, here), undrawn)
        can_be_full &= key.level > 0 or table.is_led_by(here, undrawn)
        # Voters that are there may refuse again and again: then every other attempt does without them. They were asked
        # in none of the attempts on lower levels, of which each delegate made one at least.
        tries = table.num_attempts(tickets) - key.level if tickets else 0
        if can_be_full and (tries < ATTEMPTS_BEFORE_REDUCED or tries % 2 == 0 or not may_reduce(table, tickets)):
            return False
        return True if may_reduce(table, tickets) else None

    async def _lead(self, group: PendingGroup) -> None:
        """Run one pending group to its end.

        Its last probes may end in order: cancelled ones would drop the connections that the round is about to use.
        """
        asking, grace_seconds = Tasks(), 0.0
        try:
            await self._lead_until_over(group, asking)
            grace_seconds = LAST_PROBES_SECONDS
        finally:
            if not group.over:
                group.answer_all(messages.Refused("the leader stopped"))
            if self._groups.get(group.key) is group:
                del self._groups[group.key]
            await asking.close(grace_seconds)

    async def _lead_until_over(self, group: PendingGroup, asking: Tasks) -> None:
        """The leader's main loop; it returns once the group has its answers."""
        loop, key = asyncio.get_running_loop(), group.key
        probes: dict[str, asyncio.Task[None]] = {}
        probed_at: dict[str, float] = {}
        while not group.over:
            group.changed.clear()
            now = loop.time()
            if self._position.is_ahead_of(group.head):
                group.answer_all(messages.Behind(self._context.rpc.peer_id))
                break
            if not self._is_leading(group):
                await group.wait_for_change(PROBE_SECONDS)
                continue
            expected, guests = self._expected(group), self._guests(group)
            if not group.closing:
                group.steps.foresee(self._working(group), now)
            is_reduced = self._is_reduced(group, group.tickets)
            decision = decide(group.situation(expected, now, guests, is_reduced=is_reduced), group.spec)
            if decision.action == "close" and not group.closing:
                group.closing = True
                behind = {each.peer for each in self._membership.records() if each.round < key.round}
                behind.difference_update(self._position.head.members)
                group.passed |= group.steps.absentees(expected, behind, now, group.spec.grace_seconds)
                probed_at.clear()
                self._position.close(key)
            if decision.action == "form":
                self._finish(group, [*expected, *guests], decision.reason)
                break
            if decision.action == "give up":
                alone = len(group.members) == 1
                group.answer_all(messages.Refused(decision.reason, alone=alone))
                break
            if not group.members and now - group.last_activity > IDLE_GROUP_SECONDS:
                break
            # Above level 0 the leader probes no peer: each cell chooses its delegate.
            missing = [] if key.level else [peer for peer in (*expected, *guests) if peer not in group.members]
            missing = [peer for peer in missing if peer != self._context.rpc.peer_id]
            for peer in missing if group.members or group.closing else []:
                if peer not in probes and now - probed_at.get(peer, -PROBE_SECONDS) >= PROBE_SECONDS:
                    probed_at[peer] = now
                    probes[peer] = asking.start(self._probe(peer, group), f"probe-{peer[-8:]}")
                    probes[peer].add_done_callback(partial(lambda peer, _: probes.pop(peer, None), peer))
            next_probe = min(
                (probed_at[peer] + PROBE_SECONDS - now for peer in missing if peer in probed_at),
                default=PROBE_SECONDS,
            )
            pause = min(max(next_probe, MIN_PAUSE_SECONDS), group.next_change(now))
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(pause):
                    await group.changed.wait()

    def _finish(self, group: PendingGroup, expected: list[str], reason: str) -> None:
        waited_for = {*expected, *self._membership.expected()} - self._sitting_out(group.key)
        late = [] if group.key.level else [peer for peer in sorted(waited_for) if peer not in group.members]
        late = [peer for peer in late if self._cells.includes(group.key, peer)]
        here = [] if group.key.level else [ticket.peer for ticket in group.tickets]
        is_tree = self._cells.num_levels(group.key.present) > 1  # There a roster does not tell who is in the round.
        for peer in self._sitting_out(group.key, () if is_tree else here).intersection(here):
            group.dismiss(peer, "you are not drawn for this round: your work waits")
        members = group.form(lambda tickets: self._is_reduced(group, tickets), self._position.table_of(group.key))
        for peer in late:
            self._membership.missed_round(peer)
        if not group.key.level:
            missing = [peer for peer in expected if peer in late and self._is_member(group.key, peer)]
            self._membership.waited_for(missing, members, group.key.round)
        logger.debug("round %d: group of %d: %s", group.head.round, len(members), reason)

    async def _probe(self, peer: str, group: PendingGroup) -> None:
        """Probe a missing peer, and end this group if another leader goes first or the swarm is ahead."""
        key = group.key
        try:
            said = await probe(self._context, peer, key, closing=group.closing)
        except PeerRefusedError:
            return
        except (PeerError, DeadlineError) as error:
            if not group.over:
                self._leaders.lost(peer, str(error))
            return
        finally:
            group.changed.set()
        self._membership.answered(peer)
        if self._membership.is_convicted(said.leader):
            self._on_misled(peer, said.leader)
        if group.over:
            return
        if is_ahead(said.head, group.head) and self._membership.may_follow(peer):
            group.answer_all(messages.Behind(peer))
            return
        self._leaders.heard(key, peer, said.turn)
        if said.leader and not self._leaders.is_agreed(key):
            self.give_way(key, said.leader, closing=False)
