"""Fetches a peer's chain of certificates, without results and codecs (`p2ptrain.averaging.commit.round_log`)."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Message
from p2ptrain.signing import Signer

CHAIN = "history.after"
MAX_REPLY_BYTES = 4 << 20
CALL_TIMEOUT_SECONDS = 12.0


class AskChain(Message, frozen=True):
    """Request for the certificates that follow a lineage; with ``proofs``, also those whose results are gone."""

    lineage: Annotated[bytes, Meta(max_length=32)]
    proofs: bool = False


class Chain(Message, frozen=True):
    """Certificates in wire form, each of which extends the one before."""

    certificates: Annotated[tuple[bytes, ...], Meta(max_length=1 << 16)]


async def fetch_certificates(
    rpc: Rpc, peer: str, lineage: bytes, swarm: bytes, verifier: Signer, *, proofs: bool = False
) -> list[Certificate]:
    """Return a peer's certificates from ``lineage`` on, verified and connected; see `History.certificates_after`.

    Raises:
        PeerError, DeadlineError: The call failed.
        ProtocolError: The peer sent certificates that do not verify or do not connect.
    """
    reply = await rpc.call(
        peer, CHAIN, AskChain(lineage, proofs), Chain, CALL_TIMEOUT_SECONDS, max_reply_bytes=MAX_REPLY_BYTES
    )
    certificates = []
    for item in reply.certificates:
        try:
            certificate = Certificate.from_bytes(item, swarm, verifier)
        except IntegrityError as error:
            raise ProtocolError(peer, f"sent a history in which {error}") from error
        if certificate.body.lineage != lineage or not certificate.body.is_last:
            raise ProtocolError(peer, "sent a history that does not connect")
        lineage = certificate.body.next_lineage
        certificates.append(certificate)
    return certificates
