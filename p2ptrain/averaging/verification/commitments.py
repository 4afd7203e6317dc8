"""What members sign about a share so that others can check slices of it: senders sign parts, owners sign means.

Each contributor to a share signs a `Commitment` to the part that it sent: to each chunk of it, and to its norm. The
owner signs a `Statement`, which names the mean and the commitments from which it was made. So an owner cannot show one
set of parts to one member and another set to the next.

The owner's own part need not be hashed. The owner hears the others' parts first and may choose its own as it likes, so
a later hash would bind it to nothing. The rule bounds it: the statement covers its energies, like everybody's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, ClassVar

from msgspec import Meta

from p2ptrain.averaging.protocol.signed import MAX_PROOF_BYTES, Count, Name, Positive, Signed
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.network.schema import Hash, to_wire
from p2ptrain.signing import Signer

MAX_STATEMENT_BYTES = MAX_PROOF_BYTES + 512
"""More than one takes on the wire."""
Energy = Annotated[float, Meta(ge=0.0)]


@dataclass(frozen=True)
class Slice:
    """One share of one attempt.

    Attributes:
        round: Of that attempt. With its level, it says what the vector is and how it is encoded.
        level: In the tree of groups.
        group: The roster's id.
        owner: Whose share.
        low: Its first value in the vector.
        high: The value after its last.
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
    """What one member contributes to a share.

    Attributes:
        share: Which.
        sender: Who signs; the owner does not, since its statement covers its own part.
        codec: The name of the codec in which the part travels; empty for the owner's own part.
        tokens: The weight that the sender asks for.
        root: Of the `SumTree` over the part's chunks. The owner's leaves have no hashes, only energies.
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
        """The sender."""
        return self.sender

    def verify(self, swarm: bytes, verifier: Signer) -> None:
        """Raise `IntegrityError` unless the sender signed this, or is the owner, whose statement says so."""
        if self.sender != self.share.owner:
            super().verify(swarm, verifier)
        elif self.proof or self.codec:
            raise IntegrityError("an owner committed to its own part as if it had been sent")


@dataclass(frozen=True)
class Statement(Signed):
    """What an owner says that the mean of its share is, and from what it was made.

    Attributes:
        share: Which.
        root: Hash at the root of the `SumTree` over the encoded mean's chunks, all energies zero.
        parts: `digest_of` the contributors' commitments.
    """

    CONTEXT: ClassVar[bytes] = b"p2ptrain mean"
    share: Slice
    root: Hash
    parts: Hash

    @property
    def author(self) -> str:
        """The share's owner."""
        return self.share.owner

    def differs(self, other: Statement) -> bool:
        """True if the owner states another mean of the same share in ``other``."""
        return self.share == other.share and (self.root, self.parts) != (other.root, other.parts)


def digest_of(commitments: Sequence[Commitment]) -> bytes:
    """Return what a statement says of the commitments, in the order of the roster; 32 bytes."""
    return hashlib.sha256(canonical_bytes([to_wire(each) for each in commitments])).digest()


def verify_commitments(commitments: Sequence[Commitment], statement: Statement, swarm: bytes, verifier: Signer) -> None:
    """Raise `IntegrityError` unless the statement is made of these commitments, and each is signed by its sender."""
    if digest_of(commitments) != statement.parts:
        raise IntegrityError("these are not the commitments that the owner spoke of")
    senders = {each.sender for each in commitments}
    if len(senders) < len(commitments) or any(each.share != statement.share for each in commitments):
        raise IntegrityError("commitments to another share, or two of one member")
    for each in commitments:
        each.verify(swarm, verifier)
