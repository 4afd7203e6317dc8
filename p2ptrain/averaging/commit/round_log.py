"""The last encoded results that a peer keeps, so that laggards replay rounds instead of downloading everything."""

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
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.rpc.pace import LeastRate
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

MAX_CERTIFICATES = 256
"""Most certificates that are kept; those of results that are gone still prove the lineage to onlookers."""
FOLLOWED_BYTES = 64 << 20
"""Results that are kept while a newcomer collects them, where those of ``max_rounds`` are fewer bytes."""
RESULT_RATE = LeastRate(65536.0, 30.0)
"""The least rate of a peer that sends a result for which no round waits."""
RESULT_RATION = Ration(transfers=128, transfers_per_peer=16, idle_seconds=30.0)
KNOWN_WAIT_SECONDS = 5.0
"""Timeout of a receiver that waits for a result to be known here."""
MAX_SHARED = 2
MAX_SOURCES = 4
BYTES_PER_SOURCE = 4 << 20
"""A result is fetched from one more source for each so many bytes."""


@dataclass(frozen=True)
class Result:
    """A certificate and the encoded mean of each share that it vouches for."""

    certificate: Certificate
    means: Means

    @property
    def num_bytes(self) -> int:
        """Size of the encoded means."""
        return sum(len(mean) for mean in self.means)


class History:
    """Keeps results, serves them, and fetches those of others.

    Bounded by ``max_rounds`` and ``max_bytes``; the newest result is always kept. Certificates are small: the last
    `MAX_CERTIFICATES` are kept, whatever became of their results.

    Attributes:
        find_attempt: Finds a complete but uncertified attempt by body hash; set by the averager.
        codec_of: How the vectors of a round are encoded.
        max_rounds: How many results are kept; ``spec.history_rounds``, or more where each is of a part of the model.
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
        """Keep a result that this peer applied; the attempt that gave it need not keep the means any more.

        Args:
            result: The newest.
            is_followed: Whether a newcomer collects results now: then more are kept, up to `FOLLOWED_BYTES`, because
                rounds may be shorter than its way here and back.
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
        """Forget everything: this peer moved to another lineage."""
        self._results.clear()
        self._certificates.clear()

    def chain(self, lineage: bytes) -> list[Certificate]:
        """The certificates of the results that lead from ``lineage`` to the newest; empty when one of them is gone."""
        return self.proofs(lineage) if lineage in self._results else []

    def proofs(self, lineage: bytes) -> list[Certificate]:
        """The certificates that lead from ``lineage`` to the newest, whether their results are here still or not."""
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
        """Serve a result that is complete, or on its way here; the last `MAX_SHARED` of them."""
        self._shared[chunks.body.body_hash] = chunks
        while len(self._shared) > MAX_SHARED:
            self._shared.popitem(last=False)
        self._wake()

    def shared(self, body_hash: bytes) -> ResultChunks | None:
        """Return a result that is shared."""
        return self._shared.get(body_hash)

    def unshare(self, chunks: ResultChunks) -> None:
        """Serve a result no more that will not be complete."""
        chunks.give_up()
        if self._shared.get(chunks.body.body_hash) is chunks:
            del self._shared[chunks.body.body_hash]

    async def _find(self, request: Open) -> ResultChunks:
        """Return a result that is here; or comes to be known soon, for a receiver that waits."""
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
        """Ask a peer for the chain of certificates from ``lineage`` on; verified; empty when it has none.

        Args:
            peer: Whom.
            lineage: Where the chain begins.
            proofs: Whether certificates will do whose results it does not hold any more.

        Raises:
            PeerError, DeadlineError: It failed.
            ProtocolError: It sent certificates that do not verify or do not connect.
        """
        return await fetch_certificates(self._rpc, peer, lineage, self._swarm, self._signer, proofs=proofs)

    async def fetch_means(
        self, sources: Sequence[str], body: Body, num_values: int, timeout_seconds: float | None = None
    ) -> Means:
        """Fetch the encoded means of a result, every chunk checked against the body's hashes.

        Args:
            sources: Whom to ask, by preference: the first alone for a small result.
            body: Of the result.
            num_values: Length of the vector that it averaged.
            timeout_seconds: Deadline; None for as long as they come at `RESULT_RATE`.

        Raises:
            PeerError, DeadlineError: It failed.
            IntegrityError: What came has other hashes, or is not well-formed.
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
        """Fetch what is missing of a result; raises as `p2ptrain.network.chunks.fetch.fetch`.

        Args:
            chunks: Filled as they come.
            sources: Whom to ask, by preference; `MAX_SOURCES` of them, unless there is a plan.
            plan: Which of them is asked for which chunks, once; empty where any may send any.
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
        """A certificate that came over the wire.

        Raises:
            IntegrityError: It is malformed, of another swarm, or lacks valid signatures of a majority.
        """
        return Certificate.from_bytes(certificate, self._swarm, self._signer)

    def codecs_of(self, peer: str, body: Body, num_values: int) -> list[Decoder]:
        """Return how the shares of a result are encoded that a peer offers.

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
        """A result that a peer brings, to trace what comes from it; raises `ProtocolError` as `codecs_of`."""
        chunk = chunk_values(codec_at(self.codec_of(body.round), body.level))
        return Source(body, self.codecs_of(peer, body, num_values), chunk)

    def num_bytes_of(self, peer: str, body: Body, num_values: int) -> int:
        """Size of the encoded means of a result that a peer offers; raises `ProtocolError` as `codecs_of`."""
        codecs = self.codecs_of(peer, body, num_values)
        return sum(
            codec.encoded_bytes(high - low) for codec, (low, high) in zip(codecs, pairwise(body.bounds), strict=True)
        )

    def chunks_of(self, peer: str, body: Body, num_values: int, means: Means | None = None) -> ResultChunks:
        """Return a result that a peer offers in chunks; raises `ProtocolError` as `codecs_of`.

        Args:
            peer: Whom to blame.
            body: Certified.
            num_values: Length of the vector that it averaged.
            means: If they are here.
        """
        leaf_values = chunk_values(codec_at(self.codec_of(body.round), body.level))
        return ResultChunks(self._runtime, body, self.codecs_of(peer, body, num_values), leaf_values, means)
