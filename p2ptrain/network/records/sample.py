"""A bounded sample of the records in one shard, as a directory's node or server keeps it.

Once a shard is full, a hash of its key, the hour and the peer decides which records stay. So nobody chooses which
honest peers a newcomer finds, and each hour it is others.
"""

from __future__ import annotations

import hashlib

from p2ptrain.network.directory import Entry

MAX_SUBKEYS = 32
"""Records in a sample; with the largest ones, 128 kB, far below the network daemon's 4 MiB for a message."""
EPOCH_SECONDS = 3600.0


class Sample:
    """The records under one directory key, by peer."""

    def __init__(self, key: str) -> None:
        self._key = key
        self._entries: dict[str, Entry] = {}

    def put(self, peer: str, entry: Entry, now: float) -> bool:
        """Keep a record that the caller verified, unless a known one expires no earlier or the sample has no room."""
        self._drop_expired(now)
        known = self._entries.get(peer)
        if entry.expires_at <= now or (known is not None and known.expires_at >= entry.expires_at):
            return known == entry
        self._entries[peer] = entry
        if len(self._entries) > MAX_SUBKEYS:
            del self._entries[max(self._entries, key=lambda each: self._rank(each, now))]
        return peer in self._entries

    def entries(self, now: float) -> dict[str, Entry]:
        """Return a copy of the unexpired records."""
        self._drop_expired(now)
        return dict(self._entries)

    def _drop_expired(self, now: float) -> None:
        self._entries = {peer: entry for peer, entry in self._entries.items() if entry.expires_at > now}

    def _rank(self, peer: str, now: float) -> bytes:
        return hashlib.sha256(f"{self._key} {int(now // EPOCH_SECONDS)} {peer}".encode()).digest()
