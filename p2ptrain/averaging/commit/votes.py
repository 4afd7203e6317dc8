"""Votes of peers that were not in the attempt: the seed, slow voters, and all but the delegates of a tree.

They vote on a result's body without the result. A majority of the roster must have signed it before, and more than a
third of the members that may lead: these hold the result, and strangers and a few liars cannot make one up. A voter
follows the lineage by its certificates alone, so it can vote before it has applied the rounds.

A voter's tip may outlive the state there: all trainers restart from older checkpoints, or lose their files. Then nobody
could go on, because the voter refuses all that is before its tip. So it goes back to a proved head before the tip, but
not past an anchor, and only after a long wait in which no peer shows a later state. Its operator is told.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace

from p2ptrain.averaging.commit.anchoring import serve_anchors
from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import (
    CALL_TIMEOUT_SECONDS,
    MAX_CERTIFICATE_BYTES,
    MAX_ROOT_BYTES,
    ROOT,
    AskRoot,
    Body,
    Certificate,
    Head,
    Proof,
    Root,
    fetch_certificates,
    vote,
)
from p2ptrain.averaging.timing.deadlines import silence_seconds
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.schema import Message
from p2ptrain.tasks import together

logger = logging.getLogger(__name__)

VOTE = "ballot.vote"
FIRST_ASKERS, ASKER_SECONDS = 3, 0.1
"""Members that ask the voters at once; each further one waits so much longer, and mostly hears of the votes before."""
LEAST_VOTE_SECONDS = 2.0
ROSTER_SHARE = 0.75
"""Most of a near caller's timeout that a voter spends on the question to an earlier roster: else it never answers."""
REQUEST_BYTES = 4 * MAX_CERTIFICATE_BYTES
UNKNOWN = "this peer does not know the round before"
WAITS_BEFORE_FOUNDING, WAITS_BEFORE_GOING_BACK = 3, 9
"""In `matchmaking_seconds`: how long no peer shows the state at a voter's tip, before the voter lets the swarm begin
again, or go on from an older checkpoint. The second is longer: the new lineage soon outranks one that comes back."""
LEAST_ASKS = 3
"""The time between two requests counts for at most one in so many of that wait: this process may have been suspended,
or cut off."""


class AskVote(Message, frozen=True):
    """Request for the receiver's signature of a result, with those of a majority of its roster, in wire form.

    ``head`` is the one that it extends; None before the receiver says that it does not know it.
    """

    certificate: bytes
    head: Head | None = None


class Vote(Message, frozen=True):
    proof: Proof


