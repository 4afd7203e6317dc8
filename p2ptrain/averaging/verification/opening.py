"""Showing and judging one chunk of a share: what the contributors sent for it, and whether the mean follows from that.

An owner *opens* chunks on demand. With a `Statement`, the commitments that it speaks of, and the chunk of the mean, an
opening shows either that the mean is right there or that the owner lied; and shows it to anybody (`verify_evidence`),
because the parts are signed by who sent them, and everything else by the owner.

A mean is computed again from the same bytes by the same fixed arithmetic, so it has to be the same to the bit.

Wire forms, msgpack::

    opening   [own values fp32, their proof, [[chunk of a part, its proof] for each other contributor in order]]
    answer    [statement, commitments, [[chunk, hash of own values], ...], signature of that list, [opening, ...]]
    evidence  [statement, commitments, the same list, its signature, chunk, opening, chunk of the mean, its proof]
              or [statement, another one about the same share]
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgpack

from p2ptrain.averaging.protocol.certificate import MAX_PROOF_BYTES
from p2ptrain.averaging.vector.aggregation import MIN_FOR_MEDIAN
from p2ptrain.averaging.vector.merkle_sum import leaf_hash, root_of_proof
from p2ptrain.averaging.vector.reduce import (
    RANGE_SLACK,
    OwnShare,
    check_range,
    chunk_span,
    chunk_values,
    num_chunks,
    part_weights,
)  # fmt: skip
from p2ptrain.averaging.verification.commitments import Commitment, Slice, Statement, commitments_from_wire
from p2ptrain.codecs import Codec, CodecError, smaller_codecs
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import EMPTY_HASH
from p2ptrain.manifest import AveragingSpec, canonical_bytes
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch

MAX_CHUNKS = 64
"""Chunks that one member may have opened of one share at a time."""
MAX_EVIDENCE_BYTES = 32 << 20
TWO_MEANS = "it stated two means of its share"
VALUE_BYTES = 4

Key = tuple[int, bytes]
"""A chunk, and the hash of the owner's own values in it."""


@dataclass(frozen=True)
class Rules:
    """What all peers of a swarm know of a round on a level of the tree, and the arithmetic of a share follows from.

    Attributes:
        swarm: The manifest's digest, 32 bytes.
        spec: The rule and the limits.
        codec: Of the round's vectors.
        num_values: Their length.
    """

    swarm: bytes
    spec: AveragingSpec
    codec: Codec
    num_values: int

    def num_chunks(self, size: int) -> int:
        """Chunks of a share of ``size`` values."""
        return num_chunks(size, chunk_values(self.codec))

    def span(self, low: int, high: int, chunk: int) -> tuple[int, int]:
        """First value of a share's chunk and the value after its last, counted from the share's first."""
        if not 0 <= chunk < self.num_chunks(high - low):
            raise IntegrityError(f"there is no chunk {chunk} in a share of {high - low} values")
        return chunk_span(0, high - low, chunk, chunk_values(self.codec))

    def codecs_of(self, low: int, high: int) -> tuple[Codec, dict[str, Codec]]:
        """How values of the vector are encoded in the mean, and by name: how they may be in a part."""
        try:
            allowed = (self.codec, *smaller_codecs(self.codec, self.num_values))
            return self.codec.part(low, high), {codec.name: codec.part(low, high) for codec in allowed}
        except ValueError as error:
            raise IntegrityError(f"a share is cut within blocks: {error}") from error


RulesOf = Callable[[Slice], Rules]
"""The rules for the attempt that a share is of."""


def keys_message(swarm: bytes, statement: Statement, keys: Sequence[Key]) -> bytes:
    """What an owner signs with an answer, so that nobody else can make up its own values."""
    said = hashlib.sha256(statement.message(swarm)).digest()
    return b"p2ptrain opening" + swarm + said + canonical_bytes([list(key) for key in keys])


@dataclass(frozen=True)
class Answer:
    """An owner's answer to a check, verified as far as `answer_from_bytes` says.

    Attributes:
        statement: Of the mean.
        commitments: Of its contributors, in the order of the roster.
        keys: The chunks.
        proof: The owner's signature of `keys_message`.
        openings: Of each chunk, not looked at yet.
    """

    statement: Statement
    commitments: list[Commitment]
    keys: list[Key]
    proof: bytes
    openings: list[Any]

    def evidence(self, position: int, mean: bytes, mean_proof: bytes) -> bytes:
        """All that shows what the owner did in one of the chunks."""
        return canonical_bytes([
            self.statement.to_wire(), [each.to_wire() for each in self.commitments], [list(key) for key in self.keys],
            self.proof, self.keys[position][0], self.openings[position], mean, mean_proof,
        ])  # fmt: skip


