"""`RecordBook`: the newest verified record of each peer that this one knows, bounded.

A peer that this one has spoken with is *met*: it exists, and holds the key of its id. A peer is *known* if it is met,
or if two met peers have met it. Everything else is hearsay, which anybody can make up in any amount. So records of
known peers are asked for first and evicted last.
"""

from __future__ import annotations

import hashlib
import logging
import struct
from collections.abc import Callable, Collection, Iterable, Set
from dataclasses import dataclass

from p2ptrain.buffers import Bounded
from p2ptrain.errors import IntegrityError
from p2ptrain.network.admission import Gate
from p2ptrain.network.records.record import MAX_LIFETIME_SECONDS, PeerRecord, open_record
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)

MAX_HELD = 1024
"""Records held; of the largest ones these are 4 MiB."""
MAX_REFUSED = 4096
MAX_STRANGERS = 256
MET_SECONDS = 600.0
"""Time for which a peer stays met after the last contact."""
SWEEP_SECONDS = 1.0
"""Least time between two searches of a full book for expired records; `RecordBook.held` searches at any time."""
_ENTRY = struct.Struct(">8sQ?")
ENTRY_BYTES = _ENTRY.size


@dataclass(frozen=True)
class Held:
    """A verified record, with its sealed form and the hash of that; ``rank`` decides which hearsay is evicted."""

    record: PeerRecord
    sequence: int
    expires_at: float
    value: bytes
    digest: bytes
    rank: bytes


