"""The keys and masks of one member in one roster, after Bonawitz et al. (CCS 2017, https://ia.cr/2017/281).

A ticket's nonce holds three X25519 public keys, fresh for each ticket and used in one roster at most:

* `CHANNEL` encrypts key shares between two members.
* `PAIR` gives each two members a common mask, which one adds and the other subtracts.
* `OWN` gives the member a mask of its own.

Each member shares its secrets `PAIR` and `OWN` among all members. Once the group agrees on the contributors, members
reveal their shares of `OWN` of each contributor, and of `PAIR` of all others, whose pairs do not cancel. Nobody reveals
both for one member: together they uncover its contribution. A ticket holds the public keys of all three, so a wrongly
recovered secret does not pass for the right one.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from p2ptrain.averaging.masking.codec import MASKED, WORD_BYTES, Clipped, Grid, MaskingCodec, Stream, add_streams
from p2ptrain.averaging.masking.sharing import SECRET_BYTES, SHARE_BYTES, recover, split
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.buffers import Buffer
from p2ptrain.codecs.base import CHUNK_VALUES, chunks
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import SecureAggregationSpec

KEY_BYTES, MASK_KEY_BYTES = 32, 16
CHANNEL, PAIR, OWN = range(3)
NONCE_BYTES = 3 * KEY_BYTES
BOX_BYTES = 2 * SHARE_BYTES + 16
"""An encrypted share of each of `PAIR` and `OWN`."""
MAX_UNUSED = 8
"""Key sets that are kept for tickets without a roster, the newest."""
_BOX_NONCE = bytes(12)  # each box has a key of its own


class MaskError(IntegrityError):
    """A member's keys or key shares are false; ``peer`` is the member."""

    def __init__(self, peer: str, message: str) -> None:
        super().__init__(message)
        self.peer = peer


def clamped(secret: bytes) -> bytes:
    """Return the secret with the bits that X25519 ignores in the form that it sets (RFC 7748, section 5)."""
    return bytes([secret[0] & 248, *secret[1:31], secret[31] & 127 | 64])


def public_of(secret: bytes) -> bytes:
    return X25519PrivateKey.from_private_bytes(secret).public_key().public_bytes_raw()


def is_secret_of(public: bytes, secret: bytes) -> bool:
    """True for the one clamped secret of a public key, since `clamped` bits do not change the public key."""
    return secret == clamped(secret) and public_of(secret) == public


def derived(secret: bytes, group: bytes, purpose: bytes) -> bytes:
    """Return a key of 32 bytes for one purpose in one roster."""
    return HKDF(hashes.SHA256(), KEY_BYTES, group, b"p2ptrain " + purpose).derive(secret)


class MaskKeys:
    """The secrets behind this peer's tickets; each serves one roster at most."""

    def __init__(self, spec: SecureAggregationSpec, generator: random.Random, peer: str) -> None:
        self._spec = spec
        self._random = generator
        self._peer = peer
        self._unused: dict[bytes, tuple[bytes, ...]] = {}

    def new_nonce(self) -> bytes:
        """Return the nonce of a new ticket, `NONCE_BYTES` long."""
        secrets = tuple(clamped(self._random.randbytes(SECRET_BYTES)) for _ in range(3))
        nonce = b"".join(map(public_of, secrets))
        self._unused[nonce] = secrets
        for oldest in [*self._unused][:-MAX_UNUSED]:
            del self._unused[oldest]
        return nonce

    def masking(self, roster: Roster, shares: Sequence[float]) -> Masking:
        """Return this peer's masks in a roster with one of its tickets, whose secrets are forgotten here.

        ``shares`` are the members' shares of the weight.

        Raises:
            MaskError: A member's keys are false, or this peer's ticket served another roster before.
            IntegrityError: The roster has fewer members than contributors are needed.
        """
        ticket = roster.tickets[roster.index_of(self._peer)]
        secrets = self._unused.pop(ticket.nonce, None)
        if len(roster.tickets) < self._spec.min_contributors:
            raise IntegrityError(
                f"a sum of {len(roster.tickets)} contributions tells too much of each: at least"
                f" {self._spec.min_contributors} are needed"
            )
        if secrets is None:
            raise MaskError(self._peer, "a ticket is used in two rosters")
        masking = Masking(roster, roster.index_of(self._peer), secrets, shares, self._spec, self._random)
        masking.check_keys()
        return masking


