"""The directory interface: small signed records that expire, by key and subkey.

Implementations: `libp2p.directory` (DHT), `http_directory` and `simulated`; `factory` starts the configured one.
Every implementation drops records that `records.record` refuses. So each returned record was signed by the peer whose
id is its subkey. A key holds a bounded sample (`records.sample`), for first contact: peers that know each other
exchange records themselves (`records.exchange`).
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
