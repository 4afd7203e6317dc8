"""Signatures that make a share verifiable: senders sign their parts, owners sign their means.

A `Commitment` covers every chunk of a part, and the part's norm. A `Statement` covers the mean and the commitments
behind it, so that an owner cannot show different parts to different members. The owner's own part is not hashed: the
owner receives the other parts first, so a later hash would not bind it. The rule bounds its influence, since the
statement covers its energies.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import MAX_PROOF_BYTES, Count, Name, Positive, Signed
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.network.schema import Hash, to_wire
from p2ptrain.signing import Signer

MAX_STATEMENT_BYTES = MAX_PROOF_BYTES + 512  # bound on a statement in wire form
Energy = Annotated[float, Meta(ge=0.0)]


@dataclass(frozen=True)
class Slice:
    """One share ``[low, high)`` of the vector in one attempt; ``group`` is `Roster.group_id`.

    ``round`` and ``level``, of the tree, determine the vector and its codec.
    """

    round: Count
    level: Count
    group: Hash
    owner: Name
    low: Count
    high: Count

    def __post_init__(self) -> None:
        if self.low >= self.high:
            raise ValueError("a share without values")


@dataclass(frozen=True)
class Commitment(Signed):
    """One member's commitment to its part of a share.

    Attributes:
        sender: Signs it, unless it is the owner: the owner's statement covers its own part.
        codec: Name of the part's codec; empty for the owner's own part.
        root: Of the `SumTree` over the part's chunks. The owner's leaves have energies, but no hashes.
    """

    CONTEXT: ClassVar[bytes] = b"p2ptrain part"
    share: Slice
    sender: Name
    codec: Name
    tokens: Positive
    root: tuple[Hash, Energy]

    def __post_init__(self) -> None:
        if math.isnan(self.root[1]) or math.copysign(1.0, self.root[1]) < 0:
            raise ValueError("an energy that is none")

    @property
    def author(self) -> str:
        return self.sender

    def verify(self, swarm: bytes, verifier: Signer) -> None:
        """Raise `IntegrityError` unless the sender signed this; an owner must have neither signature nor codec."""
        if self.sender != self.share.owner:
            super().verify(swarm, verifier)
        elif self.proof or self.codec:
            raise IntegrityError("an owner committed to its own part as if it had been sent")


@dataclass(frozen=True)
class Statement(Signed):
    """An owner's claim about its share's mean.

    Attributes:
        root: Hash at the root of the `SumTree` over the encoded mean's chunks, all energies zero.
        parts: `digest_of` the contributors' commitments.
    """

    CONTEXT: ClassVar[bytes] = b"p2ptrain mean"
    share: Slice
    root: Hash
    parts: Hash

    @property
    def author(self) -> str:
        return self.share.owner

    def differs(self, other: Statement) -> bool:
        """True if ``other`` claims another mean, or other parts, of the same share."""
        return self.share == other.share and (self.root, self.parts) != (other.root, other.parts)


def digest_of(commitments: Sequence[Commitment]) -> bytes:
    """Return the digest of commitments in roster order, 32 bytes."""
    return hashlib.sha256(canonical_bytes([to_wire(each) for each in commitments])).digest()


def verify_commitments(commitments: Sequence[Commitment], statement: Statement, swarm: bytes, verifier: Signer) -> None:
    """Raise `IntegrityError` unless the statement is about these commitments, and each is valid."""
    if digest_of(commitments) != statement.parts:
        raise IntegrityError("these are not the commitments that the owner spoke of")
    senders = {each.sender for each in commitments}
    if len(senders) < len(commitments) or any(each.share != statement.share for each in commitments):
        raise IntegrityError("commitments to another share, or two of one member")
    for each in commitments:
        each.verify(swarm, verifier)
