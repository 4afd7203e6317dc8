"""Validation of records, common to all directories."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable

from p2ptrain.errors import IntegrityError
from p2ptrain.network.records.record import open_record
from p2ptrain.signing import Signer

MAX_LIFETIME_SECONDS = 600.0
"""Longest accepted time to expiry; also bounds how far a publisher's clock may be ahead."""
MAX_SUBKEYS = 4096
MAX_KEYS = 65536
_VERIFIED_CACHE = 16384


class RecordGuard:
    """Checks sealed records of one swarm, with a cache of verified signatures. The caller counts ``refused``."""

    def __init__(self, swarm: bytes, verifier: Signer, now: Callable[[], float]) -> None:
        self.refused = 0
        self._swarm = swarm
        self._verifier = verifier
        self._now = now
        self._verified: OrderedDict[bytes, tuple[str, float]] = OrderedDict()

    def check(self, value: bytes) -> tuple[str, float]:
        """Return a record's signer and expiry; raise `IntegrityError` if the record is invalid or lives too long."""
        fingerprint = hashlib.sha256(value).digest()
        if fingerprint in self._verified:
            self._verified.move_to_end(fingerprint)
        else:
            opened = open_record(value, None, self._swarm, self._verifier)
            self._verified[fingerprint] = (opened.peer, opened.expires_at)
            if len(self._verified) > _VERIFIED_CACHE:
                self._verified.popitem(last=False)
        peer, expires_at = self._verified[fingerprint]
        if expires_at > self._now() + MAX_LIFETIME_SECONDS:
            raise IntegrityError("a record claims to live too long: ignored")
        return peer, expires_at
