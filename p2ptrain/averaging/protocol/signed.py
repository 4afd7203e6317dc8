"""Values that their author signs, and the bounds of their fields."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, ClassVar, Self

from msgspec import Meta

from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.network.schema import to_wire
from p2ptrain.signing import Signer

MAX_MEMBERS = 256
MAX_COUNT = (1 << 62) - 1
MAX_PRESENT = 1 << 16  # bound on the peers of a swarm; keeps the computation of a tree's shape short
MAX_PROOF_BYTES = 2048
Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Present = Annotated[int, Meta(ge=0, le=MAX_PRESENT)]
Positive = Annotated[int, Meta(ge=1, le=MAX_COUNT)]
Name = Annotated[str, Meta(max_length=128)]  # a peer's id, or a codec's name
Proof = Annotated[bytes, Meta(max_length=MAX_PROOF_BYTES)]  # a signature; empty before the value is signed


@dataclass(frozen=True, kw_only=True)
class Signed:
    """A value whose ``proof`` is its author's signature of all other fields and of the swarm's digest."""

    CONTEXT: ClassVar[bytes]
    """Domain separator: a signature is only valid for values of this type."""
    proof: Proof = b""

    @property
    def author(self) -> str:
        """Id of the peer that signs."""
        raise NotImplementedError

    def message(self, swarm: bytes) -> bytes:
        """Return the bytes that the author signs; ``swarm`` is the manifest's digest, 32 bytes."""
        return self.CONTEXT + swarm + canonical_bytes(to_wire(self) | {"proof": b""})

    def signed(self, swarm: bytes, signer: Signer) -> Self:
        """Return this value with its author's signature."""
        return replace(self, proof=signer.sign(self.message(swarm)))

    def verify(self, swarm: bytes, verifier: Signer) -> None:
        """Raise `IntegrityError` unless the author signed this value."""
        if not verifier.verify(self.author, self.message(swarm), self.proof):
            raise IntegrityError(f"a {type(self).__name__.lower()}'s signature does not match its author")
