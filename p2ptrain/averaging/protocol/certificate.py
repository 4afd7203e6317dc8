"""Tickets, rosters, results and their certificates: what members sign, and when it binds.

A *ticket* is a peer's signed wish to average one round. A *roster* is the list of tickets that a leader put together.
The roster's members reduce, and each that holds the whole result signs its *body*. A body with the signatures of a
majority of the roster is a *certificate*: only certificates advance a round, and a roster can have at most one, because
two majorities of one roster share a member and a member signs one body per roster.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import msgpack

from p2ptrain.averaging.protocol.head import DIGEST_BYTES, MAX_COUNT, MAX_PRESENT, Head
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.signing import Signer

MAX_MEMBERS = 256
MAX_RATES_BYTES = 1024
MAX_PROOF_BYTES = 2048
MAX_CERTIFICATE_BYTES = 1 << 20
MAX_LEVELS = 16


@dataclass(frozen=True)
class Ticket:
    """One peer's readiness to average one round, signed by it.

    Attributes:
        peer: Who.
        round: The round that it wants to close.
        lineage: The lineage of its head, 32 bytes.
        digest: The digest of its state, 32 bytes.
        layout: Fingerprint of codec, codec version and parameter layout, 32 bytes; members must agree.
        tokens: The weight of its contribution.
        samples: Samples that it read in this round.
        bandwidth: What it is willing to send in bytes per second; 0 for no limit.
        reachable: Whether others can open streams to it; who cannot be reached owns no share.
        rates: How fast others sent to it lately; see `p2ptrain.averaging.allreduce.bandwidth`.
        nonce: Makes every attempt of a peer distinct, 16 bytes.
        sees: Trainers that the peer knows of, itself included; their median is what the next head counts.
        present: Peers that its head counts.
        level: Of the tree (`p2ptrain.averaging.grouping.cells`); above 0 a delegate brings the result of a group of the
            level below, whose tokens and most samples of a peer are the ticket's.
        child: That result's `Body.body_hash`, 32 bytes; empty on level 0.
        peers: Peers for whom the ticket speaks: 1 on level 0.
        proof: Its signature.
    """

    peer: str
    round: int
    lineage: bytes
    digest: bytes
    layout: bytes
    tokens: int
    samples: int
    bandwidth: int
    reachable: bool
    rates: bytes
    nonce: bytes
    sees: int = 1
    present: int = 0
    level: int = 0
    child: bytes = b""
    peers: int = 1
    proof: bytes = b""

    def message(self, swarm: bytes) -> bytes:
        """The bytes that the peer signs."""
        return b"p2ptrain ticket" + swarm + canonical_bytes(self._fields()[:-1])

    def _fields(self) -> list[Any]:
        return [
            self.peer, self.round, self.lineage, self.digest, self.layout,
            self.tokens, self.samples, self.bandwidth, self.reachable, self.rates, self.nonce,
            self.sees, self.present, self.level, self.child, self.peers, self.proof,
        ]  # fmt: skip

    def signed(self, swarm: bytes, signer: Signer) -> Ticket:
        """This ticket with the peer's signature."""
        return replace(self, proof=signer.sign(self.message(swarm)))

    def to_wire(self) -> list[Any]:
        """Plain values for the wire."""
        return self._fields()

    @classmethod
    def from_wire(cls, values: Any, swarm: bytes, verifier: Signer, max_weight: float) -> Ticket:
        """Check and rebuild what `to_wire` made.

        Raises:
            IntegrityError: A field is missing or out of range, or the signature does not match.
        """
        if not (isinstance(values, list) and len(values) == 17):
            raise IntegrityError("a ticket is malformed")
        ticket = cls(*values)
        hashes = (ticket.lineage, ticket.digest, ticket.layout)
        counts = (ticket.round, ticket.samples, ticket.bandwidth)
        if not (
            type(ticket.peer) is str
            and len(ticket.peer) <= 128
            and all(type(h) is bytes and len(h) == DIGEST_BYTES for h in hashes)
            and all(type(count) is int and 0 <= count < MAX_COUNT for count in counts)
            and type(ticket.rates) is bytes
            and len(ticket.rates) <= MAX_RATES_BYTES
            and type(ticket.reachable) is bool
            and type(ticket.nonce) is bytes
            and len(ticket.nonce) == 16
            and type(ticket.proof) is bytes
            and len(ticket.proof) <= MAX_PROOF_BYTES
            and all(type(count) is int and 0 <= count <= MAX_PRESENT for count in (ticket.sees, ticket.present))
            and all(type(count) is int for count in (ticket.level, ticket.peers))
            and 0 <= ticket.level < MAX_LEVELS
            and type(ticket.child) is bytes
            and len(ticket.child) == (DIGEST_BYTES if ticket.level else 0)
            and 1 <= ticket.peers <= (MAX_PRESENT if ticket.level else 1)
        ):
            raise IntegrityError("a ticket has fields out of range")
        if not (type(ticket.tokens) is int and 0 < ticket.tokens <= max_weight * ticket.peers):
            raise IntegrityError(f"a ticket claims a weight outside 1 to {max_weight:g} tokens for each peer")
        if ticket.samples > max_weight:  # Or one ticket could push the data position out of every head's range.
            raise IntegrityError(f"a ticket claims more than {max_weight:g} samples")
        if not verifier.verify(ticket.peer, ticket.message(swarm), ticket.proof):
            raise IntegrityError("a ticket's signature does not match its peer")
        return ticket