def answer_from_bytes(data: bytes | bytearray | memoryview, rules: Rules, verifier: Signer) -> Answer:
    """Parse an answer, and verify all signatures in it.

    Raises:
        IntegrityError: It is malformed, or something is not signed by who must have.
    """
    statement, commitments, keys, proof, openings = _unpacked(data, 5)
    answer = _verified(statement, commitments, keys, proof, rules, verifier)
    if not isinstance(openings, list) or len(openings) != len(answer.keys):
        raise IntegrityError("an answer opens another number of chunks than it says")
    return Answer(answer.statement, answer.commitments, answer.keys, answer.proof, openings)


def verify_evidence(
    data: bytes | bytearray | memoryview, swarm: bytes, rules_of: RulesOf, verifier: Signer
) -> tuple[str, str]:
    """Whether a piece of evidence convicts an owner; needs nothing but what every peer of the swarm knows.

    Args:
        data: Its wire form.
        swarm: The manifest's digest, 32 bytes.
        rules_of: The arithmetic of the attempt that a share is of. Its round and level are part of what was signed.
        verifier: Checks signatures.

    Returns:
        The owner, and what it did.

    Raises:
        IntegrityError: It convicts nobody.
    """
    if len(data) > MAX_EVIDENCE_BYTES:
        raise IntegrityError("evidence is too large")
    values = _unpacked(data, 2, 8)
    if len(values) == 2:
        first, second = (Statement.from_wire(value, swarm, verifier) for value in values)
        if not first.differs(second):
            raise IntegrityError("evidence holds no two means of one share")
        return first.share.owner, TWO_MEANS
    statement, commitments, keys, proof, chunk, opening, mean, mean_proof = values
    rules = rules_of(Statement.from_wire(statement, swarm, verifier).share)
    answer = _verified(statement, commitments, keys, proof, rules, verifier)
    if type(mean) is not bytes or type(mean_proof) is not bytes:
        raise IntegrityError("evidence is malformed")
    position = [key[0] for key in answer.keys].index(chunk) if chunk in [key[0] for key in answer.keys] else -1
    if position < 0:
        raise IntegrityError("evidence is about a chunk that was not opened")
    share = answer.statement.share
    found = root_of_proof(leaf_hash(mean), mean_proof, chunk, rules.num_chunks(share.high - share.low))
    if found is None or found[0] != (answer.statement.root, 0.0):
        raise IntegrityError("evidence holds a chunk of another mean")
    fault = judge(answer, position, opening, mean, rules)
    if not fault:
        raise IntegrityError("evidence shows a mean that is right")
    return share.owner, fault


def judge(answer: Answer, position: int, opening: Any, mean: bytes | memoryview, rules: Rules) -> str:
    """What is wrong with a chunk of the mean that an owner stands by; empty if nothing.

    Args:
        answer: Statement, commitments and keys, all verified.
        position: Which of the keys.
        opening: Of that chunk, as it came.
        mean: The chunk's encoded mean; the caller knows that it is what the owner spoke of.
        rules: The swarm's.

    Raises:
        IntegrityError: The opening is not of what was committed to, so nothing can be said.
    """
    share, chunk = answer.statement.share, answer.keys[position][0]
    low, high = rules.span(share.low, share.high, chunk)
    mean_codec, part_codecs = rules.codecs_of(share.low + low, share.low + high)
    count = rules.num_chunks(share.high - share.low)
    own, parts = _opened(answer, position, opening, count, high - low)
    measured = len(answer.commitments) >= MIN_FOR_MEDIAN
    limit = rules.spec.max_value * RANGE_SLACK * RANGE_SLACK
    held = {}
    try:
        for index, (data, energy) in parts.items():
            codec = part_codecs.get(answer.commitments[index].codec)
            if codec is None:
                return "counted a part in a codec that is not allowed"
            codec.validate(data, high - low)
            check_range(codec.largest(data, high - low), limit)
            if measured and codec.squared_norms(data, high - low, chunk_values(rules.codec)) != [energy]:
                return "counted a part whose sender misstated its norm"
            held[index] = codec, data
    except CodecError as error:
        return f"counted a part that has to be refused: {error}"
    own_index = next((i for i in range(len(answer.commitments)) if i not in parts), -1)
    if own is not None:
        values, energy = own
        fault = _judge_own(values, energy if measured else None, limit, rules)
        if fault:
            return fault
    return _judge_mean(
        answer.commitments, own[0] if own else None, own_index, held, mean, mean_codec, rules, high - low
    )


def _judge_own(values: torch.Tensor, energy: float | None, limit: float, rules: Rules) -> str:
    from p2ptrain.codecs.norms import sums_of_squares

    if not float(values.abs().amax()) <= limit:  # Not a number is not.
        return "counted a part of its own that has to be refused"
    if energy is not None and sums_of_squares(values, chunk_values(rules.codec)) != [energy]:
        return "misstated the norm of its own part"
    return ""


