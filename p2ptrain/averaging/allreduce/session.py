"""All-reduce of one group in one attempt: scatter, agree on contributors, reduce once, gather, check, sign.

Member i owns the share ``[bounds[i], bounds[i+1])`` of the vector, and opens one stream to every other member j:

====================  ==================================================================================
i → j                 `Bring`, i's encoded part of j's share, and `Committed` if there are spot checks
j → i, i → j          above level 0: `Trace` of some chunks, and `Shown` with their origin
j → i                 `Arrived`: the part is complete
j → i                 `Mask`: the members whose part j holds completely
j → i                 `MeanFollows`, the encoded mean of j's share, and `Stated` if there are spot checks
i → j, j → i          `Check` of some chunks, and `Opens` with what others sent for them (see `SpotChecks`);
                      or `Signatures`, if a majority has signed before i asks
j → i                 `Clear`, once all checks of j's passed
j → i                 `Signature` of the result, once j holds the mean of every share; later `Signatures`
====================  ==================================================================================

The contributors are the intersection of all owners' masks: a part that is incomplete at one owner counts nowhere
(Moshpit SGD, arXiv 2103.03239, section 3; the certificate is ours). Unreachable members own no share. Owners forward
the signatures that two such members cannot exchange. A member that gives up sends `GaveUp` instead of its pending
messages. Its data stay in its `Attempt`, from which others can still complete theirs
(`p2ptrain.averaging.commit.recovery`).
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, replace
from enum import StrEnum

from p2ptrain.averaging.allreduce.member import Liveness, Member, first_to_give_up
from p2ptrain.averaging.allreduce.messages import GaveUp, Signatures
from p2ptrain.averaging.allreduce.streams import IncomingStreams, OutgoingStream
from p2ptrain.averaging.allreduce.variants import new_share, new_verifier
from p2ptrain.averaging.commit.attempt import (
    Attempt,
    AttemptFailedError,
    Contribution,
    LateError,
    PeerPart,
    UnencodableError,
)
from p2ptrain.averaging.context import PeerContext, Sending
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.timing.deadlines import FORWARD_SECONDS, quorum_of_others, straggler_seconds
from p2ptrain.averaging.vector.reduce import EncodedStream, ExactMean
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import CodecError
from p2ptrain.tasks import Tasks, to_its_end, until_ended

LINGER_SECONDS = 2.0  # how long a member serves its mean and signature after its commit
OUT_OF_PROPORTION = "out of proportion"  # refusal counter: contributions that the closing of a mask excludes


@dataclass(frozen=True)
class Observer:
    """Callbacks of a session.

    Attributes:
        phase_entered: A phase begins: reduce, gather or commit.
        part_arrived: A part's transfer ended, complete or not: sender, bytes, seconds, and the sender's streams.
        evidence_found: There is evidence that an owner falsified its mean; maybe after the session's `run`.
    """

    phase_entered: Callable[[str], None]
    part_arrived: Callable[[str, int, float, int], None]
    evidence_found: Callable[[bytes], None]


class Trouble(StrEnum):
    """How a member made an attempt fail."""

    LATE = "late"  # silent, or late with its contribution: possibly alive, but slow
    SLOW = "slow"  # late with its share's mean or with a signature
    FAULT = "fault"  # its share failed a check
    BROKE = "broke"  # its stream broke, or it sent a malformed message
    ACCUSED = "accused"  # it gave up first, and blamed others


@dataclass(frozen=True)
class Blame:
    """A member that made an attempt fail, or else one of ``excuses``: its accuser, or members that it accuses."""

    peer: str
    trouble: Trouble
    reason: str
    excuses: tuple[str, ...] = ()


@dataclass(frozen=True)
class SessionResult:
    """Outcome of an attempt for one member.

    Attributes:
        blamed: Members that made it fail.
        is_proven: False if members are blamed for late checks: others may have received theirs in time.
        silent: Peers that cannot be expected to answer.
        refused: By peer: why its contribution was refused, or that it signed another result.
        refusal: Why this member or most owners refused its contribution; empty if they did not. One hostile owner can
            keep a contribution out of a round, but is not believed.
        evidence: Against an owner that falsified its mean; empty without one.
        sent_parts: By share: this member's encoded parts, if error feedback or its log needs them; its own share's only
            if the codec is sparse.
        exact_mean: The own share's mean before encoding; None if the codec lost nothing.
        part: Another member's part of the own share, drawn at random; None without one.
    """

    certificate: Certificate | None
    failure: AttemptFailedError | None
    blamed: tuple[Blame, ...]
    is_proven: bool
    silent: frozenset[str]
    refused: dict[str, str]
    refusal: str
    evidence: bytes
    sent_parts: dict[int, Buffer]
    exact_mean: ExactMean | None
    contribution: Contribution
    part: PeerPart | None


class AllReduceSession:
    """One member's part in one attempt: `run` it once, let `incoming` serve the others meanwhile, then `close` it."""

    def __init__(
        self,
        context: PeerContext,
        attempt: Attempt,
        contribution: Contribution,
        observer: Observer,
        slow_checkers: set[str],
    ) -> None:
        """``attempt`` keeps what the session learns; it updates ``slow_checkers``, the peers whose checks timed out."""
        loop = asyncio.get_running_loop()
        self.context = context
        self.attempt = attempt
        self.contribution = contribution
        self.observer = observer
        self.members = tuple(
            Member(index, ticket, attempt.size(index)) for index, ticket in enumerate(attempt.roster.tickets)
        )
        self.own = self.members[attempt.roster.index_of(context.rpc.peer_id)]
        self.others = [member for member in self.members if member is not self.own]
        self.owners = [member for member in self.members if member.size]
        self.began = loop.time()
        self.deadline = math.inf
        # All members see all of the few sparse parts, and compare their own with what they sent.
        attempt.audited = context.spec.spot_checks > 0 and len(self.members) > 1 and not attempt.codec.sparse
        self.share = new_share(attempt, contribution, self.own.index)
        self.own_mask: asyncio.Future[frozenset[int]] = loop.create_future()
        self.own_mean: asyncio.Future[EncodedStream] = loop.create_future()
        self.given_up: asyncio.Future[GaveUp] = loop.create_future()
        self.has_signed = asyncio.Event()
        self.is_certified = asyncio.Event()
        self.sent_parts: dict[int, Buffer] = attempt.sent_parts if attempt.lists_parts else {}
        self.unencodable = ""
        self.tasks = Tasks(self.on_defect)
        self.liveness = Liveness(self)
        self._defect = ""
        self._mask_closed_at: float | None = None
        self._exact_mean: ExactMean | None = None
        self.verifier = new_verifier(self, slow_checkers)
        self.incoming = IncomingStreams(self)
        self._outgoing: dict[asyncio.Task[None], Member] = {}
        self._closing_mask: asyncio.Task[None] | None = None
        self._asking: list[asyncio.Task[None]] = []

    # --- phases ---------------------------------------------------------------------------------------------------

    async def run(self) -> SessionResult:
        """Take part until a majority has signed or the attempt failed; the contribution is not read afterwards."""
        loop = asyncio.get_running_loop()
        self.began, certificate, failure = loop.time(), None, None
        self.deadline = self.began + self.attempt.seconds
        try:
            self._scatter()
            await self._agree()
            await self._reduce()
            await self._gather()
            await self.verifier.open_sums()
            await self._sign()
            certificate = await self._collect_signatures()
        except AttemptFailedError as error:
            failure = error
            self._give_up(error)
        finally:
            await to_its_end(self._stop_sending())
        return self._result(certificate, failure)

    def _scatter(self) -> None:
        after = self.own.index  # Begin with different members: all would otherwise send to the first one at once.
        for member in (*self.others[after:], *self.others[:after]):
            stream = OutgoingStream(self, member)
            self._outgoing[self.tasks.start(stream.run(), f"allreduce-{member.index}")] = member
        self._closing_mask = self.tasks.start(self._close_mask(), "mask")

    async def _close_mask(self) -> None:
        """As an owner: decide which parts count: all, or a quorum and others within a timeout after it."""
        try:
            await self.context.runtime.process(self.share.own.nbytes, self.share.measure_own)
        except CodecError as error:
            self.unencodable = str(error)
            self.changed()
            return
        if self.share.own_part:
            self.sent_parts[self.own.index] = self.share.own_part
        loop, others = asyncio.get_running_loop(), len(self.others)
        quorum, quorum_at = quorum_of_others(others, self.context.spec.quorum), math.inf
        while sum(m.index in self.share.parts or bool(m.refusal) or m.is_silent for m in self.others) < others:
            if quorum_at == math.inf and len(self.share.parts) >= quorum:
                quorum_at = loop.time()
            until = min(self.deadline, self.straggler_deadline(self.began, quorum_at))
            if loop.time() >= until:
                break
            self.attempt.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self.attempt.changed.wait()
        self.own.mask = self.share.judge([claim.trust for claim in self.attempt.claims(range(len(self.members)))])
        for index, reason in self.share.refused.items():
            if index == self.own.index:
                self.own.refused_us = reason
            else:
                self.refuse(self.members[index].peer, reason)
                self.context.rpc.count_refusal(self.members[index].peer, OUT_OF_PROPORTION)
        self._mask_closed_at = loop.time()
        self.own_mask.set_result(self.own.mask)
        self.changed()

    async def _agree(self) -> None:
        """Wait for all owners' masks; the contributors are their intersection."""
        while waiting := [member for member in self.owners if member.mask is None]:
            self.fail_if_lost(waiting)
            if self.own.mask is not None:
                in_time = self.own.mask | self.share.refused.keys()
                late = [member for member in waiting if member.index not in in_time]
                if late:  # Their means would be late, too.
                    raise LateError("scatter: a part did not come in time", self.ids(late), as_owners=False)
            await self.wait_for(waiting, min(map(self._mask_is_due, waiting)))
        agreed = frozenset.intersection(*(member.mask for member in self.owners if member.mask is not None))
        if not agreed:
            raise AttemptFailedError("no contribution was complete at every owner")
        self.attempt.contributors = tuple(sorted(agreed))

    def _mask_is_due(self, owner: Member) -> float:
        """Return the deadline for another owner's mask, which closes at about the same time as this member's.

        The owner also needs this member's part, which should arrive soon after a quorum of owners acknowledged theirs.
        """
        arrivals = sorted(each.arrived_at for each in self.others if each.arrived_at is not None)
        needed = quorum_of_others(len(self.other_owners), self.context.spec.quorum)
        if self._mask_closed_at is None or len(arrivals) < needed:
            return math.inf
        arrived_at = arrivals[needed - 1] if owner.arrived_at is None else owner.arrived_at
        return self.straggler_deadline(self.began, max(self._mask_closed_at, arrived_at))

    async def _reduce(self) -> None:
        """As an owner: average the parts and encode the mean once; streams send each piece as soon as it is ready."""
        self._enter("reduce")
        attempt, runtime = self.attempt, self.context.runtime
        if not self.own.size:
            return
        assert attempt.contributors is not None
        mean = EncodedStream(runtime.buffers.lend(attempt.mean_codec_of(self.own.index).encoded_bytes(self.own.size)))
        self.own_mean.set_result(mean)
        claims = attempt.claims(attempt.contributors)
        try:
            self._exact_mean = await self.share.reduce(runtime, attempt.contributors, claims, mean)
        except CodecError as error:
            raise AttemptFailedError(f"the mean cannot be encoded: {error}") from error
        root = await runtime.process(len(mean.data), attempt.mean_root, self.own.index, mean.data)
        await self.verifier.state(root)
        attempt.add_mean(self.own.index, mean.data, root)

    async def _gather(self) -> None:
        self._enter("gather")
        loop = asyncio.get_running_loop()
        began, until = loop.time(), math.inf
        while waiting := [member for member in self.owners if self.attempt.means[member.index] is None]:
            self.fail_if_lost(waiting)
            here = [member for member in self.other_owners if member not in waiting]
            if until == math.inf and len(here) >= quorum_of_others(len(self.other_owners), self.context.spec.quorum):
                usual = loop.time() - began  # For the longest mean that arrived; a longer one takes longer.
                longest = max((member.size for member in here), default=1)
                usual *= max(1.0, max(member.size for member in waiting) / longest)
                until = self.straggler_deadline(began, began + usual)
            await self.wait_for(waiting, until)

    async def _sign(self) -> None:
        """Sign the result, unless a majority signed before this member's checks passed."""
        self._enter("commit")
        self.attempt.make_result(self.context.signer)
        if await self.verifier.may_sign():
            await self.context.runtime.offload(self.attempt.sign, self.context.signer, self.context.ballots)
        self.has_signed.set()
        self.changed()

    async def _collect_signatures(self) -> Certificate:
        attempt, asking = self.attempt, self._asking
        while (certificate := attempt.certificate()) is None:
            self.verifier.fail_on_evidence()
            if attempt.is_held and attempt.absent_voters and not asking:
                asking.append(self.tasks.start(self.verifier.ask_voters(), "ask voters"))
            for member in self.others:
                if member.contradiction:
                    raise AttemptFailedError(f"{attempt.phase}: {member.contradiction}")
            missing = [member for member in self.members if member.peer not in attempt.proofs]
            # An unreachable member may still send its signature to a reachable one.
            gone = [m for m in missing if m.gave_up or (m.ticket.reachable and m.lost)]
            if len(self.members) - len(gone) < attempt.roster.majority:
                self.fail_if_lost(gone)
            self._fail_without_voters({member.peer for member in gone}, all(task.done() for task in asking))
            await self.wait_for(missing)
        self.is_certified.set()
        return certificate

    def _fail_without_voters(self, gone: set[str], were_asked: bool) -> None:
        """Raise `AttemptFailedError` if too few voters are left to sign, once the absent ones ``were_asked``."""
        attempt = self.attempt
        if not attempt.is_last or not attempt.is_held or not were_asked:
            return
        possible = {*attempt.proofs, *attempt.roster.members} - (gone - attempt.proofs.keys())
        assert attempt.body is not None
        if reason := attempt.head.table.why_invalid(attempt.body, possible):
            why = f"{attempt.phase}: {reason}" + (f" ({attempt.refusal})" if attempt.refusal else "")
            raise AttemptFailedError(why, self.ids(m for m in self.others if m.peer in gone))

    def _result(self, certificate: Certificate | None, failure: AttemptFailedError | None) -> SessionResult:
        faults = self.verifier.faults
        blamed = {m.peer: Blame(m.peer, Trouble.LATE, m.lost) for m in self.others if m.is_silent} if failure else {}
        accuser = failure.accuser if failure else ""
        accused = self.members[self.attempt.roster.index_of(accuser)].blames if accuser else None
        excuses = self.ids(self.members[index] for index in accused or ())
        for peer in failure.suspects if failure else ():
            member = self.members[self.attempt.roster.index_of(peer)]
            trouble = Trouble.BROKE
            if member in faults:
                trouble = Trouble.FAULT
            elif isinstance(failure, LateError):
                trouble = Trouble.SLOW if failure.as_owners else Trouble.LATE
            elif member.was_cut_short:
                trouble = Trouble.LATE
            blamed[peer] = Blame(peer, trouble, str(failure), excuses if peer == accuser else (accuser,))
        if accuser and accuser not in blamed:
            blamed[accuser] = Blame(accuser, Trouble.ACCUSED, str(failure), excuses)
        refusals = [owner.refused_us for owner in self.owners if owner.refused_us]
        most_refused = 2 * len(refusals) > len(self.owners)
        sent_parts, exact_mean = self.sent_parts, self._exact_mean
        part = self._kept_part(certificate)
        self.sent_parts, self._exact_mean = {}, None  # Release large buffers: the session lingers.
        self.share.kept = None
        return SessionResult(
            certificate,
            failure,
            tuple(blamed.values()),
            not (isinstance(failure, LateError) and faults),
            frozenset(m.peer for m in self.others if m.is_silent or m.is_opening),
            {m.peer: m.refusal or m.contradiction for m in self.others if m.refusal or m.contradiction},
            self.own.refused_us or (refusals[0] if most_refused else ""),
            self.verifier.evidence,
            sent_parts,
            exact_mean,
            self.contribution,
            part,
        )

    def _kept_part(self, certificate: Certificate | None) -> PeerPart | None:
        kept = self.share.kept
        if certificate is None or kept is None:
            return None
        body, own = certificate.body, self.own.index
        samples = {index: samples for index, _, samples in body.contributors}
        if kept[0] not in samples:
            return None
        size = body.bounds[own + 1] - body.bounds[own]
        return PeerPart(body.members[kept[0]], samples[kept[0]], body.bounds[own], size, *kept[1:])

    # --- for streams and checks -----------------------------------------------------------------------------------

    def describe_sending(self) -> Sending:
        """Return which parts this member is about to send, and who may see them."""
        attempt, own = self.attempt, self.own.ticket
        seen_by = self.others if attempt.audited or attempt.lists_parts else self.other_owners
        return Sending(
            own.round, own.level, self.contribution.vector.numel(), self.contribution.codec.name, own.tokens,
            self.ids(seen_by),
        )  # fmt: skip

    @property
    def other_owners(self) -> list[Member]:
        return [member for member in self.owners if member is not self.own]

    def ids(self, members: Iterable[Member]) -> tuple[str, ...]:
        """Return the ids of members in roster order, without this one."""
        return tuple(m.peer for m in sorted(members, key=lambda member: member.index) if m is not self.own)

    def changed(self) -> None:
        """Wake all tasks that wait for a change."""
        self.attempt.changed.set()

    def refuse(self, peer: str, reason: str) -> None:
        """Exclude a peer's part, if it is a member."""
        index = self.attempt.roster.index_of(peer)
        if index >= 0:
            self.members[index].refusal = f"peer {peer[-8:]} {reason}"
            self.changed()

    def note_gave_up(self, member: Member, message: GaveUp) -> None:
        """Record a member's `GaveUp`: whom it blames, and its complaints."""
        if not member.gave_up:
            self.verifier.note_complaints(message.complaints)
        member.blames = frozenset(index for index in message.blamed if index < len(self.members))
        # It names only members that it needed. Another one, without a share, may have fallen silent, too.
        self.liveness.note_quiet()

    def note_signatures(self, message: Signatures) -> None:
        """Keep the valid signatures among those that another member forwards."""
        self.attempt.pass_on(message.proofs, self.context.signer)
        self.changed()

    def signatures(self) -> Signatures:
        return Signatures(tuple(sorted(self.attempt.proofs.items())))

    def accuse(self, peer: str, fault: str) -> None:
        """Fail the attempt, if it is still running: evidence convicts ``peer`` of a false mean."""
        index = self.attempt.roster.index_of(peer)
        if index >= 0:
            self.members[index].accusation = fault
            self.changed()

    def fail_if_lost(self, needed: Collection[Member]) -> None:
        """Raise `AttemptFailedError` if a needed member is lost or gave up, most gave up, or this one failed."""
        phase = self.attempt.phase
        if self.unencodable:
            raise UnencodableError(f"the local update cannot be encoded: {self.unencodable}")
        if self._defect:
            raise AttemptFailedError(f"{phase}: {self._defect}")
        for member in self.others:
            if member.accusation:
                raise AttemptFailedError(f"{phase}: peer {member.peer[-8:]}: {member.accusation}", (member.peer,))
        lost = [member for member in needed if member.lost]
        if lost:
            raise AttemptFailedError(f"{phase}: lost {lost[0].lost}", self.ids(lost))
        blames = {member.index: member.blames for member in self.others if member.blames is not None}
        most_did = len(self.members) - len(blames) < self.attempt.roster.majority
        if most_did or (self.attempt.body is None and any(member.gave_up for member in needed)):
            blamed = frozenset.union(*blames.values())
            late = [member for member in needed if member.index in blamed]
            why = f"{phase}: {'most others' if most_did else 'a member'} gave up"
            raise LateError(why, self.ids(late), self.members[first_to_give_up(blames)].peer)

    async def wait_for(self, waiting: Collection[Member], until: float = math.inf) -> None:
        """Wait for a change; raise `LateError` after ``until``, in loop time, or the attempt's deadline."""
        self.attempt.changed.clear()
        try:
            async with asyncio.timeout_at(min(until, self.deadline)):
                await self.attempt.changed.wait()
        except TimeoutError:
            late = [member for member in waiting if not member.gave_up] or waiting
            raise LateError(f"{self.attempt.phase}: others took too long", self.ids(late)) from None

    def straggler_deadline(self, since: float, quorum_at: float, share: float = 1.0) -> float:
        """Return the deadline for the rest after a quorum at ``quorum_at``, in loop time; infinite without a quorum.

        The wait began at ``since``; ``share`` is the fraction of the usual timeout. All waits allow for the farthest
        member, because a member waits for owners, and owners wait for it.
        """
        if quorum_at == math.inf:
            return math.inf
        farthest = max((each.round_trip_seconds for each in self.others if not each.lost), default=0.0)
        return quorum_at + share * straggler_seconds(quorum_at - since, self.context.spec.grace_seconds, farthest)

    def _enter(self, phase: str) -> None:
        self.attempt.phase = phase
        self.observer.phase_entered(phase)
        self.changed()

    def on_defect(self, error: Exception) -> None:
        """Fail the attempt because a background task of this member failed."""
        self._defect = f"a part of this peer failed ({error!r}): see the log"
        self.changed()

    # --- the end --------------------------------------------------------------------------------------------------

    def _give_up(self, failure: AttemptFailedError) -> None:
        """Send `GaveUp` to the other members, with those that this one saw fail: who gave up first, or else others."""
        self.attempt.withholds = self.own.size > 0 and not self.own_mean.done()
        if not self.given_up.done():
            failed = [failure.accuser] if failure.accuser else failure.suspects
            blamed = tuple(self.attempt.roster.index_of(peer) for peer in failed)
            self.given_up.set_result(GaveUp(blamed, tuple(self.verifier.complaints)))

    async def _stop_sending(self) -> None:
        """End the streams that this member opened.

        A complete stream ends in order, so that its connection can be reused. After a certificate, this also holds for
        a stream that only waits for signatures or for a vote, if they arrive soon.
        """
        if self._closing_mask is not None:
            self._closing_mask.cancel()
            await until_ended(self._closing_mask)
        await self.verifier.stop()
        certified = self.is_certified.is_set()
        cut = [task for task, m in self._outgoing.items() if not (m.is_through or (certified and m.has_mean))]
        asking = [] if certified else self._asking
        for task in (*cut, *asking):
            task.cancel()
        await until_ended(*cut, *asking)
        for task in cut:
            del self._outgoing[task]

    async def close(self, *, linger: bool) -> None:
        """End all streams; with ``linger``, first serve mean and signature for up to `LINGER_SECONDS`."""
        await self._stop_sending()
        await self.incoming.close(LINGER_SECONDS if linger else 0.0)
        waiting = [task for task, member in self._outgoing.items() if not member.is_through]
        if unfinished := [*waiting, *self._asking]:
            _, late = await asyncio.wait(unfinished, timeout=FORWARD_SECONDS)
            for task in late:
                task.cancel()
        await until_ended(*self._outgoing, *self._asking)
        self._outgoing.clear()
        self._asking.clear()
        self.contribution = replace(self.contribution, origin=None)  # Release it: streams refer to the session.
