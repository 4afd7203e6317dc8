"""Tickets, rosters, results, certificates, and the heads that follow from them, with the bounds of their fields.

A *ticket* is a peer's signed request to average one round. A *roster* is the list of tickets that a leader assembled.
The roster's members reduce, and each member that holds the whole result signs its *body*. A *certificate* is a body
with the signatures of a majority of the roster, which holds the result, and of two thirds of the voters in the
lineage's member table (`p2ptrain.averaging.protocol.table`). Only certificates advance a round. A *head* is the state
of a lineage after a certificate. A peer proves its lineage by its *chain*, the certificates after an earlier head.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, repeat
from typing import Annotated, ClassVar, Self

from msgspec import Meta

from p2ptrain.averaging.protocol.table import (
    MAX_ACCUSED,
    MAX_COUNT,
    MAX_ELECTORATE,
    MAX_ROWS,
    NO_MEMBERS,
    NOTHING_TOLD,
    Census,
    Table,
)
from p2ptrain.averaging.protocol.table import Count as Count
from p2ptrain.averaging.protocol.table import Name as Name
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.hashing import HASH_BYTES, canonical_bytes
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.admission import MAX_CREDENTIAL_BYTES, Gate
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Hash, Message, from_bytes, to_bytes, to_wire
from p2ptrain.signing import Signer

MAX_MEMBERS = 256
MAX_PRESENT = 1 << 16  # bound on the peers of a swarm; keeps the computation of a tree's shape short
MAX_LEVELS = 16
MAX_RATES_BYTES = 1024
MAX_NONCE_BYTES = 96
MAX_PROOF_BYTES = 2048
MAX_CERTIFICATE_BYTES = 1 << 20
CHAIN = "history.after"
MAX_CHAIN_BYTES = 4 << 20
MAX_CHAINS = 16
"""Replies of which a longer chain is put together."""
MOST_CHAIN_SECONDS = 24.0
"""No further reply is asked for after this time."""
MAX_STARTS = 128
"""More heads than a peer keeps."""
ROOT = "history.root"
MAX_ROOT_BYTES = 8 << 20
CALL_TIMEOUT_SECONDS = 12.0
Present = Annotated[int, Meta(ge=0, le=MAX_PRESENT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Level = Annotated[int, Meta(ge=0, lt=MAX_LEVELS)]
CredentialBytes = Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_BYTES)]
Proof = Annotated[bytes, Meta(max_length=MAX_PROOF_BYTES)]  # a signature; empty before the value is signed


@dataclass(frozen=True, kw_only=True)
class Signed:
    """A value whose ``proof`` is its author's signature of all other fields and of the swarm's digest."""

    CONTEXT: ClassVar[bytes]
    """Domain separator: a signature is only valid for values of this type."""
    proof: Proof = b""

    @property
    def author(self) -> str:
        raise NotImplementedError

    def message(self, swarm: bytes) -> bytes:
        """Return the bytes that the author signs; ``swarm`` is the manifest's digest, 32 bytes."""
        return self.CONTEXT + swarm + canonical_bytes(to_wire(self) | {"proof": b""})

    def signed(self, swarm: bytes, signer: Signer) -> Self:
        return replace(self, proof=signer.sign(self.message(swarm)))

    def verify(self, swarm: bytes, verifier: Signer) -> None:
        """Raise `IntegrityError` unless the author signed this value."""
        if not verifier.verify(self.author, self.message(swarm), self.proof):
            raise IntegrityError(f"a {type(self).__name__.lower()}'s signature does not match its author")


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
        present: `Body.present` of the round before; 0 at the start.
        full: `Table.full_round`: round of the newest head of the lineage that a full certificate led to.
        returned: `Table.num_returned`.
        table: The lineage's members; empty `without_proof`.
    """

    round: Count
    lineage: Hash
    tokens: Count
    samples: Count
    digest: Hash
    members: Annotated[tuple[Name, ...], Meta(max_length=MAX_MEMBERS)] = ()
    certificate: bytes = b""
    present: Present = 0
    full: Count = 0
    returned: Present = 0
    table: Table = NO_MEMBERS

    @property
    def is_reduced(self) -> bool:
        """True if reduced certificates led here from the lineage's newest full one."""
        return self.full < self.round

    def without_proof(self) -> Head:
        """Return this head without members, certificate and table, for messages that need not prove it."""
        return replace(self, members=(), certificate=b"", table=NO_MEMBERS)

    def outranks(self, other: Head) -> bool:
        """True if this lineage wins: by its newest full round, returned voters, rounds, tokens, and the smaller hash.

        Reduced rounds thus never win over a full one, however many there are.
        """
        mine, others = ((each.full, each.returned, each.round, each.tokens) for each in (self, other))
        return (*mine, other.lineage) > (*others, self.lineage)

    def after(self, certificate: Certificate, digest: bytes) -> Head:
        """Return the head after a valid certificate; raise `IntegrityError` if it is not valid here.

        ``digest`` is that of the state with its result applied, 32 bytes.
        """
        return certificate.next_head(digest, self.table.check(certificate))