class LightVotes:
    """Answers requests for votes; ``head`` returns the head of this peer's state, if it holds one."""

    def __init__(self, context: PeerContext, head: Callable[[], Head | None] = lambda: None) -> None:
        self._context = context
        self._ballots = context.ballots
        self._head = head
        self._voted_at: tuple[bytes, float] = (b"", asyncio.get_running_loop().time())
        self._refused_at: float | None = None
        self._unseen: tuple[float, float] | None = None  # seconds without a sign of the tip's state; the last request
        self._told = set[str]()
        self._turn = asyncio.Lock()
        serve_anchors(context)
        context.rpc.serve(VOTE, AskVote, self._serve, max_request_bytes=REQUEST_BYTES)

    async def _serve(self, peer: str, request: AskVote) -> Vote:
        context = self._context
        certificate = await context.runtime.offload(context.certificate, request.certificate)
        return Vote(await self._vote(peer, certificate, request.head))

    async def _vote(self, peer: str, certificate: Certificate, head: Head | None) -> bytes:
        """Return this peer's signature of a result; raise `PeerRefusedError` or `IntegrityError` if it must not."""
        context, body, own = self._context, certificate.body, self._context.rpc.peer_id
        if context.anchors.conflict:
            raise PeerRefusedError(own, "two anchors that this peer knows contradict each other")
        if body.round == 0 and context.anchors.last_round:
            raise PeerRefusedError(own, self._is_anchored())
        tip = await self._tip_at(peer, body, head)
        if tip.lineage not in (body.lineage, body.next_lineage):
            raise PeerRefusedError(own, UNKNOWN)
        if tip.lineage != body.next_lineage:  # Otherwise it is certified, and another signature only confirms it.
            held = self._head()
            # A voter without the state takes the roster's word for the digest; anybody may have led it to the tip.
            if held is None or held.lineage != tip.lineage:
                held = replace(tip, digest=body.digest)
            body.check_follows(held)
            tip.table.check_body(body)
            if body.levels != Cells(context.spec.group_size).num_levels(tip.present):
                raise IntegrityError("a certificate is of another tree than its lineage has")
            if body.round == 0 and self._waits_for_others(body):
                raise PeerRefusedError(own, "most of the trainers that this peer knows are not on the first roster")
            if body.is_reduced:
                if tip.table.is_open:
                    raise PeerRefusedError(own, "among strangers, only members close a round without the others")
                return context.signer.sign(vote(body.body_hash))
            signed = certificate.signers.intersection(body.members)
            if (body.levels == 1 and not tip.table.is_led_by(signed)) or tip.table.leaves_out_most(body.census):
                raise PeerRefusedError(own, "too few of the lineage's members are in this result")
            await self._record(certificate, tip)
        return context.signer.sign(vote(body.body_hash))

    def _is_anchored(self) -> str:
        """Return why the swarm cannot go back, and tell the operator once how it can."""
        anchors = self._context.anchors
        reason = f"round {anchors.last_round} of this swarm is anchored: it does not begin again before that"
        self._tell_once("%s. If its state is lost, delete %s at each founder, and restart it", reason, anchors.file)
        return reason

    def _tell_once(self, text: str, *values: object) -> None:
        """Log a warning with this text unless it was logged since the tip went back."""
        if text not in self._told:
            self._told.add(text)
            logger.warning(text, *values)

    def _waits_for_others(self, body: Body) -> bool:
        """True if a first roster leaves out most of the known trainers, for `matchmaking_seconds` from the first one.

        The peers of the first roster decide the rounds after it. They need half of the places where a group has too few
        for all. Records of peers that never come delay the beginning once.
        """
        context, now = self._context, asyncio.get_running_loop().time()
        known = {*context.membership.present(), *body.members}
        if 2 * len(body.members) > min(len(known), context.spec.group_size):
            return False
        self._refused_at = now if self._refused_at is None else self._refused_at
        return now - self._refused_at < context.spec.matchmaking_seconds

    async def _record(self, certificate: Certificate, tip: Head) -> None:
        """Record a vote; raise `PeerRefusedError` if this peer voted for another result."""
        context, body = self._context, certificate.body
        async with self._turn:
            now, (lineage, voted_at) = asyncio.get_running_loop().time(), self._voted_at
            if not await context.runtime.offload(self._ballots.vote, body, certificate.signers):
                # The roster of an earlier vote may be gone for good, and then never tells that it gave that result up.
                waited = lineage in (b"", body.lineage) and now - voted_at >= context.spec.matchmaking_seconds
                if waited and (holder := await self._holder_of_another(body, tip)):
                    raise PeerRefusedError(
                        context.rpc.peer_id, f"peer {holder[-8:]} holds another result of this round"
                    )
                if not (waited and await context.runtime.offload(self._ballots.vote, body)):
                    raise PeerRefusedError(context.rpc.peer_id, "this peer voted for another result of this round")
            if lineage != body.lineage:
                self._voted_at = body.lineage, now

    async def _holder_of_another(self, body: Body, tip: Head) -> str:
        """Return a member of the roster that this peer voted for before, if it shows another full result of the round.

        A member that does not answer within its keepalive timeout may hold one unseen: then there are two lineages.
        """
        context, grace = self._context, self._context.spec.grace_seconds

        async def ask(peer: str) -> str:
            seconds = silence_seconds(grace, context.rpc.dial_seconds.get(peer, 0.0))
            try:
                async with asyncio.timeout(min(seconds, ROSTER_SHARE * vote_seconds(grace))):
                    chain = await fetch_certificates(
                        context.rpc, peer, {tip.lineage: tip.table}, context.certificate, proofs=True
                    )
            except (PeerError, DeadlineError, TimeoutError) as error:
                logger.debug("peer %s shows no result of round %d: %s", peer[-8:], body.round, error)
                return ""
            shown = chain[0].body if chain else body
            return "" if shown.is_reduced or shown.body_hash == body.body_hash else peer

        return next(filter(None, await together("result", map(ask, self._ballots.members_before(body)))), "")

    async def _tip_at(self, peer: str, body: Body, claimed: Head | None) -> Head:
        """Return the tip, moved along certificates of ``peer`` if a result is not of its round.

        It goes back if `_check_forsaken` allows that; raises like it.
        """
        held, tip, context = self._head(), self._ballots.tip, self._context
        if tip is None or (held is not None and held.outranks(tip)):
            tip = held
        first = context.genesis(body.digest)
        if tip is None:
            tip = first if first.lineage == body.lineage else context.genesis(bytes(32))
        if tip.lineage not in (body.lineage, body.next_lineage):
            known = [head for head in (first, held) if head is not None and head.lineage == body.lineage]
            moved, vouched = (known[0], []) if known else await self._head_before(tip, peer, body, claimed)
            if (newest := self._ballots.tip) is not None and newest.outranks(tip):
                tip = newest  # Another request led this peer on meanwhile.
            if not (moved.round and moved.outranks(tip)):
                is_earlier = moved.lineage == body.lineage != tip.lineage
                if not is_earlier or (held is not None and not tip.outranks(held)):
                    return tip
                self._check_forsaken(tip, moved)
            for head in vouched:
                context.anchors.sign(head)
            tip = moved
        self._unseen = None
        if tip.round or tip.lineage == body.lineage:
            self._ballots.tip = tip
        return tip

    async def _head_before(self, tip: Head, peer: str, body: Body, claimed: Head | None) -> tuple[Head, list[Head]]:
        """Return the head before a result as `_head_after`: from the tip, or else from a proved head of ``peer``.

        That is the head that it ``claimed``; or a head before the tip to which certificates lead from the head that its
        history begins at, or that founders signed last.
        """
        context = self._context
        found = await self._head_after(tip, peer, body)
        if found[0].lineage == body.lineage or claimed is None:
            return found
        if await self._is_proved(tip, claimed):
            return (claimed, []) if claimed.lineage == body.lineage else found
        try:
            reply = await context.rpc.call(
                peer, ROOT, AskRoot(), Root, CALL_TIMEOUT_SECONDS, max_reply_bytes=MAX_ROOT_BYTES
            )
            if not await self._is_proved(tip, reply.head):
                return found
            since = await self._head_after(reply.head, peer, body)
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.debug("peer %s does not prove its head: %s", peer[-8:], error)
            return found
        # Voters of an earlier round may have sold their keys since: they lead no voter forward.
        return since if since[0].lineage == body.lineage and not since[0].outranks(tip) else found

    async def _is_proved(self, tip: Head, head: Head) -> bool:
        """True if enough voters of the tip signed a head; or enough founders, if it is before the tip."""
        context = self._context
        proof = await context.runtime.offload(context.certificate, head.certificate)
        if proof.next_head(head.digest, head.table) != head:
            return False
        founding = context.founding
        is_founded = bool(founding.electorate) and founding.believes(proof) and not head.outranks(tip)
        return is_founded or tip.table.believes(proof)

    def _check_forsaken(self, tip: Head, earlier: Head) -> None:
        """Return if a head before the tip may become the tip, because all that held the state there seem to be gone.

        For long peers have asked for votes after the earlier head and none after the tip, and no record tells of a
        state later than the earlier one. Of two lineages the one with more full rounds wins if a holder comes back.

        Raises:
            PeerRefusedError: It must wait, or an anchor forbids it.
        """
        context, now = self._context, asyncio.get_running_loop().time()
        own, pause = context.rpc.peer_id, context.spec.matchmaking_seconds
        if earlier.round < context.anchors.last_round:
            raise PeerRefusedError(own, self._is_anchored())
        at = (earlier.full, earlier.returned, earlier.round, earlier.tokens)
        for record in context.membership.records():
            if (record.lineage_full, record.lineage_returned, record.round, record.lineage_tokens) > at:
                self._unseen = None
                raise PeerRefusedError(own, f"by its record peer {record.peer[-8:]} holds a later state")
        needed = (WAITS_BEFORE_GOING_BACK if earlier.round else WAITS_BEFORE_FOUNDING) * pause
        seconds, asked_at = self._unseen or (0.0, now)
        seconds += min(now - asked_at, needed / LEAST_ASKS)
        self._unseen, left = (seconds, now), needed - seconds
        what = f"go on from round {earlier.round}" if earlier.round else "begin again"
        if left > 0:
            if seconds >= pause:
                self._tell_once(
                    "peers want to %s, and this voter knows round %d: they may in %.0f s, unless a peer shows it",
                    what, tip.round, left,
                )  # fmt: skip
            raise PeerRefusedError(own, f"this voter knows round {tip.round}: nobody may {what} for {left:.0f} s more")
        logger.warning("no peer shows the state of round %d: this voter lets the swarm %s", tip.round, what)
        self._voted_at = b"", self._voted_at[1]
        self._told.clear()

    async def _head_after(self, head: Head, peer: str, body: Body) -> tuple[Head, list[Head]]:
        """Return the head before a result, or how far a chain of ``peer`` leads from ``head``.

        Also return the heads on the way, the first included, whose digests a full certificate vouches for: of a reduced
        one, few could certify another digest.
        """
        context, vouched = self._context, list[Head]()
        chain = await fetch_certificates(
            context.rpc, peer, {head.lineage: head.table}, context.certificate, proofs=True
        )
        following = [*(each.body.digest for each in chain[1:]), body.digest]
        for certificate, digest in zip(chain, following, strict=False):
            if not certificate.body.is_reduced:
                vouched.append(replace(head, digest=certificate.body.digest))
            head = head.after(certificate, digest)
            if head.lineage == body.lineage:
                break
        return head, vouched


