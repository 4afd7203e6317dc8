"""Votes of peers that were not in the attempt: the seed, slow voters, and all but the delegates of a tree.

They vote on a result's body without the result. A majority of the roster must have signed it before, and more than a
third of the members that may lead: these hold the result, and strangers and a few liars cannot make one up. A voter
follows the lineage by its certificates alone, so it can vote before it has applied the rounds.

A voter's tip may outlive the state there: all trainers restart from older checkpoints, or lose their files. Then nobody
could go on, because the voter refuses all that is before its tip. So it goes back to a proved head before the tip, but
not past an anchor, and only once `LostState` allows it. Its operator is told.

A request that this peer does not sign moves its tip along a chain of certificates at most, and to no lineage that it
gave up. So a liar that replays old requests or certificates leads it nowhere. Members that come back with a lost state
lead it there by a result that it signs, as those with any head that outranks its tip.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.anchoring import serve_anchors
from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.commit.lost_state import WAITS_BEFORE_GOING_BACK, LostState, is_proved, vote_seconds
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.protocol.certificate import (
    CALL_TIMEOUT_SECONDS,
    MAX_CERTIFICATE_BYTES,
    MAX_MEMBERS,
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
from p2ptrain.averaging.protocol.table import NOTHING_TOLD
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.schema import Hash, Message
from p2ptrain.tasks import together

logger = logging.getLogger(__name__)

VOTE = "ballot.vote"
FIRST_ASKERS, ASKER_SECONDS = 3, 0.1
"""Members that ask the voters at once; each further one waits so much longer, and mostly hears of the votes before."""
CHILDREN = "ballot.children"
MAX_CHILDREN_BYTES = 8 << 20
REQUEST_BYTES = 4 * MAX_CERTIFICATE_BYTES
UNKNOWN = "this peer does not know the round before"
ANOTHER = "this peer voted for another result of this round"


class AskVote(Message, frozen=True):
    """Request for the receiver's signature of a result, with those of a majority of its roster, in wire form.

    ``head`` is the one that it extends; None before the receiver says that it does not know it.
    """

    certificate: bytes
    head: Head | None = None


class Vote(Message, frozen=True):
    proof: Proof


class AskChildren(Message, frozen=True):
    """Request for the certificates of the results that are in a group of delegates' result."""

    group: Hash


class Children(Message, frozen=True):
    """Reply with these certificates in wire form, in the order of the contributors."""

    certificates: Annotated[tuple[bytes, ...], Meta(max_length=MAX_MEMBERS)]


