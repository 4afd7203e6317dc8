"""Who signed this: the interface that manifests, records and certificates share.

The real implementation is an RSA libp2p key (`p2ptrain.network.identity`); the simulation uses a fast stand-in.
"""

from __future__ import annotations

from abc import ABC, abstractmethod


class Signer(ABC):
    """A private key whose public half hashes to ``peer_id``."""

    @property
    @abstractmethod
    def peer_id(self) -> str:
        """The base58 peer id of this key."""

    @abstractmethod
    def sign(self, message: bytes) -> bytes:
        """A self-contained proof over ``message``: public key and signature, at most 2 KiB."""

    @abstractmethod
    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        """Whether ``proof`` is a signature of ``message`` by the key that hashes to ``peer_id``.

        False, never an exception, for anything malformed: proofs come from the network.
        """
