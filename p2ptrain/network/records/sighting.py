"""Records with their publication times."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.network.records.record import PeerRecord


@dataclass(frozen=True)
class Sighting:
    """A peer's record and its publication time, in seconds since the epoch."""

    record: PeerRecord
    at: float


@dataclass(frozen=True)
class Look:
    """The records of a swarm at one moment, in seconds since the epoch.

    Attributes:
        sightings: One per peer; None if the directory did not answer.
        rejected: Invalid records dropped since the first look.
    """

    at: float
    sightings: Sequence[Sighting] | None
    rejected: int = 0
