"""One member's state of one roster's attempt at a round, and the encodings of a group's parts and means.

Encodings are pure functions of the manifest, the model and the certificate's body. All members thus choose the same, in
the round and in every replay. Under a dense codec a slow member may encode its parts smaller. Under a sparse codec a
share's mean is the list of its parts, without further loss, or dense: see `lists_parts`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from typing import TYPE_CHECKING

from p2ptrain.averaging.commit.result_chunks import Means, Origin
from p2ptrain.averaging.protocol.ballots import Ballots
from p2ptrain.averaging.protocol.certificate import Body, Certificate, Head, Roster, vote
from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector.chunks import chunk_span, chunk_values, mean_root, num_chunks
from p2ptrain.averaging.vector.rules import Claim, VotingRule, get_rule
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import (
    Codec,
    CodecError,
    Decoder,
    PartList,
    codec_at,
    dense_codec,
    fewer_bytes_listed,
    smaller_codecs,
)
from p2ptrain.errors import ResourceError, TemporaryError
from p2ptrain.hashing import EMPTY_HASH
from p2ptrain.manifest import AveragingSpec
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    import torch


logger = logging.getLogger(__name__)


def part_codecs(spec: AveragingSpec, codec: Codec, num_values: int) -> tuple[Codec, ...]:
    """Return the codecs that a member may encode its own parts in: the swarm's, then ever smaller ones.

    A sparse swarm codec has no alternative, because a list of parts has one codec. Under rules by coordinate no
    alternative is sparse, because the zeros of a slow minority would count as votes.
    """
    if codec.sparse:
        return (codec,)
    smaller = smaller_codecs(codec, num_values)
    return (codec, *(each for each in smaller if not (each.sparse and get_rule(spec).by_coordinate)))


def lists_parts(spec: AveragingSpec, codec: Codec, num_values: int, num_members: int) -> bool:
    """True if a roster of ``num_members`` sends means as lists of their parts: while that takes fewer bytes.

    The result of a `VotingRule` is no weighted sum of parts: every member would repeat all owners' work.
    """
    return (
        codec.sparse
        and not isinstance(get_rule(spec), VotingRule)
        and fewer_bytes_listed(codec, dense_codec(codec), num_values, num_members)
    )


def mean_codec(spec: AveragingSpec, codec: Codec, num_values: int, num_members: int, num_contributors: int) -> Decoder:
    """Return the decoder of a whole vector's mean; raise `ValueError` if no member contributed."""
    if lists_parts(spec, codec, num_values, num_members):
        return PartList(codec, num_contributors)
    return dense_codec(codec)


def decode_means(spec: AveragingSpec, codec: Codec, body: Body, means: Sequence[Buffer], out: torch.Tensor) -> None:
    """Decode the validated means of a result into ``out`` (fp32, ``[bounds[-1]]``), bit for bit equal at every peer."""
    decoder = mean_codec_of(spec, codec, body)
    for mean, (low, high) in zip(means, pairwise(body.bounds), strict=True):
        if high > low:
            decoder.part(low, high).decode_into(mean, out[low:high])


def mean_codec_of(spec: AveragingSpec, codec: Codec, body: Body) -> Decoder:
    return mean_codec(spec, codec_at(codec, body.level), body.bounds[-1], len(body.members), len(body.contributors))


WEIGHT_SLACK = 1 + 2**-20
"""Tolerance of a part's weight over the limit from its tokens; weights are rounded to fp32."""


class AttemptFailedError(TemporaryError):
    """The attempt cannot give a result at this peer.

    Attributes:
        suspects: Members that did not do their part.
        accuser: The member that gave up first and blames them for it; empty if this peer saw it.
    """

    def __init__(self, message: str, suspects: tuple[str, ...] = (), accuser: str = "") -> None:
        super().__init__(message)
        self.suspects = suspects
        self.accuser = accuser


class UnencodableError(AttemptFailedError):
    """This peer's contribution does not fit the codec; a retry with the same contribution fails again."""


class SpentError(AttemptFailedError):
    """The group may have learned the sum that holds this peer's contribution, and no round has it: do not average it
    again. The difference of two sums would tell of single contributions."""