@dataclass(frozen=True)
class Masking:
    """One member's masks in one roster.

    Attributes:
        own: This member's index.
        secrets: Behind `CHANNEL`, `PAIR` and `OWN`.
        shares: By member: its share of the weight of the roster.
        clipped: Counts the values of this member that were beyond the range.
    """

    roster: Roster
    own: int
    secrets: tuple[bytes, ...]
    shares: Sequence[float]
    spec: SecureAggregationSpec
    random: random.Random
    clipped: Clipped = field(default_factory=Clipped)

    @property
    def count(self) -> int:
        return len(self.roster.tickets)

    @property
    def threshold(self) -> int:
        """Number of members that must agree on the contributors, and of shares that recover a secret.

        More than half of the members and one liar: an owner that tells two sets of contributors needs this many
        members for each, and honest members agree to one.
        """
        return least_to_unmask(self.count, self.spec.threshold)

    def public(self, index: int, kind: int) -> bytes:
        nonce = self.roster.tickets[index].nonce
        return nonce[kind * KEY_BYTES : (kind + 1) * KEY_BYTES]

    def check_keys(self) -> None:
        """Raise `MaskError` unless every ticket of the roster has usable keys, of which no two are equal."""
        seen: set[bytes] = set()
        for index, ticket in enumerate(self.roster.tickets):
            keys = {self.public(index, kind) for kind in range(3)}
            if len(ticket.nonce) != NONCE_BYTES or len(keys) < 3 or keys & seen:
                raise MaskError(ticket.peer, f"peer {ticket.peer[-8:]} has no mask keys of its own in its ticket")
            seen |= keys
            try:
                for kind in (CHANNEL, PAIR):
                    self._common(index, kind)
            except ValueError as error:
                raise MaskError(ticket.peer, f"peer {ticket.peer[-8:]} has a mask key of small order") from error

    def _common(self, index: int, kind: int) -> bytes:
        secret = X25519PrivateKey.from_private_bytes(self.secrets[kind])
        return secret.exchange(X25519PublicKey.from_public_bytes(self.public(index, kind)))

    # --- the own contribution -------------------------------------------------------------------------------------

    def codec(self) -> MaskingCodec:
        """Return the codec of this member's contribution."""
        streams = [self._own_stream(self.secrets[OWN])]
        for index in range(self.count):
            if index != self.own:
                streams.append(self._pair_stream(self._common(index, PAIR), self.own, index))
        return MaskingCodec(Grid(self.spec.range), self.shares[self.own], streams, self.clipped)

    def _own_stream(self, secret: bytes) -> Stream:
        return Stream(derived(secret, self.roster.group_id, b"own mask")[:MASK_KEY_BYTES])

    def _pair_stream(self, common: bytes, index: int, other: int) -> Stream:
        """Return the mask of ``index`` with ``other``; the other's is its negative."""
        return Stream(derived(common, self.roster.group_id, b"pair mask")[:MASK_KEY_BYTES], index > other)

    # --- key shares -----------------------------------------------------------------------------------------------

    def boxes(self) -> tuple[bytes, ...]:
        """Return this member's key shares, encrypted for each member, `BOX_BYTES` each; the own place holds its own."""
        pair, own = (split(self.secrets[kind], self.threshold, self.count, self.random) for kind in (PAIR, OWN))
        return tuple(
            AESGCM(self._box_key(self.own, index)).encrypt(_BOX_NONCE, pair[index] + own[index], None)
            for index in range(self.count)
        )

    def open_box(self, dealer: int, box: bytes) -> tuple[bytes, bytes]:
        """Return this member's shares of a dealer's `PAIR` and `OWN`; raise `MaskError` if the box is false."""
        peer = self.roster.members[dealer]
        try:
            shares = AESGCM(self._box_key(dealer, self.own)).decrypt(_BOX_NONCE, box, None)
        except InvalidTag as error:
            raise MaskError(peer, f"peer {peer[-8:]} sent key shares that do not decrypt") from error
        if len(shares) != 2 * SHARE_BYTES:  # Others would take this member for the liar that reveals them.
            raise MaskError(peer, f"peer {peer[-8:]} sent key shares of {len(shares)} bytes")
        return shares[:SHARE_BYTES], shares[SHARE_BYTES:]

    def _box_key(self, dealer: int, recipient: int) -> bytes:
        if dealer == recipient:
            common = self.secrets[CHANNEL]
        else:
            common = self._common(recipient if dealer == self.own else dealer, CHANNEL)
        return derived(common, self.roster.group_id, b"key shares %d %d" % (dealer, recipient))

    # --- the sum --------------------------------------------------------------------------------------------------

    def result_hash(self, contributors: Sequence[int], hashes_: Sequence[bytes]) -> bytes:
        """Return what members agree on before they reveal anything: the contributors and the masked sums, 32 bytes."""
        told = b",".join(b"%d" % index for index in contributors)
        return hashlib.sha256(b"p2ptrain masked sums" + self.roster.group_id + told + b";" + b"".join(hashes_)).digest()

    def recovered(self, contributors: Collection[int], revealed: Mapping[int, Sequence[bytes]]) -> list[Stream] | None:
        """Return the masks of a sum, to be added to it; None if the shares do not suffice to recover them.

        Args:
            revealed: By member: its share of each member's `OWN`, if that contributed, or else `PAIR`.
        """
        streams = []
        for index in range(self.count):
            kind = OWN if index in contributors else PAIR
            shares = {teller: told[index] for teller, told in revealed.items()}
            secret = recover(shares, self.threshold, partial(is_secret_of, self.public(index, kind)))
            if secret is None:
                return None
            if kind == OWN:
                streams.append(Stream(self._own_stream(secret).key, negative=True))
                continue
            key = X25519PrivateKey.from_private_bytes(secret)
            for other in contributors:
                common = key.exchange(X25519PublicKey.from_public_bytes(self.public(other, PAIR)))
                streams.append(self._pair_stream(common, index, other))
        return streams

    def open_sum(
        self, masked: Buffer, start: int, contributors: Collection[int], streams: Sequence[Stream], out: memoryview
    ) -> None:
        """Write the mean to ``out``, fp32: the masked sum of the values from ``start`` on, without its masks.

        ``out`` may be the memory of ``masked``.
        """
        size = len(out) // WORD_BYTES
        words, values = MASKED.words(out, size), np.frombuffer(out, "<f4")
        counted = math.fsum(self.shares[index] for index in contributors)
        grid, source = Grid(self.spec.range), MASKED.words(masked, size)
        for piece in chunks(size, CHUNK_VALUES):
            if source.ctypes.data != words.ctypes.data:
                np.copyto(words[piece], source[piece])
            add_streams(words[piece], streams, start + piece.start)
            grid.to_values(words[piece], counted, values[piece])


def least_to_unmask(count: int, threshold: float) -> int:
    """Return the threshold of `Masking` in a roster of ``count`` members."""
    return min(count, max(math.ceil(threshold * count - 1e-9), (count + 1) // 2 + 1))
