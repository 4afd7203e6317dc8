"""Anchors: heads that keys of the manifest sign at times, and behind which no peer goes back.

The signatures of voters protect a lineage while two thirds of its voters are honest. Keys that were stolen later could
sign another past. An anchor forbids that. It is the head after a full certificate, with signatures of a quorum of the
anchor keys. A head is *past* an anchor if the anchor's round is before its own. Then its `Head.path` must lead through
the anchor. An anchor makes no head: without the certificate that leads to it, no peer takes it.
"""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import Lock
from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.ballots import write_synced
from p2ptrain.averaging.protocol.certificate import Certificate, Count, Head, Name, Proof, genesis
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.manifest import MAX_ANCHOR_KEYS
from p2ptrain.network.schema import Message, from_bytes
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)

PATH_ROUNDS = 4096
"""Rounds that a head's path keeps at least. It keeps all since the newest anchor, up to `MAX_PATH_ROUNDS`."""
CLAIM_BYTES = 16
MAX_CACHED = 32


class Anchor(Message, frozen=True):
    """A head with signatures of it.

    ``sequence`` is the head's round. After a swarm began again, it is that round after the sequence of the beginning,
    which is an anchor of round 0.
    """

    sequence: Count
    head: Head
    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_ANCHOR_KEYS)] = ()

    def statement(self, swarm: bytes) -> bytes:
        """Return the bytes that each key signs."""
        head = self.head
        return b"p2ptrain anchor" + swarm + canonical_bytes([self.sequence, head.round, head.lineage, head.digest])

    @property
    def claim(self) -> bytes:
        """Short name of the anchor in records; claims are ordered as sequences are."""
        return self.sequence.to_bytes(8, "big") + hashlib.sha256(self.statement(b"")).digest()[:8]

    @property
    def beginning(self) -> int:
        """Sequence of the beginning of its lineage."""
        return self.sequence - self.head.round


class _Record(Message, frozen=True):
    """A peer's anchors: the newest, one that contradicts it, and the last one that this peer signed."""

    newest: Anchor | None
    rival: Anchor | None
    own: Anchor | None


