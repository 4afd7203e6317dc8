"""This peer's log of past rounds: their results, which lagging peers replay, and its own contributions to them."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING

from p2ptrain.averaging.commit.attempt import Attempt, decode_means, mean_codec_of
from p2ptrain.averaging.commit.result_chunks import RESULT, RESULT_RATE, Means, Origin, ResultChunks, Source
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.leaders import RoundPosition
from p2ptrain.averaging.protocol.certificate import (
    CALL_TIMEOUT_SECONDS,
    CHAIN,
    MAX_CHAIN_BYTES,
    MAX_ROOT_BYTES,
    ROOT,
    AskChain,
    AskRoot,
    Body,
    Certificate,
    Chain,
    Head,
    Root,
    fetch_certificates,
)
from p2ptrain.averaging.vector.chunks import chunk_values
from p2ptrain.averaging.verification.opening import Rules, Slice
from p2ptrain.codecs import Codec, Decoder, codec_at, dense_codec
from p2ptrain.errors import DeadlineError, IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.network.chunks.fetch import FetchOptions, FetchReport, fetch
from p2ptrain.network.chunks.messages import MAX_ASKED, Open
from p2ptrain.network.chunks.server import ChunkServer, Ration

if TYPE_CHECKING:
    import torch

MAX_CERTIFICATES = 256
"""Limit of kept certificates, of a full lineage; those of evicted results still prove it."""
MAX_REDUCED_SIGNATURES = 1 << 16
"""Limit of the signatures in certificates that are kept beyond it, because a swarm in two parts needs them to meet."""
UNPROVED = "a head is not proved by the voters that this peer knows"
MAX_UNDONE = 64
"""Limit of full rounds that another lineage can undo."""
MAX_REDUCED_HEADS = 8
"""Limit of the newest heads of reduced rounds that are kept; another lineage most likely begins at a full one."""
MAX_ATTEMPTS_KEPT = 4
MIN_LOG_BYTES = 64 << 20
FOLLOWED_BYTES = 64 << 20
"""Byte limit of results kept beyond the limit of rounds while a newcomer fetches them."""
RESULT_RATION = Ration(transfers=128, transfers_per_peer=16, idle_seconds=30.0)
KNOWN_WAIT_SECONDS = 5.0
"""Timeout of a receiver's wait until this peer knows a result."""
MAX_SHARED = 2
MAX_SOURCES = 4
BYTES_PER_SOURCE = 4 << 20
"""A fetch uses one more source for each so many bytes, up to `MAX_SOURCES`."""
MAX_OWN_RESULTS = 8


Path = tuple[Certificate, ...]
"""The certificates of the levels above a cell, up to the round's last."""


@dataclass(frozen=True)
class Result:
    """A certificate and the encoded mean of each share."""

    certificate: Certificate
    means: Means

    @property
    def num_bytes(self) -> int:
        return sum(len(mean) for mean in self.means)


@dataclass(frozen=True)
class TreePath:
    """The path of a cell's result into the round's result; ``means`` are those of the last certificate."""

    path: Path
    means: Means

    def counts(self, body: Body) -> bool:
        """True if `path` proves that the round's result contains a cell's result."""
        for certificate in self.path:
            above = certificate.body
            if body.body_hash not in above.counted_children:
                return False
            body = above
        return True

    def position_of(self, body: Body, index: int) -> tuple[int, int]:
        """Return the index among all peers of the round of member ``index`` of a group at level 0, and their number."""
        for certificate in self.path:
            above = certificate.body
            index += sum(above.peers[: above.children.index(body.body_hash)])
            body = above
        return index, sum(body.peers)


