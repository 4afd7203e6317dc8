"""Records with the time at which they were published."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.network.records.record import PeerRecord


@dataclass(frozen=True)
class Sighting:
    """A peer's record and when it was published, in seconds since the epoch."""

    record: PeerRecord
    at: float


@dataclass(frozen=True)
class Look:
    """The records of a swarm at one moment.

    Attributes:
        at: Wall-clock second.
        sightings: One for each peer; None when the directory did not answer.
        rejected: Records dropped for what they say, since the first look.
    """

    at: float
    sightings: Sequence[Sighting] | None
    rejected: int = 0