@dataclass(frozen=True)
class Roster:
    """The members of one attempt at averaging one round, in the order in which everybody reduces."""

    tickets: tuple[Ticket, ...]

    @cached_property
    def members(self) -> tuple[str, ...]:
        """The peers, in roster order."""
        return tuple(ticket.peer for ticket in self.tickets)

    @property
    def majority(self) -> int:
        """Signatures that make a certificate: more than half of the members."""
        return len(self.tickets) // 2 + 1

    @cached_property
    def group_id(self) -> bytes:
        """32 bytes that name this attempt: a hash of all tickets, nonces included."""
        return hashlib.sha256(b"p2ptrain roster" + canonical_bytes([t.to_wire()[:-1] for t in self.tickets])).digest()

    def index_of(self, peer: str) -> int:
        """The position of a member; -1 for others."""
        return self.members.index(peer) if peer in self.members else -1


@dataclass(frozen=True)
class Body:
    """What a roster's members agree that the result is.

    Attributes:
        swarm: The manifest's digest, 32 bytes.
        round: The round that this closes.
        lineage: The lineage that it extends, 32 bytes.
        tokens_before: That lineage's tokens before this round.
        samples_before: Its data position before this round.
        group_id: The roster's name, 32 bytes.
        members: The roster, in order.
        contributors: (index in the roster, tokens, samples) of each member whose contribution is in the mean.
        codec: Name and version of the codec, such as ``int8/1``.
        bounds: ``len(members) + 1`` offsets into the vector; member i owns ``[bounds[i], bounds[i+1])``.
        hashes: Root of `p2ptrain.averaging.vector.reduce.mean_tree` of each share; `EMPTY_HASH` for an empty one.
        present: Peers that the swarm has, by the members' median count: how the next round's tree is shaped.
        level: Of the tree on which this roster averaged.
        levels: That the tree has; only a result of the last one ends the round.
        peers: By member: peers for whom it spoke; all 1 on level 0.
        children: By member: the result of the level below that it brought, 32 bytes each; empty on level 0.
    """

    swarm: bytes
    round: int
    lineage: bytes
    tokens_before: int
    samples_before: int
    group_id: bytes
    members: tuple[str, ...]
    contributors: tuple[tuple[int, int, int], ...]
    codec: str
    bounds: tuple[int, ...]
    hashes: tuple[bytes, ...]
    present: int = 0
    level: int = 0
    levels: int = 1
    peers: tuple[int, ...] = ()
    children: tuple[bytes, ...] = ()

    def to_bytes(self) -> bytes:
        """Canonical msgpack."""
        return canonical_bytes([
            self.swarm, self.round, self.lineage, self.tokens_before, self.samples_before, self.group_id,
            list(self.members), [list(c) for c in self.contributors], self.codec, list(self.bounds), list(self.hashes),
            self.present, self.level, self.levels, list(self.peers), list(self.children),
        ])  # fmt: skip

    @cached_property
    def body_hash(self) -> bytes:
        """32 bytes that members sign."""
        return hashlib.sha256(b"p2ptrain result" + self.to_bytes()).digest()

    @cached_property
    def next_lineage(self) -> bytes:
        """The lineage after this result, 32 bytes."""
        return hashlib.sha256(b"p2ptrain lineage" + self.lineage + self.body_hash).digest()

    @property
    def tokens(self) -> int:
        """Tokens that contributed to this round."""
        return sum(tokens for _, tokens, _ in self.contributors)

    @property
    def next_samples(self) -> int:
        """The data position after this round: every peer's stride advances as far as the fastest one read."""
        return self.samples_before + sum(self.peers) * self.most_samples

    @property
    def most_samples(self) -> int:
        """What the fastest contributor read."""
        return max((samples for *_, samples in self.contributors), default=0)

    @property
    def is_last(self) -> bool:
        """Whether this result ends the round: it is of the tree's last level."""
        return self.level == self.levels - 1

    def next_head(self, digest: bytes, certificate: bytes) -> Head:
        """The head after this result.

        Args:
            digest: Of the state with this result applied, 32 bytes.
            certificate: In wire form.

        Raises:
            IntegrityError: The result is one of a part of the swarm only.
        """
        if not self.is_last:
            raise IntegrityError("a result of a part of the swarm does not end a round")
        return Head(
            self.round + 1,
            self.next_lineage,
            self.tokens_before + self.tokens,
            self.next_samples,
            digest,
            self.members if self.levels == 1 else (),
            certificate,
            self.present,
        )

    @classmethod
    def from_bytes(cls, data: bytes) -> Body:
        """Check the shape of what `to_bytes` made; the signatures are the certificate's business.

        Raises:
            IntegrityError: It is malformed.
        """
        try:
            values = msgpack.unpackb(data, raw=False)
            (
                swarm, round_, lineage, tokens, samples, group, members, contributors, codec, bounds, hashes,
                present, level, levels, peers, children,
            ) = values  # fmt: skip
            body = cls(
                swarm, round_, lineage, tokens, samples, group, tuple(members),
                tuple((i, t, s) for i, t, s in contributors), codec, tuple(bounds), tuple(hashes),
                present, level, levels, tuple(peers), tuple(children),
            )  # fmt: skip
            size = len(body.members)
            indices = [index for index, *_ in body.contributors]
            valid = (
                all(
                    type(h) is bytes and len(h) == DIGEST_BYTES
                    for h in (swarm, lineage, group, *body.hashes, *body.children)
                )
                and all(type(count) is int and 0 <= count < MAX_COUNT for count in (round_, tokens, samples, *bounds))
                and 0 < size <= MAX_MEMBERS
                and len(set(body.members)) == size
                and all(type(member) is str for member in body.members)
                and type(codec) is str
                and all(type(count) is int for contributor in body.contributors for count in contributor)
                and indices == sorted(set(indices))
                and all(0 <= index < size for index in indices)
                and all(0 < t < MAX_COUNT and 0 <= s < MAX_COUNT for _, t, s in body.contributors)
                and len(body.bounds) == size + 1
                and len(body.hashes) == size
                and list(body.bounds) == sorted(body.bounds)
                and all(type(count) is int for count in (present, level, levels, *body.peers))
                and 0 <= level < levels <= MAX_LEVELS
                and len(body.peers) == size
                and all(1 <= count <= (MAX_PRESENT if level else 1) for count in body.peers)
                and sum(body.peers) <= present <= MAX_PRESENT
                and len(body.children) == (size if level else 0)
                and body.to_bytes() == data
            )
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise IntegrityError("a result's body is malformed") from error
        if not valid:
            raise IntegrityError("a result's body has fields out of range")
        return body


