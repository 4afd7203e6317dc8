"""Forming a group, the leader's side over the network: rallies for the rounds that this peer leads.

Every trainer runs a `Conductor`. It takes tickets and reports of all who think that this peer leads, or sends them on
to a leader that goes first. A task for each rally runs until `p2ptrain.averaging.grouping.pending_group.decide` says
how it ends, and asks missing peers whether they live, which also hurries them and tells of a swarm that is ahead.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import Any

from p2ptrain.averaging.commit.broadcast import QUIET_GRACES
from p2ptrain.averaging.grouping.absentees import Absent
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.leaders import Leaders
from p2ptrain.averaging.grouping.membership import MAX_AVOIDED_PEERS, Membership, rank
from p2ptrain.averaging.grouping.pending_group import Answer, Rally, decide
from p2ptrain.averaging.grouping.round_position import Place, nudge, probe_seconds
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.timing.deadlines import LEAST_QUIET_SECONDS
from p2ptrain.averaging.timing.global_batch import LONGEST_BATCH_SECONDS, NO_GOAL, GlobalBatch, Goal, Report
from p2ptrain.averaging.timing.keepalive import Stage, beat_until
from p2ptrain.averaging.timing.local_steps import Closing, StepReport
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
MIN_PAUSE_SECONDS = 0.05
REPORT_WAIT_SECONDS = 1.0
FORESIGHT_SECONDS = 0.25
IDLE_RALLY_SECONDS = 120.0
MAX_RALLIES = 8
MAX_HOPS = 4
CONVICTED = "there is evidence that you falsified a mean"


class Conductor:
    """Leads rallies for others, and for this peer itself, when it is its turn."""

    def __init__(
        self,
        rpc: Rpc,
        signer: Signer,
        swarm: bytes,
        spec: AveragingSpec,
        membership: Membership,
        leaders: Leaders,
        place: Place,
        goal: Goal,
    ) -> None:
        """
        Args:
            rpc: To serve and probe other peers.
            signer: Checks tickets.
            swarm: The manifest's digest, 32 bytes.
            spec: Quorum, grace, deadlines.
            membership: Who is there.
            leaders: Whose turn it is.
            place: Where this peer stands.
            goal: With what a round is due.
        """
        self._rpc = rpc
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._membership = membership
        self._leaders = leaders
        self._place = place
        self._goal = goal
        self._cells = place.cells
        self._stage = Stage()
        self._absent = Absent()
        self._pace: dict[str, float] = {}
        self._rallies: dict[Key, Rally] = {}
        self._tasks = Tasks()
        self.on_misled: Callable[[str, str], None] = lambda peer, leader: None
        """Called with a peer of this group that follows a leader which is convicted here."""
        self.closed = False
        """Whether this peer leads nobody any more."""
        rpc.serve_channel("rally.join", dict, self._serve_join)
        rpc.serve("rally.report", dict, self._serve_report)
        rpc.serve("rally.pass", dict, self._serve_pass)

    async def close(self) -> None:
        """Stop leading, for good; followers move on to the next leader."""
        self.closed = True
        await self._tasks.close()

    def heard_from(self, peer: str) -> None:
        """Note that a peer asked something: it is there."""
        self._absent.heard_from(peer)

    def give_way(self, key: Key, peer: str, closing: bool) -> bool:
        """Send the members of a rally on to a peer that leads the round rather than this one; whether there is one.

        A leader that nobody came to also gives way to one that is ``closing`` its rally, which has a quorum: which
        leaders failed is what they see differently. Of two that both have a quorum, the one leads of which less often
        nothing came, or whose `rank` is smaller. But none gives way to one that has just failed in a group.
        """
        rally, own = self._rallies.get(key), self._rpc.peer_id
        if rally is None or rally.over or self._membership.is_suspect(peer):
            return False
        alone = rally.members.keys() <= {rally.slot_of(own)}
        outranked = self._leaders.merit(key, peer) < self._leaders.merit(key, own)
        if not (self.goes_before(key, peer) or (closing and (alone or outranked))):
            return False
        rally.answer_all({"kind": "redirect", "peer": peer})
        return True

    def settle_on(self, key: Key, leader: str) -> str:
        """Whom to hand in to, once ``leader`` has been chosen; those that handed in here are sent on to it.

        If the chosen one has itself handed in here, each takes the other for the leader, and both would wait for the
        other's ticket: then the smaller `rank` leads.
        """
        own, rally = self._rpc.peer_id, self._rallies.get(key)
        if leader == own or rally is None or rally.over or not rally.members:
            return leader
        if rally.has(leader) and rank(own, key) < rank(leader, key):
            return own
        rally.answer_all({"kind": "redirect", "peer": leader})
        return leader

    def rally(self, head: Head, key: Key) -> Rally:
        """The rally for a group of the round after this head, opened when there is none.

        Raises:
            PeerRefusedError: This peer leads nobody any more.
        """
        if self.closed:
            raise PeerRefusedError(self._rpc.peer_id, "this peer is leaving")
        rally = self._rallies.get(key)
        if rally is None or rally.over:
            while len(self._rallies) >= MAX_RALLIES:
                # Never let tickets for made-up rounds push out the real one.
                oldest = min(self._rallies, key=lambda k: (self._place.is_of(k), self._rallies[k].last_activity))
                self._rallies.pop(oldest).answer_all({"kind": "refused", "reason": "too many rallies at once"})
            now, goal = asyncio.get_running_loop().time(), NO_GOAL if key.level else self._goal
            target = -(-goal.samples // self._cells.num_cells(key))
            rally = self._rallies[key] = Rally(
                head, key, self._spec_of(key), GlobalBatch(target, self._pace),
                lambda peer: self._cells.slot(key, peer), Closing(goal.steps, now, self._pace),
            )  # fmt: skip
            rally.last_activity = now
            self._tasks.start(self._conduct(key, rally), f"rally-{head.round}")
        return rally

    def _spec_of(self, key: Key) -> AveragingSpec:
        """Quorum, grace, deadlines of one group.

        A small cell is as good as a large one: the minimum is that of the swarm. Groups of delegates get theirs after
        others took up their grace periods.
        """
        alone = self._cells.num_levels(key.present) == 1
        grace = self._spec.grace_seconds * (1 + key.level)
        return self._spec if alone else self._spec.model_copy(update={"min_peers": 1, "grace_seconds": grace})

    async def _serve_join(self, channel: Channel, request: dict[str, Any]) -> None:
        ticket = Ticket.from_wire(request.get("ticket"), self._swarm, self._signer, self._spec.max_weight)
        head = Head.from_dict(request.get("head"))
        same = (head.round, head.lineage, head.present) == (ticket.round, ticket.lineage, ticket.present)
        if ticket.peer != channel.remote or not same or ticket.level >= self._cells.num_levels(ticket.present):
            raise IntegrityError("this ticket is not yours, or not for your head")
        tried, hops, avoid = request.get("tried"), request.get("hops"), request.get("avoid")
        if not (isinstance(tried, list) and type(hops) is int and isinstance(avoid, list)):
            raise IntegrityError("malformed ticket request")
        if not all(type(peer) is str for peer in [*tried, *avoid]):
            raise IntegrityError("malformed ticket request")
        if self._membership.is_convicted(ticket.peer):
            raise PeerRefusedError(self._rpc.peer_id, CONVICTED)
        self._membership.heard_from(ticket.peer)
        self._leaders.reached(ticket.peer)
        self.heard_from(ticket.peer)
        async with Tasks() as tasks:
            answer = tasks.call(self.enlist(ticket, head, tried, hops, avoid), "enlist")
            # A leader that hangs says nothing, and is passed over soon.
            await beat_until(channel, answer, self._spec.grace_seconds, self._stage)
            if answer.done():
                await channel.send(answer.result())

    async def enlist(self, ticket: Ticket, head: Head, tried: list[str], hops: int, avoid: list[str]) -> Answer:
        """The final answer to one ticket."""
        own = self._rpc.peer_id
        if self._place.head.lineage != head.lineage and self._place.head.outranks(head):
            return {"kind": "behind", "peer": own}
        key = self._cells.key_of(ticket, ticket.peer, ticket.level)
        if self._place.following == (key, ticket.peer) and rank(ticket.peer, key) < rank(own, key):
            return {"kind": "redirect", "peer": ticket.peer}  # Tickets crossed: see `settle_on`.
        if hops < MAX_HOPS:
            follows, leader = self._place.following or (None, own)
            if follows == key and leader not in (own, ticket.peer, *tried):
                return {"kind": "redirect", "peer": leader}  # As those were that came before: see `settle_on`.
            best = self._leaders.candidates(key, [*tried, *self._place.passed_over(key, ticket.peer)])[0]
            if best not in (own, ticket.peer):
                return {"kind": "redirect", "peer": best}
        await self._make_room(self.rally(head, key), ticket.peer)
        rally = self.rally(head, key)
        answer = rally.add(ticket, asyncio.get_running_loop().time(), frozenset(avoid[:MAX_AVOIDED_PEERS]))
        try:
            return await answer
        finally:
            rally.remove(ticket.peer, answer) if not rally.over else None

    async def _make_room(self, rally: Rally, peer: str) -> None:
        """If another peer speaks for a delegate's cell, ask whether it is there still; if not, it speaks no more."""
        holder = rally.holder(peer)
        if holder in ("", self._rpc.peer_id):
            return
        patience = max(LEAST_QUIET_SECONDS, QUIET_GRACES * self._spec.grace_seconds)
        try:
            await nudge(self._rpc, holder, rally.key, rally.closing, patience)
        except (PeerError, DeadlineError, IntegrityError):
            rally.dismiss(holder, "another delegate of your cell came when you did not answer")

    async def _serve_report(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        head = Head.from_dict(request.get("head"))
        samples, batch, seconds = request.get("samples"), request.get("batch"), request.get("seconds")
        held, wanted = request.get("held", 0), request.get("wanted", 0)
        if not (type(samples) is int and type(batch) is int and type(seconds) is float):
            raise IntegrityError("malformed report")
        if not (0 <= batch <= samples < 1 << 40 and 0.0 <= seconds <= LONGEST_BATCH_SECONDS):
            raise IntegrityError("a report with values out of range")
        if self._goal.steps:
            return self._serve_steps(peer, head, request)
        if not all(type(count) is int and 0 <= count < 1 << 40 for count in (held, wanted)):
            raise IntegrityError("a report with values out of range")
        self._membership.heard_from(peer)
        self._leaders.reached(peer)
        if self._place.head.lineage != head.lineage and self._place.head.outranks(head):
            return {"closing": True}
        return await self.take_report(peer, head, (samples, batch, seconds), held, wanted)

    def _serve_steps(self, peer: str, head: Head, request: dict[str, Any]) -> dict[str, Any]:
        age, is_stepping = request.get("age"), request.get("stepping")
        if not (type(age) is float and 0.0 <= age <= LONGEST_BATCH_SECONDS and type(is_stepping) is bool):
            raise IntegrityError("a malformed report")
        self._leaders.reached(peer)
        if self._place.head.lineage != head.lineage and self._place.head.outranks(head):
            return {"closing": True}  # Its process lives, but its training does not come along: it is not waited for.
        self._membership.heard_from(peer)
        return self.take_steps(peer, head, request)

    def take_steps(self, peer: str, head: Head, told: dict[str, Any]) -> dict[str, Any]:
        """Note how far a trainer is in a round of local steps, and say in how many seconds the round closes.

        Args:
            peer: Which.
            head: Its head.
            told: ``samples`` (steps), ``seconds``, ``age`` and ``stepping`` of a `StepReport`.

        Raises:
            PeerRefusedError: This peer leads nobody any more.
        """
        now = asyncio.get_running_loop().time()
        rally = self.rally(head, self._cells.key_of(head, peer))
        if not rally.has(peer):
            report = StepReport(told["samples"], told["seconds"], told["age"], now, told["stepping"])
            rally.report_steps(peer, report)
        rally.steps.foresee(self._expected(rally), now)
        reply: dict[str, Any] = {"closing": rally.closing or rally.over}
        if rally.steps.at is not None:
            reply["closes_in"] = max(0.0, rally.steps.at - now)
        return reply

    async def _serve_pass(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        head = Head.from_dict(request.get("head"))
        if self._place.head.lineage != head.lineage and self._place.head.outranks(head):
            return {"behind": True}
        self._membership.heard_from(peer)
        self.take_pass(peer, head)
        return {"behind": False}

    def reopen(self, key: Key) -> None:
        """Forget what was reported for a group that was to be closed, unless somebody handed in a ticket for it."""
        rally = self._rallies.get(key)
        if rally is not None and not rally.members:
            rally.answer_all({"kind": "refused", "reason": "nothing is left of the round: it begins again"})

    def take_pass(self, peer: str, head: Head) -> None:
        """Note that a peer has nothing for the round after a head: nobody waits for it."""
        rally = self.rally(head, self._cells.key_of(head, peer))
        rally.passed.add(peer)
        rally.stir()

    async def take_report(
        self, peer: str, head: Head, told: tuple[int, int, float], held: int = 0, wanted: int = 0
    ) -> dict[str, Any]:
        """Note how far a peer is: samples, those of its last batch, its seconds. Answer once it is clear what to do.

        Returns:
            ``closing``: hand in what there is; ``wait``: ask again; neither: compute another local batch. ``granted``:
            of the samples that it would like to take on (see `GlobalBatch.grant`), how many it should.
        """
        loop = asyncio.get_running_loop()
        rally = self.rally(head, self._cells.key_of(head, peer))
        rally.passed.discard(peer)
        rally.report(peer, Report(*told, loop.time()))
        if held or wanted:
            granted = 0 if rally.closing or rally.over else rally.batch.grant(peer, held, wanted, loop.time())
            return {"closing": rally.closing or rally.batch.is_full or rally.over, "wait": False, "granted": granted}
        deadline = loop.time() + REPORT_WAIT_SECONDS
        while not (rally.closing or rally.batch.is_full or rally.over):
            if rally.batch.should_begin(peer, self._expected(rally), loop.time()):
                return {"closing": False, "wait": False}
            if loop.time() >= deadline:
                return {"closing": False, "wait": True}
            await rally.wait_for_change(min(FORESIGHT_SECONDS, deadline - loop.time()))
        return {"closing": True, "wait": False}

    def goes_before(self, key: Key, peer: str) -> bool:
        """Whether another peer leads this round rather than this one."""
        return self._leaders.order(key, peer) < self._leaders.order(key, self._rpc.peer_id)

    def _expected(self, rally: Rally) -> list[str]:
        """The slots that a rally waits for."""
        told = {*rally.reporters, *self._leaders.nudgers(rally.key)}
        peers = {*self._membership.expected(), *(peer for peer in told if not self._membership.is_suspect(peer))}
        peers.discard(self._rpc.peer_id)
        if self._place.participates and self._place.is_of(rally.key):
            peers.add(self._rpc.peer_id)
        peers -= rally.passed
        return sorted({rally.slot_of(peer) for peer in peers if self._cells.includes(rally.key, peer)})

    async def _conduct(self, key: Key, rally: Rally) -> None:
        """Run one rally to its end; the leader's main loop."""
        loop = asyncio.get_running_loop()
        asking = Tasks()
        probes: dict[str, asyncio.Task[None]] = {}
        probed_at: dict[str, float] = {}
        try:
            while not rally.over:
                rally.changed.clear()
                now = loop.time()
                if self._place.head.lineage != rally.head.lineage and self._place.head.outranks(rally.head):
                    rally.answer_all({"kind": "behind", "peer": self._rpc.peer_id})
                    break
                expected = self._expected(rally)
                if not rally.closing:
                    rally.steps.foresee(expected, now)
                decision = decide(rally.situation(expected, now), rally.spec)
                if decision.action == "close" and not rally.closing:
                    rally.closing = True
                    behind = {each.peer for each in self._membership.records() if each.round < key.round}
                    behind.difference_update(self._place.head.members)
                    rally.passed |= rally.steps.absentees(expected, behind, now, rally.spec.grace_seconds)
                    probed_at.clear()
                    self._place.close(key)
                unasked = self._unasked(rally, now) if decision.action == "form" else []
                if decision.action == "form" and not unasked:
                    self._finish(rally, expected, decision.reason)
                    break
                if decision.action == "give up":
                    alone = len(rally.members) == 1
                    rally.answer_all({"kind": "refused", "reason": decision.reason, "alone": alone})
                    break
                if not rally.members and now - rally.last_activity > IDLE_RALLY_SECONDS:
                    break
                # Above level 0 nobody is asked: who stands for a cell is the cell's business.
                missing = [] if key.level else [peer for peer in expected if peer not in rally.members]
                missing = unasked or [peer for peer in missing if peer != self._rpc.peer_id]
                for peer in missing if rally.members or rally.closing else []:
                    if peer not in probes and now - probed_at.get(peer, -PROBE_SECONDS) >= PROBE_SECONDS:
                        probed_at[peer] = now
                        probes[peer] = asking.start(self._probe(peer, key, rally), f"probe-{peer[-8:]}")
                        probes[peer].add_done_callback(lambda _, peer=peer: probes.pop(peer, None))  # type: ignore[misc]
                next_probe = min(
                    (probed_at[peer] + PROBE_SECONDS - now for peer in missing if peer in probed_at),
                    default=PROBE_SECONDS,
                )
                pause = max(next_probe, MIN_PAUSE_SECONDS)
                if not unasked:  # Whose answers alone are waited for: the time for everything else is over.
                    pause = min(pause, rally.next_change(now))
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(pause):
                        await rally.changed.wait()
        finally:
            await asking.close()
            if not rally.over:
                rally.answer_all({"kind": "refused", "reason": "the leader stopped"})
            if self._rallies.get(key) is rally:
                del self._rallies[key]

    def _unasked(self, rally: Rally, now: float) -> list[str]:
        """Whom to ask whether the swarm is ahead, before this group ends the round without them."""
        if rally.key.level:
            return []
        rally.asking_since = now if rally.asking_since is None else rally.asking_since
        if now - rally.asking_since > rally.spec.matchmaking_seconds:
            return []
        # After a long stop all records have run out; but who was in the last round is known.
        trainers = {*self._membership.trainers(), *self._place.head.members} - {self._rpc.peer_id}
        absent = [peer for peer in sorted(trainers - rally.members.keys()) if self._cells.includes(rally.key, peer)]
        return self._absent.to_ask(rally.key, len(rally.members), absent, now)

    def _finish(self, rally: Rally, expected: list[str], reason: str) -> None:
        late = [] if rally.key.level else [peer for peer in expected if peer not in rally.members]
        members = rally.form()
        for peer in late:
            self._membership.missed_round(peer)
        logger.debug("round %d: group of %d: %s", rally.head.round, len(members), reason)

    async def _probe(self, peer: str, key: Key, rally: Rally) -> None:
        """Ask a missing peer whether it lives; hurry it; learn of a leader that goes first or a swarm that is ahead."""
        loop, patience = asyncio.get_running_loop(), probe_seconds(self._spec)
        asked = loop.time()
        try:
            said = await nudge(self._rpc, peer, key, rally.closing, patience)
        except PeerRefusedError:
            self._absent.answered(peer, key, asked)
            return
        except (PeerError, DeadlineError, IntegrityError) as error:
            self._membership.suspect(peer, str(error))
            self._leaders.lost(peer)
            self._absent.silent(peer, asked, loop.time(), patience)
            return
        finally:
            rally.changed.set()
        self._leaders.reached(peer)
        self._membership.answered(peer)
        leader = said.leader
        if self._membership.is_convicted(leader):
            self.on_misled(peer, leader)
        if not said.is_averaging:
            self._absent.answered(peer, key, asked)
        if rally.over:
            return
        if said.head.lineage != rally.head.lineage and said.head.outranks(rally.head):
            rally.answer_all({"kind": "behind", "peer": peer})
        elif leader and self.goes_before(key, leader) and not self._membership.is_suspect(leader):
            rally.answer_all({"kind": "redirect", "peer": leader})