def genesis(swarm: bytes, digest: bytes, table: Table = NO_MEMBERS) -> Head:
    """Return the head of a new lineage, whose initial state has this digest and whose founders are in ``table``."""
    return Head(0, hashlib.sha256(b"p2ptrain genesis" + swarm + digest).digest(), 0, 0, digest, table=table)


@dataclass(frozen=True)
class Ticket(Signed):
    """One peer's signed request to average one round.

    Attributes:
        digest: The digest of its state, 32 bytes.
        layout: Fingerprint of codec, codec version and parameter layout, 32 bytes; members must agree.
        tokens: The weight of its contribution.
        samples: Samples that it read in this round.
        bandwidth: Declared limit on its send rate in bytes per second; 0 for none.
        reachable: True if others can open streams to it; otherwise it owns no share.
        rates: Measured send rates of other peers; see `p2ptrain.averaging.allreduce.bandwidth`.
        nonce: Makes every attempt distinct, 16 bytes; under secure aggregation the public keys of its masks
            (`p2ptrain.averaging.masking.keys`).
        present: Number of peers that its head counts.
        level: Tree level (`p2ptrain.averaging.grouping.cells`). Above 0, a delegate brings the result of a group of the
            level below, and ``tokens`` and ``samples`` are those of this result.
        child: That result's `Body.body_hash`, 32 bytes; empty on level 0.
        peers: Number of peers that the ticket represents; 1 on level 0.
        view: Attempts at this round that the peer or its delegate was in; at least one more than its last vote's view.
        stalled: True if no full round was possible for so long that it agrees to a reduced one.
        leaves: True if it leaves the swarm after this round.
        accuses: Rows of the lineage's member table against which it has evidence; empty above level 0.
        census: Above level 0: that of the result that it brings; None on level 0.
        credentials: They admit `brings` with the others, in that order; those that are missing are empty.
    """

    CONTEXT: ClassVar[bytes] = b"p2ptrain ticket"
    peer: Name
    round: Count
    lineage: Hash
    digest: Hash
    layout: Hash
    tokens: Positive
    samples: Count
    bandwidth: Count
    reachable: bool
    rates: Annotated[bytes, Meta(max_length=MAX_RATES_BYTES)]
    nonce: Annotated[bytes, Meta(min_length=16, max_length=MAX_NONCE_BYTES)]
    present: Present = 0
    level: Level = 0
    child: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""
    peers: Annotated[int, Meta(ge=1, le=MAX_PRESENT)] = 1
    view: Count = 0
    stalled: bool = False
    leaves: bool = False
    accuses: Annotated[tuple[Count, ...], Meta(max_length=MAX_ACCUSED)] = ()
    census: Census | None = None
    credentials: Annotated[tuple[CredentialBytes, ...], Meta(max_length=MAX_ROWS)] = ()

    def __post_init__(self) -> None:
        if len(self.credentials) > len(self.brings):
            raise ValueError("a ticket has more credentials than peers")
        if (self.census is None) != (self.level == 0):
            raise ValueError("a ticket brings another level's members")
        if len(self.child) != (HASH_BYTES if self.level else 0):
            raise ValueError("a ticket brings another level's result")
        if self.peers > 1 and not self.level:
            raise ValueError("a ticket speaks for others on level 0")

    @property
    def author(self) -> str:
        return self.peer

    @property
    def brings(self) -> tuple[str, ...]:
        """The peers whose admission it shows: its own, or those that join by its census."""
        return (self.peer,) if self.census is None else self.census.joining

    def check(self, gate: Gate, max_weight: float) -> None:
        """Raise `IntegrityError` if the ticket brings a peer that is not admitted, or weighs more than it may."""
        for peer, credential in zip(self.brings, chain(self.credentials, repeat(b"")), strict=False):
            if reason := gate.admitted(peer, credential):
                raise IntegrityError(f"a ticket of peer {peer[-8:]}, which is not admitted: {reason}")
        check_weight(self.tokens, self.samples, self.peers, max_weight)
        if not self.level and self.tokens > gate.cap(self.peer):
            raise IntegrityError(f"a weight of more than the {gate.cap(self.peer):g} tokens of the peer's pass")