async def ask_voters(context: PeerContext, attempt: Attempt, index: int) -> None:
    """Collect the signatures of absent voters, until there is a certificate or each of them was asked.

    ``index`` is this member's on the roster: a few members ask, and others only if that does not suffice.
    """
    await asyncio.sleep(max(0, index + 1 - FIRST_ASKERS) * ASKER_SECONDS)
    if attempt.certificate() is None:
        await _ask(context, attempt, attempt.absent_voters)


async def endorsed(context: PeerContext, attempt: Attempt) -> Certificate | None:
    """Ask absent founders to sign an attempt's body, and return the certificate with their signatures.

    Newcomers believe the founders alone. In each round another member asks those that may answer; others return None.
    """
    index, members = attempt.roster.index_of(context.rpc.peer_id), len(attempt.roster.members)
    founders = context.founding.electorate & attempt.head.table.electorate
    absent = sorted(founders.difference(attempt.roster.members, attempt.proofs))
    absent = [peer for peer in absent if context.membership.may_answer(peer)]
    if attempt.body is None or not attempt.is_last or attempt.body.round % members != index or not absent:
        return None
    await _ask(context, attempt, absent)
    return attempt.certificate()


async def _ask(context: PeerContext, attempt: Attempt, voters: Sequence[str]) -> None:
    body = attempt.body
    if body is None:
        return
    members = tuple((peer, proof) for peer, proof in sorted(attempt.proofs.items()) if peer in body.members)
    request = AskVote(Certificate(body, members).to_bytes())

    async def ask(peer: str) -> None:
        try:
            try:
                reply = await _ask_one(context, peer, request)
            except PeerRefusedError as error:
                if error.reason != UNKNOWN or not attempt.head.round:
                    raise
                reply = await _ask_one(context, peer, AskVote(request.certificate, attempt.head))
        except PeerRefusedError as error:
            logger.debug("round %d: peer %s does not vote: %s", body.round, peer[-8:], error.reason)
            attempt.refusal = error.reason
        except (PeerError, DeadlineError, IntegrityError) as error:
            context.membership.suspect(peer, str(error))
        else:
            attempt.add_proof(peer, reply.proof, context.signer)

    await together("vote", map(ask, voters))
    attempt.changed.set()


async def _ask_one(context: PeerContext, peer: str, request: AskVote) -> Vote:
    """Return another peer's vote; a far one that takes the request has more time to look for the rounds before.

    Raises like `Rpc.open` and `Channel.receive`.
    """
    loop, rpc, grace = asyncio.get_running_loop(), context.rpc, context.spec.grace_seconds
    began = loop.time()
    async with rpc.open(peer, VOTE, request, vote_seconds(grace)) as channel:
        round_trip = max(loop.time() - began, rpc.dial_seconds.get(peer, 0.0))
        return await channel.receive(Vote, vote_seconds(grace, round_trip))


def vote_seconds(grace_seconds: float, round_trip_seconds: float = 0.0) -> float:
    """Return the timeout of a request for a vote; the voter may have to ask others before it answers."""
    return max(LEAST_VOTE_SECONDS, 2 * silence_seconds(grace_seconds, round_trip_seconds))
