"""Ending an attempt that broke in its last phase: find out whether a majority signed, and complete it if so.

A member can miss the end of an attempt: an owner died after it sent its mean to some, or signatures were lost. Any
signer holds the whole result and can bring the others up. Each member asks all others what they hold, takes over what
is missing, signs, and passes its own signature on, until there is a certificate or the deadline passes. If an owner
never began to make its share's mean, nobody can hold the result, and the attempt is given up at once.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from typing import Any

from p2ptrain.averaging.attempt import Attempt
from p2ptrain.averaging.certificate import Body, Certificate, vote
from p2ptrain.averaging.history import History
from p2ptrain.codecs import CodecError
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError
from p2ptrain.network.rpc import Rpc
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)

SETTLE_SECONDS = 6.0
PAUSE_SECONDS = 0.3
CALL_TIMEOUT_SECONDS = 2.0
MAX_ATTEMPTS_KEPT = 4


class Settlements:
    """Remembers this peer's last attempts, answers for them, and settles broken ones."""

    def __init__(self, rpc: Rpc, signer: Signer, history: History) -> None:
        self._rpc = rpc
        self._signer = signer
        self._history = history
        self._attempts: OrderedDict[bytes, Attempt] = OrderedDict()
        history.find_attempt = self.find
        rpc.serve("settle", self._serve)

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
        """Give an attempt up and forget it.

        Whoever settles later, after a stall for example, must not be handed this peer's signature any more: it could
        complete a certificate of which those who moved on to the next attempt know nothing.
        """
        self._attempts.pop(attempt.roster.group_id, None)

    async def _serve(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        group = request.get("group")
        attempt = self._attempts.get(group) if type(group) is bytes else None
        if attempt is None or peer not in attempt.roster.members:
            return {"state": "unknown"}
        attempt.add_proof(peer, request.get("proof"), self._signer)
        if attempt.body is None:
            return {"state": "withholds" if attempt.withholds else "pending"}
        proofs = [[member, proof] for member, proof in sorted(attempt.proofs.items())]
        return {"state": "pending", "body": attempt.body.to_bytes(), "proofs": proofs}

    async def settle(self, attempt: Attempt) -> Certificate | None:
        """The certificate of a broken attempt; None when there is none to be had and the attempt is given up."""
        if len(attempt.roster.tickets) == 1 or attempt.withholds:
            self._abandon(attempt)
            return None
        deadline = asyncio.get_running_loop().time() + SETTLE_SECONDS
        others = [member for member in attempt.roster.members if member != self._rpc.peer_id]
        if attempt.certificate() is not None and await self._was_given_up(attempt, others):
            self._abandon(attempt)
            return None
        while attempt.certificate() is None and asyncio.get_running_loop().time() < deadline:
            if await self._ask_all(attempt, others):
                break
            await asyncio.sleep(PAUSE_SECONDS)
        certificate = attempt.certificate()
        if certificate is None:
            self._abandon(attempt)
        return certificate

    async def _was_given_up(self, attempt: Attempt, others: list[str]) -> bool:
        """Whether nobody who answers knows of an attempt that is complete here, but too late.

        They signed it, and went on without its result: this peer stood still when it came. With it, it would make a
        second lineage.
        """
        states = await asyncio.gather(*(self._ask(attempt, peer) for peer in others))
        return "unknown" in states and all(state in ("unknown", "lost") for state in states)

    async def _ask_all(self, attempt: Attempt, others: list[str]) -> bool:
        """Ask the other members until it is clear how the attempt ends; whether it is."""
        states: dict[str, str] = {}

        async def ask(peer: str) -> None:
            states[peer] = await self._ask(attempt, peer)

        asking = {asyncio.create_task(ask(peer), name=f"settle-{peer[-8:]}") for peer in others}
        try:
            while asking:
                _, asking = await asyncio.wait(asking, return_when=asyncio.FIRST_COMPLETED)
                if attempt.certificate() is not None or "withholds" in states.values():
                    return True
            return attempt.disputed or all(state in ("unknown", "lost") for state in states.values())
        finally:
            for task in asking:
                task.cancel()
            await asyncio.gather(*asking, return_exceptions=True)

    async def _ask(self, attempt: Attempt, peer: str) -> str:
        """One member's state, after taking over from it what was missing."""
        request: dict[str, Any] = {"group": attempt.roster.group_id}
        if (own := attempt.proofs.get(self._rpc.peer_id)) is not None:
            request["proof"] = own
        try:
            reply = await self._rpc.call(peer, "settle", request, CALL_TIMEOUT_SECONDS)
            raw, proofs = reply.get("body"), reply.get("proofs")
            if type(raw) is bytes and isinstance(proofs, list):
                await self._take_over(attempt, peer, Body.from_bytes(raw), proofs)
        except (PeerError, DeadlineError, IntegrityError) as error:
            logger.info("settling with peer %s failed: %s", peer[-8:], error)
            return "lost"
        return str(reply.get("state"))

    async def _take_over(self, attempt: Attempt, peer: str, body: Body, proofs: list[Any]) -> None:
        """Adopt a signer's body if it is this attempt's, fetch its means, and sign it."""
        if attempt.body is None:
            contributors = tuple(index for index, *_ in body.contributors)
            if body.members != attempt.roster.members or body != attempt.body_of(contributors, body.hashes):
                raise IntegrityError("its result is not one of this roster")
            means = await self._history.fetch_means(peer, body, attempt.bounds[-1], SETTLE_SECONDS)
            if attempt.body is None:
                attempt.contributors = contributors
                own = attempt.roster.index_of(self._rpc.peer_id)
                try:
                    for index, mean in enumerate(means):
                        attempt.check_quotes(index, mean, own)
                except CodecError as error:
                    raise IntegrityError(f"its result is not to be signed: {error}") from error
                attempt.means = list(means)
                attempt.body = body
                if not attempt.audited:  # Nobody vouches for means that it could not check.
                    attempt.proofs[self._rpc.peer_id] = self._signer.sign(vote(body.body_hash))
        for entry in proofs[: len(attempt.roster.tickets)]:
            if isinstance(entry, list) and len(entry) == 2 and isinstance(entry[0], str):
                attempt.add_proof(entry[0], entry[1], self._signer)