@dataclass(frozen=True)
class Certificate:
    """A body with the signatures of a majority of its roster."""

    body: Body
    proofs: tuple[tuple[str, bytes], ...]

    def to_bytes(self) -> bytes:
        """The wire form."""
        return canonical_bytes([self.body.to_bytes(), [[peer, proof] for peer, proof in self.proofs]])

    @classmethod
    def from_bytes(cls, data: bytes, swarm: bytes, verifier: Signer) -> Certificate:
        """Parse and verify.

        Raises:
            IntegrityError: It is malformed, of another swarm, or lacks valid signatures of a majority.
        """
        if len(data) > MAX_CERTIFICATE_BYTES:
            raise IntegrityError("a certificate is too large")
        try:
            raw_body, raw_proofs = msgpack.unpackb(data, raw=False)
            proofs = tuple((peer, proof) for peer, proof in raw_proofs)
        except (ValueError, TypeError, msgpack.UnpackException) as error:
            raise IntegrityError("a certificate is malformed") from error
        if not all(
            type(peer) is str and type(proof) is bytes and len(proof) <= MAX_PROOF_BYTES for peer, proof in proofs
        ):
            raise IntegrityError("a certificate has signatures out of range")
        body = Body.from_bytes(raw_body)
        if len(proofs) > len(body.members) or len({peer for peer, _ in proofs}) < len(proofs):
            raise IntegrityError("a certificate has more signatures than members")
        if body.swarm != swarm:
            raise IntegrityError("a certificate is of another swarm")
        body_hash = body.body_hash
        signers = {
            peer for peer, proof in proofs if peer in body.members and verifier.verify(peer, vote(body_hash), proof)
        }
        if len(signers) <= len(body.members) // 2:
            raise IntegrityError(f"a certificate has {len(signers)} of {len(body.members)} signatures: not a majority")
        return cls(body, proofs)


def vote(body_hash: bytes) -> bytes:
    """The message that a member signs for a body."""
    return b"p2ptrain vote" + body_hash
