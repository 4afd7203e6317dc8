"""Forming a group, both sides over the network: who leads, who follows, who is too late or ahead.

Every trainer runs a `Matchmaker`. `find_group` hands a ticket to the round's leader (possibly itself) and returns the
roster. Views of who is there may differ, so two peers may both think they lead: a follower is redirected to a leader of
smaller rank, and leaders that probe each other's followers merge into the one of smaller rank.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Any

from p2ptrain.averaging.batch import LONGEST_BATCH_SECONDS, GlobalBatch, Report
from p2ptrain.averaging.certificate import Roster, Ticket
from p2ptrain.averaging.head import Head
from p2ptrain.averaging.leaders import Key, Leaders
from p2ptrain.averaging.membership import MAX_AVOIDED_PEERS, Membership
from p2ptrain.averaging.rally import Answer, Rally, decide
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError, ProtocolError, TemporaryError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.rpc import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)

PROBE_SECONDS = 1.0
MIN_PAUSE_SECONDS = 0.05
REPORT_WAIT_SECONDS = 1.0
FORESIGHT_SECONDS = 0.25
PROBE_TIMEOUT_SECONDS = 3.0
OPEN_TIMEOUT_SECONDS = 8.0
IDLE_RALLY_SECONDS = 120.0
MAX_RALLIES = 8
MAX_HOPS = 4
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
    """Finds groups for this peer, and leads rallies for others when it is its turn.

    Attributes:
        head: This peer's head; its owner keeps it current with `move`.
        participates: Whether this peer trains: a leader then waits for itself too.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        spec: AveragingSpec,
        membership: Membership,
        head: Head,
        batch_target: int = 0,
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._membership = membership
        self._batch_target = batch_target
        self.head = head
        self.participates = False
        self._rallies: dict[Key, Rally] = {}
        self._conductors: set[asyncio.Task[None]] = set()
        self._closing: Key | None = None
        self._following: tuple[Key, str] | None = None
        self._last_leader: tuple[Key, str] | None = None
        self._pace: dict[str, float] = {}
        self._leaders = Leaders(rpc.peer_id, membership)
        rpc.serve_channel("rally.join", self._serve_join)
        rpc.serve("rally.report", self._serve_report)
        rpc.serve("rally.nudge", self._serve_nudge)

    @property
    def last_leader(self) -> str:
        """Who led the group found last; empty before the first."""
        return self._last_leader[1] if self._last_leader is not None else ""

    def is_closing(self) -> bool:
        """Whether the round in progress should be closed with what this peer has."""
        return self._closing == (self.head.round, self.head.lineage)

    def move(self, head: Head) -> None:
        """Go on to another head, with those that were in its last round, of whom no record may have told yet."""
        self.head = head
        for peer in head.members:
            if peer != self._rpc.peer_id and self._membership.is_news(peer):
                self._leaders.nudged_by((head.round, head.lineage), peer)

    async def close(self) -> None:
        """Stop leading; followers move on to the next leader."""
        for task in list(self._conductors):
            task.cancel()
        await asyncio.gather(*self._conductors, return_exceptions=True)

    async def announce(self) -> None:
        """Tell all peers that train, or are about to, that this one takes part in the round in progress.

        Records spread with a delay; without this, two peers that start together would each end their first round alone.
        """
        key = (self.head.round, self.head.lineage)
        peers = self._membership.present()[:MAX_GREETED]
        await asyncio.gather(*(self._greet(peer, key) for peer in peers))

    async def _greet(self, peer: str, key: Key) -> None:
        try:
            await self._nudge(peer, key, closing=False)
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.debug("peer %s was not told that this one takes part: %s", peer[-8:], error)

    async def _nudge(self, peer: str, key: Key, closing: bool) -> tuple[Head, Any]:
        """Tell a peer that this one is in a round; its head, and whom it says that it follows."""
        request = {"round": key[0], "lineage": key[1], "closing": closing}
        reply = await self._rpc.call(peer, "rally.nudge", request, PROBE_TIMEOUT_SECONDS)
        return Head.from_dict(reply.get("head")), reply.get("leader")

    # --- following -----------------------------------------------------------------------------------------------

    def group_broke(self) -> None:
        """Note that the group found last came to nothing: another peer leads the next attempt."""
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
        deadline = loop.time() + self._spec.matchmaking_seconds + self._spec.grace_seconds + PROBE_TIMEOUT_SECONDS
        key = (ticket.round, ticket.lineage)
        tried: list[str] = []
        target, hops = "", 0
        try:
            while (remaining := deadline - loop.time()) > 0:
                leader = target or self._leaders.candidates(key, tried)[0]
                target = ""
                self._following = self._last_leader = (key, leader)
                answer = await self._hand_in(leader, ticket, tried, hops, remaining)
                if answer is not None and answer["kind"] != "redirect":
                    return self._accept(answer, ticket, leader)
                hops += answer is not None
                target = self._next_leader(key, answer, tried) if answer and hops <= MAX_HOPS else ""
                if not target or self._leaders.order(key, target) > self._leaders.order(key, leader):
                    # It failed, leads no more, or leads in circles; nor must this peer send others there.
                    tried.append(leader)
                    self._leaders.failed(key, leader)
                if hops > MAX_HOPS:
                    await asyncio.sleep(RETRY_SECONDS)
        except TemporaryError:
            self.group_broke()
            raise
        finally:
            self._following = None
        self.group_broke()
        raise NoGroupError("no group was found before the matchmaking deadline")

    def _next_leader(self, key: Key, answer: Answer, tried: list[str]) -> str:
        """Where a leader's redirection leads; empty when it is of no use."""
        wanted = answer.get("peer")
        usable = isinstance(wanted, str) and wanted not in tried and not self._membership.is_suspect(wanted)
        return str(wanted) if usable else ""

    async def _hand_in(
        self, leader: str, ticket: Ticket, tried: list[str], hops: int, timeout_seconds: float
    ) -> Answer | None:
        """One leader's answer; None when it failed and the next should be asked."""
        try:
            if leader == self._rpc.peer_id:
                async with asyncio.timeout(timeout_seconds):
                    return await self._enlist(ticket, self.head, tried, MAX_HOPS, self._membership.avoided())
            request = {
                "ticket": ticket.to_wire(),
                "head": self.head.without_proof().to_dict(),
                "tried": tried[-8:],
                "hops": hops,
                "avoid": self._membership.avoided(),
            }
            async with self._rpc.open(leader, "rally.join", request, OPEN_TIMEOUT_SECONDS) as channel:
                answer = await channel.receive(timeout_seconds, max_bytes=MAX_ROSTER_BYTES)
            if answer.get("kind") not in ("roster", "redirect", "behind", "refused"):
                raise ProtocolError(leader, "answered a ticket with nonsense")
            return answer
        except PeerRefusedError as error:
            logger.info("peer %s does not lead round %d: %s", leader[-8:], ticket.round, error.reason)
        except (PeerError, DeadlineError) as error:
            self._membership.suspect(leader, str(error))
            self._leaders.lost(leader)
            logger.info("leader %s of round %d failed: %s", leader[-8:], ticket.round, error)
        except TimeoutError:
            logger.info("no group for round %d within the deadline", ticket.round)
        return None

    def _accept(self, answer: Answer, ticket: Ticket, leader: str) -> Roster:
        """Turn a leader's final answer into a roster or a typed error; nothing in it is trusted."""
        kind = answer["kind"]
        reason = str(answer.get("reason", ""))[:200]
        if kind == "behind":
            source = answer.get("peer")
            raise BehindError(source if isinstance(source, str) and source else leader)
        if kind == "refused":
            raise MismatchError(reason) if answer.get("mismatch") else NoGroupError(reason)
        raw = answer.get("tickets")
        if not isinstance(raw, list) or not 0 < len(raw) <= self._spec.group_size:
            raise NoGroupError("the leader sent a roster of an impossible size")
        try:
            own = ticket.to_wire()
            tickets = tuple(
                ticket if values == own else Ticket.from_wire(values, self._swarm, self._signer, self._spec.max_weight)
                for values in raw
            )
        except IntegrityError as error:
            self._membership.suspect(leader, str(error))
            raise NoGroupError(f"the leader sent a roster with {error}") from error
        roster = Roster(tickets)
        agreed = {(t.round, t.lineage, t.digest, t.layout) for t in tickets}
        ordered = list(roster.members) == sorted(set(roster.members))
        if len(agreed) != 1 or ticket not in tickets or not ordered or len(tickets) < self._spec.min_peers:
            raise NoGroupError("the leader sent a roster that does not agree with itself")
        return roster

    async def report(self, samples: int, batch_samples: int, batch_seconds: float) -> bool:
        """Tell the round's leader how far this peer is, and wait while another local batch would be too much.

        Args:
            samples: Samples that this peer has for the round.
            batch_samples: Of which in its last local batch.
            batch_seconds: How long that took.

        Returns:
            True when the round should be closed now; False when this peer should compute another local batch.
        """
        key = (self.head.round, self.head.lineage)
        seconds = min(batch_seconds, LONGEST_BATCH_SECONDS)
        while key == (self.head.round, self.head.lineage):
            leader = self._leaders.candidates(key, [])[0]
            try:
                if leader == self._rpc.peer_id:
                    reply = await self._take_report(leader, self.head, (samples, batch_samples, seconds))
                else:
                    head = self.head.without_proof().to_dict()
                    request = {"head": head, "samples": samples, "batch": batch_samples, "seconds": seconds}
                    reply = await self._rpc.call(leader, "rally.report", request, PROBE_TIMEOUT_SECONDS)
            except PeerRefusedError:
                return False
            except (PeerError, DeadlineError) as error:
                self._membership.suspect(leader, str(error))
                return False
            if reply.get("closing") is True:
                self._closing = key
            if self.is_closing() or reply.get("wait") is not True:
                break
        return self.is_closing()

    # --- leading -------------------------------------------------------------------------------------------------

    def _rally(self, head: Head) -> Rally:
        key = (head.round, head.lineage)
        rally = self._rallies.get(key)
        if rally is None or rally.over:
            while len(self._rallies) >= MAX_RALLIES:
                # Never let tickets for made-up rounds push out the real one.
                own = (self.head.round, self.head.lineage)
                oldest = min(self._rallies, key=lambda k: (k == own, self._rallies[k].last_activity))
                self._rallies.pop(oldest).answer_all({"kind": "refused", "reason": "too many rallies at once"})
            rally = self._rallies[key] = Rally(head, self._spec, GlobalBatch(self._batch_target, self._pace))
            rally.last_activity = asyncio.get_running_loop().time()
            task = asyncio.create_task(self._conduct(key, rally), name=f"rally-{head.round}")
            self._conductors.add(task)
            task.add_done_callback(self._conductors.discard)
        return rally

    async def _serve_join(self, channel: Channel, request: dict[str, Any]) -> None:
        ticket = Ticket.from_wire(request.get("ticket"), self._swarm, self._signer, self._spec.max_weight)
        head = Head.from_dict(request.get("head"))
        if ticket.peer != channel.remote or (head.round, head.lineage) != (ticket.round, ticket.lineage):
            raise IntegrityError("this ticket is not yours, or not for your head")
        tried, hops, avoid = request.get("tried"), request.get("hops"), request.get("avoid")
        if not (isinstance(tried, list) and type(hops) is int and isinstance(avoid, list)):
            raise IntegrityError("malformed ticket request")
        if not all(type(peer) is str for peer in [*tried, *avoid]):
            raise IntegrityError("malformed ticket request")
        self._membership.heard_from(ticket.peer)
        answer = asyncio.create_task(self._enlist(ticket, head, tried, hops, avoid), name="enlist")
        try:
            waiting: set[asyncio.Future[Any]] = {answer, channel.lost}
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            if answer.done():
                await channel.send(answer.result())
        finally:
            answer.cancel()
            await asyncio.gather(answer, return_exceptions=True)

    async def _enlist(self, ticket: Ticket, head: Head, tried: list[str], hops: int, avoid: list[str]) -> Answer:
        """The final answer to one ticket."""
        own = self._rpc.peer_id
        if self.head.lineage != head.lineage and self.head.outranks(head):
            return {"kind": "behind", "peer": own}
        key = (ticket.round, ticket.lineage)
        if hops < MAX_HOPS:
            best = self._leaders.candidates(key, tried)[0]
            if best not in (own, ticket.peer):
                return {"kind": "redirect", "peer": best}
        rally = self._rally(head)
        answer = rally.add(ticket, asyncio.get_running_loop().time(), frozenset(avoid[:MAX_AVOIDED_PEERS]))
        try:
            return await answer
        finally:
            rally.remove(ticket.peer, answer) if not rally.over else None

    async def _serve_report(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        head = Head.from_dict(request.get("head"))
        samples, batch, seconds = request.get("samples"), request.get("batch"), request.get("seconds")
        if not (type(samples) is int and type(batch) is int and type(seconds) is float):
            raise IntegrityError("malformed report")
        if not (0 <= batch <= samples < 1 << 40 and 0.0 <= seconds <= LONGEST_BATCH_SECONDS):
            raise IntegrityError("a report with values out of range")
        self._membership.heard_from(peer)
        if self.head.lineage != head.lineage and self.head.outranks(head):
            return {"closing": True}
        return await self._take_report(peer, head, (samples, batch, seconds))

    async def _take_report(self, peer: str, head: Head, told: tuple[int, int, float]) -> dict[str, Any]:
        """Note how far a peer is: samples, those of its last batch, its seconds. Answer once it is clear what to do.

        Returns:
            ``closing``: hand in what there is; ``wait``: ask again; neither: compute another local batch.
        """
        loop = asyncio.get_running_loop()
        rally = self._rally(head)
        rally.report(peer, Report(*told, loop.time()))
        deadline = loop.time() + REPORT_WAIT_SECONDS
        while not (rally.closing or rally.batch.is_full or rally.over):
            if rally.batch.should_begin(peer, self._expected(rally), loop.time()):
                return {"closing": False, "wait": False}
            if loop.time() >= deadline:
                return {"closing": False, "wait": True}
            await rally.wait_for_change(min(FORESIGHT_SECONDS, deadline - loop.time()))
        return {"closing": True, "wait": False}

    async def _serve_nudge(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        key = (request.get("round"), request.get("lineage"))
        if type(key[0]) is not int or type(key[1]) is not bytes:
            raise IntegrityError("malformed nudge")
        checked: Key = (key[0], key[1])
        if request.get("closing") is True:
            self._closing = checked
        if checked == (self.head.round, self.head.lineage):
            self._leaders.nudged_by(checked, peer)
        following = self._following[1] if self._following and self._following[0] == checked else ""
        own = self._rallies.get(checked)
        leads = following == self._rpc.peer_id and own is not None and not own.over
        if own is not None and leads and self._goes_before(checked, peer):
            own.answer_all({"kind": "redirect", "peer": peer})
            following = peer
        return {"head": self.head.without_proof().to_dict(), "leader": following}

    def _goes_before(self, key: Key, peer: str) -> bool:
        return self._leaders.order(key, peer) < self._leaders.order(key, self._rpc.peer_id)

    def _expected(self, rally: Rally) -> list[str]:
        told = {*rally.batch.peers, *self._leaders.nudgers((rally.head.round, rally.head.lineage))}
        peers = {*self._membership.expected(), *(peer for peer in told if not self._membership.is_suspect(peer))}
        peers.discard(self._rpc.peer_id)
        mine = (self.head.round, self.head.lineage) == (rally.head.round, rally.head.lineage)
        return sorted([*peers, self._rpc.peer_id] if self.participates and mine else peers)

    async def _conduct(self, key: Key, rally: Rally) -> None:
        """Run one rally to its end; the leader's main loop."""
        loop = asyncio.get_running_loop()
        probes: dict[str, asyncio.Task[None]] = {}
        probed_at: dict[str, float] = {}
        try:
            while not rally.over:
                rally.changed.clear()
                now = loop.time()
                if self.head.lineage != rally.head.lineage and self.head.outranks(rally.head):
                    rally.answer_all({"kind": "behind", "peer": self._rpc.peer_id})
                    break
                expected = self._expected(rally)
                decision = decide(rally.situation(expected, now), self._spec)
                if decision.action == "close" and not rally.closing:
                    rally.closing = True
                    probed_at.clear()
                    self._closing = key if key == (self.head.round, self.head.lineage) else self._closing
                if decision.action == "form":
                    self._finish(rally, expected, decision.reason)
                    break
                if decision.action == "give up":
                    rally.answer_all({"kind": "refused", "reason": decision.reason})
                    break
                if not rally.members and now - rally.last_activity > IDLE_RALLY_SECONDS:
                    break
                missing = [peer for peer in expected if peer not in rally.members and peer != self._rpc.peer_id]
                for peer in missing if rally.members or rally.closing else []:
                    if peer not in probes and now - probed_at.get(peer, -PROBE_SECONDS) >= PROBE_SECONDS:
                        probed_at[peer] = now
                        probes[peer] = asyncio.create_task(self._probe(peer, key, rally), name=f"probe-{peer[-8:]}")
                        probes[peer].add_done_callback(lambda _, peer=peer: probes.pop(peer, None))  # type: ignore[misc]
                next_probe = min(
                    (probed_at[peer] + PROBE_SECONDS - now for peer in missing if peer in probed_at),
                    default=PROBE_SECONDS,
                )
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(min(rally.next_change(now), max(next_probe, MIN_PAUSE_SECONDS))):
                        await rally.changed.wait()
        finally:
            for probe in list(probes.values()):
                probe.cancel()
            await asyncio.gather(*probes.values(), return_exceptions=True)
            if not rally.over:
                rally.answer_all({"kind": "refused", "reason": "the leader stopped"})
            if self._rallies.get(key) is rally:
                del self._rallies[key]

    def _finish(self, rally: Rally, expected: list[str], reason: str) -> None:
        late = [peer for peer in expected if peer not in rally.members]
        members = rally.form()
        for peer in late:
            self._membership.missed_round(peer)
        logger.debug("round %d: group of %d: %s", rally.head.round, len(members), reason)

    async def _probe(self, peer: str, key: Key, rally: Rally) -> None:
        """Ask a missing peer whether it lives; hurry it; learn of a leader that goes first or a swarm that is ahead."""
        try:
            head, leader = await self._nudge(peer, key, rally.closing)
        except PeerRefusedError:
            return
        except (PeerError, DeadlineError, IntegrityError) as error:
            self._membership.suspect(peer, str(error))
            self._leaders.lost(peer)
            rally.changed.set()
            return
        if rally.over:
            return
        if head.lineage != rally.head.lineage and head.outranks(rally.head):
            rally.answer_all({"kind": "behind", "peer": peer})
        elif (
            isinstance(leader, str)
            and leader
            and self._goes_before(key, leader)
            and not self._membership.is_suspect(leader)
        ):
            rally.answer_all({"kind": "redirect", "peer": leader})