def check_weight(tokens: int, samples: int, peers: int, max_weight: float) -> None:
    """Raise `IntegrityError` if ``peers`` claim more tokens or samples than the manifest allows."""
    if tokens > max_weight * peers:
        raise IntegrityError(f"a weight of more than {max_weight:g} tokens for each peer")
    if samples > max_weight:  # Otherwise the data position could exceed a head's range.
        raise IntegrityError(f"more than {max_weight:g} samples for each peer")


@dataclass(frozen=True)
class Roster:
    """The members of one attempt at a round, in the order of reduction.

    If it ``is_reduced``, they close the round without the voters that a full one needs. ``leader`` assembled it.
    """

    tickets: tuple[Ticket, ...]
    is_reduced: bool = False
    leader: Name = ""

    @cached_property
    def members(self) -> tuple[str, ...]:
        return tuple(ticket.peer for ticket in self.tickets)

    @property
    def majority(self) -> int:
        """Number of members that must hold the result, and sign it: more than half."""
        return len(self.tickets) // 2 + 1

    @cached_property
    def group_id(self) -> bytes:
        """Id of this attempt, 32 bytes: a hash of all tickets, nonces included."""
        unsigned = [to_wire(replace(ticket, proof=b"")) for ticket in self.tickets]
        return hashlib.sha256(b"p2ptrain roster" + canonical_bytes([self.is_reduced, self.leader, unsigned])).digest()

    def credentials_of(self, peers: Iterable[str]) -> tuple[bytes, ...]:
        """Return what admits each of these peers with the others; nothing if nobody here has a credential."""
        shown = {
            peer: raw for ticket in self.tickets for peer, raw in zip(ticket.brings, ticket.credentials, strict=False)
        }
        return tuple(shown.get(peer, b"") for peer in peers) if shown else ()

    def index_of(self, peer: str) -> int:
        """Return the index of a member; -1 for other peers."""
        return self.members.index(peer) if peer in self.members else -1


