"""All-reduce of one group in one attempt: scatter, agree on contributors, reduce once, gather, check, sign.

Every member i owns the share ``[bounds[i], bounds[i+1])`` of the vector and opens one stream to every other member j
(`p2ptrain.averaging.allreduce.messages` has the messages):

====================  ==================================================================================
i → j                 `Bring`, i's encoded part of j's share, and i's signature of it
j → i, i → j          above level 0: which chunks of it j wants traced, and what they come from
j → i                 `Arrived`: what was written may still have been on its way for long
j → i                 `Mask`: the members whose part j holds completely
j → i                 `MeanFollows`, the encoded mean of j's share, and j's signature of it
i → j, j → i          which chunks of the share i wants to check, and what others sent for them (see `SpotChecks`);
                      or all signatures, if a majority has signed before i asks
j → i                 `Clear`, once all checks of j's passed
j → i                 `Signature` of the result, once j holds the mean of every share; later all that j has
====================  ==================================================================================

The contributors are the intersection of all owners' masks: incomplete at one owner counts nowhere. An owner closes its
mask when every part is there, or when a quorum is and the rest had time enough (`p2ptrain.averaging.timing.deadlines`);
by the same rule members wait for masks and means. The owner encodes its mean once and decodes those bytes like
everybody else. (Moshpit SGD, arXiv 2103.03239, section 3; the certificate is ours.) Sparse parts are not encoded again:
their list is the mean. A slow member may encode its own parts with another codec than the mean's
(`p2ptrain.averaging.commit.encodings`).

Members that no stream can be opened to own no share. What two of them cannot tell each other, owners pass on.

An attempt that fails names the members at fault. What this member holds at that point stays in its `Attempt`, from
which other members can still complete theirs (`p2ptrain.averaging.commit.recovery`). A member that gives up sends
`GaveUp` in place of what it owes; the others come to their own conclusion, or blame it.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

from p2ptrain.averaging.allreduce.incoming import IncomingStreams
from p2ptrain.averaging.allreduce.member import Blame, Liveness, Member, Trouble
from p2ptrain.averaging.allreduce.messages import GaveUp, Request, Signatures
from p2ptrain.averaging.allreduce.outgoing import OutgoingStream
from p2ptrain.averaging.allreduce.spot_checks import SpotChecks, Verifier
from p2ptrain.averaging.commit.attempt import Attempt, AttemptFailedError, LateError, UnencodableError
from p2ptrain.averaging.commit.provenance import Origin, Source
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.timing.deadlines import FORWARD_SECONDS, patience_seconds, quorum_of_others
from p2ptrain.averaging.vector.reduce import ExactMean, OwnShare
from p2ptrain.averaging.vector.streaming import EncodedStream
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, dense_codec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.tasks import Tasks, to_its_end, until_ended

if TYPE_CHECKING:
    import torch

LINGER_SECONDS = 2.0
"""How long a member that has committed lets the others fetch its mean and signature."""
OUT_OF_PROPORTION = "out of proportion"
"""What a refusal at the closing of a mask is counted as."""


@dataclass(frozen=True)
class Contribution:
    """What one member brings to an attempt.

    Attributes:
        vector: fp32, shape ``[bounds[-1]]``; must not change until the session's `run` returns.
        codec: How its parts are encoded.
        origin: Above level 0: what the vector comes from.
    """

    vector: torch.Tensor
    codec: Codec
    origin: Origin | None = None


class Observer(Protocol):
    """Hears of what happens in a session."""

    def phase_entered(self, phase: str) -> None:
        """A phase begins: reduce, gather or commit."""

    def part_arrived(self, peer: str, num_bytes: int, seconds: float, senders: int) -> None:
        """A part came, wholly or not, while so many members sent at the same time."""

    def evidence_found(self, evidence: bytes) -> None:
        """An owner falsified its mean, and this proves it; perhaps after the session's `run`."""