class AnchorBook:
    """The newest anchor, in ``path``, if given, before it counts; safe from any thread.

    Raises:
        IntegrityError: The file is damaged.

    Attributes:
        keys: Peers whose signatures count.
        newest: None before the first.
        claims: By key: the claim in its last reply to a request for a vote.
    """

    def __init__(
        self,
        swarm: bytes,
        signer: Signer,
        read: Callable[[bytes], Certificate],
        keys: Sequence[str] = (),
        quorum: int = 0,
        every: int = 1,
        path: Path | None = None,
    ) -> None:
        """
        Args:
            read: Parses and verifies a certificate.
            quorum: Number of keys that must sign; 0 for more than half.
            every: A key signs the head of each round that this divides.
        """
        self.keys = frozenset(keys)
        self.newest: Anchor | None = None
        self.claims: dict[str, bytes] = {}
        self._swarm, self._signer, self._read, self._path = swarm, signer, read, path
        self._quorum = quorum or len(self.keys) // 2 + 1
        self._every = every
        self._rival: Anchor | None = None
        self._by_key: dict[str, Anchor] = {}
        self._contained: dict[tuple[bytes, bytes], bool] = {}
        self._lock = Lock()
        if path is not None and path.is_file():
            try:
                record = from_bytes(_Record, path.read_bytes())
            except IntegrityError as error:
                raise IntegrityError(f"the anchors in {path} are damaged ({error}): delete the file") from error
            self.newest, self._rival = record.newest, record.rival
            if record.own is not None:
                self._by_key[signer.peer_id] = record.own

    def held(self) -> tuple[Anchor, ...]:
        """Return the newest anchor, one that contradicts it, and a newer one that this peer signed."""
        own = self._by_key.get(self._signer.peer_id)
        is_newer = own is not None and (self.newest is None or own.sequence > self.newest.sequence)
        return tuple(each for each in (self.newest, self._rival, own if is_newer else None) if each is not None)

    @property
    def conflict(self) -> str:
        """Why this peer must not go on; empty if it may."""
        if self.newest is None or self._rival is None:
            return ""
        one, other = self.newest.head, self._rival.head
        return (
            f"two anchors contradict each other: {one.lineage.hex()[:8]} of round {one.round} and"
            f" {other.lineage.hex()[:8]} of round {other.round}: ask the organizer which is right,"
            " and see 'Anchors' in docs/security.md"
        )

    # --- heads

    def contains(self, head: Head) -> bool | None:
        """True if a head's lineage contains the newest anchor; None if its path does not tell."""
        if self.newest is None or self.newest.head.round == 0:
            return True
        key = (self.newest.claim, head.lineage)
        if key not in self._contained:
            found = head.lineage_at(self.newest.head.round)
            if found is None or head.lineage_at(head.round) != head.lineage:
                return None
            self._contained = dict([*self._contained.items(), (key, found == self.newest.head.lineage)][-MAX_CACHED:])
        return self._contained[key]

    def allows(self, head: Head) -> bool:
        """True unless a head is past the newest anchor and does not show that it contains it."""
        return self.newest is None or head.round < self.newest.head.round or self.contains(head) is True

    def start_of(self, own: Head) -> Head:
        """Return from which head later ones must be proved: this peer's own, or the anchor's if it lacks the anchor."""
        return own if self.newest is None or self.contains(own) else self.newest.head

    def is_off(self, head: Head) -> bool:
        """True if a head is of a lineage that parted before the newest anchor."""
        return self.contains(head) is False

    def claim_of(self, head: Head | None = None) -> bytes:
        """Return the claim that this peer publishes: its newest anchor, if ``head`` contains it."""
        held = self.held()
        if not held or (held[-1] is self.newest and head is not None and not self.contains(head)):
            return b""
        return held[-1].claim

    def is_met_by(self, claim: bytes) -> bool:
        """True if a peer claims that its lineage contains the newest anchor or a later one."""
        return self.newest is None or claim == self.newest.claim or claim[:8] > self.newest.claim[:8]

    def wants(self, claim: bytes) -> bool:
        """True if this peer should ask for an anchor with this claim."""
        if len(claim) != CLAIM_BYTES or not self.keys or self.conflict:
            return False
        return self.newest is None or (claim != self.newest.claim and claim[:8] >= self.newest.claim[:8])

    # --- anchors

    def reached(self, head: Head) -> Head:
        """Take note of a head to which certificates led this peer, and sign it if due; return it with a shorter path.

        Raises:
            OSError: The signature cannot be written, and is not sent.
        """
        if self._signer.peer_id in self.keys and head.round and head.round % self._every == 0 and not head.is_reduced:
            self._sign(head)
        first = head.round - PATH_ROUNDS
        if self.newest is not None and self.contains(head):
            first = min(first, self.newest.head.round)
        return head.since(first)

    def begin_again(self, head: Head) -> None:
        """Sign a beginning, as the state that the earlier anchors named is gone; raise as `reached`."""
        if self._signer.peer_id in self.keys and self.held():
            self._sign(head)

    def _sign(self, head: Head) -> None:
        """Sign a head, unless it does not follow from what this key signed before."""
        with self._lock:
            held = self.held()
            last = max(held, key=lambda each: each.sequence, default=None)
            if last is None or not head.round:
                sequence = 1 + last.sequence if last is not None else head.round
            else:
                sequence = last.beginning + head.round
                follows = not last.head.round or head.lineage_at(last.head.round) == last.head.lineage
                if sequence <= last.sequence or not follows or self._rival is not None:
                    return
            anchor = Anchor(sequence, head)
            proof = self._signer.sign(anchor.statement(self._swarm))
            self._count(Anchor(sequence, head, ((self._signer.peer_id, proof),)), None)

    def take(self, anchor: Anchor, own: Head) -> None:
        """Take an anchor from anybody, at this peer's own head; ignore one that is not newer.

        Raises:
            IntegrityError: It is not of this swarm's keys, of no certified head, or of none that shows that it follows
                from the newest anchor.
        """
        if not self.wants(anchor.claim):
            return
        head, statement = anchor.head, anchor.statement(self._swarm)
        signers = {key for key, _ in anchor.proofs}
        if not signers or not signers <= self.keys or len(signers) < len(anchor.proofs):
            raise IntegrityError("an anchor is not signed by the keys that the manifest names")
        if not all(self._signer.verify(key, statement, proof) for key, proof in anchor.proofs):
            raise IntegrityError("an anchor has a signature that does not match its key")
        if anchor.beginning < 0 or head.round % self._every or head.is_reduced:
            raise IntegrityError("an anchor is of a round that has none")
        if head.round == 0:
            if head.lineage != genesis(self._swarm, head.digest).lineage:
                raise IntegrityError("an anchor at round 0 is not a beginning")
        elif self._read(head.certificate).next_head(head.digest, head.table) != head:
            raise IntegrityError("an anchor is of a head that does not follow from its certificate")
        elif head.lineage_at(head.round) != head.lineage:
            raise IntegrityError("an anchor's path does not lead to it")
        with self._lock:
            self._count(anchor, own)

    def _count(self, anchor: Anchor, own: Head | None) -> None:
        """Add signatures that were verified, and adopt the anchor once there are enough."""
        for key, proof in anchor.proofs:
            known = self._by_key.get(key)
            if known is None or known.sequence < anchor.sequence:
                self._by_key[key] = Anchor(anchor.sequence, anchor.head, ((key, proof),))
        statement = anchor.statement(self._swarm)
        same = [each for each in self._by_key.values() if each.statement(self._swarm) == statement]
        proofs = dict(anchor.proofs) | dict(each.proofs[0] for each in same)
        newest, rival = self.newest, self._rival
        if len(proofs) >= self._quorum:
            complete = Anchor(anchor.sequence, anchor.head, tuple(sorted(proofs.items())))
            if self._contradicts(complete, own):
                rival = complete
            else:
                newest = complete
        if self._path is not None:
            write_synced(self._path, _Record(newest, rival, self._by_key.get(self._signer.peer_id)))
        self.newest, self._rival = newest, rival
        if rival is not None:
            logger.error("%s", self.conflict)
        elif newest is not None:
            logger.info("round %d is anchored", newest.head.round)

    def _contradicts(self, later: Anchor, own: Head | None) -> bool:
        """True if the newest anchor and a later one exclude each other; raise `IntegrityError` if it is not known."""
        if (newest := self.newest) is None:
            return False
        if later.beginning != newest.beginning:  # A swarm that has its state must not begin again.
            is_held = own is not None and newest.head.round and self.contains(own)
            return later.beginning < newest.beginning or bool(is_held)
        found = later.head.lineage_at(newest.head.round)
        if found is None and later.head.round < newest.head.round + PATH_ROUNDS:
            raise IntegrityError("an anchor does not show that it follows from the one before")
        is_other = found is not None and found != newest.head.lineage
        return is_other or (later.sequence == newest.sequence and later.claim != newest.claim)
