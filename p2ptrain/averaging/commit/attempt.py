"""What one member knows about one roster's attempt at a round, and how an attempt fails."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import StrEnum
from statistics import median_low

from p2ptrain.averaging.commit.encodings import lists_parts, mean_codec
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Roster, vote
from p2ptrain.averaging.protocol.head import Head
from p2ptrain.averaging.protocol.signed import MAX_PRESENT
from p2ptrain.averaging.vector.reduce import chunk_span, chunk_values, num_chunks
from p2ptrain.averaging.vector.rules import get_rule
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, PartList
from p2ptrain.errors import TemporaryError
from p2ptrain.hashing import EMPTY_HASH
from p2ptrain.manifest import AveragingSpec
from p2ptrain.signing import Signer

WEIGHT_SLACK = 1 + 2**-20
"""Weights may exceed what tokens give by this factor, because they are rounded to fp32."""


class AttemptFailedError(TemporaryError):
    """This attempt cannot give a result here.

    Args:
        message: What happened.
        suspects: Members that did not do their part.
    """

    def __init__(self, message: str, suspects: tuple[str, ...] = ()) -> None:
        super().__init__(message)
        self.suspects = suspects


class UnencodableError(AttemptFailedError):
    """This peer's own contribution does not fit the codec: trying again with the same one cannot help."""


class LateError(AttemptFailedError):
    """Members did not do their part in time; they may be alive, but slow.

    Args:
        message: What happened.
        suspects: Who was late.
        as_owners: Whether with their share's mean, rather than with their own contribution.
    """

    def __init__(self, message: str, suspects: tuple[str, ...] = (), *, as_owners: bool = True) -> None:
        super().__init__(message, suspects)
        self.as_owners = as_owners


class Standing(StrEnum):
    """Where a member stands with an attempt, as it says itself."""

    RUNNING = "running"
    """It is in the attempt still, or ended it with a certificate."""
    FETCHING = "fetching"
    """Its attempt broke, and it takes over a result."""
    OPEN = "open"
    """Its attempt broke; it would sign a result that another holds."""
    SIGNED = "signed"
    """Its attempt broke when it had signed, or it signed what it took over."""
    RENOUNCED = "renounced"
    """It did not sign, and never will."""
    WITHHOLDS = "withholds"
    """It never began to make the mean of the share that it owns, and never will."""
    UNKNOWN = "unknown"
    """It knows nothing of the attempt, or gave up one that it had signed."""
    LOST = "lost"
    """It does not answer. Nobody says so of itself."""

    @property
    def is_over(self) -> bool:
        """True if nothing more can come from this member by itself."""
        return self not in (Standing.RUNNING, Standing.FETCHING, Standing.SIGNED)


