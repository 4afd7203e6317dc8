"""The file of what the sites of a private swarm told each other: measurements, and losses of privacy.

It holds what their records held, this site's own included. So nothing is in it that a site's policy keeps.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from p2ptrain.buffers import Bounded
from p2ptrain.network.records.evaluation import Evaluation, PrivacyLoss
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.schema import Count
from p2ptrain.training.metrics import MetricsWriter

SITES_FILE = "sites.jsonl"
SITE = "site"
"""Kind of its lines."""
MAX_SITES = 1024
"""Sites whose last line is remembered; of others a line is repeated."""


@dataclass(frozen=True)
class SiteReport:
    """One line: a site's record told this.

    Attributes:
        round: Rounds done by then.
        evaluation, privacy: None if the record told none.
    """

    peer: str
    round: Count
    evaluation: Evaluation | None = None
    privacy: PrivacyLoss | None = None


class SiteReports:
    """Appends a line whenever a record tells something else; bounded as its ``writer``, which its owner closes."""

    def __init__(self, path: Path, restricted: str = "") -> None:
        """Open the file.

        Args:
            restricted: This site's id, if it has a policy: a first line then tells anew what its record holds, so that
                earlier lines do not outlive a policy that forbids them. Empty for none.
        """
        self.writer = MetricsWriter(path)
        self._restricted = restricted
        self._last = Bounded[str, SiteReport](MAX_SITES)

    def learn(self, records: Sequence[tuple[PeerRecord, int, float]]) -> None:
        """Take in the present records; a listener of `Presence`."""
        for record, _, _ in records:
            report = SiteReport(record.peer, record.round, record.evaluation, record.privacy)
            known = self._last.get(record.peer)
            if known is None and record.peer != self._restricted:
                known = SiteReport(record.peer, record.round)
            if known is None or (known.evaluation, known.privacy) != (report.evaluation, report.privacy):
                self._last[record.peer] = report
                self.writer.write(SITE, **asdict(report))
