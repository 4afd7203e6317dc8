"""Whom a leader asks before few peers end a round: those that are absent, though they say that they train.

A peer that was stopped for a while goes on with old news: its deadlines have passed, nobody seems to answer, and it
would end alone a round that the others have ended meanwhile. That makes two lineages, of which one is lost. So when
those that came are not more than those that did not, each of these is asked once more first. A silent one costs a few
seconds, and not in each round; one that is ending the round with others is waited for, for a while.
"""

from __future__ import annotations

from collections.abc import Sequence

from p2ptrain.averaging.grouping.cells import Key

ANSWER_SECONDS = 2.0
"""So long it is not asked again about a round: others wait longer for a leader than that before they go on."""
SILENCE_SECONDS = 10.0
"""So long one that did not answer is not asked again about any."""


class Absent:
    """What a leader knows of those that do not come. Times are the event loop's."""

    def __init__(self) -> None:
        self._answers: dict[str, tuple[Key, float]] = {}
        self._silences: dict[str, float] = {}

    def to_ask(self, key: Key, present: int, absent: Sequence[str], now: float) -> list[str]:
        """Who has to be asked before a round ends with those that are here.

        Args:
            key: Which group of which round.
            present: How many are here.
            absent: The others that say that they train, those included that are presumed not to answer.
            now: The time.
        """
        self._answers = {
            peer: (about, until) for peer, (about, until) in self._answers.items() if about == key and until > now
        }
        self._silences = {peer: until for peer, until in self._silences.items() if until > now}
        known = self._answers.keys() | self._silences.keys()
        return [] if present > len(absent) else [peer for peer in absent if peer not in known]

    def answered(self, peer: str, key: Key, asked: float) -> None:
        """Note that a peer was asked then, and is neither ahead nor ending the round with others."""
        self._answers[peer] = (key, asked + ANSWER_SECONDS)

    def silent(self, peer: str, asked: float, now: float, patience_seconds: float) -> None:
        """Note that a peer was asked then, and did not answer in time.

        If that took much longer than it should have, it was this peer that stood still, and the answer may be waiting.
        """
        if now - asked <= 2 * patience_seconds:
            self._silences[peer] = asked + SILENCE_SECONDS

    def heard_from(self, peer: str) -> None:
        """Note that a peer is not silent any more."""
        self._silences.pop(peer, None)
