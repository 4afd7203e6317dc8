"""Admission of peers to a swarm: credentials, invites, revocations, and `Admission`, which decides by them.

::

    the organizer's key, which the manifest names, or an issuer's
      ├── signs a `Pass` for one peer
      └── vouches for the key of an `Invite`, with which each holder of the link signs a pass for itself

All keys are Ed25519, so a credential has at most 300 bytes. It travels in the peer's record and in the header of each
stream. A verdict follows from the manifest, the organizer's newest `Revocations`, the credential and the time alone.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Annotated, Protocol

import msgspec
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Meta

from p2ptrain.buffers import Bounded
from p2ptrain.errors import ConfigError, IntegrityError
from p2ptrain.manifest import Manifest
from p2ptrain.network.schema import Count, Hash, Message, from_bytes, to_bytes
from p2ptrain.signing import Signer, issuing_key, seeds_issuing_key

MAX_CREDENTIAL_BYTES = 600
MAX_REVOCATION_BYTES = 2048  # about 105 marks; < `records.record.MAX_PAYLOAD_BYTES`
MAX_GRANTS = 16384
OPEN_PROTOCOLS = frozenset({"manifest", "admission.pass", "history.after", "reach.carry", "records.exchange"})
"""Names that peers serve to all: what a newcomer asks first, what an observer reads, and the self-test of relays."""
BANNED = "the organizer has banned this peer"
NOT_ADMITTED = "not admitted"
"""Start of the refusal of a stream; the reason follows."""

Signature = Annotated[bytes, Meta(min_length=64, max_length=64)]
Mark = Annotated[bytes, Meta(min_length=16, max_length=16)]
Marks = Annotated[tuple[Mark, ...], Meta(max_length=256)]


class Voucher(Message, frozen=True, array_like=True):
    """A signature of the organizer or an issuer under an invite's key.

    Attributes:
        expires: Until when passes by ``key`` count, in seconds since the epoch; 0 sets no end.
        cap: The most that a contribution of the invited weighs, in tokens; 0 sets no limit.
    """

    key: Hash
    issuer: Hash
    signature: Signature
    expires: Count = 0
    cap: Count = 0


class Credential(Message, frozen=True, tag=True, array_like=True):
    """The bytes that a peer shows, and those in an invite link."""


class Solution(Credential, frozen=True, tag="puzzle"):
    """The solution of the puzzle of an ``open`` swarm, which is bound to swarm and peer."""

    nonce: Count


class Pass(Credential, frozen=True, tag="pass"):
    """The admission of one peer, signed by ``issuer``; ``voucher`` is the one of an invite's key."""

    issuer: Hash
    signature: Signature
    expires: Count = 0
    cap: Count = 0
    voucher: Voucher | None = None


class Invite(Credential, frozen=True, tag="invite"):
    """A secret ``seed`` of a key that admits each peer that holds it; the rest is of its `Voucher`.

    ``issuer`` is empty for the organizer, which keeps links short.
    """

    seed: Hash
    signature: Signature
    expires: Count = 0
    cap: Count = 0
    issuer: Annotated[bytes, Meta(max_length=32)] = b""

    @property
    def key(self) -> bytes:
        return Ed25519PrivateKey.from_private_bytes(self.seed).public_key().public_bytes_raw()


class Revocations(Message, frozen=True, array_like=True):
    """The organizer's list of what no longer counts; a list of a higher ``sequence`` replaces it.

    Attributes:
        revoked: Marks of invites' keys, and of peers whose passes are void.
        stay: Marks of peers that stay although their invite was revoked.
        banned: Marks of peers that nothing admits.
    """

    sequence: Count = 0
    revoked: Marks = ()
    stay: Marks = ()
    banned: Marks = ()
    signature: Annotated[bytes, Meta(max_length=64)] = b""

    def message(self, swarm: bytes) -> bytes:
        return b"p2ptrain revocations\0" + swarm + to_bytes(msgspec.structs.replace(self, signature=b""))


NO_REVOCATIONS = Revocations()


def mark(name: str | bytes) -> bytes:
    """Return the mark of a peer id or of an invite's key in `Revocations`: 16 bytes of its SHA-256."""
    return hashlib.sha256(name.encode() if isinstance(name, str) else name).digest()[:16]