@dataclass(frozen=True)
class Body:
    """The result that a roster's members agree on.

    Attributes:
        swarm: The manifest's digest, 32 bytes.
        lineage: The lineage that it extends, 32 bytes.
        digest: The digest of the state that it extends, 32 bytes: a certificate vouches for the state before it.
        tokens_before: The lineage's tokens before this round.
        samples_before: Its data position before this round.
        contributors: (index in the roster, tokens, samples) of each member whose contribution is in the mean.
        codec: Name and version of the codec, such as ``int8/1``.
        bounds: ``len(members) + 1`` offsets into the vector; member i owns ``[bounds[i], bounds[i+1])``.
        hashes: `p2ptrain.averaging.vector.chunks.mean_root` of each share; `EMPTY_HASH` for an empty one.
        present: `Table.num_awake` after this result, which shapes the next round's tree; 0 below the tree's last level.
        levels: Number of the tree's levels; only a result of the last one ends the round.
        peers: By member: number of peers that it represents; all 1 on level 0.
        children: By member: `body_hash` of the lower level's result that it brought, 32 bytes; empty on level 0.
        leader: The peer that assembled its roster.
        view: Attempts before (`Table.view`); a voter signs one body of each view.
        is_reduced: See `Roster`.
        census: What the round tells about the members of the lineage.
        table: `Table.hash` after this result; empty below the tree's last level.
    """

    swarm: Hash
    round: Count
    lineage: Hash
    digest: Hash
    tokens_before: Count
    samples_before: Count
    group_id: Hash
    members: Annotated[tuple[Name, ...], Meta(min_length=1, max_length=MAX_MEMBERS)]
    contributors: tuple[tuple[Count, Positive, Count], ...]
    codec: Name
    bounds: tuple[Count, ...]
    hashes: tuple[Hash, ...]
    present: Present = 0
    level: Level = 0
    levels: Annotated[int, Meta(ge=1, le=MAX_LEVELS)] = 1
    peers: tuple[Annotated[int, Meta(ge=1, le=MAX_PRESENT)], ...] = ()
    children: tuple[Hash, ...] = ()
    leader: Name = ""
    view: Count = 0
    is_reduced: bool = False
    census: Census = NOTHING_TOLD
    table: Annotated[bytes, Meta(max_length=HASH_BYTES)] = b""

    def check(self) -> None:
        size, indices = len(self.members), [index for index, *_ in self.contributors]
        if not (
            len(set(self.members)) == size
            and indices == sorted(set(indices))
            and max(indices, default=0) < size
            and len(self.bounds) == size + 1
            and list(self.bounds) == sorted(self.bounds)
            and len(self.hashes) == size
            and self.level < self.levels
            and len(self.peers) == size
            and max(self.peers) <= (MAX_PRESENT if self.level else 1)
            and sum(self.peers) <= MAX_PRESENT
            and len(self.children) == (size if self.level else 0)
            and len(self.table) == (HASH_BYTES if self.is_last else 0)
        ):
            raise IntegrityError("a result's body has fields that do not fit together")

    def check_allowed(self, spec: AveragingSpec) -> None:
        """Raise `IntegrityError` unless the result keeps to the manifest, and leaves room for the rounds after it."""
        if not self.contributors or len(self.members) > spec.group_size:
            raise IntegrityError("a result is nobody's, or of more members than a group may have")
        if self.is_last and sum(self.peers) < spec.min_peers:
            raise IntegrityError(f"a result is of fewer than {spec.min_peers} peers")
        for index, tokens, samples in self.contributors:
            check_weight(tokens, samples, self.peers[index], spec.max_weight)
        if max(self.round + 1, self.tokens_before + self.tokens, self.next_samples) > MAX_COUNT:
            raise IntegrityError("a result leaves no room for the rounds after it")

    def check_follows(self, head: Head) -> None:
        """Raise `IntegrityError` unless this is a result of the round in progress after ``head``."""
        counts = (self.round, self.tokens_before, self.samples_before)
        if self.lineage != head.lineage or counts != (head.round, head.tokens, head.samples):
            raise IntegrityError("a certificate's counts do not follow from its lineage")
        if self.digest != head.digest:
            raise IntegrityError("a certificate is of another state than its lineage has here")

    def check_brought(self, below: Body) -> None:
        """Raise `IntegrityError` unless members brought this result of the level below, as it is."""
        brought = {index for index, child in enumerate(self.children) if child == below.body_hash}
        if not brought or below.level + 1 != self.level or self._frame != below._frame:
            raise IntegrityError("one does not follow from the other")
        counted = {(tokens, samples) for index, tokens, samples in self.contributors if index in brought}
        if not counted <= {(below.tokens, below.most_samples)} or {self.peers[i] for i in brought} != {
            sum(below.peers)
        }:
            raise IntegrityError("one has another number of tokens, samples or peers than was brought to it")

    @property
    def _frame(self) -> tuple[object, ...]:
        """The fields that all results of one round and tree have in common."""
        return self.round, self.lineage, self.digest, self.levels, self.tokens_before, self.samples_before

    def to_bytes(self) -> bytes:
        """Return canonical msgpack."""
        return to_bytes(self)

    @cached_property
    def body_hash(self) -> bytes:
        """Hash that members sign by `vote`, 32 bytes."""
        return hashlib.sha256(b"p2ptrain result" + self.to_bytes()).digest()

    @cached_property
    def next_lineage(self) -> bytes:
        """The lineage after this result, 32 bytes."""
        return lineage_after(self.lineage, self.body_hash)

    @property
    def contributing(self) -> list[str]:
        """Ids of the contributors, in roster order."""
        return [self.members[index] for index, *_ in self.contributors]

    @property
    def counted_children(self) -> set[bytes]:
        """Above level 0: `body_hash` of each result that is in the mean."""
        return {self.children[index] for index, *_ in self.contributors}

    @property
    def tokens(self) -> int:
        return sum(tokens for _, tokens, _ in self.contributors)

    @property
    def next_samples(self) -> int:
        """Data position after this round: it advances by `most_samples` for every peer."""
        return self.samples_before + sum(self.peers) * self.most_samples

    @property
    def most_samples(self) -> int:
        return max((samples for *_, samples in self.contributors), default=0)

    @property
    def is_last(self) -> bool:
        """True if this result is of the tree's last level, and so ends the round."""
        return self.level == self.levels - 1

    @property
    def is_full(self) -> bool:
        """True if it ends a full round; of these, a voter signs one of each view (`Ballots`)."""
        return self.is_last and not self.is_reduced

    def excludes(self, other: Body) -> bool:
        """True if no honest voter signs both: they are different full results of one round and view."""
        same = (self.swarm, self.lineage, self.view) == (other.swarm, other.lineage, other.view)
        return same and self.is_full and other.is_full and self.body_hash != other.body_hash

    @classmethod
    def from_bytes(cls, data: bytes) -> Body:
        """Parse the output of `to_bytes`; raise `IntegrityError` if it is malformed or not canonical."""
        body = from_bytes(cls, data)
        body.check()
        if body.to_bytes() != data:
            raise IntegrityError("a result's body is not in its canonical form")
        return body


