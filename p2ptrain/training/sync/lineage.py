"""A lineage, followed by its certificates alone: the peer does not average."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

from p2ptrain.averaging.commit.round_log import RoundLog
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import HOLDING_STATES
from p2ptrain.averaging.protocol.certificate import Certificate, Head
from p2ptrain.errors import IntegrityError, TemporaryError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.tasks import together
from p2ptrain.training.sync.background_download import SOURCE_FAILURES
from p2ptrain.training.sync.state_server import announced_digests, check_head

logger = logging.getLogger(__name__)

VOUCH_SECONDS = 15.0
"""Timeout for a certificate or records that tell a head's digest; > the time that a record takes."""
LOOK_SECONDS = 0.5
MAX_WITNESSES = 4
"""Peers asked for the certificate after a head."""


class FollowedLineage:
    """A swarm's lineage, or that of one of its stages; ``head`` is the newest one that this peer believes."""

    def __init__(self, context: PeerContext) -> None:
        self.context = context
        self.head = context.genesis(bytes(HASH_BYTES))
        self._log = RoundLog(context, ())

    @property
    def is_trained(self) -> bool:
        """True if a peer holds a state, by its record, and has ended a round."""
        records = self.context.membership.records()
        return any(record.round and record.state in HOLDING_STATES for record in records)

    @property
    def holders(self) -> list[str]:
        """The peers that hold the state of a round, and have not failed lately."""
        return [record.peer for record in self.context.membership.trusted_records() if record.round]

    def adopt(self, head: Head) -> None:
        """Go on from a head that was checked, or that this peer knows otherwise."""
        self.head = head
        self._log.begin_at(head)

    async def check(self, source: str, head: Head) -> None:
        """Return if certificates lead to a head that ``source`` told, and vouch for its digest.

        Raises:
            IntegrityError: They do not.
            TemporaryError: The head is not ahead, or nobody tells its digest yet.
        """
        check_head(self.context, head)
        await self._log.believe(source, self.head, head)
        if head.lineage != self.head.lineage and not head.outranks(self.head):
            raise TemporaryError("a source is not ahead of this peer")
        try:
            async with asyncio.timeout(VOUCH_SECONDS):
                while (digest := await self._digest_at(source, head)) is None:  # noqa: ASYNC110
                    await asyncio.sleep(LOOK_SECONDS)
        except TimeoutError:
            raise TemporaryError("no other peer tells the digest of this state") from None
        if digest != head.digest:
            raise IntegrityError("a source tells another digest than the swarm has")

    async def _digest_at(self, source: str, head: Head) -> bytes | None:
        """Return the digest at a head's lineage; None if nobody tells it yet.

        A certificate vouches for the state before it. While a head is the newest, its holders' records tell its digest.
        """

        async def ask(peer: str) -> Sequence[Certificate]:
            try:
                return await self._log.certificates_after(peer, head, proofs=True)
            except SOURCE_FAILURES as error:
                logger.debug("peer %s tells no certificates: %s", peer[-8:], error)
                return []

        others = [peer for peer in self.holders if peer != source]
        self.context.runtime.random.shuffle(others)
        for chain in await together("vouch", map(ask, [*others, source][:MAX_WITNESSES])):
            if chain:
                return chain[0].body.digest
        votes = announced_digests(self.context, head)
        return votes.most_common(1)[0][0] if votes else None
