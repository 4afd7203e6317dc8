"""Anchors: heads that keys of the manifest sign at times, and past which no peer goes back.

Voters' signatures protect a lineage while two thirds of its voters are honest. Keys of voters that are stolen later
could sign another past. An *anchor* is the head after a full certificate with signatures of enough anchor keys. A later
head counts only if it is proved from the anchor's head, or from one that was: by a chain of certificates, or by the
votes of two thirds of its electorate. Then it is *past* the anchor. An anchor chooses among certified heads, and makes
none: it holds the certificate that leads to it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from threading import Lock
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from p2ptrain.averaging.protocol.certificate import Certificate, Count, Head, Name, Proof
from p2ptrain.disk import WriteLog, replace_file
from p2ptrain.errors import IntegrityError
from p2ptrain.hashing import canonical_bytes
from p2ptrain.manifest import MAX_ANCHOR_KEYS
from p2ptrain.network.schema import Hash, Message, from_bytes, to_bytes
from p2ptrain.signing import Signer

logger = logging.getLogger(__name__)


class Anchor(Message, frozen=True):
    """A head with the signatures of anchor keys; each signs round, lineage and digest."""

    head: Head
    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_ANCHOR_KEYS)]

    def statement(self, swarm: bytes) -> bytes:
        """Return the bytes that each key signs; ``swarm`` is the digest of the manifest or unit, 32 bytes."""
        head = self.head
        return b"p2ptrain anchor" + swarm + canonical_bytes([head.round, head.lineage, head.digest])


class _Record(Message, frozen=True):
    """``passed`` is round and lineage of the last head of this peer's own that could be anchored."""

    newest: Anchor | None = None
    rival: Anchor | None = None
    own: Anchor | None = None
    is_off: bool = False
    passed: tuple[Count, Hash] | None = None


