"""The head of a lineage: the facts that all holders of one certificate share."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.signed import MAX_MEMBERS, Count, Name, Present
from p2ptrain.network.schema import Hash


@dataclass(frozen=True)
class Head:
    """The newest state of a lineage that a peer holds.

    Attributes:
        round: Rounds committed since the lineage began; also the number of the round in progress.
        lineage: Hash chain over the bodies of all its certificates, 32 bytes.
        tokens: Tokens that contributed to it in all rounds; the lineage with more tokens wins.
        samples: Data position up to which the lineage has handed out samples.
        digest: Merkle root of parameters, buffers and shared optimizer state at the start of the round, 32 bytes.
        members: Roster of the round before, in order; empty at the start, and after a roster of delegates.
        certificate: Certificate of the round before, in wire form; empty at the start.
        present: Number of peers that the round before counted; 0 at the start.
    """

    round: Count
    lineage: Hash
    tokens: Count
    samples: Count
    digest: Hash
    members: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)] = ()
    certificate: bytes = b""
    present: Present = 0

    def without_proof(self) -> Head:
        """Return this head without members and certificate, for messages that need not prove it."""
        return Head(self.round, self.lineage, self.tokens, self.samples, self.digest, present=self.present)

    def outranks(self, other: Head) -> bool:
        """True if this lineage wins: by more tokens, then by more rounds, then by the smaller hash."""
        return (self.tokens, self.round, other.lineage) > (other.tokens, other.round, self.lineage)


def genesis(swarm: bytes, digest: bytes) -> Head:
    """Return the head of a new lineage, whose initial state has this digest."""
    return Head(0, hashlib.sha256(b"p2ptrain genesis" + swarm + digest).digest(), 0, 0, digest)