@dataclass(frozen=True)
class Certificate:
    """A body with (peer, signature) pairs: of a majority of its roster, and of voters that need not be on it."""

    body: Body
    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_MEMBERS + MAX_ELECTORATE)]

    @cached_property
    def signers(self) -> frozenset[str]:
        return frozenset(peer for peer, _ in self.proofs)

    @property
    def signing_members(self) -> frozenset[str]:
        """The signers on its roster, without voters that only confirm the result."""
        return self.signers.intersection(self.body.members)

    def to_bytes(self) -> bytes:
        return to_bytes(self)

    def next_head(self, digest: bytes, table: Table) -> Head:
        """Return the head after this result, if ``table`` is the one after it; raise `IntegrityError` if not."""
        body = self.body
        if not body.is_last or table.hash != body.table:
            raise IntegrityError("a head has another member table than its certificate")
        return Head(
            body.round + 1,
            body.next_lineage,
            body.tokens_before + body.tokens,
            body.next_samples,
            digest,
            body.members if body.levels == 1 else (),
            self.to_bytes(),
            body.present,
            table.full_round,
            table.num_returned,
            table,
        )

    @classmethod
    def from_bytes(cls, data: bytes, swarm: bytes, verifier: Signer) -> Certificate:
        """Parse and verify the wire form; whether it counts depends on the lineage (`Table.check`).

        Raises:
            IntegrityError: It is malformed, of another swarm, or has a wrong signature or none of a majority.
        """
        if len(data) > MAX_CERTIFICATE_BYTES:
            raise IntegrityError("a certificate is too large")
        certificate = from_bytes(cls, data)
        body = certificate.body
        body.check()
        if body.swarm != swarm:
            raise IntegrityError("a certificate is of another swarm")
        if len(certificate.signers) < len(certificate.proofs):
            raise IntegrityError("a certificate has two signatures of one peer")
        message = vote(body.body_hash)
        if not all(verifier.verify(peer, message, proof) for peer, proof in certificate.proofs):
            raise IntegrityError("a certificate has a signature that does not match its signer")
        signed = len(certificate.signers.intersection(body.members))
        if signed <= len(body.members) // 2:
            raise IntegrityError(f"a certificate has {signed} of {len(body.members)} signatures: not a majority")
        return certificate


