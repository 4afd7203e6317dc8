"""Signatures of microbatches: the trainer signs each once, and every host of the route checks it before it computes.

The signed `Claim` names the swarm, the microbatch and its round, samples, tokens, and hashes of the first stage's
inputs and of the targets. So no host can invent a microbatch, inflate one, alter its targets, or bring it into another
round.

Signing uses an Ed25519 session key of the trainer's process, for which the trainer's identity (RSA) vouches once: an
RSA signature for each microbatch would cost the trainer ten times as much. The voucher travels with each hop, and hosts
remember those that they have verified.

A host signs nothing. A receiver knows from the connection which caller sent an invalid signature, and cannot prove it
to others. Two different claims with one id prove that their trainer signed both.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain.errors import ProtocolError
from p2ptrain.hashing import bulk_hash
from p2ptrain.network.schema import Hash, Message, to_bytes
from p2ptrain.pipeline.messages import Hop, HopRequest, MaybePosition, MicrobatchId, Signature
from p2ptrain.signing import Signer

MAX_KEYS = 1024
"""Bound on the remembered session keys; a trainer has one for each start of its process."""
_KEY_CONTEXT, _CLAIM_CONTEXT = b"p2ptrain microbatch key\0", b"p2ptrain microbatch\0"


class NotSignedError(ProtocolError):
    """The peer sent a microbatch that its trainer did not sign."""


class Claim(Message, frozen=True):
    """The signed statement of a trainer about one microbatch; fields as in `HopRequest` and `Signature`."""

    swarm: Hash
    id: MicrobatchId
    samples: int
    tokens: int
    requires_grad: bool
    returns_output: bool
    position: MaybePosition
    inputs: Hash
    targets: Hash

    @classmethod
    def of(cls, swarm: bytes, hop: Hop | HopRequest, signature: Signature) -> Claim:
        return cls(
            swarm, hop.id, hop.samples, hop.tokens, hop.requires_grad, hop.returns_output,
            signature.position, signature.inputs, signature.targets,
        )  # fmt: skip


class MicrobatchSigner:
    """Signs a trainer's microbatches with a session key of its own."""

    def __init__(self, signer: Signer, swarm: bytes) -> None:
        self._swarm = swarm
        self._key = Ed25519PrivateKey.generate()
        self._public = self._key.public_key().public_bytes_raw()
        self._voucher = signer.sign(_KEY_CONTEXT + swarm + self._public)

    def sign(self, hop: Hop, position: int | None) -> Hop:
        """Return a first stage's hop with its signature; ``position`` is the claimed position of its data."""
        inputs, targets = bulk_hash(hop.inputs.data), bulk_hash(hop.targets.data)
        unsigned = Signature(position, inputs, targets, self._public, self._voucher)
        value = self._key.sign(_CLAIM_CONTEXT + to_bytes(Claim.of(self._swarm, hop, unsigned)))
        return replace(hop, signature=Signature(position, inputs, targets, self._public, self._voucher, value))


class MicrobatchVerifier:
    """Verifies the signatures of hops; ``verifier`` is any signer with the swarm's type of key."""

    def __init__(self, verifier: Signer, swarm: bytes) -> None:
        self._verifier = verifier
        self._swarm = swarm
        self._keys: OrderedDict[tuple[str, bytes], Ed25519PublicKey] = OrderedDict()

    def check(self, caller: str, request: HopRequest) -> None:
        """Raise `NotSignedError`, which blames ``caller``, unless the request's trainer signed its microbatch."""
        signature = request.signature
        claim = _CLAIM_CONTEXT + to_bytes(Claim.of(self._swarm, request, signature))
        try:
            self._session_key(caller, request.id, signature).verify(signature.value, claim)
        except InvalidSignature:
            raise NotSignedError(caller, f"sent {request.id}, which differs from what its trainer signed") from None

    def check_data(self, caller: str, hop: Hop) -> None:
        """Raise `NotSignedError` unless targets, and inputs of the first stage, are the signed ones."""
        signature = hop.signature
        if bulk_hash(hop.targets.data) != signature.targets:
            raise NotSignedError(caller, f"sent {hop.id} with other targets than its trainer signed")
        if hop.stage == 0 and bulk_hash(hop.inputs.data) != signature.inputs:
            raise NotSignedError(caller, f"sent {hop.id} with other inputs than its trainer signed")

    def _session_key(self, caller: str, id: MicrobatchId, signature: Signature) -> Ed25519PublicKey:
        name = (id.trainer, signature.key)
        if name in self._keys:
            self._keys.move_to_end(name)
        else:
            if not self._verifier.verify(id.trainer, _KEY_CONTEXT + self._swarm + signature.key, signature.voucher):
                raise NotSignedError(caller, f"sent {id}, for whose key its trainer does not vouch")
            self._keys[name] = Ed25519PublicKey.from_public_bytes(signature.key)
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        return self._keys[name]