def _voucher_message(swarm: bytes, key: bytes, expires: int, cap: int) -> bytes:
    return b"p2ptrain invite\0" + swarm + key + expires.to_bytes(8, "big") + cap.to_bytes(8, "big")


def _pass_message(swarm: bytes, peer: str, expires: int, cap: int) -> bytes:
    return b"p2ptrain pass\0" + swarm + expires.to_bytes(8, "big") + cap.to_bytes(8, "big") + peer.encode()


def _is_signed(key: bytes, message: bytes, signature: bytes) -> bool:
    try:
        Ed25519PublicKey.from_public_bytes(key).verify(signature, message)
    except (InvalidSignature, ValueError):
        return False
    return True


def is_solved(swarm: bytes, peer: str, bits: int, nonce: int) -> bool:
    digest = hashlib.sha256(_puzzle(swarm, peer) + nonce.to_bytes(8, "big")).digest()
    return int.from_bytes(digest, "big") >> (256 - bits) == 0


def _puzzle(swarm: bytes, peer: str) -> bytes:
    return b"p2ptrain puzzle\0" + swarm + peer.encode()


def solve(swarm: bytes, peer: str, bits: int) -> Solution:
    """Return the puzzle's solution after about ``2 ** bits`` hashes, half a microsecond each."""
    began = hashlib.sha256(_puzzle(swarm, peer))
    limit, nonce = 1 << (256 - bits), 0
    while True:
        hasher = began.copy()
        hasher.update(nonce.to_bytes(8, "big"))
        if int.from_bytes(hasher.digest(), "big") < limit:
            return Solution(nonce)
        nonce += 1


def signed_pass(key: Ed25519PrivateKey, swarm: bytes, peer: str, expires: int = 0, cap: int = 0) -> Pass:
    """Return a pass of a peer, signed with the organizer's key or an issuer's."""
    signature = key.sign(_pass_message(swarm, peer, expires, cap))
    return Pass(key.public_key().public_bytes_raw(), signature, expires, cap)


class Issuer:
    """Signs invites, passes and revocations of a swarm with the organizer's key or an issuer's."""

    def __init__(self, manifest: Manifest, signer: Signer) -> None:
        """Raise `ConfigError` if the manifest does not name the signer's key."""
        self._signer = signer
        self._key = issuing_key(signer)
        self._public = self._key.public_key().public_bytes_raw()
        self._swarm = manifest.digest
        self.is_organizer = self._public.hex() == manifest.admission.key
        if not self.is_organizer and self._public.hex() not in manifest.admission.issuers:
            raise ConfigError(
                f"swarm {manifest.name!r} has another organizer, and its issuers lack the key {self._public.hex()}:"
                " use the key that signed its manifest"
            )

    def invite(self, seed: bytes, expires: int = 0, cap: int = 0) -> Invite:
        """Return the invite of a secret ``seed``, 32 bytes; the other arguments as in `Voucher`."""
        key = Ed25519PrivateKey.from_private_bytes(seed).public_key().public_bytes_raw()
        signature = self._key.sign(_voucher_message(self._swarm, key, expires, cap))
        return Invite(seed, signature, expires, cap, b"" if self.is_organizer else self._public)

    def standing_invite(self, revocations: Revocations = NO_REVOCATIONS) -> Invite:
        """Return the invite of the seed's link: always the same, until it is revoked."""
        number = 0
        while True:
            invite = self.invite(self._signer.derive(b"standing invite %d" % number + self._swarm))
            if mark(invite.key) not in revocations.revoked:
                return invite
            number += 1

    def pass_for(self, peer: str, expires: int = 0, cap: int = 0) -> Pass:
        return signed_pass(self._key, self._swarm, peer, expires, cap)

    def sign(self, revocations: Revocations) -> bytes:
        """Return the signed list; raise `ConfigError` if it is too long, or the key is not the organizer's."""
        if not self.is_organizer:
            raise ConfigError("only the organizer's key revokes and bans")
        signature = self._key.sign(revocations.message(self._swarm))
        data = to_bytes(msgspec.structs.replace(revocations, signature=signature))
        if len(data) > MAX_REVOCATION_BYTES:
            raise ConfigError(
                f"the list of revocations has {len(data)} bytes, and {MAX_REVOCATION_BYTES} is the limit: start a new"
                " swarm from the last checkpoint, or take entries back with --undo"
            )
        return data