class RoundLog:
    """Keeps and serves this peer's results, and fetches other peers' results.

    ``spec.history_rounds`` for each part of the model and ``max_bytes`` bound the kept results, except the newest.
    Certificates outlive their results.

    Attributes:
        attempts: The last attempts by group, whose results other members may recover or fetch.
        shared: Complete or arriving results that `share` serves, by body hash.
    """

    def __init__(self, context: PeerContext, parts: Sequence[tuple[Codec, int]], max_bytes: int | None = None) -> None:
        """
        Args:
            parts: Codec and number of values of each of the model's P parts; round r averages part r mod P.
            max_bytes: By default two dense results of the whole model, and at least `MIN_LOG_BYTES`.
        """
        if max_bytes is None:
            dense_bytes = sum(dense_codec(codec).encoded_bytes(num_values) for codec, num_values in parts)
            max_bytes = max(MIN_LOG_BYTES, 2 * dense_bytes)
        self._context = context
        self._parts = parts
        self.num_parts = len(parts)
        self._max_rounds = context.spec.history_rounds * len(parts)
        self._max_bytes = max_bytes
        self.attempts: OrderedDict[bytes, Attempt] = OrderedDict()
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._certificates: OrderedDict[bytes, Certificate] = OrderedDict()
        self._heads: OrderedDict[bytes, Head] = OrderedDict()
        self.shared: OrderedDict[bytes, ResultChunks] = OrderedDict()
        self._changed = asyncio.Event()
        self._root: Head | None = None
        self._endorsed: Certificate | None = None
        context.rpc.serve(CHAIN, AskChain, self._serve_chain)
        context.rpc.serve(ROOT, AskRoot, self._serve_root)
        ChunkServer(context.rpc, RESULT, self._find, RESULT_RATION)

    def codec_of(self, round_: int, level: int = 0) -> Codec:
        """Return the codec of a round's vectors on a level of the tree."""
        return codec_at(self._parts[round_ % len(self._parts)][0], level)

    def num_values(self, round_: int) -> int:
        return self._parts[round_ % len(self._parts)][1]

    def rules_of(self, share: Slice) -> Rules:
        codec = self.codec_of(share.round, share.level)
        return Rules(self._context.swarm, self._context.spec, codec, self.num_values(share.round))

    # --- own results

    def remember(self, attempt: Attempt) -> None:
        """Keep an attempt, for other members' recovery; at most `MAX_ATTEMPTS_KEPT` are kept."""
        self.attempts[attempt.roster.group_id] = attempt
        while len(self.attempts) > MAX_ATTEMPTS_KEPT:
            self.attempts.popitem(last=False)

    def _attempt_of(self, body_hash: bytes) -> Attempt | None:
        for attempt in self.attempts.values():
            if attempt.body is not None and attempt.body.body_hash == body_hash:
                return attempt
        return None

    def add(self, result: Result, head: Head, is_followed: bool = False) -> None:
        """Keep the newest result, which this peer applied at ``head``, and release the means of its attempt.

        While a newcomer fetches results (``is_followed``), up to `FOLLOWED_BYTES` are kept, because a round may be
        shorter than the newcomer's round trip.
        """
        body = result.certificate.body
        self._results[body.lineage] = result
        self._certificates[body.lineage] = result.certificate
        self._keep(head)
        self.endorse(self._endorsed)
        self.endorse(result.certificate)
        self._wake()
        while self._has_too_many_certificates(head):
            self._certificates.popitem(last=False)
        if (attempt := self._attempt_of(body.body_hash)) is not None:
            attempt.means = []
        num_bytes = sum(result.num_bytes for result in self._results.values())
        max_bytes = min(FOLLOWED_BYTES, self._max_bytes) if is_followed else 0
        while len(self._results) > 1 and num_bytes > (
            max_bytes if len(self._results) > self._max_rounds else self._max_bytes
        ):
            num_bytes -= self._results.popitem(last=False)[1].num_bytes

    def _keep(self, head: Head) -> None:
        """Keep a head: another lineage may begin there, most likely at one that a full certificate led to."""
        self._heads[head.lineage] = head
        for is_reduced, limit in ((False, MAX_UNDONE), (True, MAX_REDUCED_HEADS)):
            lineages = [each.lineage for each in self._heads.values() if each.is_reduced is is_reduced]
            for lineage in lineages[:-limit]:
                del self._heads[lineage]

    def _has_too_many_certificates(self, head: Head) -> bool:
        if len(self._certificates) <= max(MAX_CERTIFICATES, self._max_rounds):
            return False
        first = head.full - MAX_UNDONE
        if self._context.anchors.round:  # A newcomer needs those since the newest anchor.
            first = min(first, self._context.anchors.round)
        if next(iter(self._certificates.values())).body.round < first:
            return True
        return sum(len(each.proofs) for each in self._certificates.values()) > MAX_REDUCED_SIGNATURES

    def endorse(self, certificate: Certificate | None) -> None:
        """Take the head after a certificate as the root, if the founders signed it; it may be the newest one."""
        if certificate is None or not self._context.founding.believes(certificate):
            return
        self._endorsed, head = certificate, self._heads.get(certificate.body.next_lineage)
        if head is not None:
            self._root = replace(head, certificate=certificate.to_bytes())
            self._endorsed = None

    def begin_at(self, head: Head) -> None:
        """Drop all results and certificates, because this peer moved to a head that it believes."""
        self._root = head
        self._results.clear()
        self._certificates.clear()
        self._heads.clear()
        self._keep(head)

    def heads(self) -> list[Head]:
        """Return the kept heads of this peer's lineage, the newest first."""
        return list(reversed(self._heads.values()))

    def lineages(self) -> set[bytes]:
        """Return the lineages at the rounds of which this peer keeps heads or certificates."""
        return {*self._heads, *self._certificates, *(c.body.next_lineage for c in self._certificates.values())}

    def lineage_at(self, own: Head, round_: int) -> bytes | None:
        """Return the lineage at an earlier round of this peer's ``own`` head; None if it is not known."""
        known = {each.round: each.lineage for each in (*self._heads.values(), own)}
        known |= {c.body.round: c.body.lineage for c in self._certificates.values()}
        return known.get(round_) or (self._context.anchors.lineage_at(round_) if round_ <= own.round else None)

    def chain(self, lineage: bytes) -> list[Certificate]:
        """Return the certificates from ``lineage`` to the newest; empty if the result after ``lineage`` is evicted."""
        return self.proofs(lineage) if lineage in self._results else []

    def proofs(self, lineage: bytes) -> list[Certificate]:
        """Return the certificates from ``lineage`` to the newest, including those of evicted results."""
        certificates = []
        while (certificate := self._certificates.get(lineage)) is not None:
            certificates.append(certificate)
            lineage = certificate.body.next_lineage
        return certificates

    async def _serve_chain(self, peer: str, request: AskChain) -> Chain:
        encoded, num_bytes = list[bytes](), 0
        chains = (self.proofs(start) if request.proofs else self.chain(start) for start in request.lineages)
        for certificate in next(filter(None, chains), []):
            encoded.append(certificate.to_bytes())
            num_bytes += len(encoded[-1])
            if num_bytes > MAX_CHAIN_BYTES // 2:
                break
        return Chain(tuple(encoded))

    async def _serve_root(self, peer: str, request: AskRoot) -> Root:
        if self._root is None:
            raise PeerRefusedError(self._context.rpc.peer_id, "this peer's lineage begins with the first round")
        return Root(self._root)

    # --- served results

    def share(self, chunks: ResultChunks) -> None:
        """Serve a complete or arriving result; at most the last `MAX_SHARED`."""
        self.shared[chunks.body.body_hash] = chunks
        while len(self.shared) > MAX_SHARED:
            self.shared.popitem(last=False)
        self._wake()

    def unshare(self, chunks: ResultChunks) -> None:
        """Stop serving a result that stays incomplete."""
        chunks.give_up()
        if self.shared.get(chunks.body.body_hash) is chunks:
            del self.shared[chunks.body.body_hash]

    async def _find(self, request: Open) -> ResultChunks:
        """Return a result that is here; for a waiting receiver, wait up to `KNOWN_WAIT_SECONDS` for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WAIT_SECONDS):
                while (found := self._find_now(request.key)) is None and request.waits:
                    await self._changed.wait()
                if found is not None:
                    return found
        raise PeerRefusedError(self._context.rpc.peer_id, "this result is not kept here")

    def _find_now(self, body_hash: bytes) -> ResultChunks | None:
        if (shared := self.shared.get(body_hash)) is not None:
            return shared
        own = self._context.rpc.peer_id
        for result in self._results.values():
            if (body := result.certificate.body).body_hash == body_hash:
                return self.chunks_of(own, body, result.means)
        attempt = self._attempt_of(body_hash)
        if attempt is None or attempt.body is None or not attempt.means:
            return None
        return self.chunks_of(own, attempt.body, attempt.complete_means())

    def _wake(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    # --- other peers' results

    async def certificates_after(
        self, peer: str, *heads: Head, proofs: bool = False, until: bytes | None = None
    ) -> list[Certificate]:
        """Fetch and verify a peer's chain of certificates from one of these heads on; see `fetch_certificates`."""
        context, starts = self._context, {head.lineage: head.table for head in heads}
        return await fetch_certificates(context.rpc, peer, starts, context.certificate, proofs=proofs, until=until)

    async def believe(self, source: str, own: Head, head: Head, *, is_stalled: bool = False) -> None:
        """Return if a peer's head follows from this peer's own, or from one shortly before it, where both part.

        Voters that this peer knows must have signed it, or a chain of certificates lead to it. The chain may begin at
        the source's *root*, an earlier head that voters of this peer's own head signed. A peer that goes on without
        most voters, or cannot go on (``is_stalled``), takes the founders' signatures, too, as a newcomer does. Where
        nobody founded the swarm, peers that began it apart come together, unless it is open to strangers.

        A head past the newest anchor must be proved from the anchor, or from a head of this peer's past it.

        Raises:
            PeerError, DeadlineError: The source does not answer.
            IntegrityError: The source does not prove it.
        """
        context, anchors = self._context, self._context.anchors
        if head.lineage == own.lineage:
            return
        own = anchors.start_for(own, head)
        if head.lineage == own.lineage or head.round == 0:
            return
        if own.table.believes(await context.runtime.offload(context.certificate, head.certificate)):
            return
        before = [each for each in self.heads() if own.full - each.full < MAX_UNDONE]
        if is_anchored := 0 < anchors.round <= own.round:
            before = [each for each in before if anchors.is_past(each)]
        before = [each for each in before if each.table.electorate or not each.table.is_open]
        if await self.leads_to(source, head, own, *before):
            return
        root = (
            await context.rpc.call(source, ROOT, AskRoot(), Root, CALL_TIMEOUT_SECONDS, max_reply_bytes=MAX_ROOT_BYTES)
        ).head
        proof = await context.runtime.offload(context.certificate, root.certificate)
        known = own.table.believes(proof)
        asks_founders = (own.is_reduced or is_stalled) and not is_anchored
        if asks_founders and context.founding.electorate and own.full - root.full < MAX_UNDONE:
            known |= context.founding.believes(proof)
        if proof.next_head(root.digest, root.table) != root or not known:
            raise IntegrityError(UNPROVED)
        if head.lineage != root.lineage and not await self.leads_to(source, head, root):
            raise IntegrityError(UNPROVED)

    async def leads_to(self, source: str, head: Head, *starts: Head) -> bool:
        """True if a peer has the certificates from one of these heads to ``head``."""
        chain = await self.certificates_after(source, *starts, proofs=True, until=head.lineage)
        return any(each.body.next_lineage == head.lineage for each in chain)

    async def fetch_means(self, sources: Sequence[str], body: Body, timeout_seconds: float | None = None) -> Means:
        """Fetch the encoded means of a result, and check every chunk against the body's hashes.

        Args:
            sources: Peers to ask, by preference: only the first for a small result.
            timeout_seconds: None for no limit but `RESULT_RATE`.

        Raises:
            PeerError, DeadlineError: The fetch failed.
            IntegrityError: The means have other hashes, or are malformed.
            ProtocolError: The body does not fit this model.
        """
        chunks = self.chunks_of(sources[0], body)
        try:
            async with asyncio.timeout(timeout_seconds):
                await self.fetch(chunks, sources)
        except TimeoutError:
            raise DeadlineError(f"the result of round {body.round} did not come within {timeout_seconds:g} s") from None
        return chunks.means

    async def fetch(
        self, chunks: ResultChunks, sources: Sequence[str], plan: Mapping[str, Sequence[int]] | None = None
    ) -> FetchReport:
        """Fetch the missing chunks of a result; raises as `p2ptrain.network.chunks.fetch.fetch`.

        Args:
            sources: Peers to ask, by preference, at most `MAX_SOURCES`; unused with a plan.
            plan: By source: the chunks to request from it, without retry; None or empty if any source may send any.
        """
        plan = plan or {}
        asked = list(plan) or sources[:MAX_SOURCES]
        options = FetchOptions(
            open_seconds=CALL_TIMEOUT_SECONDS,
            least=RESULT_RATE,
            max_sources=len(plan) or min(MAX_SOURCES, 1 + chunks.expected_bytes // BYTES_PER_SOURCE),
            attempts=1 if plan else 2,
            first_span=MAX_ASKED,
            waits=bool(plan),
            plan=plan,
        )
        report = await fetch(self._context.rpc, RESULT, chunks.body.body_hash, chunks, lambda: asked, options)
        await chunks.validate()
        return report

    def decode(self, body: Body, means: Means, out: torch.Tensor) -> None:
        """See `decode_means`."""
        decode_means(self._context.spec, self.codec_of(body.round), body, means, out)

    # --- layout of a result that a peer offers: these raise `ProtocolError` if it does not fit this model

    def codecs_of(self, peer: str, body: Body) -> list[Decoder]:
        """Return the decoders of the shares' means in a result that ``peer`` offers."""
        if body.bounds[0] != 0 or body.bounds[-1] != self.num_values(body.round):
            raise ProtocolError(peer, "offers a result of another size than this model")
        codec = self.codec_of(body.round, body.level)
        if body.codec != f"{codec.name}/{codec.version}":
            raise ProtocolError(peer, f"offers a result in codec {body.codec}")
        if not body.contributors:
            raise ProtocolError(peer, "offers a result of nobody's contributions")
        means = mean_codec_of(self._context.spec, self.codec_of(body.round), body)
        try:
            return [means.part(low, high) for low, high in pairwise(body.bounds)]
        except ValueError as error:
            raise ProtocolError(peer, f"offers a result that is cut within blocks: {error}") from error

    def num_bytes_of(self, peer: str, body: Body) -> int:
        shares = zip(self.codecs_of(peer, body), pairwise(body.bounds), strict=True)
        return sum(codec.encoded_bytes(high - low) for codec, (low, high) in shares)

    def source_of(self, peer: str, body: Body) -> Source:
        return Source(body, self.codecs_of(peer, body), self._leaf_values(body))

    def origin_of(self, certificate: Certificate, means: Means) -> Origin:
        """Return this peer's contribution to the next level of the tree: the result of its group."""
        return Origin(certificate, means, self.source_of(self._context.rpc.peer_id, certificate.body))

    def chunks_of(self, peer: str, body: Body, means: Means | None = None) -> ResultChunks:
        """Return the chunks of a certified result; ``means`` are complete, or None to fetch them."""
        codecs = self.codecs_of(peer, body)
        return ResultChunks(self._context.runtime, body, codecs, self._leaf_values(body), means)

    def _leaf_values(self, body: Body) -> int:
        return chunk_values(self.codec_of(body.round, body.level))


class ContributionLog:
    """Log of this peer's contributions: tells whether results that it did not complete contain them.

    Thus no work counts twice, and none is lost.
    """

    def __init__(self, position: RoundPosition, num_parts: int) -> None:
        """``num_parts`` is P, the number of the model's parts: round r averages part r mod P."""
        self._position = position
        self._peer = position.peer
        self._num_parts = num_parts
        self._results: deque[Body] = deque(maxlen=MAX_OWN_RESULTS)
        self._gave_up_on = b""
        self._uncertain_parts: set[int] = set()
        self._is_complete = True

    def add_result(self, body: Body) -> None:
        """Record a result of this peer's group at level 0, which goes up the tree."""
        self._results.append(body)
        self._is_complete = True

    def give_up_on(self, head: Head) -> None:
        """Record that this peer gave up an attempt or a result at ``head`` that other peers may complete."""
        self._gave_up_on = head.lineage
        self._is_complete = True
        self._uncertain_parts.add(head.round % self._num_parts)

    def completed(self) -> None:
        """Record that this peer completed the round that it gave up before, with its newest result."""
        self._gave_up_on = b""

    def forget(self, waiting: Iterable[int] = ()) -> None:
        """Record that an earlier process of this peer may have contributed to rounds unknown to this process.

        ``waiting`` are the parts with pending work of that process.
        """
        self._is_complete = False
        self._uncertain_parts.update(waiting)

    def consumed(self, parts: Iterable[int]) -> None:
        """Record that all earlier work on parts was counted or dropped, so none is pending."""
        self._uncertain_parts.difference_update(parts)

    def may_count(self, part: int) -> bool:
        """True if pending work on a part may already count in a lineage unknown to this peer."""
        return part in self._uncertain_parts

    def is_in(self, body: Body) -> bool:
        """True if a result that this peer did not complete contains its contribution.

        Where this peer does not know the path up the tree, any delegate of its cell among the contributors suffices.
        """
        if body.levels == 1:
            return self._peer in body.contributing
        mine = [each for each in self._results if each.lineage == body.lineage and self._peer in each.contributing]
        gave_up = self._gave_up_on == body.lineage
        if not mine and self._is_complete and not gave_up:
            return False
        if mine and body.level == 1 and not gave_up:
            return any(result.body_hash in body.counted_children for result in mine)
        cells = self._position.cells
        key = cells.key_of(self._position.head, self._peer, body.level)
        return cells.slot(key, self._peer) in {cells.slot(key, peer) for peer in body.contributing}

    def counts_in(self, body: Body) -> tuple[int, int] | None:
        """Return this peer's tokens and samples in a round's result; None if unknown.

        Above level 0 ``body`` lists only delegates' totals, so the counts come from this peer's own group's result.
        """
        results = [body] if body.levels == 1 else [each for each in self._results if each.lineage == body.lineage]
        if body.levels == 2:
            results = [result for result in results if result.body_hash in body.counted_children]
        elif body.levels > 2 and self._gave_up_on == body.lineage:
            return None
        for result in reversed(results):
            for index, tokens, samples in result.contributors:
                if result.members[index] == self._peer:
                    return tokens, samples
        return None
