"""Log of a peer's last encoded results: lagging peers replay rounds instead of downloading the whole state."""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.commit.encodings import mean_codec_of
from p2ptrain.averaging.commit.provenance import Source
from p2ptrain.averaging.commit.result_chunks import RESULT, Means, ResultChunks
from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.protocol.certificate_chain import (
    CALL_TIMEOUT_SECONDS,
    CHAIN,
    MAX_REPLY_BYTES,
    AskChain,
    Chain,
    fetch_certificates,
)
from p2ptrain.averaging.vector.reduce import chunk_values
from p2ptrain.codecs import Codec, Decoder, codec_at
from p2ptrain.errors import DeadlineError, PeerRefusedError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.chunks.fetch import FetchOptions, FetchReport, fetch
from p2ptrain.network.chunks.messages import MAX_ASKED, Open
from p2ptrain.network.chunks.server import ChunkServer, Ration
from p2ptrain.network.rpc.channel import LeastRate
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

MAX_CERTIFICATES = 256
"""Limit of kept certificates; those of evicted results still prove the lineage."""
FOLLOWED_BYTES = 64 << 20
"""Byte limit of results kept beyond ``max_rounds`` while a newcomer fetches them."""
RESULT_RATE = LeastRate(65536.0, 30.0)
"""Minimum rate of a source of a result, when no round waits for it."""
RESULT_RATION = Ration(transfers=128, transfers_per_peer=16, idle_seconds=30.0)
KNOWN_WAIT_SECONDS = 5.0
"""Timeout of a receiver's wait until this peer knows a result."""
MAX_SHARED = 2
MAX_SOURCES = 4
BYTES_PER_SOURCE = 4 << 20
"""A fetch uses one more source for each so many bytes, up to `MAX_SOURCES`."""


@dataclass(frozen=True)
class Result:
    """A certificate and the encoded mean of each share."""

    certificate: Certificate
    means: Means

    @property
    def num_bytes(self) -> int:
        """Return the size of the encoded means."""
        return sum(len(mean) for mean in self.means)


