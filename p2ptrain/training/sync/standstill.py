"""`Standstill`: a warning in words while a peer's rounds fail, for those who see its log alone."""

from __future__ import annotations

from p2ptrain.training.sync.background_download import TOO_SLOW
from p2ptrain.training.sync.synchronizer import CAUGHT_UP, RoundResult

FIRST_SECONDS = 30.0
"""Time without a round after which failed rounds get a warning; a pause gets it at once."""
FEW_CATCH_UPS = 3
"""A peer that caught up so often, and contributed to no round between, is too slow for the others."""


class Standstill:
    """The time since a peer's rounds fail. It is told when it has doubled, so a log does not fill."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._due_seconds = 0.0
        self._catch_ups, self._first_round = 0, 0

    def note(self, result: RoundResult, now: float) -> str:
        """Return the warning that is due after a round's end at ``now``; empty for none.

        Args:
            now: In seconds, on any clock that does not jump.
        """
        is_caught_up = result.reason == CAUGHT_UP
        if result.committed and not is_caught_up:
            self._since = None
            return ""
        if self._since is None:
            self._since, self._due_seconds = now - result.seconds, 0.0 if result.paused else FIRST_SECONDS
            self._catch_ups, self._first_round = 0, result.round
        if is_caught_up:
            self._catch_ups += 1
        seconds = now - self._since
        if seconds < self._due_seconds or (is_caught_up and self._catch_ups < FEW_CATCH_UPS):
            return ""
        self._due_seconds = max(FIRST_SECONDS, 2 * seconds)
        if is_caught_up:
            ended = result.round - self._first_round
            return (
                f"this peer has taken part in no round for {seconds:.0f} s: it caught up {self._catch_ups} times,"
                f" while the others ended {ended} rounds; {TOO_SLOW}"
            )
        told = f"round {result.round}: {'paused' if result.paused else 'not committed'}"
        told += f" for {seconds:.0f} s: {result.reason}"
        if not result.paused:
            return f"{told}. This peer tries again"
        return (
            f"{told}. This peer waits until that changes; if the others are done, end it with Ctrl-C: it leaves in good"
            " order, and saves if it has a run directory"
        )