class AnchorBook:
    """The newest anchor that this peer knows; in ``path``, if given, before it counts.

    `check` is safe from any thread. All else is called on the event loop.

    Raises:
        IntegrityError: The file is damaged.

    Attributes:
        keys: Peers whose signatures count; without any there are no anchors.
        every: Rounds from one anchor to the next.
    """

    def __init__(
        self,
        swarm: bytes,
        signer: Signer,
        read: Callable[[bytes], Certificate],
        keys: Iterable[str] = (),
        quorum: int = 0,
        every: int = 1,
        path: Path | None = None,
    ) -> None:
        """
        Args:
            read: Parses and verifies a certificate.
            quorum: How many keys must sign; 0 for more than half.
        """
        self.keys, self.every = frozenset(keys), every
        self._quorum = quorum or len(self.keys) // 2 + 1
        self._swarm, self._signer, self._read, self._path = swarm, signer, read, path
        self._log = WriteLog("anchors", path)
        self._record = _Record()
        self._by_key: dict[str, Anchor] = {}
        self._lock = Lock()
        if path is not None and self.keys and path.is_file():
            try:
                self._record = from_bytes(_Record, path.read_bytes())
            except IntegrityError as error:
                raise IntegrityError(f"the anchors in {path} are damaged ({error}): delete the file") from error

    @property
    def newest(self) -> Head | None:
        """The head of the newest anchor; None before the first."""
        return None if self._record.newest is None else self._record.newest.head

    @property
    def round(self) -> int:
        """Round of the newest anchor; 0 before the first."""
        return 0 if self.newest is None else self.newest.round

    @property
    def last_round(self) -> int:
        """Round of the newest anchor, or of the newest head that this peer signed; 0 before the first."""
        return max(self.round, 0 if self._record.own is None else self._record.own.head.round)

    @property
    def file(self) -> str:
        """The file that keeps the anchors, for the operator."""
        return str(self._path or "the anchors")

    @property
    def is_off(self) -> bool:
        """True if this peer's lineage parted from the anchor's before it."""
        return self._record.is_off

    @property
    def conflict(self) -> str:
        """Why this peer must not go on; empty if it may."""
        if self._record.rival is None:
            return ""
        names = [
            f"{each.head.lineage.hex()[:8]} of round {each.head.round}"
            for each in (self._record.newest, self._record.rival)
            if each is not None
        ]
        return (
            f"two anchors contradict each other: {' and '.join(names)}: ask the organizer which is right, and delete"
            f" {self.file} of the peers that hold the other; see docs/explanation/rounds.md"
        )

    def held(self, known: bytes = b"") -> tuple[Anchor, ...]:
        """Return the anchors of which another peer should hear that knows the newest one of lineage ``known``."""
        newest, rival, own = self._record.newest, self._record.rival, self._record.own
        if newest is not None and own is not None and own.head.round <= newest.head.round:
            own = None
        if newest is not None and newest.head.lineage == known:
            newest = None
        return tuple(each for each in (newest, rival, own) if each is not None)

    # --- this peer's lineage

    def is_past(self, head: Head) -> bool:
        """True if a head of this peer's lineage is the newest anchor's, or follows from it."""
        return not self.is_off and head.round >= self.round

    def start_for(self, own: Head, head: Head) -> Head:
        """Return the head from which ``head`` must be proved: this peer's own, or the newest anchor's.

        Raises:
            IntegrityError: The head is before the anchor, and this peer's own is past it.
        """
        newest = self.newest
        if newest is None or (head.round < newest.round and own.round < newest.round):
            return own
        if head.round < newest.round:
            raise IntegrityError("a head is before the newest anchor")
        return own if self.is_past(own) else newest

    def check_digest(self, head: Head) -> None:
        """Raise `IntegrityError` if the newest anchor is of this head's lineage, and of another state."""
        if self.newest is not None and head.lineage == self.newest.lineage and head.digest != self.newest.digest:
            raise IntegrityError("a head has another digest than its anchor")

    def parts(self, certificate: Certificate) -> bool:
        """True if a certificate leads to the newest anchor's round, and not to the anchor."""
        newest, body = self.newest, certificate.body
        return newest is not None and body.round + 1 == newest.round and body.next_lineage != newest.lineage

    def reached(self, head: Head) -> None:
        """Record the head after this peer's next round, and sign it if that is due."""
        if not self.keys or head.round % self.every:
            return
        newest, is_off = self.newest, self.is_off
        if newest is not None and head.round == newest.round:
            is_off = head.lineage != newest.lineage
        self._set(is_off=is_off, passed=(head.round, head.lineage))
        self.sign(head)

    def sign(self, head: Head) -> None:
        """Sign the head after a full certificate, if this peer has a key and it is due; on disk before it is shown."""
        own, signer = self._record.own, self._signer
        if signer.peer_id not in self.keys or head.round % self.every or head.is_reduced:
            return
        if self.conflict or not self.is_past(head) or head.round <= (0 if own is None else own.head.round):
            return
        self._set(own=Anchor(head, ((signer.peer_id, signer.sign(Anchor(head, ()).statement(self._swarm))),)))

    def moved(self, *, is_off: bool = False) -> None:
        """Record that this peer moved to a head of another lineage, which was proved from `start_for`.

        ``is_off`` tells that an anchor came since the proof.
        """
        if self.keys:
            self._set(is_off=is_off, passed=None)

    def lineage_at(self, round_: int) -> bytes | None:
        """Return the lineage of this peer's last head that could be anchored, if it was of this round."""
        passed = self._record.passed
        return passed[1] if passed is not None and passed[0] == round_ else None

    # --- anchors

    def check(self, anchor: Anchor) -> Anchor | None:
        """Return an anchor from anybody with all known signatures, once there are enough; None before.

        Raises:
            IntegrityError: It is not of this swarm's keys, or of no certified head that may be anchored.
        """
        head, statement = anchor.head, anchor.statement(self._swarm)
        signers = {key for key, _ in anchor.proofs}
        if not signers or not signers <= self.keys or len(signers) < len(anchor.proofs):
            raise IntegrityError("an anchor is not signed by the keys that the manifest names")
        if head.round == 0 or head.round % self.every or head.is_reduced:
            raise IntegrityError("an anchor is of a round that has none")
        if not all(self._signer.verify(key, statement, proof) for key, proof in anchor.proofs):
            raise IntegrityError("an anchor has a signature that does not match its key")
        if self._read(head.certificate).next_head(head.digest, head.table) != head:
            raise IntegrityError("an anchor is of a head that does not follow from its certificate")
        with self._lock:
            for key, proof in anchor.proofs:
                known = self._by_key.get(key)
                if known is None or known.head.round <= head.round:
                    self._by_key[key] = Anchor(head, ((key, proof),))
            same = [each for each in self._by_key.values() if each.statement(self._swarm) == statement]
        proofs = dict(anchor.proofs) | dict(each.proofs[0] for each in same)
        return Anchor(head, tuple(sorted(proofs.items()))) if len(proofs) >= self._quorum else None

    def adopt(self, anchor: Anchor, *, is_off: bool) -> None:
        """Keep a complete anchor as the newest one; ``is_off`` tells whether this peer's lineage lacks it."""
        if self._set(newest=anchor, is_off=is_off):
            logger.info("round %d is anchored", anchor.head.round)

    def forget(self) -> None:
        """Forget the newest anchor, because this peer begins again at a head before it.

        If all have lost the state since, they could not go on. If others have it, they show the anchor again. The
        voters are nearly the same at both heads: keys that could lead this peer astray here could do so there.
        """
        logger.warning("this peer's state is of a round before the anchor of round %d: it asks anew", self.round)
        self._set(newest=None, is_off=False, passed=None)

    def contradict(self, anchor: Anchor) -> None:
        """Keep a complete anchor that excludes the newest one: this peer stops."""
        if self._set(rival=anchor):
            logger.error("%s", self.conflict)

    def _set(self, **changes: Any) -> bool:
        """Change the record, on disk before it counts; return False if it cannot be written."""
        with self._lock:
            record = msgspec.structs.replace(self._record, **changes)
            if record == self._record:
                return False
            try:
                if self._path is not None:
                    with self._log.writing():
                        self._path.parent.mkdir(parents=True, exist_ok=True)
                        replace_file(self._path, to_bytes(record), synced=True)
            except OSError:
                return False
            self._record = record
            return True


def follows(newest: Head | None, path: Mapping[int, bytes]) -> bool | None:
    """Return whether the end of a path of certificates follows from the newest anchor.

    Args:
        path: Lineage by round, without a gap, from a head to a later one. It is not empty.

    Returns:
        False if the two exclude each other; None if the path begins after the anchor, and so does not tell.
    """
    if newest is None:
        return True
    return None if newest.round < min(path) else path.get(newest.round) == newest.lineage
