"""What members sign about a share so that others can check slices of it: parts by who sent them, the mean by its owner.

Whoever contributes to a share signs a `Commitment` to the part that it sent: to each chunk of it, and to its norm. The
owner signs a `Statement`: this is the mean, and these are the commitments from which it was made. So it cannot show one
set of parts to one member and another to the next, nor tell afterwards which parts it meant.

The owner's own part, which it alone holds, need not be hashed: whoever hears the others' parts first may choose its own
as it likes, and a hash made afterwards would bind it to nothing. What bounds it is the rule, for which its energies are
part of the statement, like everybody's.
"""

from __future__ import annotations

import hashlib
import math
from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, MAX_PROOF_BYTES
from p2ptrain.averaging.protocol.head import DIGEST_BYTES, MAX_COUNT
from p2ptrain.averaging.vector.merkle_sum import Node
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.signing import Signer

MAX_NAME_LENGTH = 128
SLICE_FIELDS = 6
MAX_STATEMENT_BYTES = MAX_PROOF_BYTES + 512
"""More than one takes on the wire."""


@dataclass(frozen=True)
class Slice:
    """Which share of which attempt.

    Attributes:
        round: Of that attempt. With its level, it says what the vector is and how it is encoded.
        level: In the tree of groups.
        group: The roster's name, 32 bytes.
        owner: Whose share.
        low: Its first value in the vector.
        high: The value after its last.
    """

    round: int
    level: int
    group: bytes
    owner: str
    low: int
    high: int

    def to_list(self) -> list[Any]:
        """Plain values for the wire."""
        return [self.round, self.level, self.group, self.owner, self.low, self.high]

    @classmethod
    def from_list(cls, values: list[Any]) -> Slice:
        """Rebuild what `to_list` made; raises `IntegrityError` when a field is out of range."""
        round_, level, group, owner, low, high = values
        counts = all(_is_count(value) for value in (round_, level, low, high))
        if not (counts and _is_hash(group) and _is_name(owner) and low < high):
            raise IntegrityError("a commitment is to an impossible share")
        return cls(round_, level, group, owner, low, high)


@dataclass(frozen=True)
class Commitment:
    """What one member contributes to a share.

    Attributes:
        share: Which.
        sender: Who.
        codec: The name of the codec in which the part travels; empty for the owner's own part.
        tokens: The weight that the sender asks for.
        root: Of the `SumTree` over the part's chunks. The owner's leaves have no hashes, only energies.
        proof: The sender's signature; empty for the owner, whose statement covers it.
    """

    share: Slice
    sender: str
    codec: str
    tokens: int
    root: Node
    proof: bytes = b""

    def message(self, swarm: bytes) -> bytes:
        """The bytes that the sender signs."""
        return b"p2ptrain part" + swarm + canonical_bytes(self.to_wire()[:-1])

    def to_wire(self) -> list[Any]:
        """Plain values."""
        return [*self.share.to_list(), self.sender, self.codec, self.tokens, *self.root, self.proof]

    def signed(self, swarm: bytes, signer: Signer) -> Commitment:
        """This commitment with the sender's signature."""
        return replace(self, proof=signer.sign(self.message(swarm)))

    @classmethod
    def from_wire(cls, values: Any) -> Commitment:
        """Check the shape of what `to_wire` made; see `verify`.

        Raises:
            IntegrityError: A field is missing or out of range.
        """
        if not (isinstance(values, list) and len(values) == 6 + SLICE_FIELDS):
            raise IntegrityError("a commitment is malformed")
        share = Slice.from_list(values[:SLICE_FIELDS])
        sender, codec, tokens, digest, energy, proof = values[SLICE_FIELDS:]
        if not (
            _is_name(sender)
            and _is_name(codec)
            and _is_count(tokens)
            and tokens > 0
            and _is_hash(digest)
            and type(energy) is float
            and energy >= 0
            and math.copysign(1.0, energy) > 0
            and type(proof) is bytes
            and len(proof) <= MAX_PROOF_BYTES
        ):
            raise IntegrityError("a commitment has fields out of range")
        return cls(share, sender, codec, tokens, (digest, energy), proof)

    def verify(self, swarm: bytes, verifier: Signer) -> None:
        """Raise `IntegrityError` unless the sender signed this, or is the owner, whose statement says so."""
        if self.sender == self.share.owner:
            if self.proof or self.codec:
                raise IntegrityError("an owner committed to its own part as if it had been sent")
        elif not verifier.verify(self.sender, self.message(swarm), self.proof):
            raise IntegrityError("a commitment's signature does not match its sender")


