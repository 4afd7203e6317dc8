"""A signer that needs no keys."""

import hashlib

from p2ptrain.signing import Signer


class NamedSigner(Signer):
    """Signs with a hash over its name: enough to tell whose signature of what it is."""

    def __init__(self, name: str) -> None:
        self.peer_id = name

    def sign(self, message: bytes) -> bytes:
        return hashlib.sha256(self.peer_id.encode() + message).digest()

    def verify(self, peer_id: str, message: bytes, proof: bytes) -> bool:
        return NamedSigner(peer_id).sign(message) == proof

    def derive(self, purpose: bytes) -> bytes:
        return hashlib.sha256(b"secret" + self.peer_id.encode() + purpose).digest()
