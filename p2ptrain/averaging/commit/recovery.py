"""Ending an attempt that broke in its last phase: find out whether a majority signed, and complete it if so.

A member can miss the end of an attempt: an owner died after it sent its mean to some, or signatures were lost. Any
signer holds the whole result and can bring the others up. Each member whose attempt broke asks all others what they
hold, takes over what is missing, signs, and passes its own signature on, until there is a certificate or it is clear
that none can be had. Questions and answers both say where the sender stands (`Standing`), so that two members settle
with one question.

**Why giving up is safe.** A certificate needs signatures of a majority of the roster on one body.

* An owner that ended its attempt before it began to make its share's mean *withholds* it. Nobody can hold a result.
* A member that has not signed *renounces*: it will never sign this roster's body, and says so from then on. Once so
  many renounced that the rest is no majority, no certificate can exist anywhere, whatever silent members hold.
* A member renounces only once nobody that answers holds a result or may still come to one. Until then it could be the
  one that completes a result together with a signer. Where means are checked it cannot sign what it takes over, and so
  renounces at once.

In a group of three or more of which one member froze, the others therefore know for certain that nothing can come of
the attempt, or one of them signed. In that case the frozen member may hold a certificate alone. The signer's result is
taken over and completed by the others; where they may not sign it, they give it up. If the frozen member did hold
a certificate, there are two lineages, and `Head.outranks` decides (two generals). Waiting longer cannot exclude that.

**How long it takes.** Nobody waits for members that were found silent, or for longer than others may be late
(`p2ptrain.averaging.timing.deadlines`). A transfer that goes on is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.commit.attempt import Attempt, Standing
from p2ptrain.averaging.commit.round_log import History
from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.protocol.signed import MAX_MEMBERS, Name, Proof
from p2ptrain.averaging.timing.deadlines import patience_seconds, silence_seconds
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import CodecError
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerLostError
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.schema import Hash, Message
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

PAUSE_SECONDS = 0.3
MAX_ATTEMPTS_KEPT = 4


def can_complete(members: int, majority: int, standings: Collection[Standing]) -> bool:
    """True unless it is certain that a roster has no certificate and never will.

    Args:
        members: Of the roster.
        majority: Signatures that a certificate needs.
        standings: Of those members that are known, this one included.
    """
    renounced = sum(standing is Standing.RENOUNCED for standing in standings)
    return members - renounced >= majority and Standing.WITHHOLDS not in standings


def may_renounce(others: Mapping[str, Standing], silent: Collection[str]) -> bool:
    """True if no other member holds a result or may still come to one, as far as anybody answers.

    Args:
        others: Standings of all other members that are known.
        silent: Members that are not waited for.
    """
    return all(standing.is_over for peer, standing in others.items() if peer not in silent)


class WhereNow(Message, frozen=True):
    """A member's question about an attempt that broke.

    Attributes:
        group: The roster's id.
        standing: Where the member stands itself.
        proof: Its signature of the result; empty if it has not signed.
    """

    group: Hash
    standing: Standing
    proof: Proof = b""


class StandsAt(Message, frozen=True):
    """The answer.

    Attributes:
        standing: Where the member stands.
        body: The result that it holds; empty if it holds none.
        proofs: All signatures of that: (who, signature).
    """

    standing: Standing
    body: bytes = b""
    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_MEMBERS)] = ()


class Settlements:
    """Remembers this peer's last attempts, answers for them, and settles broken ones."""

    def __init__(self, rpc: Rpc, signer: Signer, history: History) -> None:
        self._rpc = rpc
        self._signer = signer
        self._history = history
        self._attempts: OrderedDict[bytes, Attempt] = OrderedDict()
        history.find_attempt = self.find
        rpc.serve("settle", WhereNow, self._serve)

    def remember(self, attempt: Attempt) -> None:
        """Keep an attempt so that others can complete theirs from it; only a few are kept."""
        self._attempts[attempt.roster.group_id] = attempt
        while len(self._attempts) > MAX_ATTEMPTS_KEPT:
            self._attempts.popitem(last=False)

    def find(self, body_hash: bytes) -> Attempt | None:
        """A complete attempt by the hash of its body."""
        for attempt in self._attempts.values():
            if attempt.body is not None and attempt.body.body_hash == body_hash:
                return attempt
        return None

    def knows(self, group: bytes) -> bool:
        """Whether this peer took part in an attempt of this group."""
        return group in self._attempts

    def _abandon(self, attempt: Attempt) -> None:
        """Give an attempt up, and keep of it only where this peer stands.

        A member that settles later, after a stall for example, must not be handed this peer's signature any more: it
        could complete a certificate of which those that moved on to the next attempt know nothing.
        """
        left_as = {Standing.SIGNED: Standing.UNKNOWN, Standing.WITHHOLDS: Standing.WITHHOLDS}
        attempt.left_as = left_as.get(self._standing(attempt), Standing.RENOUNCED)
        attempt.body, attempt.contributors, attempt.means = None, None, [None] * len(attempt.means)
        attempt.proofs.clear()

    def _standing(self, attempt: Attempt) -> Standing:
        """Where this peer stands with an attempt."""
        if attempt.left_as is not None:
            return attempt.left_as
        if attempt.withholds:
            return Standing.WITHHOLDS
        if not attempt.is_over:  # Also when all is done: then the signatures say so.
            return Standing.RUNNING
        if self._rpc.peer_id in attempt.proofs:
            return Standing.SIGNED
        if attempt.has_renounced or attempt.audited:  # Nobody vouches for means that it could not check.
            return Standing.RENOUNCED
        return Standing.FETCHING if attempt.is_fetching else Standing.OPEN

    def _note(self, attempt: Attempt, peer: str, standing: Standing) -> None:
        """Take down where another member stands, and draw the conclusion for this one."""
        attempt.standings[peer] = standing
        if standing is not Standing.LOST:
            attempt.silent.discard(peer)
            attempt.fell_silent.pop(peer, None)
        self._conclude(attempt)

    def _conclude(self, attempt: Attempt) -> None:
        """Renounce if the time has come, and let `settle` look again."""
        known = attempt.standings.keys() | attempt.silent | {self._rpc.peer_id}
        if self._standing(attempt) is Standing.OPEN and known.issuperset(attempt.roster.members):
            attempt.has_renounced = may_renounce(attempt.standings, attempt.silent)
        attempt.changed.set()

    async def _serve(self, peer: str, question: WhereNow) -> StandsAt:
        attempt = self._attempts.get(question.group)
        if attempt is None or peer not in attempt.roster.members:
            return StandsAt(Standing.UNKNOWN)
        attempt.add_proof(peer, question.proof, self._signer)
        self._note(attempt, peer, question.standing)
        standing = self._standing(attempt)
        if attempt.body is None:
            return StandsAt(standing)
        return StandsAt(standing, attempt.body.to_bytes(), tuple(sorted(attempt.proofs.items())))

    async def settle(
        self, attempt: Attempt, elapsed_seconds: float = 0.0, silent: Collection[str] = ()
    ) -> Certificate | None:
        """End a broken attempt.

        Args:
            attempt: What this member holds.
            elapsed_seconds: How long the attempt took until it broke; says how long others may be later.
            silent: Other members that were found silent, and are not waited for unless they act.

        Returns:
            Its certificate; None when there is none to be had and the attempt is given up.
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
        """Whether nobody who answers knows of an attempt that is complete here, but too late.

        They signed it, and went on without its result: this peer stood still when it came. With it, it would make a
        second lineage.
        """
        seconds = silence_seconds(attempt.spec.grace_seconds)
        await together("settle", (self._ask(attempt, peer, seconds) for peer in others))
        standings = attempt.standings.values()
        gone = (Standing.UNKNOWN, Standing.RENOUNCED, Standing.WITHHOLDS)
        return any(standing in gone for standing in standings) and all(
            standing in (*gone, Standing.LOST) for standing in standings
        )

    async def _ask_on(self, attempt: Attempt, others: list[str], tasks: Tasks, elapsed_seconds: float) -> None:
        """Ask the other members again and again until it is clear how the attempt ends, or the deadline passes."""
        loop, grace = asyncio.get_running_loop(), attempt.spec.grace_seconds
        deadline = loop.time() + patience_seconds(elapsed_seconds, grace)
        fetched_by = deadline + elapsed_seconds
        asked: dict[str, tuple[Standing, float, asyncio.Task[None]]] = {}
        while not self._is_clear(attempt, others):
            now, own = loop.time(), self._standing(attempt)
            if now >= (fetched_by if attempt.is_fetching else deadline):
                return
            for peer in others:
                told, at, task = asked.get(peer, (None, 0.0, None))
                # A member that waits for this one should know at once.
                if task is None or own is not told or (task.done() and now - at >= PAUSE_SECONDS):
                    question = self._ask(attempt, peer, silence_seconds(grace), fetched_by - now)
                    asked[peer] = own, now, tasks.start(question, f"settle-{peer[-8:]}")
            attempt.changed.clear()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(PAUSE_SECONDS):
                    await attempt.changed.wait()

    def _is_clear(self, attempt: Attempt, others: list[str]) -> bool:
        """Whether there is a certificate, or nothing more to wait for."""
        own, majority = self._standing(attempt), attempt.roster.majority
        if attempt.certificate() is not None:
            return True
        if not can_complete(len(others) + 1, majority, [own, *attempt.standings.values()]):
            return True
        if attempt.is_fetching:
            return False
        waited_for = [peer for peer in others if peer not in attempt.silent]
        # A signer has done all that it can once its result is here; one that is open decides soon.
        done = (Standing.RENOUNCED, Standing.UNKNOWN, Standing.LOST, Standing.SIGNED)
        return own is not Standing.OPEN and all(attempt.standings.get(peer) in done for peer in waited_for)

    async def _ask(self, attempt: Attempt, peer: str, timeout_seconds: float, fetch_seconds: float = 0.0) -> None:
        """Ask where one member stands, and take over what it holds and this one does not."""
        own = attempt.proofs.get(self._rpc.peer_id, b"")
        try:
            reply = await self._rpc.call(
                peer,
                "settle",
                WhereNow(attempt.roster.group_id, self._standing(attempt), own),
                StandsAt,
                timeout_seconds,
            )
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

    async def _take_over(self, attempt: Attempt, peer: str, reply: StandsAt, timeout_seconds: float) -> None:
        """Adopt a signer's body if it is this attempt's, fetch its means, and sign it."""
        body = Body.from_bytes(reply.body)
        if attempt.body is None and not attempt.is_fetching:
            contributors = tuple(index for index, *_ in body.contributors)
            if body.members != attempt.roster.members or body != attempt.body_of(contributors, body.hashes):
                raise IntegrityError("its result is not one of this roster")
            attempt.is_fetching = True
            try:
                means = await self._history.fetch_means([peer], body, attempt.bounds[-1], timeout_seconds)
                self._adopt(attempt, body, contributors, means)
            finally:
                attempt.is_fetching = False
        for member, proof in reply.proofs:
            attempt.add_proof(member, proof, self._signer)

    def _adopt(self, attempt: Attempt, body: Body, contributors: tuple[int, ...], means: Sequence[Buffer]) -> None:
        """Hold a result that another member made as the own one, and sign it if this member may."""
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
            attempt.sign(self._signer)
