"""The seam between protocol code and the DHT: small records that expire.

Two implementations: `p2ptrain.network.libp2p.transport` (a hivemind ``DHTNode``) and `p2ptrain.network.simulated`.
Values are signed records (`p2ptrain.network.records.record`); a directory drops any whose signature does not match, so
what `look_up` returns was written by the peer whose id is the subkey.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


@dataclass(frozen=True)
class Entry:
    """One value of a directory key, with the wall-clock second at which it expires."""

    value: bytes
    expires_at: float


class Directory(ABC):
    """Publish, look up and withdraw records that expire."""

    @abstractmethod
    async def publish(self, key: str, subkey: str, value: bytes, expires_at: float, timeout_seconds: float) -> bool:
        """Store ``value`` under (key, subkey) until ``expires_at``; True when at least one peer took it.

        A later ``expires_at`` replaces an earlier one. Never raises for the network's sake.
        """

    @abstractmethod
    async def look_up(self, key: str, timeout_seconds: float) -> dict[str, Entry] | None:
        """All unexpired entries of ``key`` by subkey; empty when there are none, None when nobody could be asked."""

    @abstractmethod
    async def close(self) -> None:
        """Stop taking part; idempotent."""
