"""Signed commitments to the parts and the mean of a share, openings of its chunks, and judgement of its mean.

Senders sign their parts, and owners their means. A `Commitment` covers every chunk of a part, and the part's norm. A
`Statement` covers the mean and the commitments behind it, so that an owner cannot show different parts to different
members. The owner's own part is not hashed: the owner receives the other parts first, so a later hash would not bind
it. The rule bounds its influence, since the statement covers its energies.

An owner *opens* chunks on demand: it shows the contributors' encoded parts of them. With the `Statement`, its
commitments and the chunk of the mean, an opening proves to any peer that the mean is right, or that the owner lied
(`verify_evidence`). The senders signed the parts, and the owner all the rest. A mean is recomputed from the same bytes
with deterministic arithmetic, so it must be identical to the bit.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import (
    MAX_MEMBERS,
    MAX_PROOF_BYTES,
    Body,
    Count,
    Name,
    Positive,
    Proof,
    Signed,
    vote,
)
from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector.chunks import (
    RANGE_SLACK,
    check_range,
    chunk_span,
    chunk_values,
    leaf_hash,
    num_chunks,
    root_of_proof,
)
from p2ptrain.averaging.vector.reduce import OwnShare, part_weights
from p2ptrain.averaging.vector.rules import MIN_FOR_MEDIAN, Claim
from p2ptrain.codecs import Codec, CodecError, smaller_codecs
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import EMPTY_HASH, canonical_bytes
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.schema import Hash, Message, from_bytes, to_wire
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch

MAX_CHUNKS = 64  # chunks of one share that a member may have opened at a time
MAX_EVIDENCE_BYTES = 32 << 20
TWO_MEANS = "it stated two means of its share"
TWO_VOTES = "it voted for two results of one round in one view"
VALUE_BYTES = 4
MAX_STATEMENT_BYTES = MAX_PROOF_BYTES + 512  # bound on a statement in wire form

Energy = Annotated[float, Meta(ge=0.0)]
ChunkKey = tuple[Count, Hash]  # a chunk's number, and the hash of the owner's own values in it


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
        tokens, trust: See `Claim`.
        codec: Name of the part's codec; empty for the owner's own part.
        root: Of the `SumTree` over the part's chunks. The owner's leaves have energies, but no hashes.
    """

    CONTEXT: ClassVar[bytes] = b"p2ptrain part"
    share: Slice
    sender: Name
    codec: Name
    tokens: Positive
    trust: Annotated[int, Meta(ge=1, le=FULL_TRUST)]
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


@dataclass(frozen=True)
class Rules:
    """The swarm's agreement about a round on a tree level; it determines the arithmetic of a share.

    ``codec`` and ``num_values`` are those of the round's vectors; ``swarm`` is the manifest's digest, 32 bytes.
    """

    swarm: bytes
    spec: AveragingSpec
    codec: Codec
    num_values: int

    def num_chunks(self, size: int) -> int:
        return num_chunks(size, chunk_values(self.codec))

    def span(self, low: int, high: int, chunk: int) -> tuple[int, int]:
        """Return a chunk's span from the share's first value; raise `IntegrityError` if there is no such chunk."""
        if not 0 <= chunk < self.num_chunks(high - low):
            raise IntegrityError(f"there is no chunk {chunk} in a share of {high - low} values")
        return chunk_span(0, high - low, chunk, chunk_values(self.codec))

    def codecs_of(self, low: int, high: int) -> tuple[Codec, dict[str, Codec]]:
        """Return the mean's codec of ``[low, high)``, and parts' by name; raise `IntegrityError` within a block."""
        try:
            allowed = (self.codec, *smaller_codecs(self.codec, self.num_values))
            return self.codec.part(low, high), {codec.name: codec.part(low, high) for codec in allowed}
        except ValueError as error:
            raise IntegrityError(f"a share is cut within blocks: {error}") from error


RulesOf = Callable[[Slice], Rules]  # returns the rules of the attempt to which a share belongs


def keys_message(swarm: bytes, statement: Statement, keys: Sequence[ChunkKey]) -> bytes:
    """Return the message that an owner signs with an answer; it authenticates the owner's own values."""
    said = hashlib.sha256(statement.message(swarm)).digest()
    return b"p2ptrain opening" + swarm + said + canonical_bytes([list(key) for key in keys])