@dataclass
class Attempt:
    """Everything about one roster's attempt that outlives the streams.

    Attributes:
        roster: Who takes part.
        head: The head that the result will extend.
        bounds: Share offsets, one more than members.
        codec: How the whole vector is encoded.
        swarm: The manifest's digest, 32 bytes.
        spec: The rule by which shares are reduced.
        levels: Of the round's tree.
        seconds: Its deadline, from when it begins; that of ``spec`` unless given.
        means: Encoded mean of each share, as far as they arrived.
        hashes: What names them; see `p2ptrain.averaging.vector.reduce.mean_tree`.
        contributors: Indices into the roster, once agreed.
        sent_parts: By share: what this member sent, encoded, where means are lists of parts; see `check_quotes`.
        body: Once every mean is here.
        proofs: By peer: valid signatures of ``body``.
        phase: What this peer is doing, for logs and reports.
        audited: Whether only who checked slices of all means may sign: see `p2ptrain.averaging.verification.audit`.
        disputed: Whether a share did not pass its checks here or elsewhere: nobody waits for others then.
        withholds: Whether this peer's own part is over although it owns a share, whose mean it never began to make:
            then nobody can hold a result, now or later.
        is_over: Whether this peer's own attempt broke.
        is_fetching: Whether it takes over a result that another member made.
        has_renounced: Whether it told others that it will never sign.
        left_as: Where it stands once it gave the attempt up; None before.
        standings: By other member: where it stands, as it said last.
        silent: Other members that are not waited for, because they did not answer.
        fell_silent: Those of them that could be reached and did not answer a question: how.
    """

    roster: Roster
    head: Head
    bounds: tuple[int, ...]
    codec: Codec
    swarm: bytes
    spec: AveragingSpec
    levels: int = 1
    seconds: float = 0.0
    means: list[Buffer | None] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    contributors: tuple[int, ...] | None = None
    sent_parts: dict[int, Buffer] = field(default_factory=dict)
    body: Body | None = None
    proofs: dict[str, bytes] = field(default_factory=dict)
    phase: str = "scatter"
    audited: bool = False
    disputed: bool = False
    withholds: bool = False
    is_over: bool = False
    is_fetching: bool = False
    has_renounced: bool = False
    left_as: Standing | None = None
    standings: dict[str, Standing] = field(default_factory=dict)
    silent: set[str] = field(default_factory=set)
    fell_silent: dict[str, str] = field(default_factory=dict)
    changed: asyncio.Event = field(default_factory=asyncio.Event)
    _passed_on: list[tuple[str, bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.seconds = self.seconds or self.spec.round_seconds
        self.means = [b"" if self.size(i) == 0 else None for i in range(len(self.roster.members))]
        self.hashes = [EMPTY_HASH] * len(self.means)

    def size(self, index: int) -> int:
        """Values in a member's share."""
        return self.bounds[index + 1] - self.bounds[index]

    @property
    def chunk(self) -> int:
        """Values in a chunk; see `p2ptrain.averaging.vector.reduce.chunk_values`."""
        return chunk_values(self.codec)

    def num_chunks(self, index: int) -> int:
        """Chunks of a member's share."""
        return num_chunks(self.size(index), self.chunk)

    def span(self, index: int, chunk: int) -> tuple[int, int]:
        """First value of a chunk of a member's share in the vector, and the value after its last."""
        return chunk_span(self.bounds[index], self.bounds[index + 1], chunk, self.chunk)

    @property
    def lists_parts(self) -> bool:
        """Whether means are lists of their parts."""
        return lists_parts(self.spec, self.codec, self.bounds[-1], len(self.roster.tickets))

    def mean_codec_of(self, index: int) -> Decoder:
        """How the mean of a member's share is encoded; until the contributors are agreed on, as if all were."""
        members = len(self.roster.tickets)
        contributors = members if self.contributors is None else len(self.contributors)
        codec = mean_codec(self.spec, self.codec, self.bounds[-1], members, contributors)
        return codec.part(self.bounds[index], self.bounds[index + 1])

    def check_quotes(self, index: int, mean: Buffer, own_index: int) -> None:
        """Hold an owner's list of parts against what this member knows of them; other means pass.

        So an owner that puts other bytes in the place of an honest member's loses that member's signature; nor can it
        let anybody count for more than its tokens.

        Args:
            index: Whose share's mean it is; the contributors must be agreed on.
            mean: Complete and valid.
            own_index: This member.

        Raises:
            CodecError: It is not what this member can sign.
        """
        codec, contributors = self.mean_codec_of(index), self.contributors
        if not isinstance(codec, PartList) or contributors is None or not self.size(index):
            return
        limits = get_rule(self.spec).shares(self.spec, [self.roster.tickets[i].tokens for i in contributors])
        weights, parts = codec.split(mean, self.size(index))
        for contributor, weight, limit, part in zip(contributors, weights, limits, parts, strict=True):
            if weight > limit * WEIGHT_SLACK:
                raise CodecError("a part weighs more than its sender's tokens allow")
            sent = self.sent_parts.get(index) if contributor == own_index else None
            if sent is not None and part != sent:
                raise CodecError("this peer's own part is not what it sent")

    def add_mean(self, index: int, mean: Buffer, digest: bytes) -> None:
        """Take in a share's mean and its hash, unless one is here."""
        if self.means[index] is None:
            self.means[index] = mean
            self.hashes[index] = digest
            self.changed.set()

    def is_complete(self) -> bool:
        """Whether every share's mean is here."""
        return all(mean is not None for mean in self.means)

    def make_result(self, verifier: Signer) -> None:
        """Make the body of what is held, and take in the signatures of it that others passed on."""
        assert self.contributors is not None
        assert self.is_complete()
        self.body = self.body_of(self.contributors, tuple(self.hashes))
        self.pass_on((), verifier)
        self.changed.set()

    def sign(self, signer: Signer) -> None:
        """Sign the body."""
        assert self.body is not None
        self.proofs[signer.peer_id] = signer.sign(vote(self.body.body_hash))

    def body_of(self, contributors: tuple[int, ...], hashes: tuple[bytes, ...]) -> Body:
        """The only body that this roster can have with these contributors and means."""
        tickets = self.roster.tickets
        level, peers = tickets[0].level, tuple(ticket.peers for ticket in tickets)
        return Body(
            swarm=self.swarm,
            round=self.head.round,
            lineage=self.head.lineage,
            tokens_before=self.head.tokens,
            samples_before=self.head.samples,
            group_id=self.roster.group_id,
            members=self.roster.members,
            contributors=tuple((i, tickets[i].tokens, tickets[i].samples) for i in contributors),
            codec=f"{self.codec.name}/{self.codec.version}",
            bounds=self.bounds,
            hashes=hashes,
            present=min(MAX_PRESENT, max(sum(peers), median_low(ticket.sees for ticket in tickets))),
            level=level,
            levels=self.levels,
            peers=peers,
            children=tuple(ticket.child for ticket in tickets) if level else (),
        )

    def add_proof(self, peer: str, proof: bytes, verifier: Signer) -> bool:
        """Keep a member's signature if it is one of this body; return True if it was."""
        if self.body is None or peer not in self.roster.members:
            return False
        if peer not in self.proofs:
            if not verifier.verify(peer, vote(self.body.body_hash), proof):
                return False
            self.proofs[peer] = proof
            self.changed.set()
        return True

    def pass_on(self, proofs: Iterable[tuple[str, bytes]], verifier: Signer) -> None:
        """Keep signatures that another member passes on, as soon as the body is known that they are of."""
        self._passed_on.extend(proofs)
        if self.body is not None:
            for peer, proof in self._passed_on:
                self.add_proof(peer, proof, verifier)
            self._passed_on.clear()

    def certificate(self) -> Certificate | None:
        """The certificate, once a majority signed."""
        if self.body is None or len(self.proofs) < self.roster.majority:
            return None
        return Certificate(self.body, tuple(sorted(self.proofs.items())))
