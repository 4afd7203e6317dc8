"""Events for the begin and end of alerts, with hysteresis against flickering ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.status.views import Alert, Event

HOLD_SECONDS = 6.0
"""An alert begins after it held this long; a peer between two rounds causes shorter ones."""
CLEAR_SECONDS = 20.0
"""An alert ends after it was absent this long."""
MAX_LASTING = 200


@dataclass
class _Lasting:
    alert: Alert
    since: float
    last: float
    told: bool = False


class AlertBook:
    def __init__(self) -> None:
        self._lasting: dict[tuple[str, str], _Lasting] = {}

    def update(self, alerts: Sequence[Alert], now: float) -> list[Event]:
        """Take in the current alerts; return an event for each alert that begins or ends."""
        events = []
        current = {(alert.rule, alert.subject) for alert in alerts}
        for alert in alerts:
            key = (alert.rule, alert.subject)
            known = self._lasting.get(key)
            if known is None:
                if len(self._lasting) >= MAX_LASTING:
                    continue
                known = self._lasting[key] = _Lasting(alert, now, now)
            known.alert, known.last = alert, now
            if not known.told and now - known.since >= HOLD_SECONDS:
                known.told = True
                events.append(Event(now, "alert", alert.subject, alert.text))
        for key, known in list(self._lasting.items()):
            # An unreported alert must hold without a gap; a reported one ends only after `CLEAR_SECONDS`.
            if key not in current and (not known.told or now - known.last >= CLEAR_SECONDS):
                del self._lasting[key]
                if known.told:
                    events.append(Event(now, "cleared", known.alert.subject, f"over: {known.alert.text}"))
        return events