def entrance(manifest: Manifest, organizer: Signer, revocations: Revocations = NO_REVOCATIONS) -> tuple[bytes, bytes]:
    """Return what a seed lets others in with, or nothing: its link's invite, and the secret key of its passes."""
    spec = manifest.admission
    invite = to_bytes(Issuer(manifest, organizer).standing_invite(revocations)) if spec.mode == "invite" else b""
    return invite, seeds_issuing_key(organizer).private_bytes_raw() if spec.peers_per_network else b""


@dataclass(frozen=True)
class Grant:
    """The rights that a verified credential gives its peer.

    Attributes:
        invite: The mark of the invite's key.
        is_solution: True for the solution of the puzzle.
    """

    credential: bytes
    expires: int = 0
    cap: int = 0
    invite: bytes = b""
    is_solution: bool = False


class Gate(Protocol):
    """Rules of who is in the swarm, which streams, records and rosters ask; see `Admission`."""

    def admitted(self, peer: str, credential: bytes = b"", *, contributes: bool = True) -> str:
        """Return why a peer is not in the swarm, or may not ``contribute`` to it; empty if it is, or may."""

    def cap(self, peer: str) -> float:
        """Return the most tokens that a contribution of an admitted peer weighs."""

    def learn(self, data: bytes) -> bool:
        """Take on a list of revocations if the organizer signed it and it is newer; return True if so."""


class OpenGate:
    """The `Gate` that admits everybody, before the manifest is known."""

    def admitted(self, peer: str, credential: bytes = b"", *, contributes: bool = True) -> str:
        return ""

    def cap(self, peer: str) -> float:
        return math.inf

    def learn(self, data: bytes) -> bool:
        return False


