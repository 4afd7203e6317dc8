"""Asks a peer for certificates alone, without results and codecs, which `p2ptrain.averaging.commit.round_log` needs."""

from __future__ import annotations

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.signing import Signer

MAX_REPLY_BYTES = 4 << 20
CALL_TIMEOUT_SECONDS = 12.0


async def fetch_certificates(
    rpc: Rpc, peer: str, lineage: bytes, swarm: bytes, verifier: Signer, *, proofs: bool = False
) -> list[Certificate]:
    """Return a peer's certificates from ``lineage`` on, verified and connected; see `History.certificates_after`.

    Raises:
        PeerError, DeadlineError: The call failed.
        ProtocolError: The peer sent certificates that do not verify or do not connect.
    """
    request = {"lineage": lineage, "proofs": proofs}
    reply = await rpc.call(peer, "history.after", request, dict, CALL_TIMEOUT_SECONDS, max_reply_bytes=MAX_REPLY_BYTES)
    raw = reply.get("certificates")
    if not isinstance(raw, list) or not all(type(item) is bytes for item in raw):
        raise ProtocolError(peer, "sent a malformed history")
    certificates = []
    for item in raw:
        try:
            certificate = Certificate.from_bytes(item, swarm, verifier)
        except IntegrityError as error:
            raise ProtocolError(peer, f"sent a history in which {error}") from error
        if certificate.body.lineage != lineage or not certificate.body.is_last:
            raise ProtocolError(peer, "sent a history that does not connect")
        lineage = certificate.body.next_lineage
        certificates.append(certificate)
    return certificates
