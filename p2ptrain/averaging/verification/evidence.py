"""Evidence against owners that falsified a mean: kept, shown to whoever asks, and brought to whoever should know.

Evidence convinces anybody (`p2ptrain.averaging.verification.opening.verify_evidence`), so nobody's word is taken for
it, and whoever has it may pass it on. A peer that finds or receives some brings it to all trainers that it knows; and
each asks the members of its groups now and then.

The cost of liars is bounded: a piece has at most `MAX_EVIDENCE_BYTES`, one is received and verified at a time, and a
peer that brought some that convicts nobody is not listened to any more. It is useless to convict identities of one's
own in numbers: what is kept of each beyond the last few is its name.
"""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import MAX_KNOWN_PEERS, Membership
from p2ptrain.averaging.protocol.signed import Name
from p2ptrain.averaging.verification.opening import MAX_EVIDENCE_BYTES, RulesOf, verify_evidence
from p2ptrain.errors import DeadlineError, IntegrityError, PeerError, PeerRefusedError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import Message, Nothing
from p2ptrain.tasks import Tasks

logger = logging.getLogger(__name__)

CALL_SECONDS = 5.0
TRANSFER_SECONDS = 30.0
ASK_AGAIN_SECONDS = 600.0
MAX_KEPT_BYTES = 2 * MAX_EVIDENCE_BYTES
MAX_TOLD = 64
"""Peers that evidence is brought to."""
MAX_LISTED = 64
Size = Annotated[int, Meta(ge=1, le=MAX_EVIDENCE_BYTES)]


class Question(Message, frozen=True, tag=True):
    """What a peer opens a stream with."""


class List(Question, frozen=True, tag="list"):
    """Whom can you convict?"""


class Get(Question, frozen=True, tag="get"):
    """Send what convicts this peer."""

    accused: Name


class Offer(Question, frozen=True, tag="offer"):
    """Here is what convicts a peer, this long; it follows if it is wanted."""

    accused: Name
    num_bytes: Size


class Listed(Message, frozen=True):
    """The peers that the sender can convict."""

    accused: Annotated[tuple[Name, ...], Meta(max_length=MAX_LISTED)]


class Sends(Message, frozen=True):
    """The evidence follows, this long."""

    num_bytes: Size


class Wanted(Message, frozen=True):
    """Tells whether an offer is wanted."""

    is_wanted: bool


class EvidenceStore:
    """What this peer can prove about others.

    Attributes:
        convicted: By peer, the oldest first: the evidence; empty where only the name is kept.
    """

    def __init__(
        self,
        context: PeerContext,
        rules_of: RulesOf,
        membership: Membership,
        on_conviction: Callable[[str, str], None],
    ) -> None:
        """
        Args:
            context: This peer.
            rules_of: What the swarm agreed on for an attempt.
            membership: Keeps convicted peers out.
            on_conviction: Called once for each peer, with what it did.
        """
        self._context = context
        self._rpc = context.rpc
        self._rules_of = rules_of
        self._membership = membership
        self._on_conviction = on_conviction
        self.convicted: OrderedDict[str, bytes] = OrderedDict()
        self._ask_again_at: dict[str, float] = {}
        self._liars: set[str] = set()
        self._receiving = asyncio.Lock()
        self._tasks = Tasks()

    def serve(self) -> None:
        """Show others what is known here, and take in what they bring."""
        self._rpc.serve_channel("evidence", Question, self._serve)

    async def add(self, evidence: bytes) -> str:
        """Take in evidence, and bring it to the others if it is news; returns whom it convicts.

        Raises:
            IntegrityError: Nobody.
        """
        peer, fault = await self._context.runtime.offload(
            verify_evidence, evidence, self._context.swarm, self._rules_of, self._context.signer
        )
        if peer not in self.convicted and peer != self._rpc.peer_id:
            self.convicted[peer] = evidence
            self._forget_some()
            self._membership.convict(peer)
            self._on_conviction(peer, fault)
            for other in [p for p in self._membership.present() if p != peer][:MAX_TOLD]:
                self._start(self._offer(other, peer, evidence))
        return peer

    def add_soon(self, evidence: bytes) -> None:
        """As `add`, without waiting for it."""

        async def add() -> None:
            await self.add(evidence)

        self._start(add())

    def show(self, to: str, accused: str) -> None:
        """Bring a peer what is known here about another one, if anything is."""
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
        """Learn what peers can prove, unless they were asked lately."""
        now = asyncio.get_running_loop().time()
        for peer in peers:
            if now >= self._ask_again_at.get(peer, now) and len(self._ask_again_at) < MAX_KNOWN_PEERS:
                self._ask_again_at[peer] = now + ASK_AGAIN_SECONDS
                self._start(self._fetch_all(peer))

    def _start(self, work: Awaitable[None]) -> None:
        async def run() -> None:
            try:
                await work
            except (PeerError, DeadlineError, IntegrityError) as error:
                logger.debug("evidence was not passed on: %s", error)

        self._tasks.start(run(), "evidence")

    async def close(self) -> None:
        """End everything that was started."""
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
        """Receive and verify evidence; a peer that brings none that convicts is not listened to again."""
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