class Admission:
    """Decides who is in the swarm of one manifest; the gates of records, streams and rosters ask it.

    Attributes:
        revocations, signed_revocations: The newest list that was learnt, and its bytes.
        per_network: Most peers of one network that get passes of a seed; 0 if an ``open`` swarm needs no passes.
    """

    def __init__(self, manifest: Manifest, now: Callable[[], float]) -> None:
        spec = manifest.admission
        self.swarm = manifest.digest
        self.mode = spec.mode
        self.puzzle_bits = spec.puzzle_bits
        self.per_network = spec.peers_per_network if spec.mode == "open" else 0
        self.revocations = NO_REVOCATIONS
        self.signed_revocations = b""
        self._organizer = manifest.organizer
        self._founders = frozenset(manifest.founders)
        self._listed = frozenset(spec.members)
        self._key = bytes.fromhex(spec.key)
        self._issuers = frozenset(map(bytes.fromhex, filter(None, (spec.key, *spec.issuers))))
        self._now = now
        self._revoked: frozenset[bytes] = frozenset()
        self._banned: frozenset[bytes] = frozenset()
        self._grants = Bounded[str, Grant](MAX_GRANTS)

    def admitted(self, peer: str, credential: bytes = b"", *, contributes: bool = True) -> str:
        """See `Gate.admitted`.

        The transport, or the signature of a record, proves that ``credential`` comes from the peer. A credential that
        is not known yet costs two signatures to verify; all else are look-ups. Without one, the last one counts.
        """
        if peer == self._organizer:
            return ""
        if self._banned and mark(peer) in self._banned:
            return BANNED
        if peer in self._founders or peer in self._listed:
            return ""
        needs_pass = contributes and self.per_network > 0
        if self.mode == "open" and not self.puzzle_bits and not needs_pass:
            return ""
        grant, reason = self._grants.get(peer), NO_PASS if needs_pass else _MISSING[self.mode]
        if credential and (grant is None or grant.credential != credential):
            try:
                grant = self._grants[peer] = self._verified(peer, credential)
            except IntegrityError as error:
                reason = str(error)
        if grant is not None and needs_pass and grant.is_solution:
            return NO_PASS
        return reason if grant is None else self._why_over(peer, grant)

    def use(self, invite: Invite, peer: str) -> Pass:
        """Return a pass for a peer that holds an invite."""
        voucher = Voucher(invite.key, invite.issuer or self._key, invite.signature, invite.expires, invite.cap)
        key = Ed25519PrivateKey.from_private_bytes(invite.seed)
        return Pass(voucher.key, key.sign(_pass_message(self.swarm, peer, 0, 0)), 0, 0, voucher)

    def grant(self, peer: str) -> Grant | None:
        """Return what the last valid credential of a peer gives it; None for a peer that has shown none."""
        return self._grants.get(peer)

    def cap(self, peer: str) -> float:
        grant = self._grants.get(peer)
        return grant.cap if grant is not None and grant.cap else math.inf

    def way_in(self, peer: str) -> str:
        """Return how an admitted peer came in, for people."""
        named = {"organizer": (self._organizer,), "founder": self._founders, "member list": self._listed}
        for words, peers in named.items():
            if peer in peers:
                return words
        grant = self._grants.get(peer)
        if grant is None:
            return "open to all"
        if grant.invite:
            return f"invite {grant.invite.hex()}"
        return "puzzle" if grant.is_solution else "pass"

    def learn(self, data: bytes) -> bool:
        if not data or data == self.signed_revocations:
            return False
        try:
            found = from_bytes(Revocations, data)
        except IntegrityError:
            return False
        if found.sequence <= self.revocations.sequence:
            return False
        if not _is_signed(self._key, found.message(self.swarm), found.signature):
            return False
        self.revocations, self.signed_revocations = found, data
        self._revoked, self._banned = frozenset(found.revoked), frozenset(found.banned)
        return True

    def _verified(self, peer: str, data: bytes) -> Grant:
        """Return what a credential gives; raise `IntegrityError`, with the reason, if it gives nothing."""
        try:
            credential = from_bytes(Credential, data)
        except IntegrityError as error:
            raise IntegrityError(f"its credential cannot be parsed ({error})") from error
        if isinstance(credential, Solution) and self.mode == "open":
            if not is_solved(self.swarm, peer, self.puzzle_bits, credential.nonce):
                raise IntegrityError("its solution of the puzzle is wrong")
            return Grant(data, is_solution=True)
        if not isinstance(credential, Pass):
            raise IntegrityError("its credential is of a kind that this swarm does not accept")
        voucher = credential.voucher
        if voucher is not None:
            if self.mode == "allowlist":
                raise IntegrityError("this swarm accepts no invites")
            message = _voucher_message(self.swarm, voucher.key, voucher.expires, voucher.cap)
            if voucher.issuer not in self._issuers or not _is_signed(voucher.issuer, message, voucher.signature):
                raise IntegrityError("its invite is not signed by this swarm's organizer")
        keys = self._issuers if voucher is None else (voucher.key,)
        message = _pass_message(self.swarm, peer, credential.expires, credential.cap)
        if credential.issuer not in keys or not _is_signed(credential.issuer, message, credential.signature):
            raise IntegrityError("its pass is not signed for this peer and swarm")
        given = (credential,) if voucher is None else (credential, voucher)
        return Grant(
            data,
            _least(each.expires for each in given),
            _least(each.cap for each in given),
            mark(voucher.key) if voucher is not None else b"",
        )

    def _why_over(self, peer: str, grant: Grant) -> str:
        if grant.expires and grant.expires <= self._now():
            return "its invite or pass has expired"
        if self._revoked and mark(peer) in self._revoked:
            return "its pass was revoked"
        if grant.invite in self._revoked and mark(peer) not in self.revocations.stay:
            return "its invite was revoked"
        return ""


NO_PASS = "no seed of this swarm has let it in"
_MISSING = {
    "open": "it has not solved this swarm's puzzle",
    "invite": "it has neither an invite to this swarm nor a pass",
    "allowlist": "it is not among this swarm's members, and has no pass",
}


def _least(limits: Iterable[int]) -> int:
    """Return the least limit; 0 is none."""
    return min(filter(None, limits), default=0)