class LightVotes:
    """Answers requests for votes; ``head`` returns the head of this peer's state, if it holds one."""

    def __init__(self, context: PeerContext, head: Callable[[], Head | None] = lambda: None) -> None:
        self._context = context
        self._ballots = context.ballots
        self._head = head
        self._voted_at: tuple[bytes, float] = (b"", asyncio.get_running_loop().time())
        self._refused_at: float | None = None
        self._lost_state = LostState(context, head)
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
        if not self._ballots.has_voted_for(body):
            await self._judge(peer, certificate, head)
        return context.signer.sign(vote(body.body_hash))

    async def _judge(self, peer: str, certificate: Certificate, head: Head | None) -> None:
        """Record a vote for a result that this peer may sign; raise as `_vote` if it must not."""
        context, body, own = self._context, certificate.body, self._context.rpc.peer_id
        tip, moved, vouched = await self._head_before(peer, body, head)
        if moved.lineage == body.next_lineage:
            # It is certified, and another signature only confirms it.
            if body.is_full and not await context.runtime.offload(self._ballots.vote, body):
                raise PeerRefusedError(own, ANOTHER)
            return
        goes_back = tip.lineage != moved.lineage and not moved.outranks(tip)
        held = self._head()
        if moved.lineage != body.lineage or (goes_back and held is not None and not tip.outranks(held)):
            raise PeerRefusedError(own, UNKNOWN)
        # A voter without the state takes the roster's word for the digest; anybody may have led it to the head.
        if held is None or held.lineage != moved.lineage:
            held = replace(moved, digest=body.digest)
        body.check_follows(held)
        moved.table.check_body(body)
        if body.levels != Cells(context.spec.group_size).num_levels(moved.present):
            raise IntegrityError("a certificate is of another tree than its lineage has")
        if body.level:
            await self._look_below(peer, certificate, moved)
        if body.round == 0 and self._waits_for_others(body):
            raise PeerRefusedError(own, "most of the trainers that this peer knows are not on the first roster")
        if body.levels == 1 and not context.sitting_out(moved, body.members).isdisjoint(body.members):
            raise PeerRefusedError(own, "a member of this result is not drawn for the round")
        signed, undrawn = certificate.signers.intersection(body.members), context.undrawn(moved)
        is_led = body.levels > 1 or moved.table.is_led_by(signed, undrawn)
        if body.is_reduced:
            if moved.table.is_open:
                raise PeerRefusedError(own, "among strangers, only members close a round without the others")
        elif not is_led or moved.table.leaves_out_most(body.census, undrawn):
            raise PeerRefusedError(own, "too few of the lineage's members are in this result")
        if goes_back:
            if moved.round < context.anchors.last_round:
                raise PeerRefusedError(own, self._is_anchored())
            await self._lost_state.check(tip, moved, body)
        if body.is_reduced:
            self._check_tip(tip, moved)
            self._ballots.tip = moved
        else:
            await self._record(certificate, tip, moved, goes_back=goes_back)
        for each in vouched:
            context.anchors.sign(each)

    async def _look_below(self, peer: str, certificate: Certificate, head: Head) -> None:
        """Raise `IntegrityError` unless the results in a result of delegates are their cells' own.

        A delegate may be alone on its roster, and then nobody else has looked. Any signer shows the certificates, so
        that those of a large tree do not all come from the few members that ask for votes.
        """
        context, body, failure = self._context, certificate.body, ""
        others = sorted(certificate.signing_members - {context.rpc.peer_id, peer}) or [peer]
        for holder in dict.fromkeys((context.runtime.random.choice(others), peer)):
            try:
                reply = await context.rpc.call(
                    holder, CHILDREN, AskChildren(body.group_id), Children, CALL_TIMEOUT_SECONDS,
                    max_reply_bytes=MAX_CHILDREN_BYTES,
                )  # fmt: skip
                return await context.runtime.offload(self._check_below, body, head, reply.certificates)
            except (PeerError, DeadlineError, IntegrityError) as error:
                failure = str(error)
        raise IntegrityError(f"a result of delegates is not their cells': {failure}")

    def _check_below(self, body: Body, head: Head, raw: Sequence[bytes]) -> None:
        """Raise `IntegrityError` unless these certificates make up a result of delegates, one for each contributor."""
        cells, found, census = Cells(self._context.spec.group_size), set[Key](), NOTHING_TOLD
        if len(raw) != len(body.contributors):
            raise IntegrityError("a cell's certificate is missing")
        for peer, certificate in zip(body.contributing, map(self._context.certificate, raw), strict=True):
            below = certificate.body
            body.check_brought(below)
            keys = {cells.key_of(head, member, below.level) for member in below.members}
            if peer not in below.members or len(keys) != 1 or not (below.level or head.table.fits(below)):
                raise IntegrityError("one is not of its delegate's cell")
            if not head.table.is_vouched(below.members, certificate.signers):
                raise IntegrityError("less than half of a cell's members signed")
            found |= keys
            census = census.merged(below.census)
        if len(found) != len(body.contributors) or census != body.census:
            raise IntegrityError("one cell counts twice, or another one than told")

    def _is_anchored(self) -> str:
        """Return why the swarm cannot go back, and tell the operator once how it can."""
        anchors = self._context.anchors
        reason = f"round {anchors.last_round} of this swarm is anchored: it does not begin again before that"
        self._lost_state.tell_once(
            "%s. If its state is lost, delete %s at each founder, and restart it", reason, anchors.file
        )
        return reason

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

    async def _record(self, certificate: Certificate, tip: Head, moved: Head, *, goes_back: bool) -> None:
        """Record a vote at ``moved``, which becomes the tip; raise `PeerRefusedError` if it must not."""
        context, ballots, body = self._context, self._ballots, certificate.body
        own = context.rpc.peer_id
        async with self._turn:
            self._check_tip(tip, moved)
            now, (lineage, voted_at) = asyncio.get_running_loop().time(), self._voted_at
            # The roster of an earlier vote may be gone for good, and then never tells that it gave that result up.
            waited = lineage in (b"", body.lineage) and now - voted_at >= context.spec.matchmaking_seconds
            signers, lost = None if goes_back or waited else certificate.signers, tuple[bytes, ...]()
            places, rosters = ballots.rivals(body, moved)
            if not ballots.may_vote(body, signers):
                raise PeerRefusedError(own, ANOTHER)
            if goes_back:
                lost = (tip.lineage, *ballots.results_after(moved.lineage, tip.lineage))
            elif others := rosters - certificate.signers:
                holder, lost = await self._lost_state.shown(others, places, moved.table, body)
                if holder and self._lost_state.seconds_left(WAITS_BEFORE_GOING_BACK) > 0:
                    raise PeerRefusedError(own, f"peer {holder[-8:]} holds another result of this round")
            leaving = moved.table.leaving(body.census)
            record = partial(ballots.vote, body, signers, tip=moved, lost=lost, leaving=leaving)
            if not await context.runtime.offload(record):
                raise PeerRefusedError(own, ANOTHER)
            self._lost_state.seen()
            if lineage != body.lineage:
                self._voted_at = body.lineage, now

    def _check_tip(self, tip: Head, moved: Head) -> None:
        """Raise `PeerRefusedError` if other requests moved the tip meanwhile, and it excludes ``moved`` now."""
        newest = self._ballots.tip
        if newest is not None and newest.lineage not in (tip.lineage, moved.lineage) and not moved.outranks(newest):
            raise PeerRefusedError(self._context.rpc.peer_id, UNKNOWN)

    async def _head_before(self, peer: str, body: Body, claimed: Head | None) -> tuple[Head, Head, list[Head]]:
        """Return the tip, the head before a result as far as it is known, and heads for anchors as `_head_after`.

        Certificates of ``peer`` lead there from the tip; or from a proved head of ``peer``. That is the head that it
        ``claimed``; or a head before the tip that its history begins at, or that founders signed last.
        """
        held, tip, context = self._head(), self._ballots.tip, self._context
        if tip is None or (held is not None and held.outranks(tip)):
            tip = held
        first = context.genesis(body.digest)
        if tip is None:
            tip = first if first.lineage == body.lineage else context.genesis(bytes(32))
        if tip.lineage in (body.lineage, body.next_lineage):
            return tip, tip, []
        known = [head for head in (first, held) if head is not None and head.lineage == body.lineage]
        if known:
            return tip, known[0], []
        found = await self._head_after(tip, peer, body)
        if found[0].lineage != body.lineage and found[0].outranks(tip) and self._ballots.tip in (None, tip):
            self._ballots.tip = found[0]  # The next request leads on from there.
            for each in found[1]:
                context.anchors.sign(each)
        if found[0].lineage == body.lineage or claimed is None:
            return tip, *found
        if await is_proved(context, tip, claimed):
            return (tip, claimed, []) if claimed.lineage == body.lineage else (tip, *found)
        try:
            reply = await context.rpc.call(
                peer, ROOT, AskRoot(), Root, CALL_TIMEOUT_SECONDS, max_reply_bytes=MAX_ROOT_BYTES
            )
            if not await is_proved(context, tip, reply.head):
                return tip, *found
            since = await self._head_after(reply.head, peer, body)
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.debug("peer %s does not prove its head: %s", peer[-8:], error)
            return tip, *found
        # Voters of an earlier round may have sold their keys since: they lead no voter forward.
        is_earlier = since[0].lineage == body.lineage and not since[0].outranks(tip)
        return (tip, *since) if is_earlier else (tip, *found)

    async def _head_after(self, head: Head, peer: str, body: Body) -> tuple[Head, list[Head]]:
        """Return the head before a result, or how far a chain of ``peer`` leads from ``head``.

        Also return the heads on the way, the first included, whose digests a full certificate vouches for: of a reduced
        one, few could certify another digest. A chain through a lineage that this peer gave up leads nowhere, unless
        the result is on it.
        """
        context, vouched, start, way = self._context, list[Head](), head, set[bytes]()
        chain = await fetch_certificates(
            context.rpc, peer, {head.lineage: head.table}, context.certificate, proofs=True
        )
        following = [*(each.body.digest for each in chain[1:]), body.digest]
        for certificate, digest in zip(chain, following, strict=False):
            if not certificate.body.is_reduced:
                vouched.append(replace(head, digest=certificate.body.digest))
            head = head.after(certificate, digest)
            way.add(head.lineage)
            if head.lineage == body.lineage:
                break
        if head.lineage != body.lineage and not self._ballots.lost.isdisjoint(way):
            return start, []
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
