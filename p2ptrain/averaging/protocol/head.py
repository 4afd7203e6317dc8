"""Where a lineage stands: the facts that every holder of one certificate shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Annotated, Any, cast

from msgspec import Meta

from p2ptrain.network.schema import Hash, from_wire, to_wire

DIGEST_BYTES = 32
MAX_COUNT = 1 << 62
MAX_PRESENT = 1 << 16
"""Peers that a swarm counts at most: enough for any, and few enough that the shape of a tree is computed in no time."""
_Count = Annotated[int, Meta(ge=0, lt=MAX_COUNT)]


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

    round: _Count
    lineage: Hash
    tokens: _Count
    samples: _Count
    digest: Hash
    members: Annotated[tuple[Annotated[str, Meta(max_length=128)], ...], Meta(max_length=256)] = ()
    certificate: bytes = b""
    present: Annotated[int, Meta(ge=0, le=MAX_PRESENT)] = 0

    def to_dict(self) -> dict[str, Any]:
        """Return plain values."""
        return cast(dict[str, Any], to_wire(self))

    @classmethod
    def from_dict(cls, values: object) -> Head:
        """Return the head that `to_dict` gave; raises `IntegrityError` if it is none."""
        return from_wire(cls, values)

    def without_proof(self) -> Head:
        """This head without members and certificate, for messages that need not prove it."""
        return Head(self.round, self.lineage, self.tokens, self.samples, self.digest, present=self.present)

    def outranks(self, other: Head) -> bool:
        """The lineage rule: more tokens win; then more rounds; then the smaller hash, so that all agree."""
        return (self.tokens, self.round, other.lineage) > (other.tokens, other.round, self.lineage)


def genesis(swarm: bytes, digest: bytes) -> Head:
    """The head of a lineage in which nothing happened yet, for initial state with this digest."""
    return Head(0, hashlib.sha256(b"p2ptrain genesis" + swarm + digest).digest(), 0, 0, digest)