@dataclass(frozen=True)
class SessionResult:
    """How an attempt ended for one member.

    Attributes:
        certificate: Of the result; None if the attempt failed.
        failure: Why it did; None if it did not.
        blamed: The members that kept it from its end.
        is_proven: False if members are blamed for checks that came late: others may have gone on in time.
        silent: Members that no answer can be expected of.
        refused: By member: why its contribution was refused, or that it signed something else.
        refusal: Why this member's contribution was refused, by itself or by most owners; empty if it was not. One
            hostile owner may refuse anybody: that keeps a contribution out of one round, but is not believed.
        evidence: Against an owner that falsified its mean; empty without one.
        sent_parts: By share: the encoded parts that this member sent, for error feedback; under a sparse codec that of
            its own share too.
        exact_mean: The mean of the own share before encoding; None if that lost nothing.
        contribution: What this member brought.
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


class AllReduceSession:
    """One member's part in one attempt: `run` it once, `serve` the others' streams meanwhile, then `close` it."""

    def __init__(
        self,
        context: PeerContext,
        attempt: Attempt,
        contribution: Contribution,
        observer: Observer,
        slow_checkers: set[str],
    ) -> None:
        """
        Args:
            context: This peer.
            attempt: The roster, and where to leave what is learnt.
            contribution: What this member brings.
            observer: Hears of what happens.
            slow_checkers: Peers whose checks took too long in an earlier attempt; kept up to date here.
        """
        loop = asyncio.get_running_loop()
        self.context = context
        self.attempt = attempt
        self.contribution = contribution
        self.observer = observer
        self.members = tuple(
            Member(index, ticket, attempt.size(index)) for index, ticket in enumerate(attempt.roster.tickets)
        )
        self.own = self.members[attempt.roster.index_of(context.peer_id)]
        self.others = [member for member in self.members if member is not self.own]
        self.owners = [member for member in self.members if member.size]
        self.began = loop.time()
        self.deadline = math.inf
        self.share = self._own_share()
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
        self.verifier = SpotChecks(self, slow_checkers) if attempt.audited else Verifier(self)
        self._incoming = IncomingStreams(self)
        self._outgoing = [OutgoingStream(self, member) for member in self.others]
        self._closing_mask: asyncio.Task[None] | None = None

    def _own_share(self) -> OwnShare:
        attempt, spec = self.attempt, self.context.spec
        low, high = attempt.bounds[self.own.index : self.own.index + 2]
        # Sparse parts are so few that all members see all of them, and hold them against what they sent.
        attempt.audited = spec.spot_checks > 0 and len(self.members) > 1 and not attempt.codec.sparse
        return OwnShare(
            dense_codec(attempt.codec).part(low, high), spec, self.contribution.vector[low:high], self.own.index,
            len(self.members), attempt.codec.part(low, high) if attempt.codec.sparse else None, attempt.lists_parts,
            chunk=attempt.chunk, audited=attempt.audited,
        )  # fmt: skip

    # --- the life of an attempt -----------------------------------------------------------------------------------

    async def run(self) -> SessionResult:
        """Take part until a majority has signed, or until that cannot happen any more.

        The contribution is not read any more when this returns.
        """
        loop = asyncio.get_running_loop()
        self.began, certificate, failure = loop.time(), None, None
        self.deadline = self.began + self.attempt.seconds
        try:
            self._scatter()
            await self._agree()
            await self._reduce()
            await self._gather()
            await self._sign()
            certificate = await self._collect_signatures()
        except AttemptFailedError as error:
            failure = error
            self._give_up(error.suspects)
        finally:
            await to_its_end(self._stop_sending())
        return self._result(certificate, failure)

    def _scatter(self) -> None:
        """Send the own parts to their owners, and collect those of the own share."""
        for stream in self._outgoing:
            stream.start()
        self._closing_mask = self.tasks.start(self._close_mask(), "mask")

    async def _close_mask(self) -> None:
        """As an owner: decide which parts count, all or those of a quorum and of others that came soon after it."""
        try:
            await self.context.runtime.offload(self.share.measure_own)
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
            until = min(self.deadline, self.patience_ends(self.began, quorum_at))
            if loop.time() >= until:
                break
            self.attempt.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout_at(until):
                    await self.attempt.changed.wait()
        self.own.mask = self.share.judge()
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
        """Wait for all owners' masks; what each of them holds is averaged."""
        while waiting := [member for member in self.owners if member.mask is None]:
            self.fail_if_lost(waiting)
            if self.own.mask is not None:
                in_time = self.own.mask | self.share.refused.keys()
                late = [member for member in waiting if member.index not in in_time]
                if late:  # A member whose part was late will not be in time with its share's mean.
                    raise LateError("scatter: a part did not come in time", self.ids(late), as_owners=False)
            await self.wait_for(waiting, min(map(self._mask_is_due, waiting)))
        agreed = frozenset.intersection(*(member.mask for member in self.owners if member.mask is not None))
        if not agreed:
            raise AttemptFailedError("no contribution was complete at every owner")
        self.attempt.contributors = tuple(sorted(agreed))

    def _mask_is_due(self, owner: Member) -> float:
        """Return until when another owner's mask may take.

        The owner needs this member's part, which should be there soon after a quorum of the owners has its own. It
        closes its mask about when this member does.
        """
        arrivals = sorted(each.arrived_at for each in self.others if each.arrived_at is not None)
        needed = quorum_of_others(len(self.other_owners), self.context.spec.quorum)
        if self._mask_closed_at is None or len(arrivals) < needed:
            return math.inf
        arrived_at = arrivals[needed - 1] if owner.arrived_at is None else owner.arrived_at
        return self.patience_ends(self.began, max(self._mask_closed_at, arrived_at))

    async def _reduce(self) -> None:
        """As an owner: average the parts and encode the mean once; streams send each piece as soon as it is there."""
        self._enter("reduce")
        attempt, runtime = self.attempt, self.context.runtime
        if not self.own.size:
            return
        assert attempt.contributors is not None
        mean = EncodedStream(runtime.buffers.lend(attempt.mean_codec_of(self.own.index).encoded_bytes(self.own.size)))
        self.own_mean.set_result(mean)
        tokens = [self.members[index].ticket.tokens for index in attempt.contributors]
        try:
            self._exact_mean = await self.share.reduce(runtime, attempt.contributors, tokens, mean)
        except CodecError as error:
            raise AttemptFailedError(f"the mean cannot be encoded: {error}") from error
        attempt.add_mean(self.own.index, mean.data, await self.verifier.state(mean.data))

    async def _gather(self) -> None:
        """Wait for the other owners' means."""
        self._enter("gather")
        loop = asyncio.get_running_loop()
        began, until = loop.time(), math.inf
        while waiting := [member for member in self.owners if self.attempt.means[member.index] is None]:
            self.fail_if_lost(waiting)
            here = [member for member in self.other_owners if member not in waiting]
            if until == math.inf and len(here) >= quorum_of_others(len(self.other_owners), self.context.spec.quorum):
                usual = loop.time() - began  # For the longest share that is here; a longer one takes longer.
                longest = max((member.size for member in here), default=1)
                usual *= max(1.0, max(member.size for member in waiting) / longest)
                until = self.patience_ends(began, began + usual)
            await self.wait_for(waiting, until)

    async def _sign(self) -> None:
        """Sign the result, unless a majority did before this member's checks were through."""
        self._enter("commit")
        self.attempt.make_result(self.context.signer)
        if await self.verifier.may_sign():
            self.attempt.sign(self.context.signer)
        self.has_signed.set()
        self.changed()

    async def _collect_signatures(self) -> Certificate:
        attempt = self.attempt
        while (certificate := attempt.certificate()) is None:
            self.verifier.fail_on_evidence()
            for member in self.others:
                if member.contradiction:
                    raise AttemptFailedError(f"{attempt.phase}: {member.contradiction}")
            missing = [member for member in self.members if member.peer not in attempt.proofs]
            # A member that cannot be reached may still give its signature to one that can.
            gone = [m for m in missing if m.gave_up or (m.ticket.reachable and m.lost)]
            if len(self.members) - len(gone) < attempt.roster.majority:
                self.fail_if_lost(gone)
            await self.wait_for(missing)
        self.is_certified.set()
        return certificate

    def _result(self, certificate: Certificate | None, failure: AttemptFailedError | None) -> SessionResult:
        troubles = self.verifier.faulty()
        blamed = {m.peer: Blame(m.peer, Trouble.LATE, m.lost) for m in self.others if m.is_silent} if failure else {}
        for peer in failure.suspects if failure else ():
            member = self.members[self.attempt.roster.index_of(peer)]
            trouble = Trouble.BROKE
            if member in troubles:
                trouble = Trouble.FAULT
            elif isinstance(failure, LateError):
                trouble = Trouble.SLOW if failure.as_owners else Trouble.LATE
            elif member.was_cut_short:
                trouble = Trouble.LATE
            blamed[peer] = Blame(peer, trouble, str(failure))
        sent_parts, exact_mean, contribution = self.sent_parts, self._exact_mean, self.contribution
        self.sent_parts, self._exact_mean = {}, None  # They are large, and the session lingers.
        return SessionResult(
            certificate,
            failure,
            tuple(blamed.values()),
            not (isinstance(failure, LateError) and troubles),
            frozenset(m.peer for m in self.others if m.is_silent or m.is_opening),
            {m.peer: m.refusal or m.contradiction for m in self.others if m.refusal or m.contradiction},
            self._refusal(),
            self.verifier.evidence,
            sent_parts,
            exact_mean,
            contribution,
        )

    def _refusal(self) -> str:
        refusals = [owner.refused_us for owner in self.owners if owner.refused_us]
        if self.own.refused_us or 2 * len(refusals) > len(self.owners):
            return self.own.refused_us or refusals[0]
        return ""

    # --- what streams and checks tell -----------------------------------------------------------------------------

    @property
    def other_owners(self) -> list[Member]:
        """The other members that own a share."""
        return [member for member in self.owners if member is not self.own]

    def ids(self, members: Iterable[Member]) -> tuple[str, ...]:
        """Return the peers of members, this one left out, in the order of the roster."""
        return tuple(m.peer for m in sorted(members, key=lambda member: member.index) if m is not self.own)

    def changed(self) -> None:
        """Let all that wait for something look again."""
        self.attempt.changed.set()

    def refuse(self, peer: str, reason: str) -> None:
        """Do without a peer's part, if it is a member."""
        index = self.attempt.roster.index_of(peer)
        if index >= 0:
            self.members[index].refusal = f"peer {peer[-8:]} {reason}"
            self.changed()

    def note_gave_up(self, member: Member, message: GaveUp) -> None:
        """Take down whom a member blames that gave up, and what it could not check."""
        if not member.gave_up:
            self.verifier.note_complaints(message.complaints)
        member.blames = frozenset(index for index in message.blamed if index < len(self.members))
        self.changed()

    def note_signatures(self, message: Signatures) -> None:
        """Take in signatures that another member passes on; those that are none are left out."""
        self.attempt.pass_on(message.proofs, self.context.signer)
        self.changed()

    def signatures(self) -> Signatures:
        """Return all signatures of the result that this member has."""
        return Signatures(tuple(sorted(self.attempt.proofs.items())))

    def accuse(self, peer: str, fault: str) -> None:
        """Give up if it is not too late: ``peer`` was proved to have falsified a mean."""
        index = self.attempt.roster.index_of(peer)
        if index >= 0:
            self.members[index].accusation = fault
            self.attempt.disputed = True
            self.changed()

    def fail_if_lost(self, needed: Collection[Member]) -> None:
        """Raise `AttemptFailedError` if one of these members is lost or gave up, most did, or this one cannot go on."""
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
        blames = [member.blames for member in self.others if member.blames is not None]
        most_did = len(self.members) - len(blames) < self.attempt.roster.majority
        if most_did or (self.attempt.body is None and any(member.gave_up for member in needed)):
            blamed = frozenset.union(*blames)
            late = [member for member in needed if member.index in blamed]
            raise LateError(f"{phase}: {'most others' if most_did else 'a member'} gave up", self.ids(late))

    async def wait_for(self, waiting: Collection[Member], until: float = math.inf) -> None:
        """Wait until something changes.

        Raises:
            LateError: Nothing did by ``until``, in the loop's time, or the attempt's deadline passed.
        """
        self.attempt.changed.clear()
        try:
            async with asyncio.timeout_at(min(until, self.deadline)):
                await self.attempt.changed.wait()
        except TimeoutError:
            late = [member for member in waiting if not member.gave_up] or waiting
            raise LateError(f"{self.attempt.phase}: others took too long", self.ids(late)) from None

    def patience_ends(self, since: float, quorum_at: float, share: float = 1.0) -> float:
        """Return until when the rest may take, all in the loop's time; infinite without a quorum.

        Args:
            since: When the wait began.
            quorum_at: When a quorum was there.
            share: Of the time that the rest is given.
        """
        if quorum_at == math.inf:
            return math.inf
        return quorum_at + share * patience_seconds(quorum_at - since, self.context.spec.grace_seconds)

    def _enter(self, phase: str) -> None:
        self.attempt.phase = phase
        self.observer.phase_entered(phase)
        self.changed()

    def on_defect(self, error: Exception) -> None:
        """End the attempt: a background task of this member failed."""
        self._defect = f"a part of this peer failed ({error!r}): see the log"
        self.changed()

    # --- ends -----------------------------------------------------------------------------------------------------

    async def serve(self, channel: Channel, request: Request, source: Source | None = None) -> None:
        """Handle another member's stream.

        Args:
            channel: The stream.
            request: What it was opened with.
            source: Above level 0: what the member brings.
        """
        await self._incoming.serve(channel, request, source)

    def _give_up(self, suspects: Sequence[str]) -> None:
        """Tell the other members that this one has given up, and whom it blames."""
        self.attempt.withholds = self.own.size > 0 and not self.own_mean.done()
        if not self.given_up.done():
            blamed = tuple(self.attempt.roster.index_of(peer) for peer in suspects)
            self.given_up.set_result(GaveUp(blamed, self.verifier.complaints()))

    async def _stop_sending(self) -> None:
        """End the streams that this member opened.

        Those on which all has been said end in order, so that their connections can be used again; and so do those of a
        round that was certified before some members had signed, if those sign soon.
        """
        if self._closing_mask is not None:
            self._closing_mask.cancel()
            await until_ended(self._closing_mask)
        await self.verifier.stop()
        certified = self.is_certified.is_set()
        cut = [s for s in self._outgoing if not (s.member.is_through or (certified and s.member.has_mean))]
        for stream in cut:
            stream.cancel()
        await until_ended(*[stream.task for stream in cut if stream.task is not None])
        self._outgoing = [stream for stream in self._outgoing if stream not in cut]

    async def close(self, *, linger: bool) -> None:
        """End all streams; with ``linger``, first let the others fetch mean and signature for a bounded time."""
        await self._stop_sending()
        await self._incoming.close(LINGER_SECONDS if linger else 0.0)
        left = [stream.task for stream in self._outgoing if stream.task is not None]
        if unfinished := [s.task for s in self._outgoing if s.task is not None and not s.member.is_through]:
            _, late = await asyncio.wait(unfinished, timeout=FORWARD_SECONDS)
            for task in late:
                task.cancel()
        await until_ended(*left)
        self._outgoing = []
        self.contribution = replace(self.contribution, origin=None)  # It is large, and streams refer to the session.