@dataclass(frozen=True)
class Statement:
    """What an owner says that the mean of its share is, and from what it was made.

    Attributes:
        share: Which.
        root: Hash at the root of the `SumTree` over the encoded mean's chunks, all energies zero.
        parts: `digest_of` the contributors' commitments.
        proof: The owner's signature.
    """

    share: Slice
    root: bytes
    parts: bytes
    proof: bytes = b""

    def message(self, swarm: bytes) -> bytes:
        """The bytes that the owner signs."""
        return b"p2ptrain mean" + swarm + canonical_bytes(self.to_wire()[:-1])

    def to_wire(self) -> list[Any]:
        """Plain values."""
        return [*self.share.to_list(), self.root, self.parts, self.proof]

    def signed(self, swarm: bytes, signer: Signer) -> Statement:
        """This statement with the owner's signature."""
        return replace(self, proof=signer.sign(self.message(swarm)))

    def differs(self, other: Statement) -> bool:
        """Whether the owner states another mean of the same share there: it may state one."""
        return self.share == other.share and (self.root, self.parts) != (other.root, other.parts)

    @classmethod
    def from_wire(cls, values: Any, swarm: bytes, verifier: Signer) -> Statement:
        """Check and rebuild what `to_wire` made.

        Raises:
            IntegrityError: A field is missing or out of range, or the signature does not match.
        """
        if not (isinstance(values, list) and len(values) == 3 + SLICE_FIELDS):
            raise IntegrityError("a statement about a mean is malformed")
        share = Slice.from_list(values[:SLICE_FIELDS])
        root, parts, proof = values[SLICE_FIELDS:]
        if not (_is_hash(root) and _is_hash(parts) and type(proof) is bytes and len(proof) <= MAX_PROOF_BYTES):
            raise IntegrityError("a statement about a mean has fields out of range")
        found = cls(share, root, parts, proof)
        if not verifier.verify(share.owner, found.message(swarm), proof):
            raise IntegrityError("a statement's signature does not match the share's owner")
        return found


def digest_of(commitments: list[Commitment]) -> bytes:
    """What a statement says of the commitments, in the order of the roster; 32 bytes."""
    return hashlib.sha256(canonical_bytes([each.to_wire() for each in commitments])).digest()


def commitments_from_wire(values: Any, statement: Statement, swarm: bytes, verifier: Signer) -> list[Commitment]:
    """The commitments that a statement speaks of.

    Raises:
        IntegrityError: They are others, or one of them is malformed, of another share, or not signed by its sender.
    """
    if not (isinstance(values, list) and 0 < len(values) <= MAX_MEMBERS):
        raise IntegrityError("a list of commitments is malformed")
    found = [Commitment.from_wire(value) for value in values]
    if digest_of(found) != statement.parts:
        raise IntegrityError("these are not the commitments that the owner spoke of")
    if len({each.sender for each in found}) < len(found) or any(each.share != statement.share for each in found):
        raise IntegrityError("commitments to another share, or two of one member")
    for each in found:
        each.verify(swarm, verifier)
    return found


def _is_hash(value: Any) -> bool:
    return type(value) is bytes and len(value) == DIGEST_BYTES


def _is_name(value: Any) -> bool:
    return type(value) is str and len(value) <= MAX_NAME_LENGTH


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < MAX_COUNT
