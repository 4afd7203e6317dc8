"""Cheap identities, whose signatures are valid only inside one simulated network."""

from __future__ import annotations

import hashlib
import hmac

from p2ptrain.signing import Signer

_ALPHABET = "123456789ABCDEFGHJKLMNPQRSTUVWXYZabcdefghijkmnopqrstuvwxyz"


class SimulatedSigner(Signer):
    """Signs with a keyed hash; the signers of one network share their keys by peer id through ``keyring``.

    The network's seed and the name determine the identity.
    """

    def __init__(self, seed: int | str, name: str, keyring: dict[str, bytes]) -> None:
        self._key = hashlib.sha256(f"{seed}/{name}".encode()).digest()
        self._peer_id = _base58(b"\x12\x20" + hashlib.sha256(b"public" + self._key).digest())
        self._keyring = keyring
        keyring[self._peer_id] = self._key

    @property
    def peer_id(self) -> str:
        return self._peer_id

    def sign(self, message: bytes) -> bytes:
        """Return a keyed hash of ``message``, 32 bytes."""
        return hashlib.blake2b(message, key=self._key, digest_size=32).digest()

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        """True if the peer of this network with that id signed ``message``."""
        key = self._keyring.get(peer_id)
        if key is None or not isinstance(proof, bytes):
            return False
        return hmac.compare_digest(hashlib.blake2b(message, key=key, digest_size=32).digest(), proof)


def _base58(data: bytes) -> str:
    number, text = int.from_bytes(data, "big"), ""
    while number:
        number, digit = divmod(number, 58)
        text = _ALPHABET[digit] + text
    return text
