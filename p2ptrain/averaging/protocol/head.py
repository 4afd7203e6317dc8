"""Where a lineage stands: the facts that every holder of one certificate shares."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

from p2ptrain.errors import IntegrityError

DIGEST_BYTES = 32
MAX_COUNT = 1 << 62
MAX_PRESENT = 1 << 16
"""Peers that a swarm counts at most: enough for any, and few enough that the shape of a tree is computed in no time."""


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

    round: int
    lineage: bytes
    tokens: int
    samples: int
    digest: bytes
    members: tuple[str, ...] = ()
    certificate: bytes = b""
    present: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Plain values for the wire."""
        return {
            "round": self.round,
            "lineage": self.lineage,
            "tokens": self.tokens,
            "samples": self.samples,
            "digest": self.digest,
            "members": list(self.members),
            "certificate": self.certificate,
            "present": self.present,
        }

    @classmethod
    def from_dict(cls, values: Any) -> Head:
        """Check and rebuild what `to_dict` made.

        Raises:
            IntegrityError: A field is missing, of the wrong type, or out of range.
        """
        try:
            head = cls(
                round=values["round"],
                lineage=values["lineage"],
                tokens=values["tokens"],
                samples=values["samples"],
                digest=values["digest"],
                members=tuple(values["members"]),
                certificate=values["certificate"],
                present=values["present"],
            )
        except (TypeError, KeyError) as error:
            raise IntegrityError("a head lacks fields: the peer that sent it is broken or hostile") from error
        counts = (head.round, head.tokens, head.samples)
        valid = (
            all(type(count) is int and 0 <= count < MAX_COUNT for count in counts)
            and all(type(h) is bytes and len(h) == DIGEST_BYTES for h in (head.lineage, head.digest))
            and len(head.members) <= 256
            and all(type(member) is str and len(member) <= 128 for member in head.members)
            and type(head.certificate) is bytes
            and type(head.present) is int
            and 0 <= head.present <= MAX_PRESENT
        )
        if not valid:
            raise IntegrityError("a head has fields out of range: the peer that sent it is broken or hostile")
        return head

    def without_proof(self) -> Head:
        """This head without members and certificate, for messages that need not prove it."""
        return Head(self.round, self.lineage, self.tokens, self.samples, self.digest, present=self.present)

    def outranks(self, other: Head) -> bool:
        """The lineage rule: more tokens win; then more rounds; then the smaller hash, so that all agree."""
        return (self.tokens, self.round, other.lineage) > (other.tokens, other.round, self.lineage)


def genesis(swarm: bytes, digest: bytes) -> Head:
    """The head of a lineage in which nothing happened yet, for initial state with this digest."""
    return Head(0, hashlib.sha256(b"p2ptrain genesis" + swarm + digest).digest(), 0, 0, digest)
