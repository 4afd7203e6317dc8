"""From alerts of each look to events when they begin and end; flickering alerts make none."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.status.views import Alert, Event

HOLD_SECONDS = 6.0
"""What holds for less is not told of: a peer may be between two rounds when it is looked at."""
CLEAR_SECONDS = 20.0
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
        """Take in the alerts of now; return the events that began and ended with them."""
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
            # What was not told yet has to hold without a gap; what was told is over only after a while.
            if key not in current and (not known.told or now - known.last >= CLEAR_SECONDS):
                del self._lasting[key]
                if known.told:
                    events.append(Event(now, "cleared", known.alert.subject, f"over: {known.alert.text}"))
        return events
