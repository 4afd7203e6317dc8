"""The totals of what a peer gave to its swarm, over all runs in its run directory."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from p2ptrain.disk import replace_file
from p2ptrain.network.records.record import PeerRecord

logger = logging.getLogger(__name__)

TOTALS_FILE = "given.json"


@dataclass(frozen=True)
class Totals:
    """The sums over all runs of one identity; written to ``given.json`` in its run directory.

    Attributes:
        runs: Times that the peer was started.
        rounds: Committed rounds with its work.
        tokens: Its tokens in them.
        seconds: Time in which it did not rest.
    """

    peer: str
    name: str
    runs: int = 0
    rounds: int = 0
    tokens: int = 0
    seconds: float = 0.0
    bytes_sent: int = 0


class GivenBook:
    """Adds one run to the totals of earlier ones."""

    def __init__(self, run_dir: Path, record: PeerRecord) -> None:
        self._path = run_dir / TOTALS_FILE
        before = read_totals(run_dir)
        before = before if before is not None and before.peer == record.peer else Totals(record.peer, record.name)
        self.totals = replace(before, name=record.name, runs=before.runs + 1)
        self._last = (0, 0, 0)

    def add(self, record: PeerRecord, seconds: float) -> None:
        """Add the record's news, and ``seconds`` of work; a host's counts begin anew when it moves to another stage."""
        now = (record.trained_rounds, record.trained_tokens, record.bytes_sent)
        news = [new - old if new >= old else new for new, old in zip(now, self._last, strict=True)]
        self._last, before = now, self.totals
        self.totals = replace(
            before, rounds=before.rounds + news[0], tokens=before.tokens + news[1],
            bytes_sent=before.bytes_sent + news[2], seconds=before.seconds + seconds,
        )  # fmt: skip

    def save(self) -> None:
        """Write the totals; a failure is logged."""
        try:
            replace_file(self._path, msgspec.json.encode(self.totals) + b"\n")
        except OSError as error:
            logger.warning("cannot write %s, going on without: %s", self._path, error.strerror)


def read_totals(run_dir: Path) -> Totals | None:
    """Return the totals of a run directory; None if they are missing or cannot be decoded."""
    try:
        return msgspec.json.decode((run_dir / TOTALS_FILE).read_bytes(), type=Totals)
    except (OSError, msgspec.DecodeError):
        return None