class History:
    """Keeps and serves this peer's results, and fetches other peers' results.

    ``max_rounds`` and ``max_bytes`` bound the kept results, except the newest. Certificates outlive their results.

    Attributes:
        find_attempt: Lookup of a complete attempt by body hash; set by `Settlements`.
        codec_of: Codec of a round's vectors.
        max_rounds: Limit of kept results; ``spec.history_rounds``, or more if each covers a part of the model.
    """

    def __init__(
        self,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        swarm: bytes,
        codec: Codec,
        spec: AveragingSpec,
        max_bytes: int,
    ) -> None:
        self._rpc = rpc
        self._runtime = runtime
        self._signer = signer
        self._swarm = swarm
        self._spec = spec
        self._max_bytes = max_bytes
        self._results: OrderedDict[bytes, Result] = OrderedDict()
        self._certificates: OrderedDict[bytes, Certificate] = OrderedDict()
        self.find_attempt: Callable[[bytes], Attempt | None] = lambda body_hash: None
        self.codec_of: Callable[[int], Codec] = lambda round_: codec
        self.max_rounds = spec.history_rounds
        self._shared: OrderedDict[bytes, ResultChunks] = OrderedDict()
        self._changed = asyncio.Event()
        rpc.serve(CHAIN, AskChain, self._serve_chain)
        ChunkServer(rpc, RESULT, self._find, RESULT_RATION)

    def add(self, result: Result, is_followed: bool = False) -> None:
        """Keep a result that this peer applied, and release the means of its attempt.

        Args:
            result: The newest result.
            is_followed: True while a newcomer fetches results. Then up to `FOLLOWED_BYTES` are kept, because a round
                may be shorter than the newcomer's round trip.
        """
        body = result.certificate.body
        self._results[body.lineage] = result
        self._certificates[body.lineage] = result.certificate
        self._wake()
        if len(self._certificates) > max(MAX_CERTIFICATES, self.max_rounds):
            self._certificates.popitem(last=False)
        if (attempt := self.find_attempt(body.body_hash)) is not None:
            attempt.means = []
        max_bytes = min(FOLLOWED_BYTES, self._max_bytes) if is_followed else 0
        while len(self._results) > 1 and (
            self._num_bytes() > self._max_bytes
            or (len(self._results) > self.max_rounds and self._num_bytes() > max_bytes)
        ):
            self._results.popitem(last=False)

    def _num_bytes(self) -> int:
        return sum(result.num_bytes for result in self._results.values())

    def clear(self) -> None:
        """Drop all results and certificates, because this peer moved to another lineage."""
        self._results.clear()
        self._certificates.clear()

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
        encoded: list[bytes] = []
        for certificate in self.proofs(request.lineage) if request.proofs else self.chain(request.lineage):
            encoded.append(certificate.to_bytes())
            if sum(map(len, encoded)) > MAX_REPLY_BYTES // 2:
                break
        return Chain(tuple(encoded))

    def share(self, chunks: ResultChunks) -> None:
        """Serve a complete or arriving result; at most the last `MAX_SHARED`."""
        self._shared[chunks.body.body_hash] = chunks
        while len(self._shared) > MAX_SHARED:
            self._shared.popitem(last=False)
        self._wake()

    def shared(self, body_hash: bytes) -> ResultChunks | None:
        """Return the shared result with this body hash; None if there is none."""
        return self._shared.get(body_hash)

    def unshare(self, chunks: ResultChunks) -> None:
        """Stop serving a result that stays incomplete."""
        chunks.give_up()
        if self._shared.get(chunks.body.body_hash) is chunks:
            del self._shared[chunks.body.body_hash]

    async def _find(self, request: Open) -> ResultChunks:
        """Return a result that is here; for a waiting receiver, wait up to `KNOWN_WAIT_SECONDS` for it."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(KNOWN_WAIT_SECONDS):
                while (found := self._find_now(request.key)) is None and request.waits:
                    await self._changed.wait()
                if found is not None:
                    return found
        raise PeerRefusedError(self._rpc.peer_id, "this result is not kept here")

    def _find_now(self, body_hash: bytes) -> ResultChunks | None:
        if (shared := self._shared.get(body_hash)) is not None:
            return shared
        for result in self._results.values():
            if (body := result.certificate.body).body_hash == body_hash:
                return self.chunks_of(self._rpc.peer_id, body, body.bounds[-1], result.means)
        attempt = self.find_attempt(body_hash)
        if attempt is None or attempt.body is None or not attempt.means:
            return None
        means = [mean or b"" for mean in attempt.means]
        return self.chunks_of(self._rpc.peer_id, attempt.body, attempt.bounds[-1], means)

    def _wake(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

    async def certificates_after(self, peer: str, lineage: bytes, *, proofs: bool = False) -> list[Certificate]:
        """Fetch and verify a peer's chain of certificates from ``lineage`` on; empty if the peer has none.

        Args:
            peer: The peer to ask.
            lineage: Start of the chain.
            proofs: True to accept certificates of results that the peer has evicted.

        Raises:
            PeerError, DeadlineError: The call failed.
            ProtocolError: The certificates do not verify or do not form a chain.
        """
        return await fetch_certificates(self._rpc, peer, lineage, self._swarm, self._signer, proofs=proofs)

    async def fetch_means(
        self, sources: Sequence[str], body: Body, num_values: int, timeout_seconds: float | None = None
    ) -> Means:
        """Fetch the encoded means of a result, and check every chunk against the body's hashes.

        Args:
            sources: Peers to ask, by preference: only the first for a small result.
            body: Body of the result.
            num_values: Length of the averaged vector.
            timeout_seconds: Timeout; None for no limit but `RESULT_RATE`.

        Raises:
            PeerError, DeadlineError: The fetch failed.
            IntegrityError: The means have other hashes, or are malformed.
            ProtocolError: The body does not fit this model.
        """
        chunks = self.chunks_of(sources[0], body, num_values)
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
            chunks: Filled as chunks arrive.
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
        report = await fetch(self._rpc, RESULT, chunks.body.body_hash, chunks, lambda: asked, options)
        await chunks.validate()
        return report

    def verified(self, certificate: bytes) -> Certificate:
        """Parse and verify a certificate in wire form.

        Raises:
            IntegrityError: It is malformed, of another swarm, or lacks valid signatures of a majority.
        """
        return Certificate.from_bytes(certificate, self._swarm, self._signer)

    def codecs_of(self, peer: str, body: Body, num_values: int) -> list[Decoder]:
        """Return the decoders of the shares' means in a result that a peer offers.

        Raises:
            ProtocolError: The body does not fit this model.
        """
        if body.bounds[0] != 0 or body.bounds[-1] != num_values:
            raise ProtocolError(peer, "offers a result of another size than this model")
        usual = self.codec_of(body.round)
        codec = codec_at(usual, body.level)
        if body.codec != f"{codec.name}/{codec.version}":
            raise ProtocolError(peer, f"offers a result in codec {body.codec}")
        if not body.contributors:
            raise ProtocolError(peer, "offers a result of nobody's contributions")
        means = mean_codec_of(self._spec, usual, body)
        try:
            return [means.part(low, high) for low, high in pairwise(body.bounds)]
        except ValueError as error:
            raise ProtocolError(peer, f"offers a result that is cut within blocks: {error}") from error

    def source_of(self, peer: str, body: Body, num_values: int) -> Source:
        """Return the `Source` of a peer's result, for tracing; raises `ProtocolError` as `codecs_of`."""
        chunk = chunk_values(codec_at(self.codec_of(body.round), body.level))
        return Source(body, self.codecs_of(peer, body, num_values), chunk)

    def num_bytes_of(self, peer: str, body: Body, num_values: int) -> int:
        """Return the size of the means of a result that a peer offers; raises `ProtocolError` as `codecs_of`."""
        codecs = self.codecs_of(peer, body, num_values)
        return sum(
            codec.encoded_bytes(high - low) for codec, (low, high) in zip(codecs, pairwise(body.bounds), strict=True)
        )

    def chunks_of(self, peer: str, body: Body, num_values: int, means: Means | None = None) -> ResultChunks:
        """Return the chunks of a result that a peer offers; raises `ProtocolError` as `codecs_of`.

        Args:
            peer: The peer that a `ProtocolError` names.
            body: Certified body of the result.
            num_values: Length of the averaged vector.
            means: The complete means; None to fetch them.
        """
        leaf_values = chunk_values(codec_at(self.codec_of(body.round), body.level))
        return ResultChunks(self._runtime, body, self.codecs_of(peer, body, num_values), leaf_values, means)
