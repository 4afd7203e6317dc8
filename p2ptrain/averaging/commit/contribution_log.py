"""Log of this peer's contributions: prevents work from counting twice or getting lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.protocol.head import Head

MAX_RESULTS = 8


class OwnWork:
    """Decides whether results that this peer did not complete contain its contributions.

    Attributes:
        num_parts: Parts of the model; round r averages part r mod ``num_parts``.
    """

    def __init__(self, peer: str, matchmaker: Matchmaker) -> None:
        """
        Args:
            peer: This peer's id.
            matchmaker: Source of the tree's cells and this peer's head.
        """
        self.num_parts = 1
        self._peer = peer
        self._matchmaker = matchmaker
        self._results: deque[Body] = deque(maxlen=MAX_RESULTS)
        self._gave_up_on = b""
        self._uncertain_parts: set[int] = set()
        self._is_complete = True

    def add_result(self, body: Body) -> None:
        """Record a result of this peer's group at level 0, which goes up the tree."""
        self._results.append(body)
        self._is_complete = True

    def give_up_on(self, head: Head) -> None:
        """Record that this peer gave up an attempt or a result at ``head`` that other peers may complete."""
        self._gave_up_on = head.lineage
        self._is_complete = True
        self._uncertain_parts.add(head.round % self.num_parts)

    def forget(self, waiting: Iterable[int] = ()) -> None:
        """Record that an earlier process of this peer may have contributed to rounds unknown to this process.

        Args:
            waiting: Parts with pending work of that process.
        """
        self._is_complete = False
        self._uncertain_parts.update(waiting)

    def consumed(self, parts: Iterable[int]) -> None:
        """Record that all earlier work on parts was counted or dropped, so none is pending."""
        self._uncertain_parts.difference_update(parts)

    def may_count(self, part: int) -> bool:
        """True if pending work on a part may already count in a lineage unknown to this peer."""
        return part in self._uncertain_parts

    def is_in(self, body: Body) -> bool:
        """True if a result that this peer did not complete contains its contribution.

        Where this peer does not know the path up the tree, any delegate of its cell among the contributors suffices.
        """
        if body.levels == 1:
            return any(body.members[index] == self._peer for index, *_ in body.contributors)
        mine = [result for result in self._results if result.lineage == body.lineage]
        mine = [result for result in mine if self._peer in [result.members[index] for index, *_ in result.contributors]]
        if not mine and self._is_complete and self._gave_up_on != body.lineage:
            return False
        brought = {body.children[index] for index, *_ in body.contributors}
        if mine and body.level == 1 and self._gave_up_on != body.lineage:
            return any(result.body_hash in brought for result in mine)
        cells, head = self._matchmaker.cells, self._matchmaker.head
        key = cells.key_of(head, self._peer, body.level)
        return cells.slot(key, self._peer) in {cells.slot(key, body.members[index]) for index, *_ in body.contributors}

    def counts_in(self, body: Body) -> tuple[int, int] | None:
        """Return this peer's tokens and samples in a round's result; None if unknown.

        Above level 0 ``body`` lists only delegates' totals, so the counts come from this peer's own group's result.
        """
        results = [body] if body.levels == 1 else [each for each in self._results if each.lineage == body.lineage]
        if body.levels == 2:
            brought = {body.children[index] for index, *_ in body.contributors}
            results = [result for result in results if result.body_hash in brought]
        elif body.levels > 2 and self._gave_up_on == body.lineage:
            return None
        for result in reversed(results):
            for index, tokens, samples in result.contributors:
                if result.members[index] == self._peer:
                    return tokens, samples
        return None
