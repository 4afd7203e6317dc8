"""The last encoded results that a peer keeps, so that laggards replay rounds instead of downloading everything."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from p2ptrain.averaging.commit.attempt import Attempt
from p2ptrain.averaging.commit.encodings import mean_codec_of
from p2ptrain.averaging.commit.provenance import Source
from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.protocol.certificate_chain import CALL_TIMEOUT_SECONDS, MAX_REPLY_BYTES, fetch_certificates
from p2ptrain.averaging.vector.reduce import chunk_values, mean_root
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec, CodecError, Decoder, codec_at
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.rpc.pace import LeastRate, receive_steadily
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

Means = list[Buffer]

MAX_CERTIFICATES = 256
"""How many certificates are kept; those of results that are gone are proof still, for who only looks on."""
FOLLOWED_BYTES = 64 << 20
"""Results that are kept while a newcomer collects them, where those of ``max_rounds`` are fewer bytes."""
RESULT_RATE = LeastRate(65536.0, 30.0)
"""What a peer has to send of a result that nobody waits for."""


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
        is_followed: Whether a newcomer collects results now: then more are kept, up to `FOLLOWED_BYTES`, because rounds
            may be shorter than its way here and back.
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
        self.is_followed: Callable[[], bool] = lambda: False
        self.max_rounds = spec.history_rounds
        rpc.serve("history.after", dict, self._serve_after)
        rpc.serve_channel("history.result", dict, self._serve_result)

    def add(self, result: Result) -> None:
        """Keep a result that this peer applied; the attempt that gave it need not keep the means any more."""
        body = result.certificate.body
        self._results[body.lineage] = result
        self._certificates[body.lineage] = result.certificate
        if len(self._certificates) > max(MAX_CERTIFICATES, self.max_rounds):
            self._certificates.popitem(last=False)
        if (attempt := self.find_attempt(body.body_hash)) is not None:
            attempt.means = []
        max_bytes = min(FOLLOWED_BYTES, self._max_bytes) if self.is_followed() else 0
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

    async def _serve_after(self, peer: str, request: dict[str, Any]) -> dict[str, Any]:
        lineage, proofs = request.get("lineage"), request.get("proofs", False)
        if type(lineage) is not bytes or type(proofs) is not bool:
            raise IntegrityError("malformed request for history")
        encoded: list[bytes] = []
        for certificate in self.proofs(lineage) if proofs else self.chain(lineage):
            encoded.append(certificate.to_bytes())
            if sum(map(len, encoded)) > MAX_REPLY_BYTES // 2:
                break
        return {"certificates": encoded}

    async def _serve_result(self, channel: Channel, request: dict[str, Any]) -> None:
        wanted = request.get("body")
        means: list[Buffer | None] | Means | None = None
        for result in self._results.values():
            if result.certificate.body.body_hash == wanted:
                means = result.means
        if means is None and type(wanted) is bytes and (attempt := self.find_attempt(wanted)) is not None:
            means = attempt.means or None
        if means is None:
            raise PeerRefusedError(self._rpc.peer_id, "this result is not kept here any more")
        for mean in means:
            if mean:
                await channel.send_bytes(mean)
        await channel.send({"done": True})

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

    async def fetch_means(self, peer: str, body: Body, num_values: int, timeout_seconds: float | None = None) -> Means:
        """Fetch the encoded means of a result from a peer, checked against the body's hashes.

        Args:
            peer: Whom to ask.
            body: Of the result.
            num_values: Length of the vector that it averaged.
            timeout_seconds: Deadline for each share; None for as long as they come at `RESULT_RATE`.

        Raises:
            PeerError, DeadlineError: It failed.
            ProtocolError: It sent bytes with other hashes, or the body does not fit this model.
        """
        codecs = self.codecs_of(peer, body, num_values)
        means: Means = []
        request = {"body": body.body_hash}
        total = self.num_bytes_of(peer, body, num_values)
        async with self._rpc.open(
            peer, "history.result", request, CALL_TIMEOUT_SECONDS, expected_bytes=total
        ) as channel:
            for part, (low, high) in zip(codecs, pairwise(body.bounds), strict=True):
                if high == low:
                    means.append(b"")
                    continue
                data = self._runtime.buffers.lend(part.encoded_bytes(high - low))
                if timeout_seconds is None:
                    means.append(await receive_steadily(channel, len(data), data, RESULT_RATE))
                else:
                    means.append(await channel.receive_bytes(len(data), timeout_seconds, data))
            await channel.receive(dict, CALL_TIMEOUT_SECONDS if timeout_seconds is None else timeout_seconds)
        await self.check_means(peer, body, means)
        return means

    def verified(self, certificate: bytes) -> Certificate:
        """A certificate that came over the wire.

        Raises:
            IntegrityError: It is malformed, of another swarm, or lacks valid signatures of a majority.
        """
        return Certificate.from_bytes(certificate, self._swarm, self._signer)

    def codecs_of(self, peer: str, body: Body, num_values: int) -> list[Decoder]:
        """How the shares of a result are encoded that a peer offers.

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

    async def check_means(self, peer: str, body: Body, means: Means) -> None:
        """Check the means that a peer sent of a result which fits this model.

        Raises:
            ProtocolError: They are not those of the body, or not well-formed.
        """
        codecs = self.codecs_of(peer, body, body.bounds[-1])
        await self._runtime.offload(self._check_means, peer, body, means, codecs)

    def _check_means(self, peer: str, body: Body, means: Means, codecs: list[Decoder]) -> None:
        for index, (mean, codec) in enumerate(zip(means, codecs, strict=True)):
            size = body.bounds[index + 1] - body.bounds[index]
            if not size:
                continue
            chunk = chunk_values(codec_at(self.codec_of(body.round), body.level))
            if mean_root(codec, mean, size, chunk) != body.hashes[index]:
                raise ProtocolError(peer, "sent a result that does not match its certificate")
            try:
                codec.validate(mean, size)
            except CodecError as error:
                raise ProtocolError(peer, f"sent a result that is refused: {error}") from error
