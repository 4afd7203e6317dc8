"""Signatures of microbatches: the trainer signs each once, and every host of the route checks it before it computes.

The signed `Claim` names the swarm, the microbatch and its round, samples, tokens, and hashes of the first stage's
inputs and of the targets. So no host can invent a microbatch, inflate one, alter its targets, or bring it into another
round.

Signing uses an Ed25519 session key of the trainer's process, for which the trainer's identity (RSA) vouches once: an
RSA signature for each microbatch would cost the trainer ten times as much. The voucher travels with each hop, together
with the trainer's credential, and hosts remember the last key of each trainer.

A host signs nothing. A receiver knows from the connection which caller sent an invalid signature, and cannot prove it
to others. Two different claims with one id prove that their trainer signed both.
"""

from __future__ import annotations

from dataclasses import replace

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

from p2ptrain.buffers import Bounded
from p2ptrain.errors import ProtocolError
from p2ptrain.hashing import bulk_hash
from p2ptrain.network.schema import Hash, Message, to_bytes
from p2ptrain.pipeline.messages import Hop, HopRequest, MaybePosition, MicrobatchId, Samples, Signature, TokenCount
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

MAX_KEYS = 1024
"""Bound on the trainers whose session key is remembered."""
MAX_FORGERIES = 8
"""Invalid signatures of one caller, after which its hops are refused unread. Honest hosts check before they call."""
MAX_FORGERS = 1024
"""Bound on the remembered callers; the one whose last forgery is the oldest is dropped."""
_KEY_CONTEXT, _CLAIM_CONTEXT = b"p2ptrain microbatch key\0", b"p2ptrain microbatch\0"


class NotSignedError(ProtocolError):
    """The peer sent a microbatch that its trainer did not sign."""


class Claim(Message, frozen=True):
    """The signed statement of a trainer about one microbatch; fields as in `HopRequest` and `Signature`."""

    swarm: Hash
    id: MicrobatchId
    samples: Samples
    tokens: TokenCount
    requires_grad: bool
    returns_output: bool
    position: MaybePosition
    inputs: Hash
    targets: Hash


class MicrobatchSigner:
    """Signs a trainer's microbatches with a session key of its own; ``credential`` admits the trainer to the swarm."""

    def __init__(self, signer: Signer, swarm: bytes, credential: bytes = b"") -> None:
        self._swarm = swarm
        self._key = Ed25519PrivateKey.generate()
        key = self._key.public_key().public_bytes_raw()
        voucher = signer.sign(_voucher_message(swarm, key, credential))
        self._unsigned = Signature(None, bytes(32), bytes(32), key, voucher, credential)

    def sign(self, hop: Hop, position: int | None) -> Hop:
        """Return a first stage's hop with its signature; ``position`` is the claimed position of its data."""
        hashes = bulk_hash(hop.inputs.data), bulk_hash(hop.targets.data)
        unsigned = msgspec.structs.replace(self._unsigned, position=position, inputs=hashes[0], targets=hashes[1])
        value = self._key.sign(_claim_message(self._swarm, hop, unsigned))
        return replace(hop, signature=msgspec.structs.replace(unsigned, value=value))


class MicrobatchVerifier:
    """Verifies the signatures of hops; ``verifier`` is any signer with the swarm's type of key."""

    def __init__(self, verifier: Signer, swarm: bytes, runtime: Runtime) -> None:
        self._verifier = verifier
        self._swarm = swarm
        self._runtime = runtime
        self._keys = Bounded[str, bytes](MAX_KEYS)
        """The last session key of each trainer, and the voucher's credential."""
        self._forgeries = Bounded[str, int](MAX_FORGERS)

    async def check(self, caller: str, request: HopRequest) -> None:
        """Raise `NotSignedError`, which blames ``caller``, unless the request's trainer signed its microbatch."""
        if self._forgeries.get(caller, 0) >= MAX_FORGERIES:
            raise NotSignedError(caller, "sent microbatches that no trainer signed: no more are read")
        trainer, vouched = request.id.trainer, request.signature.key + request.signature.credential
        is_known = self._keys.get(trainer) == vouched
        self._blame(caller, await self._runtime.offload(self._fault, request, is_known))
        self._keys[trainer] = vouched

    async def check_data(self, caller: str, hop: Hop) -> None:
        """Raise `NotSignedError` unless targets, and inputs of the first stage, are the signed ones."""
        self._blame(caller, await self._runtime.offload(_fault_of_data, hop))

    def _fault(self, request: HopRequest, is_known: bool) -> str:
        """Return what is wrong with a signature, or an empty text; ``is_known`` skips the check of the voucher."""
        id, signature = request.id, request.signature
        if not is_known:
            vouched = _voucher_message(self._swarm, signature.key, signature.credential)
            if not self._verifier.verify(id.trainer, vouched, signature.voucher):
                return f"sent {id}, for whose key its trainer does not vouch"
        try:
            key = Ed25519PublicKey.from_public_bytes(signature.key)
            key.verify(signature.value, _claim_message(self._swarm, request, signature))
        except InvalidSignature:
            return f"sent {id}, which differs from what its trainer signed"
        return ""

    def _blame(self, caller: str, fault: str) -> None:
        if not fault:
            return
        self._forgeries[caller] = self._forgeries.get(caller, 0) + 1
        raise NotSignedError(caller, fault)


def _voucher_message(swarm: bytes, key: bytes, credential: bytes) -> bytes:
    return _KEY_CONTEXT + swarm + key + credential


def _claim_message(swarm: bytes, hop: Hop | HopRequest, signature: Signature) -> bytes:
    claim = Claim(
        swarm, hop.id, hop.samples, hop.tokens, hop.requires_grad, hop.returns_output, signature.position,
        signature.inputs, signature.targets,
    )  # fmt: skip
    return _CLAIM_CONTEXT + to_bytes(claim)


def _fault_of_data(hop: Hop) -> str:
    """Return how the tensors of a hop differ from the signed ones, or an empty text."""
    if bulk_hash(hop.targets.data) != hop.signature.targets:
        return f"sent {hop.id} with other targets than its trainer signed"
    if hop.stage == 0 and bulk_hash(hop.inputs.data) != hop.signature.inputs:
        return f"sent {hop.id} with other inputs than its trainer signed"
    return ""
