"""The signature interface of manifests, records and certificates.

The real implementation is an RSA libp2p key (`p2ptrain.network.identity`); the simulation uses a fast substitute.
"""

from __future__ import annotations

from abc import ABC, abstractmethod

from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey


class Signer(ABC):
    """A private key whose public half hashes to ``peer_id``, which is base58."""

    peer_id: str

    @abstractmethod
    def sign(self, message: bytes) -> bytes:
        """Return a self-contained proof over ``message``: public key and signature, at most 2 KiB."""

    @abstractmethod
    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        """True if ``proof`` is a signature of ``message`` by the key that hashes to ``peer_id``.

        Returns False for a malformed proof and never raises: proofs come from the network.
        """

    @abstractmethod
    def derive(self, purpose: bytes) -> bytes:
        """Return 32 secret bytes, always the same, which only the private key's holder can compute."""


def issuing_key(organizer: Signer) -> Ed25519PrivateKey:
    """Return the key with which an organizer signs invites and passes: Ed25519, for signatures of 64 bytes."""
    return Ed25519PrivateKey.from_private_bytes(organizer.derive(b"admission"))


def seeds_issuing_key(organizer: Signer) -> Ed25519PrivateKey:
    """Return the key with which the seeds of an organizer's swarms sign passes (``admission.peers_per_network``)."""
    return Ed25519PrivateKey.from_private_bytes(organizer.derive(b"admission by seeds"))