def _judge_mean(
    commitments: list[Commitment], own: torch.Tensor | None, own_index: int, held: dict[int, tuple[Codec, bytes]],
    mean: bytes | memoryview, codec: Codec, rules: Rules, size: int,
) -> str:  # fmt: skip
    """Compute the mean again, and compare."""
    import torch

    indices = list(range(len(commitments)))
    share = OwnShare(
        codec,
        rules.spec,
        torch.empty(0) if own is None else own,
        own_index,
        len(indices),
        chunk=chunk_values(rules.codec),
    )
    share.parts.update({index: (part_codec, bytearray(data)) for index, (part_codec, data) in held.items()})
    norms = [math.sqrt(each.root[1]) for each in commitments]
    weights = part_weights(rules.spec, norms, [each.tokens for each in commitments])
    exact, encoded = torch.empty(size), bytearray(codec.encoded_bytes(size))
    try:
        share.reduce_piece(0, size, indices, weights, exact, encoded)
    except (CodecError, ValueError) as error:
        raise IntegrityError(f"an opening cannot be averaged: {error}") from error
    return "" if bytes(encoded) == bytes(mean) else "its mean is not that of the parts"


def _opened(
    answer: Answer, position: int, opening: Any, count: int, size: int
) -> tuple[tuple[torch.Tensor, float] | None, dict[int, tuple[bytes, float]]]:
    """The owner's values and energy, and by position among the contributors the others' encoded chunks and energies."""
    import torch

    chunk, own_hash = answer.keys[position]
    owner = answer.statement.share.owner
    if not (isinstance(opening, list) and len(opening) == 3 and isinstance(opening[2], list)):
        raise IntegrityError("an opening is malformed")
    own_bytes, own_proof, others = opening
    senders = [index for index, each in enumerate(answer.commitments) if each.sender != owner]
    if len(others) != len(senders) or type(own_bytes) is not bytes or type(own_proof) is not bytes:
        raise IntegrityError("an opening is malformed")
    parts = {}
    for index, pair in zip(senders, others, strict=True):
        if not (isinstance(pair, list) and len(pair) == 2 and all(type(item) is bytes for item in pair)):
            raise IntegrityError("an opening is malformed")
        found = root_of_proof(leaf_hash(pair[0]), pair[1], chunk, count)
        if found is None or found[0] != answer.commitments[index].root:
            raise IntegrityError("an opening holds a part that its sender did not commit to")
        parts[index] = pair[0], found[1]
    if len(senders) == len(answer.commitments):
        return None, parts
    found = root_of_proof(EMPTY_HASH, own_proof, chunk, count)
    own_index = next(index for index, each in enumerate(answer.commitments) if each.sender == owner)
    if found is None or found[0] != answer.commitments[own_index].root:
        raise IntegrityError("an opening holds another norm of the owner's part than it spoke of")
    if len(own_bytes) != size * VALUE_BYTES or leaf_hash(own_bytes) != own_hash:
        raise IntegrityError("an opening holds other values of the owner's than it signed")
    return (torch.frombuffer(bytearray(own_bytes), dtype=torch.float32), found[1]), parts


def _unpacked(data: bytes | bytearray | memoryview, *lengths: int) -> list[Any]:
    try:
        values = msgpack.unpackb(data, raw=False, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise IntegrityError("an opening cannot be parsed") from error
    if not isinstance(values, list) or len(values) not in lengths:
        raise IntegrityError("an opening is malformed")
    return values


def _verified(statement: Any, commitments: Any, keys: Any, proof: Any, rules: Rules, verifier: Signer) -> Answer:
    """Everything that is signed, without openings."""
    said = Statement.from_wire(statement, rules.swarm, verifier)
    if said.share.high > rules.num_values:
        raise IntegrityError("a statement is about another vector than that of its round")
    contributors = commitments_from_wire(commitments, said, rules.swarm, verifier)
    if not (isinstance(keys, list) and 0 < len(keys) <= MAX_CHUNKS):
        raise IntegrityError("a list of chunks is malformed")
    found: list[Key] = []
    for key in keys:
        if not (isinstance(key, list) and len(key) == 2 and type(key[0]) is int and type(key[1]) is bytes):
            raise IntegrityError("a list of chunks is malformed")
        found.append((key[0], key[1]))
    if type(proof) is not bytes or len(proof) > MAX_PROOF_BYTES:
        raise IntegrityError("a signature is out of range")
    if not verifier.verify(said.share.owner, keys_message(rules.swarm, said, found), proof):
        raise IntegrityError("the chunks shown are not signed by the share's owner")
    return Answer(said, contributors, found, proof, [])
