"""Recovery of an attempt that broke in its last phase: complete it if a majority can sign, else give it up.

A member can miss the end of an attempt, as when an owner dies or signatures are lost. Every signer holds the result.

1. A member whose attempt broke asks all others for their `Standing`; request and reply both carry the sender's.
2. It fetches a signer's result, signs it, and sends its signature with its next questions.
3. It repeats this until there is a certificate, or none is possible, or the deadline passes.

**Why giving up is safe.** A certificate needs signatures of a majority of the roster on one body.

* An owner that ended before it began to reduce its share *withholds* the mean. No member can hold a result.
* A member that has not signed *renounces*: it promises never to sign. No certificate can exist once the members that
  have not renounced are no majority.
* A member renounces only if no answering member holds or may obtain a result. Where means are audited, it cannot sign a
  fetched result, and so renounces at once.

If one member of three or more freezes, either the others know that no certificate can exist, or one of them signed.
A frozen member may then hold a certificate alone. The others complete the signer's result, or give it up where they may
not sign it. Two lineages are then possible, and `Head.outranks` decides (two generals problem). No timeout prevents it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.attempt import Attempt, Standing
from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.commit.votes import CHILDREN, AskChildren, Children, LightVotes, ask_voters
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, Body, Certificate, Head, Name, Proof
from p2ptrain.averaging.timing.deadlines import silence_seconds, straggler_seconds
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import CodecError
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerLostError, PeerRefusedError
from p2ptrain.network.schema import Hash, Message
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

STANDING = "recovery.standing"
PAUSE_SECONDS = 0.3


def can_complete(members: int, majority: int, standings: Collection[Standing]) -> bool:
    """True unless the known standings, this member's included, prove that a roster never has a certificate."""
    renounced = sum(standing is Standing.RENOUNCED for standing in standings)
    return members - renounced >= majority and Standing.WITHHOLDS not in standings


def may_renounce(others: Mapping[str, Standing], silent: Collection[str]) -> bool:
    """True if no other member outside ``silent`` is known to hold a result or able to obtain one."""
    return all(standing.is_over for peer, standing in others.items() if peer not in silent)


class AskStanding(Message, frozen=True):
    """Request for a member's standing in a broken attempt, with the sender's.

    ``proof`` is the sender's signature of the result; empty if it has not signed.
    """

    group: Hash
    standing: Standing
    proof: Proof = b""


class StandingReply(Message, frozen=True):
    """Reply to `AskStanding`: with the member's result, if it holds one, and the signatures of it that it knows."""

    standing: Standing
    body: bytes = b""
    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_MEMBERS)] = ()