class RecordBook:
    """Verified records by peer, this one's own included; each distinct one is verified, or refused and counted, once.

    ``on_record`` is called with each newer record of a known peer, and with the record of a peer that becomes known.
    So what somebody makes up about peers that do not exist stays here.

    Attributes:
        strangers: The record of each peer that the swarm does not admit, and why not; bounded.
        rejected: Number of distinct records dropped as invalid, and of strangers.
    """

    def __init__(
        self, swarm: bytes, signer: Signer, runtime: Runtime, gate: Gate, on_record: Callable[[Held], None]
    ) -> None:
        self.strangers: dict[str, tuple[PeerRecord, str]] = {}
        self.rejected = 0
        self._gate = gate
        self._swarm = swarm
        self._signer = signer
        self._runtime = runtime
        self._on_record = on_record
        self._held: dict[str, Held] = {}
        """The last learnt one is last."""
        self._digests: set[bytes] = set()
        self._peers: dict[bytes, str] = {}
        self._met: dict[str, float] = {}
        self._met_by: dict[str, str] = {}
        """By peer: the first met peer that has met it, or empty if there are two."""
        self._refused = Bounded[bytes, None](MAX_REFUSED)
        self._salt = runtime.random.randbytes(16)
        self._swept_at = 0.0

    def __len__(self) -> int:
        return len(self._held)

    def peers(self) -> Set[str]:
        """Return the peers of all records, this one included."""
        return self._held.keys()

    def take(self, value: bytes, partner: str = "", wanted: Collection[bytes] | None = None) -> bool:
        """Take in a sealed record; True unless it is invalid. An older one than the held one changes nothing.

        Args:
            partner: The peer that hands it over as its own, and is met thereby; another's is invalid.
            wanted: Fingerprints that were asked for; another peer's record is invalid.
        """
        digest = hashlib.sha256(value).digest()
        if digest in self._digests:
            return True
        if digest in self._refused:
            self._refused[digest] = None
            return False
        try:
            self._take(value, digest, partner, wanted)
        except IntegrityError:
            self.rejected += 1
            self._refused[digest] = None
            return False
        return True

    def _take(self, value: bytes, digest: bytes, partner: str, wanted: Collection[bytes] | None) -> None:
        opened = open_record(value, self._swarm, self._signer)
        now, known = self._runtime.now(), self._held.get(opened.peer)
        if partner not in ("", opened.peer) or (wanted is not None and fingerprint_of(opened.peer) not in wanted):
            raise IntegrityError("a record of another peer than was asked for: ignored")
        if opened.expires_at > now + MAX_LIFETIME_SECONDS:
            return  # By this peer's clock alone, and not for long.
        record = PeerRecord.from_payload(opened.peer, opened.payload)
        self._gate.learn(record.revocations)
        if reason := self._gate.admitted(opened.peer, record.credential):
            self._turn_away(record, reason)
            return
        self.strangers.pop(opened.peer, None)
        if opened.expires_at <= now or (known is not None and known.sequence >= opened.sequence):
            return
        if known is not None:
            self._digests.discard(known.digest)
            del self._held[opened.peer]
        self._digests.add(digest)
        rank = self._rank(fingerprint_of(opened.peer))
        held = self._held[opened.peer] = Held(record, opened.sequence, opened.expires_at, value, digest, rank)
        self._peers[fingerprint_of(opened.peer)] = opened.peer
        if partner:
            self._met[partner] = now
        if len(self._held) > MAX_HELD:
            self._evict()
        if opened.peer in self._held and self._is_known(opened.peer):
            self._on_record(held)

    def _rank(self, fingerprint: bytes) -> bytes:
        return hashlib.sha256(self._salt + fingerprint).digest()

    def _turn_away(self, record: PeerRecord, reason: str) -> None:
        if record.peer not in self.strangers:
            self.rejected += 1
            logger.info("dropped the record of peer %s: %s", record.peer[-8:], reason)
        if record.peer in self.strangers or len(self.strangers) < MAX_STRANGERS:
            self.strangers[record.peer] = record, reason

    def _evict(self) -> None:
        if self._runtime.now() >= self._swept_at + SWEEP_SECONDS:
            self.forget_expired()
        if len(self._held) > MAX_HELD:
            self._drop(self._most_dispensable())

    def _most_dispensable(self) -> str:
        """Return the peer whose record is evicted first: of unknown peers if there are any, and last its own."""
        others = self._held.keys() - {self._signer.peer_id}
        hearsay = [peer for peer in others if not self._is_known(peer)]
        return max(hearsay or others or self._held, key=lambda peer: self._held[peer].rank)

    def _dispensability(self, peer: str) -> tuple[bool, bool, bytes]:
        return peer != self._signer.peer_id, not self._is_known(peer), self._held[peer].rank

    def _drop(self, peer: str) -> None:
        self._digests.discard(self._held.pop(peer).digest)
        self._peers.pop(fingerprint_of(peer), None)
        self._met.pop(peer, None)
        self._met_by.pop(peer, None)

    def _is_known(self, peer: str) -> bool:
        """True if a peer is met, or two met peers have met it; of all, while this one has met nobody."""
        return peer in self._met or self._met_by.get(peer) == "" or self._met.keys() <= {self._signer.peer_id}

    def forget_expired(self) -> None:
        """Drop expired records, those of peers that are no longer admitted, and contacts that are too long ago."""
        now = self._swept_at = self._runtime.now()
        for peer, held in list(self._held.items()):
            if held.expires_at <= now:
                self._drop(peer)
            elif reason := self._gate.admitted(peer, held.record.credential):
                self._drop(peer)
                self._turn_away(held.record, reason)
        self._met = {peer: at for peer, at in self._met.items() if now < at + MET_SECONDS}

    def meet(self, peer: str) -> bool:
        """Record that this peer has just spoken with another; False if it does not hold the other's record."""
        if peer not in self._held:
            return False
        was_known = self._is_known(peer)
        self._met[peer] = self._runtime.now()
        if not was_known:
            self._on_record(self._held[peer])
        return True

    def held(self) -> list[Held]:
        """Return all unexpired records, ordered by peer id."""
        self.forget_expired()
        return [self._held[peer] for peer in sorted(self._held)]

    def has_met(self, peer: str) -> bool:
        return peer in self._met

    def met(self) -> list[str]:
        """Return the met peers, this one included, ordered by id."""
        return sorted(self._met)

    def known(self) -> list[str]:
        """Return the known peers, this one included, ordered by id."""
        return sorted(filter(self._is_known, self._held))

    # Exchange

    def offer(self, limit: int) -> bytes:
        """Return packed entries of held records, at most ``limit``.

        First this peer's own, then those learnt last, of met peers and of others, and some of the rest.
        """
        own = self._signer.peer_id
        peers = sorted(reversed(self._held), key=lambda peer: peer != own)
        if len(peers) > limit:
            met = [peer for peer in peers if peer in self._met]
            hearsay = [peer for peer in peers if peer not in self._met]
            newest = [*met[: limit // 2], *hearsay[: limit // 4]]
            rest = [*met[limit // 2 :], *hearsay[limit // 4 :]]
            peers = [*newest, *self._runtime.random.sample(rest, limit - len(newest))]
        return b"".join(
            _ENTRY.pack(fingerprint_of(peer), self._held[peer].sequence, peer in self._met) for peer in peers
        )

    def missing(self, entries: bytes, partner: str) -> tuple[list[bytes], list[bytes]]:
        """Return the fingerprints of a partner's newer records: of itself and known peers, and of others.

        Those others that the partner has met come first. Without room, records that would be evicted are left out.
        """
        known, others = list[bytes](), list[tuple[bool, float, bytes]]()
        is_full = len(self._held) >= MAX_HELD
        worst = self._dispensability(self._most_dispensable()) if is_full else (True, True, b"")
        for fingerprint, sequence, is_met_there in _ENTRY.iter_unpack(entries):
            peer = self._peers.get(fingerprint)
            if peer is not None and is_met_there and partner in self._met:
                self._vouch(peer, partner)
            if peer is not None and self._held[peer].sequence >= sequence:
                continue
            if fingerprint == fingerprint_of(partner) or (peer is not None and self._is_known(peer)):
                known.append(fingerprint)
            elif peer is not None or not is_full or (True, True, self._rank(fingerprint)) < worst:
                others.append((not is_met_there, self._runtime.random.random(), fingerprint))
        return known, [fingerprint for *_, fingerprint in sorted(others)]

    def _vouch(self, peer: str, partner: str) -> None:
        """Record that a met peer has met a held one."""
        was_known = self._is_known(peer)
        self._met_by[peer] = "" if self._met_by.setdefault(peer, partner) != partner else partner
        if not was_known and self._is_known(peer):
            self._on_record(self._held[peer])

    def values(self, fingerprints: Iterable[bytes]) -> list[bytes]:
        """Return the held sealed records of fingerprints."""
        peers = (self._peers.get(fingerprint, "") for fingerprint in fingerprints)
        return [self._held[peer].value for peer in peers if peer in self._held]


def fingerprint_of(peer: str) -> bytes:
    """Return a peer's name in offers, 8 bytes."""
    return hashlib.sha256(peer.encode()).digest()[:8]
