"""The directory: small signed records that expire, by key and subkey; its interface, and the sample under each key.

Implementations: `libp2p.directory` (DHT), `http_directory` and `simulated`; `factory` starts the configured one.
Every implementation drops records that `records.record` refuses. So each returned record was signed by the peer whose
id is its subkey. A key holds a bounded `Sample`, for first contact: peers that know each other exchange records
themselves (`records.exchange`). Once a key is full, a hash of the key, the hour and the peer decides which records
stay. So nobody chooses which honest peers a newcomer finds, and each hour it is others.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

MAX_SUBKEYS = 32
"""Records in a sample; with the largest ones, 128 kB, far below the network daemon's 4 MiB for a message."""
EPOCH_SECONDS = 3600.0


@dataclass(frozen=True)
class Entry:
    """One value of a directory key, with the wall-clock second at which it expires."""

    value: bytes
    expires_at: float


class Directory(ABC):
    """Publishes and looks up records that expire."""

    @property
    def clock_skew_seconds(self) -> float | None:
        """Seconds by which this machine's clock is ahead of the swarm's; None if the directory cannot tell.

        The caller corrects for it by setting ``runtime.clock_offset_seconds`` to its negative.
        """
        return None

    @abstractmethod
    async def publish(self, key: str, subkey: str, value: bytes, expires_at: float, timeout_seconds: float) -> bool:
        """Store ``value`` until ``expires_at``; return False on network failures, or if the key's sample is full.

        A value with a later ``expires_at`` replaces one with an earlier.
        """

    @abstractmethod
    async def look_up(self, key: str, timeout_seconds: float) -> dict[str, Entry] | None:
        """Return a sample of the unexpired entries of ``key`` by subkey; None if the directory could not be reached."""

    @abstractmethod
    async def close(self) -> None:
        """Leave the directory; idempotent."""


class Sample:
    """The records under one directory key, by peer, as a node or server keeps them."""

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
