"""The curves of a private swarm: each site's measurement on its own held-out data, and the pooled one, over rounds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from p2ptrain.network.records.evaluation import Evaluation, pooled
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.status.views import CurvePoint, SiteCurve

MAX_SITES = 64
MAX_POINTS = 96
"""Of a curve; when it has them, every second one goes, so that it still shows all rounds."""
POOLED = ""
"""The id of the pooled curve."""


class SiteCurves:
    """The curves of at most `MAX_SITES` sites; sites that left make room for others."""

    def __init__(self) -> None:
        self._curves: dict[str, _Curve] = {}

    def learn(self, records: Sequence[PeerRecord]) -> None:
        """Add the measurements of the present sites."""
        measured = {each.peer: each for each in records if each.evaluation is not None}
        for peer, record in measured.items():
            if peer not in self._curves and len(self._curves.keys() - {POOLED}) >= MAX_SITES:
                gone = [known for known in self._curves if known != POOLED and known not in measured]
                if not gone:
                    continue
                del self._curves[gone[0]]
            self._add(peer, record.label, record.evaluation)
        self._add(POOLED, "all sites", pooled([each.evaluation for each in measured.values() if each.evaluation]))

    def _add(self, peer: str, name: str, evaluation: Evaluation | None) -> None:
        if evaluation is None:
            return
        curve = self._curves.setdefault(peer, _Curve())
        if curve.metric != evaluation.metric:
            curve.metric, curve.points = evaluation.metric, []
        curve.name = name
        error = evaluation.error if evaluation.error is not None and math.isfinite(evaluation.error) else None
        # After the swarm went back, the rounds begin again.
        curve.points = [point for point in curve.points if point.round < evaluation.round]
        if len(curve.points) >= MAX_POINTS:
            curve.points = curve.points[::2]
        curve.points.append(CurvePoint(evaluation.round, evaluation.mean, error))

    def views(self) -> tuple[SiteCurve, ...]:
        """Return the curves, the pooled one first, then by name."""
        ordered = sorted(self._curves.items(), key=lambda item: (bool(item[0]), item[1].name.casefold(), item[0]))
        return tuple(SiteCurve(peer, each.name, each.metric, tuple(each.points)) for peer, each in ordered)


class _Curve:
    def __init__(self) -> None:
        self.name = ""
        self.metric = ""
        self.points: list[CurvePoint] = []
