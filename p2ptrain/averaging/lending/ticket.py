"""The ticket of an auxiliary: a peer that owns a share of a round to which it does not contribute."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from p2ptrain.averaging.protocol.head import DIGEST_BYTES, MAX_COUNT, MAX_PRESENT
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import canonical_bytes
from p2ptrain.signing import Signer

MAX_AUXILIARIES = 64
MAX_PROOF_BYTES = 2048


@dataclass(frozen=True)
class AuxiliaryTicket:
    """One peer's readiness to own a share of one round to which it does not contribute, signed by it.

    Attributes:
        peer: Who.
        round: The round that it wants to help with.
        lineage: That the round extends, 32 bytes.
        present: Peers that the lineage's head counts.
        layout: Fingerprint of codec, codec version and parameter layout as the peer knows it, 32 bytes.
        bandwidth: What it is willing to send in bytes per second; 0 for no limit.
        nonce: Makes every attempt of a peer distinct, 16 bytes.
        proof: Its signature.
    """

    peer: str
    round: int
    lineage: bytes
    present: int
    layout: bytes
    bandwidth: int
    nonce: bytes
    proof: bytes = b""

    def message(self, swarm: bytes) -> bytes:
        """The bytes that the peer signs."""
        return b"p2ptrain auxiliary" + swarm + canonical_bytes(self.to_wire()[:-1])

    def signed(self, swarm: bytes, signer: Signer) -> AuxiliaryTicket:
        """This ticket with the peer's signature."""
        return replace(self, proof=signer.sign(self.message(swarm)))

    def to_wire(self) -> list[Any]:
        """Plain values for the wire."""
        return [
            self.peer, self.round, self.lineage, self.present, self.layout, self.bandwidth, self.nonce, self.proof,
        ]  # fmt: skip

    @classmethod
    def from_wire(cls, values: Any, swarm: bytes, verifier: Signer) -> AuxiliaryTicket:
        """Check and rebuild what `to_wire` made.

        Raises:
            IntegrityError: A field is missing or out of range, or the signature does not match.
        """
        if not (isinstance(values, list) and len(values) == 8):
            raise IntegrityError("an auxiliary's ticket is malformed")
        ticket = cls(*values)
        if not (
            type(ticket.peer) is str
            and 0 < len(ticket.peer) <= 128
            and all(type(h) is bytes and len(h) == DIGEST_BYTES for h in (ticket.lineage, ticket.layout))
            and all(type(count) is int and 0 <= count < MAX_COUNT for count in (ticket.round, ticket.bandwidth))
            and type(ticket.present) is int
            and 0 <= ticket.present <= MAX_PRESENT
            and type(ticket.nonce) is bytes
            and len(ticket.nonce) == 16
            and type(ticket.proof) is bytes
            and len(ticket.proof) <= MAX_PROOF_BYTES
        ):
            raise IntegrityError("an auxiliary's ticket has fields out of range")
        if not verifier.verify(ticket.peer, ticket.message(swarm), ticket.proof):
            raise IntegrityError("the signature of an auxiliary's ticket does not match its peer")
        return ticket