class AttemptRecovery:
    """Answers other members about the attempts that the round log keeps, and recovers broken ones."""

    def __init__(
        self, context: PeerContext, round_log: RoundLog, head: Callable[[], Head | None] = lambda: None
    ) -> None:
        """``head`` returns the head of this peer's state."""
        LightVotes(context, head)
        self._context = context
        self._rpc = context.rpc
        self._signer = context.signer
        self._ballots = context.ballots
        self._round_log = round_log
        context.rpc.serve(STANDING, AskStanding, self._serve)
        context.rpc.serve(CHILDREN, AskChildren, self._serve_children)

    def _abandon(self, attempt: Attempt) -> None:
        """Discard an attempt except for this peer's standing.

        A member that recovers late must not receive this peer's signature. It could complete a certificate unknown to
        the members that moved on to the next attempt.
        """
        left_as = {Standing.SIGNED: Standing.UNKNOWN, Standing.WITHHOLDS: Standing.WITHHOLDS}
        attempt.left_as = left_as.get(self._standing(attempt), Standing.RENOUNCED)
        if attempt.body is not None:
            self._context.seen_votes.add(attempt.body, attempt.proofs.items(), is_own=True)
        attempt.body, attempt.contributors, attempt.means = None, None, [None] * len(attempt.means)
        attempt.proofs.clear()

    def _standing(self, attempt: Attempt) -> Standing:
        if attempt.left_as is not None:
            return attempt.left_as
        if attempt.withholds:
            return Standing.WITHHOLDS
        if not attempt.is_over:  # Also after success; the signatures show that.
            return Standing.RUNNING
        if self._rpc.peer_id in attempt.proofs:
            return Standing.SIGNED
        if attempt.has_renounced or attempt.audited:  # An audited result needs checks by its signers.
            return Standing.RENOUNCED
        return Standing.FETCHING if attempt.is_fetching else Standing.OPEN

    def _note(self, attempt: Attempt, peer: str, standing: Standing) -> None:
        """Record another member's standing, and update this peer's."""
        attempt.standings[peer] = standing
        if standing is not Standing.LOST:
            attempt.silent.discard(peer)
            attempt.fell_silent.pop(peer, None)
        self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        """Renounce if all other standings allow it, and wake `recover`."""
        known = attempt.standings.keys() | attempt.silent | {self._rpc.peer_id}
        if self._standing(attempt) is Standing.OPEN and known.issuperset(attempt.roster.members):
            attempt.has_renounced = may_renounce(attempt.standings, attempt.silent)
        attempt.changed.set()

    async def _serve(self, peer: str, request: AskStanding) -> StandingReply:
        attempt = self._round_log.attempts.get(request.group)
        if attempt is None or peer not in attempt.roster.members:
            return StandingReply(Standing.UNKNOWN)
        attempt.add_proof(peer, request.proof, self._signer)
        self._note(attempt, peer, request.standing)
        standing = self._standing(attempt)
        if attempt.body is None:
            return StandingReply(standing)
        return StandingReply(standing, attempt.body.to_bytes(), tuple(sorted(attempt.proofs.items())))

    async def _serve_children(self, peer: str, request: AskChildren) -> Children:
        attempt = self._round_log.attempts.get(request.group)
        contributors = attempt.contributors if attempt is not None else None
        if attempt is None or contributors is None or not attempt.children.keys() >= {*contributors}:
            raise PeerRefusedError(self._rpc.peer_id, "this peer has no such result")
        return Children(tuple(attempt.children[index] for index in contributors))

    async def recover(
        self, attempt: Attempt, elapsed_seconds: float = 0.0, silent: Collection[str] = ()
    ) -> Certificate | None:
        """Recover a broken attempt and return its certificate, or give it up and return None.

        Args:
            elapsed_seconds: Time from the attempt's start until it broke; sets the deadline for the others.
            silent: Other members that did not answer; the wait excludes them unless they act.
        """
        attempt.is_over = True
        if len(attempt.roster.tickets) == 1 or attempt.withholds:
            self._abandon(attempt)
            return None
        others = [member for member in attempt.roster.members if member != self._rpc.peer_id]
        attempt.silent.update(silent)
        self._conclude(attempt)
        if attempt.certificate() is not None and await self._was_given_up(attempt, others):
            self._abandon(attempt)
            return None
        async with Tasks() as tasks:
            await self._ask_on(attempt, others, tasks, elapsed_seconds)
        certificate = attempt.certificate()
        if certificate is None:
            self._abandon(attempt)
        return certificate

    async def _was_given_up(self, attempt: Attempt, others: list[str]) -> bool:
        """True if all answering members, at least one, have given up an attempt that is complete here.

        This peer stalled while they moved on. Its late certificate would start a second lineage.
        """
        await together("recover", (self._ask(attempt, peer) for peer in others))
        standings = attempt.standings.values()
        gone = (Standing.UNKNOWN, Standing.RENOUNCED, Standing.WITHHOLDS)
        return any(standing in gone for standing in standings) and all(
            standing in (*gone, Standing.LOST) for standing in standings
        )

    async def _ask_on(self, attempt: Attempt, others: list[str], tasks: Tasks, elapsed_seconds: float) -> None:
        """Ask the other members repeatedly until the outcome is clear or the deadline passes."""
        loop, grace = asyncio.get_running_loop(), attempt.spec.grace_seconds
        farthest = max(self._rpc.dial_seconds.get(peer, 0.0) for peer in others)
        deadline = loop.time() + straggler_seconds(elapsed_seconds, grace, farthest)
        fetched_by = deadline + elapsed_seconds
        asked: dict[str, tuple[Standing, float, asyncio.Task[None]]] = {}
        voting: asyncio.Task[None] | None = None
        while not self._is_clear(attempt, others) or (voting is not None and not voting.done()):
            if attempt.certificate() is not None:
                return
            if voting is None and attempt.is_held and attempt.absent_voters:
                voting = tasks.start(ask_voters(self._context, attempt, 0), "ask voters")
            now, own = loop.time(), self._standing(attempt)
            if now >= (fetched_by if attempt.is_fetching else deadline):
                return
            for peer in others:
                sent, at, task = asked.get(peer, (None, 0.0, None))
                # Send a changed standing at once: members may wait for it.
                if task is None or own is not sent or (task.done() and now - at >= PAUSE_SECONDS):
                    question = self._ask(attempt, peer, fetched_by - now)
                    asked[peer] = own, now, tasks.start(question, f"recover-{peer[-8:]}")
            attempt.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):
                    await attempt.changed.wait()

    def _is_clear(self, attempt: Attempt, others: list[str]) -> bool:
        """True if there is a certificate, or no reason to wait for one."""
        own, majority = self._standing(attempt), attempt.roster.majority
        if attempt.certificate() is not None:
            return True
        if not can_complete(len(others) + 1, majority, [own, *attempt.standings.values()]):
            return True
        if attempt.is_fetching:
            return False
        waited_for = [peer for peer in others if peer not in attempt.silent]
        # A signer adds nothing once its result is here; a member in OPEN decides soon.
        done = (Standing.RENOUNCED, Standing.UNKNOWN, Standing.LOST, Standing.SIGNED)
        return own is not Standing.OPEN and all(attempt.standings.get(peer) in done for peer in waited_for)

    async def _ask(self, attempt: Attempt, peer: str, fetch_seconds: float = 0.0) -> None:
        """Ask for a member's standing, and fetch its result if this member has none."""
        timeout_seconds = silence_seconds(attempt.spec.grace_seconds, self._rpc.dial_seconds.get(peer, 0.0))
        own = attempt.proofs.get(self._rpc.peer_id, b"")
        try:
            request = AskStanding(attempt.roster.group_id, self._standing(attempt), own)
            reply = await self._rpc.call(peer, STANDING, request, StandingReply, timeout_seconds)
            if reply.body:
                await self._take_over(attempt, peer, reply, fetch_seconds)
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.info("settling with peer %s failed: %s", peer[-8:], error)
            attempt.silent.add(peer)
            if isinstance(error, (DeadlineError, PeerLostError)):
                attempt.fell_silent[peer] = str(error)
            self._note(attempt, peer, Standing.LOST)
            return
        self._note(attempt, peer, reply.standing)

    async def _take_over(self, attempt: Attempt, peer: str, reply: StandingReply, timeout_seconds: float) -> None:
        """Fetch, adopt and sign a member's result if it is this attempt's, and add its signatures."""
        body = Body.from_bytes(reply.body)
        if attempt.body is None and not attempt.is_fetching:
            contributors = tuple(index for index, *_ in body.contributors)
            if body.members != attempt.roster.members or body != attempt.body_of(contributors, body.hashes):
                raise IntegrityError("its result is not one of this roster")
            attempt.is_fetching = True
            try:
                means = await self._round_log.fetch_means([peer], body, timeout_seconds)
                self._adopt(attempt, body, contributors, means)
            finally:
                attempt.is_fetching = False
        for member, proof in reply.proofs:
            attempt.add_proof(member, proof, self._signer)

    def _adopt(self, attempt: Attempt, body: Body, contributors: tuple[int, ...], means: Sequence[Buffer]) -> None:
        """Adopt another member's result, and sign it if this member may."""
        if attempt.body is not None or attempt.left_as is not None:
            return
        attempt.contributors = contributors
        own = attempt.roster.index_of(self._rpc.peer_id)
        try:
            for index, mean in enumerate(means):
                attempt.check_quotes(index, mean, own)
        except CodecError as error:
            raise IntegrityError(f"its result is not to be signed: {error}") from error
        attempt.means = list(means)
        attempt.body = body
        if not (attempt.audited or attempt.has_renounced):
            attempt.sign(self._signer, self._ballots)