class LateError(AttemptFailedError):
    """Members missed a deadline, ``as_owners`` with their share's mean or else with their contribution."""

    def __init__(
        self, message: str, suspects: tuple[str, ...] = (), accuser: str = "", *, as_owners: bool = True
    ) -> None:
        super().__init__(message, suspects, accuser)
        self.as_owners = as_owners


class Standing(StrEnum):
    """A member's state in an attempt, as the member reports it."""

    RUNNING = "running"
    """The member runs the attempt, or ended it with a certificate."""
    FETCHING = "fetching"
    """Its attempt broke, and it fetches another member's result."""
    OPEN = "open"
    """Its attempt broke; it would sign another member's result."""
    SIGNED = "signed"
    """It signed a result before its attempt broke, or signed a fetched result."""
    RENOUNCED = "renounced"
    """It did not sign, and never will sign."""
    WITHHOLDS = "withholds"
    """It never began to reduce the share that it owns, and never will."""
    UNKNOWN = "unknown"
    """It does not know the attempt, or gave it up after it had signed."""
    LOST = "lost"
    """It does not answer. No member reports this of itself."""

    @property
    def is_over(self) -> bool:
        """True if the member will not produce a result or a signature on its own."""
        return self not in (Standing.RUNNING, Standing.FETCHING, Standing.SIGNED)


@dataclass(frozen=True)
class Contribution:
    """One member's input to an attempt.

    Attributes:
        vector: fp32, shape ``[bounds[-1]]``; must not change until the session's `run` returns.
        codec: Codec of its parts; a slow member's differs from the mean's.
        origin: Above level 0: the group result from which the vector was decoded.
    """

    vector: torch.Tensor
    codec: Codec
    origin: Origin | None = None

    @property
    def has_error(self) -> bool:
        """True if the next round should add what the codec lost of the parts."""
        return True


@dataclass(frozen=True)
class PeerPart:
    """Another peer's contribution to this peer's share of a round.

    Attributes:
        samples: Number of samples that the peer says that it read.
        start: Offset of the share in the round's vector.
        num_values: Length of the share.
        data: Encoded by ``codec``.
    """

    peer: str
    samples: int
    start: int
    num_values: int
    codec: Codec
    data: Buffer

    def decode(self) -> torch.Tensor:
        """Return the values, fp32, ``[num_values]``."""
        import torch

        values = torch.empty(self.num_values, dtype=torch.float32)
        self.codec.part(0, self.num_values).decode_into(memoryview(self.data), values)
        return values


