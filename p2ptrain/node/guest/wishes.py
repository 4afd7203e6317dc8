"""`Wishes`: why a peer rests, and the parts of its role that rest with it."""

from __future__ import annotations

import logging
from collections.abc import Callable

logger = logging.getLogger(__name__)

Pause = Callable[[bool], None]
"""Pauses a part of a role, or with False lets it go on; returns at once, on the event loop."""


class Wishes:
    """The owner's reasons to pause, by source; a peer rests while there is one.

    Attributes:
        reasons: By source, such as ``owner`` or ``battery``: the reason, for people.
    """

    def __init__(self) -> None:
        self.reasons: dict[str, str] = {}
        self._parts: list[Pause] = []
        self._finish: list[Callable[[], None]] = []

    @property
    def reason(self) -> str:
        """All reasons in one line; empty while the peer works."""
        return ", ".join(self.reasons.values())

    def join(self, part: Pause, finish: Callable[[], None] | None = None) -> None:
        """Pause and resume a part from now on; it pauses at once if the peer rests.

        Args:
            finish: Ends the part after the round in progress; None if the part has no rounds.
        """
        self._parts.append(part)
        self._finish += [finish] if finish is not None else []
        if self.reasons:
            part(True)

    def set(self, source: str, reason: str) -> None:
        """Set a source's reason to pause; an empty one withdraws it."""
        before = self.reason
        self.reasons[source] = reason
        if not reason:
            del self.reasons[source]
        if self.reason != before:
            logger.info("paused: %s" if self.reasons else "going on; it was paused: %s", self.reason or before)
        if bool(self.reason) != bool(before):
            for part in self._parts:
                part(bool(self.reasons))

    def finish(self) -> bool:
        """End the parts after the round in progress; return False if none of them has one."""
        if self.reasons:
            return False
        for finish in self._finish:
            finish()
        return bool(self._finish)
