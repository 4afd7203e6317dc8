"""Evidence against owners that falsified a mean, and voters that voted twice: kept, served, and spread to trainers.

Evidence convinces every peer (`p2ptrain.averaging.verification.opening.verify_evidence`), so any peer may forward it.
The cost of liars is bounded: a piece has at most `MAX_EVIDENCE_BYTES`, one is received and verified at a time, and a
peer that brings invalid evidence is ignored from then on. Mass convictions of own identities gain nothing: beyond
`MAX_KEPT_BYTES`, only names are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import MAX_KNOWN_PEERS
from p2ptrain.averaging.protocol.ballots import Votes
from p2ptrain.averaging.protocol.certificate import Name
from p2ptrain.averaging.verification.opening import MAX_EVIDENCE_BYTES, DoubleVote, RulesOf, verify_evidence
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import Message, Nothing, to_bytes
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
TRANSFER_SECONDS = 30.0
ASK_AGAIN_SECONDS = 600.0
MAX_KEPT_BYTES = 2 * MAX_EVIDENCE_BYTES
MAX_OFFERED = 64  # number of peers that new evidence is offered to
MAX_LISTED = 64
Size = Annotated[int, Meta(ge=1, le=MAX_EVIDENCE_BYTES)]


class Question(Message, frozen=True, tag=True):
    """Request that opens a stream."""


class List(Question, frozen=True, tag="list"):
    """Request for the peers that the receiver can convict."""


class Get(Question, frozen=True, tag="get"):
    accused: Name


class Offer(Question, frozen=True, tag="offer"):
    """Offer of evidence of this size, which follows if it is wanted."""

    accused: Name
    num_bytes: Size


class Listed(Message, frozen=True):
    accused: Annotated[tuple[Name, ...], Meta(max_length=MAX_LISTED)]


class Sends(Message, frozen=True):
    """Header of the evidence, which follows."""

    num_bytes: Size


class Wanted(Message, frozen=True):
    is_wanted: bool


class EvidenceStore:
    """The evidence that this peer holds against others.

    Attributes:
        convicted: Evidence by peer, the oldest first; empty where only the name is kept.
    """

    def __init__(self, context: PeerContext, rules_of: RulesOf, on_conviction: Callable[[str, str], None]) -> None:
        """``on_conviction`` is called once for each convicted peer, with its fault."""
        self._context = context
        self._rpc = context.rpc
        self._rules_of = rules_of
        self._membership = context.membership
        self._on_conviction = on_conviction
        self.convicted: OrderedDict[str, bytes] = OrderedDict()
        self._ask_again_at: dict[str, float] = {}
        self._liars: set[str] = set()
        self._receiving = asyncio.Lock()
        self._tasks = Tasks()

    def serve(self) -> None:
        """Serve this peer's evidence to others, and receive theirs."""
        self._rpc.serve_channel("evidence", Question, self._serve)

    async def add(self, evidence: bytes) -> str:
        """Verify evidence, and offer it if it is new; return the convicted peer, or raise `IntegrityError`."""
        peer, fault = await self._context.runtime.offload(
            verify_evidence, evidence, self._context.swarm, self._rules_of, self._context.signer
        )
        if peer not in self.convicted and peer != self._rpc.peer_id:
            self.convicted[peer] = evidence
            self._forget_some()
            self._membership.convict(peer)
            self._on_conviction(peer, fault)
            for other in [p for p in self._membership.present() if p != peer][:MAX_OFFERED]:
                self._start(self._offer(other, peer, evidence))
        return peer

    async def add_own(self, evidence: bytes) -> None:
        """Add evidence that this peer found, unless it is too large, as it may be in a very large group."""
        with contextlib.suppress(IntegrityError):
            await self.add(evidence)

    async def add_double_vote(self, voter: str, first: Votes, second: Votes) -> None:
        """Add evidence of a voter that voted for both."""
        both = DoubleVote(voter, (first.body, second.body), (first.proofs[voter], second.proofs[voter]))
        await self.add_own(to_bytes(both))

    def add_soon(self, evidence: bytes) -> None:
        self._start(self.add(evidence))

    def show(self, to: str, accused: str) -> None:
        """Offer a peer the evidence against another one, if there is any."""
        if evidence := self.convicted.get(accused):
            self._start(self._offer(to, accused, evidence))

    def _forget_some(self) -> None:
        kept = sum(map(len, self.convicted.values()))
        for peer, evidence in self.convicted.items():
            if kept <= MAX_KEPT_BYTES:
                break
            kept -= len(evidence)
            self.convicted[peer] = b""
        while len(self.convicted) > MAX_KNOWN_PEERS:
            self.convicted.popitem(last=False)

    def ask(self, peers: Iterable[str]) -> None:
        """Fetch evidence from peers that were not asked lately."""
        now = asyncio.get_running_loop().time()
        for peer in peers:
            if now >= self._ask_again_at.get(peer, now) and len(self._ask_again_at) < MAX_KNOWN_PEERS:
                self._ask_again_at[peer] = now + ASK_AGAIN_SECONDS
                self._start(self._fetch_all(peer))

    def _start(self, work: Awaitable[object]) -> None:
        async def run() -> None:
            try:
                await work
            except (PeerError, DeadlineError, IntegrityError) as error:
                logger.debug("evidence was not passed on: %s", error)

        self._tasks.start(run(), "evidence")

    async def close(self) -> None:
        await self._tasks.close()

    async def _offer(self, to: str, accused: str, evidence: bytes) -> None:
        offer = Offer(accused, len(evidence))
        async with self._rpc.open(to, "evidence", offer, CALL_SECONDS, expected_bytes=len(evidence)) as channel:
            if (await channel.receive(Wanted, TRANSFER_SECONDS)).is_wanted:
                await channel.send_bytes(evidence)
                await channel.receive(Nothing, TRANSFER_SECONDS)

    async def _fetch_all(self, peer: str) -> None:
        async with self._rpc.open(peer, "evidence", List(), CALL_SECONDS) as channel:
            accused = (await channel.receive(Listed, CALL_SECONDS)).accused
        for name in accused:
            if self._wants(name, peer):
                async with self._rpc.open(peer, "evidence", Get(name), CALL_SECONDS) as channel:
                    await self._receive(channel, (await channel.receive(Sends, CALL_SECONDS)).num_bytes)

    def _wants(self, accused: str, source: str) -> bool:
        return accused not in self.convicted and accused != self._rpc.peer_id and source not in self._liars

    async def _receive(self, channel: Channel, num_bytes: int) -> None:
        """Receive and verify evidence; ignore the sender from now on if it is invalid."""
        try:
            async with self._receiving:
                await self.add(bytes(await channel.receive_bytes(num_bytes, TRANSFER_SECONDS)))
        except IntegrityError:
            if len(self._liars) < MAX_KNOWN_PEERS:
                self._liars.add(channel.remote)
            raise

    async def _serve(self, channel: Channel, question: Question) -> None:
        match question:
            case Get(accused):
                evidence = self.convicted.get(accused, b"")
                if not evidence:
                    raise PeerRefusedError(self._rpc.peer_id, "there is no such evidence here")
                await channel.send(Sends(len(evidence)))
                await channel.send_bytes(evidence)
            case Offer(accused, num_bytes):
                is_wanted = self._wants(accused, channel.remote) and not self._receiving.locked()
                await channel.send(Wanted(is_wanted))
                if is_wanted:
                    await self._receive(channel, num_bytes)
                    await channel.send(Nothing())
            case _:
                await channel.send(Listed(tuple(peer for peer, kept in self.convicted.items() if kept)[-MAX_LISTED:]))
