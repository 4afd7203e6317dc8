"""The seam between protocol code and the directory: small records that expire.

Implementations are `p2ptrain.network.libp2p.directory` (a hivemind ``DHTNode``), `p2ptrain.network.http_directory` and
`p2ptrain.network.simulated`; `p2ptrain.network.factory` starts the one that a peer's configuration names. Values are
signed records (`p2ptrain.network.records.record`). A directory drops any that `p2ptrain.network.records.guard` refuses,
so the peer whose id is the subkey wrote what `look_up` returns.
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

    @property
    def clock_skew_seconds(self) -> float | None:
        """Seconds by which this machine's clock is ahead of the swarm's; None if the directory cannot tell.

        Set ``runtime.clock_offset_seconds`` to its negative to correct for it.
        """
        return None

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
