"""Cheap identities, whose signatures are valid only inside one simulated network."""

from __future__ import annotations

import hashlib
import hmac

import base58

from p2ptrain.signing import Signer


class SimulatedSigner(Signer):
    """Signs with a keyed hash; the signers of one network share their keys by peer id through ``keyring``.

    The network's seed and the name determine the identity.
    """

    def __init__(self, seed: int | str, name: str, keyring: dict[str, bytes]) -> None:
        self._key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self.peer_id = base58.b58encode(b"\x12\x20" + hashlib.sha256(b"public" + self._key).digest()).decode()
        self._keyring = keyring
        keyring[self.peer_id] = self._key

    def sign(self, message: bytes) -> bytes:
        """Return a keyed hash of ``message``, 32 bytes."""
        return hashlib.blake2b(message, key=self._key, digest_size=32).digest()

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        """True if the peer of this network with that id signed ``message``."""
        key = self._keyring.get(peer_id)
        if key is None or not isinstance(proof, bytes):
            return False
        return hmac.compare_digest(hashlib.blake2b(message, key=key, digest_size=32).digest(), proof)
