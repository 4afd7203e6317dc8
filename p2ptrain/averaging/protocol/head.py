"""Where a lineage stands: the facts that every holder of one certificate shares."""

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
        lineage: 32 bytes; a hash chain over the bodies of all its certificates.
        tokens: Tokens that contributed to it, over all rounds; the lineage with more of them wins.
        samples: Position in the data up to which the lineage has handed out samples.
        digest: Merkle root of parameters, buffers and shared optimizer state at the start of the round, 32 bytes.
        members: The roster of the round that led here, in roster order; empty at the start, and where that was one of
            delegates.
        certificate: That round's certificate in wire form; empty at the start.
        present: Peers that the swarm counted in that round; 0 at the start.
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
        """This head without members and certificate, for messages that need not prove it."""
        return Head(self.round, self.lineage, self.tokens, self.samples, self.digest, present=self.present)

    def outranks(self, other: Head) -> bool:
        """The lineage rule: more tokens win; then more rounds; then the smaller hash, so that all agree."""
        return (self.tokens, self.round, other.lineage) > (other.tokens, other.round, self.lineage)


def genesis(swarm: bytes, digest: bytes) -> Head:
    """The head of a lineage in which nothing happened yet, for initial state with this digest."""
    return Head(0, hashlib.sha256(b"p2ptrain genesis" + swarm + digest).digest(), 0, 0, digest)