class Opening(Message, frozen=True):
    """The opening of one chunk of a share.

    Attributes:
        own: The owner's values, fp32; empty if it did not contribute.
        own_proof: Proof of their energy, up to the root in the owner's commitment.
        parts: Of each other contributor, in order: the encoded chunk, and its proof up to the signed root.
    """

    own: bytes
    own_proof: bytes
    parts: Annotated[tuple[tuple[bytes, bytes], ...], Meta(max_length=MAX_MEMBERS)]


class Opened(Message, frozen=True):
    """Everything that an owner signs about the chunks that it opens.

    Attributes:
        commitments: Of the contributors, in roster order.
        proof: The owner's signature of `keys_message`.
    """

    statement: Statement
    commitments: Annotated[tuple[Commitment, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    keys: Annotated[tuple[ChunkKey, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]
    proof: Proof

    def verify(self, rules: Rules, verifier: Signer) -> None:
        """Raise `IntegrityError` unless all signatures are valid and the share fits the vector."""
        share = self.statement.share
        self.statement.verify(rules.swarm, verifier)
        if share.high > rules.num_values:
            raise IntegrityError("a statement is about another vector than that of its round")
        verify_commitments(self.commitments, self.statement, rules.swarm, verifier)
        if not verifier.verify(share.owner, keys_message(rules.swarm, self.statement, self.keys), self.proof):
            raise IntegrityError("the chunks shown are not signed by the share's owner")


class Answer(Message, frozen=True):
    """An owner's answer to a check: one opening of each chunk of ``opened``."""

    opened: Opened
    openings: Annotated[tuple[Opening, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]

    def __post_init__(self) -> None:
        if len(self.openings) != len(self.opened.keys):
            raise ValueError("opens another number of chunks than it says")


class Evidence(Message, frozen=True, tag=True):
    """Transferable proof that an owner or a voter cheated."""


class TwoMeans(Evidence, frozen=True, tag="two means"):
    """Two conflicting statements of an owner about one share."""

    first: Statement
    second: Statement


class DoubleVote(Evidence, frozen=True, tag="double vote"):
    """Two results of which no voter may sign both, with a voter's signatures of them."""

    voter: Name
    bodies: tuple[Body, Body]
    proofs: tuple[Proof, Proof]


class FalseChunk(Evidence, frozen=True, tag="false chunk"):
    """A chunk of a mean that does not follow from the parts.

    ``position`` is the index of its key in ``opened``; ``mean_proof`` leads to the root in the statement.
    """

    opened: Opened
    position: Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]
    opening: Opening
    mean: bytes
    mean_proof: bytes

    def __post_init__(self) -> None:
        if self.position >= len(self.opened.keys):
            raise ValueError("evidence is about a chunk that was not opened")


def verify_evidence(
    data: bytes | bytearray | memoryview, swarm: bytes, rules_of: RulesOf, verifier: Signer
) -> tuple[str, str]:
    """Return a peer and its fault, if the evidence proves it from facts that every peer of the swarm knows.

    Raises:
        IntegrityError: It convicts nobody.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise IntegrityError("evidence is too large")
    evidence = from_bytes(Evidence, data)
    if isinstance(evidence, TwoMeans):
        evidence.first.verify(swarm, verifier)
        evidence.second.verify(swarm, verifier)
        if not evidence.first.differs(evidence.second):
            raise IntegrityError("evidence holds no two means of one share")
        return evidence.first.author, TWO_MEANS
    if isinstance(evidence, DoubleVote):
        first, second = evidence.bodies
        if first.swarm != swarm or not first.excludes(second):
            raise IntegrityError("evidence holds no two results that exclude each other")
        for body, proof in zip(evidence.bodies, evidence.proofs, strict=True):
            if not verifier.verify(evidence.voter, vote(body.body_hash), proof):
                raise IntegrityError("evidence holds a signature that does not match its voter")
        return evidence.voter, TWO_VOTES
    assert isinstance(evidence, FalseChunk)
    statement, share = evidence.opened.statement, evidence.opened.statement.share
    statement.verify(swarm, verifier)  # Before its round and level are used.
    rules = rules_of(share)
    evidence.opened.verify(rules, verifier)
    chunk, mean = evidence.opened.keys[evidence.position][0], evidence.mean
    found = root_of_proof(leaf_hash(mean), evidence.mean_proof, chunk, rules.num_chunks(share.high - share.low))
    if found is None or found[0] != (statement.root, 0.0):
        raise IntegrityError("evidence holds a chunk of another mean")
    fault = judge(evidence.opened, evidence.position, evidence.opening, mean, rules)
    if not fault:
        raise IntegrityError("evidence shows a mean that is right")
    return share.owner, fault


def judge(opened: Opened, position: int, opening: Opening, mean: bytes | memoryview, rules: Rules) -> str:
    """Return the fault in a chunk of the mean that an owner signed; empty if it is right.

    The caller has verified ``opened``, and that ``mean``, the encoded chunk, is in the statement's tree. ``position``
    is the index of the chunk's key in ``opened``.

    Raises:
        IntegrityError: The opening does not match the commitments, and so proves nothing.
    """
    import torch

    from p2ptrain.codecs.base import sums_of_squares

    share, chunk = opened.statement.share, opened.keys[position][0]
    low, high = rules.span(share.low, share.high, chunk)
    mean_codec, part_codecs = rules.codecs_of(share.low + low, share.low + high)
    size, chunk_length = high - low, chunk_values(rules.codec)
    own, parts = _parts_of(opened, position, opening, rules.num_chunks(share.high - share.low), size)
    measured = len(opened.commitments) >= MIN_FOR_MEDIAN
    limit = rules.spec.max_value * RANGE_SLACK * RANGE_SLACK
    own_index = next((i for i in range(len(opened.commitments)) if i not in parts), -1)
    values = torch.empty(0, dtype=torch.float32) if own is None else own[0]
    recomputed = OwnShare(mean_codec, rules.spec, values, own_index, len(opened.commitments), chunk=chunk_length)
    try:
        for index, (data, energy) in parts.items():
            codec = part_codecs.get(opened.commitments[index].codec)
            if codec is None:
                return "counted a part in a codec that is not allowed"
            codec.validate(data, size)
            check_range(codec.largest(data, size), limit)
            if measured and codec.squared_norms(data, size, chunk_length) != [energy]:
                return "counted a part whose sender misstated its norm"
            recomputed.parts[index] = codec, bytearray(data)
    except CodecError as error:
        return f"counted a part that has to be refused: {error}"
    if own is not None:
        if not float(values.abs().amax()) <= limit:  # True for NaN, too.
            return "counted a part of its own that has to be refused"
        if measured and sums_of_squares(values, chunk_length) != [own[1]]:
            return "misstated the norm of its own part"
    norms = [math.sqrt(each.root[1]) for each in opened.commitments]
    weights = part_weights(rules.spec, norms, [Claim(each.tokens, each.trust) for each in opened.commitments])
    exact, encoded = torch.empty(size, dtype=torch.float32), bytearray(mean_codec.encoded_bytes(size))
    try:
        recomputed.reduce_piece(0, size, dict(enumerate(weights)), exact, encoded)
    except (CodecError, ValueError) as error:
        raise IntegrityError(f"an opening cannot be averaged: {error}") from error
    return "" if bytes(encoded) == bytes(mean) else "its mean is not that of the parts"


def _parts_of(
    opened: Opened, position: int, opening: Opening, count: int, size: int
) -> tuple[tuple[torch.Tensor, float] | None, dict[int, tuple[bytes, float]]]:
    """Verify an opening's proofs; return the owner's (values, energy), and by position the others' (chunk, energy)."""
    import torch

    chunk, own_hash = opened.keys[position]
    senders = [index for index, each in enumerate(opened.commitments) if each.sender != opened.statement.author]
    if len(opening.parts) != len(senders):
        raise IntegrityError("an opening holds another number of parts than were counted")
    parts = {}
    for index, (data, proof) in zip(senders, opening.parts, strict=True):
        found = root_of_proof(leaf_hash(data), proof, chunk, count)
        if found is None or found[0] != opened.commitments[index].root:
            raise IntegrityError("an opening holds a part that its sender did not commit to")
        parts[index] = data, found[1]
    if len(senders) == len(opened.commitments):
        return None, parts
    own_index = next(index for index in range(len(opened.commitments)) if index not in parts)
    found = root_of_proof(EMPTY_HASH, opening.own_proof, chunk, count)
    if found is None or found[0] != opened.commitments[own_index].root:
        raise IntegrityError("an opening holds another norm of the owner's part than it spoke of")
    if len(opening.own) != size * VALUE_BYTES or leaf_hash(opening.own) != own_hash:
        raise IntegrityError("an opening holds other values of the owner's than it signed")
    return (torch.frombuffer(bytearray(opening.own), dtype=torch.float32), found[1]), parts