def lineage_after(lineage: bytes, body_hash: bytes) -> bytes:
    """Return the lineage after a result, 32 bytes."""
    return hashlib.sha256(b"p2ptrain lineage" + lineage + body_hash).digest()


def head_through(head: Head, chain: Iterable[Certificate]) -> Head:
    """Return the head, its digest unknown, to which valid certificates lead; raise `IntegrityError` if one is not."""
    for certificate in chain:
        head = head.after(certificate, b"")
    return head


def vote(body_hash: bytes) -> bytes:
    """Return the message that a member signs for a body."""
    return b"p2ptrain vote" + body_hash


class AskChain(Message, frozen=True):
    """Request for the certificates that follow the first of these lineages of which the receiver has any.

    With ``proofs``, also those whose results are gone.
    """

    lineages: Annotated[tuple[Hash, ...], Meta(max_length=MAX_STARTS)]
    proofs: bool = False


class Chain(Message, frozen=True):
    """Certificates in wire form, each of which extends the one before."""

    certificates: Annotated[tuple[bytes, ...], Meta(max_length=1 << 16)]


class AskRoot(Message, frozen=True):
    """Request for the receiver's `Root`."""


class Root(Message, frozen=True):
    """The newest head in a peer's history that the founders signed, or else the one where its history begins."""

    head: Head


async def fetch_certificates(
    rpc: Rpc,
    peer: str,
    starts: Mapping[bytes, Table | None],
    read: Callable[[bytes], Certificate],
    *,
    proofs: bool = False,
    until: bytes | None = None,
) -> list[Certificate]:
    """Return a peer's certificates from one of ``starts`` on, verified and connected.

    See `RoundLog.certificates_after`.

    Args:
        starts: By lineage, the best first: its table, by which the next certificate must count. An observer without
            tables passes None, and must not apply the results.
        read: Parses and verifies a certificate; raises `IntegrityError` if it is not valid.
        until: The lineage that is looked for; without it, a long chain ends after one reply.

    Raises:
        PeerError, DeadlineError: A call failed.
        ProtocolError: The peer sent certificates that do not verify or do not connect.
    """
    certificates, loop = list[Certificate](), asyncio.get_running_loop()
    deadline = loop.time() + MOST_CHAIN_SECONDS
    for _ in range(MAX_CHAINS if until is not None else 1):
        request = AskChain(tuple(starts), proofs)
        reply = await rpc.call(peer, CHAIN, request, Chain, CALL_TIMEOUT_SECONDS, max_reply_bytes=MAX_CHAIN_BYTES)
        for item in reply.certificates:
            try:
                certificate = read(item)
                body = certificate.body
                if body.lineage not in starts or not body.is_last:
                    raise ProtocolError(peer, "sent a history that does not connect")
                table = starts[body.lineage]
                starts = {body.next_lineage: table.check(certificate) if table is not None else None}
            except IntegrityError as error:
                raise ProtocolError(peer, f"sent a history in which {error}") from error
            certificates.append(certificate)
            await asyncio.sleep(0)
        is_found = any(each.body.next_lineage == until for each in certificates)
        if not reply.certificates or is_found or loop.time() > deadline:
            break
    return certificates