@dataclass
class Attempt:
    """The state of one roster's attempt that outlives its streams.

    Attributes:
        head: The head that the result will extend.
        bounds: Share offsets in values; one more than members.
        shareless: Indices of the members that would own no share of a vector of any length.
        codec: Codec of the whole vector.
        masked: Codec of parts and of means while the means are masked sums; None in a plain attempt, and afterwards.
        is_spent: True if the group may have learned the sum with this peer's contribution; see `SpentError`.
        levels: Levels of the round's tree.
        seconds: Timeout of the attempt; 0 for ``spec.round_seconds``.
        means: Encoded mean of each share; None until it arrives.
        hashes: `mean_root` of each mean.
        contributors: Indices into the roster; None until agreed.
        children: By index: certificate of the result that a delegate brought, in wire form.
        sent_parts: By share: this member's encoded part, where means are lists of parts; see `check_quotes`.
        body: None until every mean is here.
        proofs: By peer: valid signatures of ``body``.
        refusal: Why an absent voter did not sign; empty if none refused.
        audited: True if members spot-check the means before they sign (`p2ptrain.averaging.verification.audit`).
        withholds: True if this peer ended before it began to reduce its share: no member can ever hold a result.
        is_over: True if this peer's attempt broke.
        left_as: The standing that this peer reports after it gave the attempt up; None before.
        standings: By other member: its last reported standing.
        silent: Other members that did not answer; this peer does not wait for them.
        fell_silent: By silent member that was reached but left a question unanswered: the error.
    """

    roster: Roster
    head: Head
    bounds: tuple[int, ...]
    codec: Codec
    swarm: bytes
    spec: AveragingSpec
    levels: int = 1
    seconds: float = 0.0
    shareless: frozenset[int] = frozenset()
    masked: Codec | None = None
    is_spent: bool = False
    means: list[Buffer | None] = field(default_factory=list)
    hashes: list[bytes] = field(default_factory=list)
    contributors: tuple[int, ...] | None = None
    children: dict[int, bytes] = field(default_factory=dict)
    sent_parts: dict[int, Buffer] = field(default_factory=dict)
    body: Body | None = None
    proofs: dict[str, bytes] = field(default_factory=dict)
    refusal: str = ""
    phase: str = "scatter"
    audited: bool = False
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
        return self.bounds[index + 1] - self.bounds[index]

    @property
    def chunk(self) -> int:
        return chunk_values(self.codec)

    def num_chunks(self, index: int) -> int:
        return num_chunks(self.size(index), self.chunk)

    def span(self, index: int, chunk: int) -> tuple[int, int]:
        """Return the values ``[low, high)`` of the vector in a chunk of a member's share."""
        return chunk_span(self.bounds[index], self.bounds[index + 1], chunk, self.chunk)

    @property
    def lists_parts(self) -> bool:
        return lists_parts(self.spec, self.codec, self.bounds[-1], len(self.roster.tickets))

    @property
    def dense_codec(self) -> Codec:
        """Codec of a whole vector's mean that does not list its parts."""
        return dense_codec(self.codec)

    @property
    def part_codecs(self) -> tuple[Codec, ...]:
        return (self.masked,) if self.masked else part_codecs(self.spec, self.codec, self.bounds[-1])

    def part_of(self, codec: Codec, index: int) -> Codec:
        return codec.part(self.bounds[index], self.bounds[index + 1])

    def mean_codec_of(self, index: int) -> Decoder:
        """Return the decoder of a share's mean; all members count as contributors until they agree."""
        if self.masked is not None:
            return self.part_of(self.masked, index)
        members = len(self.roster.tickets)
        contributors = members if self.contributors is None else len(self.contributors)
        codec = mean_codec(self.spec, self.codec, self.bounds[-1], members, contributors)
        return codec.part(self.bounds[index], self.bounds[index + 1])

    def mean_root(self, index: int, mean: Buffer) -> bytes:
        """Return the digest that names an encoded mean of a share; see `p2ptrain.averaging.vector.chunks.mean_root`."""
        return mean_root(self.mean_codec_of(index), mean, self.size(index), self.chunk)

    def check_quotes(self, index: int, mean: Buffer, own_index: int) -> None:
        """Check the weights and this member's own part in an owner's list of parts; other means pass.

        An owner that replaces an honest member's part thus loses that member's signature. No check happens before the
        contributors are agreed.

        Raises:
            CodecError: A weight exceeds its sender's tokens, or this member's part is not the one that it sent.
        """
        codec, contributors = self.mean_codec_of(index), self.contributors
        if not isinstance(codec, PartList) or contributors is None or not self.size(index):
            return
        limits = get_rule(self.spec).shares(self.spec, self.claims(contributors))
        weights, parts = codec.split(mean, self.size(index))
        for contributor, weight, limit, part in zip(contributors, weights, limits, parts, strict=True):
            if weight > limit * WEIGHT_SLACK:
                raise CodecError("a part weighs more than its sender's tokens allow")
            sent = self.sent_parts.get(index) if contributor == own_index else None
            if sent is not None and part != sent:
                raise CodecError("this peer's own part is not what it sent")

    def claims(self, members: Iterable[int]) -> list[Claim]:
        """Return the claims of members, by index; a delegate speaks for its cell, and has full trust."""
        tickets, table = [self.roster.tickets[index] for index in members], self.head.table
        return [Claim(each.tokens, FULL_TRUST if each.level else table.trust_of(each.peer)) for each in tickets]

    def complete_means(self) -> Means:
        return [mean if mean is not None else b"" for mean in self.means]

    def add_mean(self, index: int, mean: Buffer, digest: bytes) -> None:
        """Store a share's mean and its hash, unless one is here."""
        if self.means[index] is None:
            self.means[index] = mean
            self.hashes[index] = digest
            self.changed.set()

    def unmask(self, means: Sequence[Buffer]) -> None:
        """Replace the masked sums by the encoded means, and their hashes with them."""
        self.masked = None
        self.means = list(means)
        self.hashes = [self.mean_root(i, mean) if self.size(i) else EMPTY_HASH for i, mean in enumerate(means)]

    def make_result(self, verifier: Signer) -> None:
        """Build the body from the means, and add its signatures that arrived earlier."""
        assert self.contributors is not None
        assert all(mean is not None for mean in self.means)
        self.body = self.body_of(self.contributors, tuple(self.hashes))
        self.pass_on((), verifier)
        self.changed.set()

    def sign(self, signer: Signer, ballots: Ballots) -> None:
        """Sign the result, unless this peer voted for another one in this view, or cannot record its vote."""
        assert self.body is not None
        try:
            may_sign = not self.body.is_last or ballots.vote(self.body)
        except ResourceError as error:
            logger.debug("round %d: %s", self.body.round, error)
            return
        if may_sign:
            self.proofs[signer.peer_id] = signer.sign(vote(self.body.body_hash))

    def body_of(self, contributors: tuple[int, ...], hashes: tuple[bytes, ...]) -> Body:
        """Return the body of these contributors and means; every member builds the same."""
        tickets = self.roster.tickets
        level, peers = tickets[0].level, tuple(ticket.peers for ticket in tickets)
        body = Body(
            swarm=self.swarm,
            round=self.head.round,
            lineage=self.head.lineage,
            digest=self.head.digest,
            tokens_before=self.head.tokens,
            samples_before=self.head.samples,
            group_id=self.roster.group_id,
            members=self.roster.members,
            contributors=tuple((i, tickets[i].tokens, tickets[i].samples) for i in contributors),
            codec=f"{self.codec.name}/{self.codec.version}",
            bounds=self.bounds,
            hashes=hashes,
            level=level,
            levels=self.levels,
            peers=peers,
            children=tuple(ticket.child for ticket in tickets) if level else (),
            leader=self.roster.leader,
            view=self.head.table.view(tickets),
            is_reduced=self.roster.is_reduced,
            census=self.head.table.census(tickets, {tickets[index].peer for index in contributors}),
        )
        return self.head.table.completed(body) if body.is_last else body

    @property
    def is_last(self) -> bool:
        """True if the result ends the round."""
        return self.roster.tickets[0].level == self.levels - 1

    @property
    def is_held(self) -> bool:
        """True if a majority of the members signed: they hold the result."""
        return sum(peer in self.proofs for peer in self.roster.members) >= self.roster.majority

    @property
    def answering(self) -> set[str]:
        """The other members that told their standing, and have not fallen silent since."""
        return {peer for peer, standing in self.standings.items() if standing is not Standing.LOST}

    @property
    def absent_voters(self) -> list[str]:
        """The voters beyond the roster whose signatures would count, in order."""
        table = self.head.table
        if not self.is_last or (self.roster.is_reduced and any(map(table.row_of, self.roster.members))):
            return []
        return sorted(self.head.table.electorate.difference(self.roster.members))

    def add_proof(self, peer: str, proof: bytes, verifier: Signer) -> bool:
        """Store a member's or voter's signature of the body; return False if it is not valid."""
        if self.body is None or (peer not in self.roster.members and peer not in self.head.table.electorate):
            return False
        if peer not in self.proofs:
            if not verifier.verify(peer, vote(self.body.body_hash), proof):
                return False
            self.proofs[peer] = proof
            self.changed.set()
        return True

    def pass_on(self, proofs: Iterable[tuple[str, bytes]], verifier: Signer) -> None:
        """Queue signatures that another member forwards, and add them once the body is known."""
        self._passed_on.extend(proofs)
        if self.body is not None:
            for peer, proof in self._passed_on:
                self.add_proof(peer, proof, verifier)
            self._passed_on.clear()

    def certificate(self) -> Certificate | None:
        """Return the certificate; None until a majority has signed, and enough voters or members of its cell."""
        if self.body is None or not self.is_held:
            return None
        table, signers = self.head.table, self.proofs.keys()
        if table.why_invalid(self.body, signers) if self.is_last else not table.is_vouched(self.body.members, signers):
            return None
        return Certificate(self.body, tuple(sorted(self.proofs.items())))
