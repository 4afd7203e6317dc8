"""What of this peer's work is in which result, as far as can be told: nothing counts twice, and nothing is lost."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.protocol.head import Head

MAX_RESULTS = 8


class OwnWork:
    """Tells whether this peer's contributions are in results that it did not see completed.

    Attributes:
        num_parts: Parts of the model that rounds average in turn, round r part r mod ``num_parts``.
    """

    def __init__(self, peer: str, matchmaker: Matchmaker) -> None:
        """
        Args:
            peer: This one.
            matchmaker: Knows the cells of the tree, and where this peer stands.
        """
        self.num_parts = 1
        self._peer = peer
        self._matchmaker = matchmaker
        self._results: deque[Body] = deque(maxlen=MAX_RESULTS)
        self._gave_up_on = b""
        self._uncertain_parts: set[int] = set()
        self._is_complete = True

    def add_result(self, body: Body) -> None:
        """Note a result of this peer's own group on level 0, which is to go up the tree."""
        self._results.append(body)
        self._is_complete = True

    def give_up_on(self, head: Head) -> None:
        """Note that at this head an attempt or a result was given up that others may bring to an end."""
        self._gave_up_on = head.lineage
        self._is_complete = True
        self._uncertain_parts.add(head.round % self.num_parts)

    def forget(self, waiting: Iterable[int] = ()) -> None:
        """Note that an earlier process of this peer may have contributed to rounds of which this one knows nothing.

        Args:
            waiting: Parts with work of that process that still waits.
        """
        self._is_complete = False
        self._uncertain_parts.update(waiting)

    def consumed(self, parts: Iterable[int]) -> None:
        """Note that all work on parts that was averaged before was counted or dropped: it waits for no other round."""
        self._uncertain_parts.difference_update(parts)

    def may_count(self, part: int) -> bool:
        """Whether an attempt was given up whose work, which still waits, may be in a lineage that is not known here."""
        return part in self._uncertain_parts

    def is_in(self, body: Body) -> bool:
        """Whether it is in a round's result that this peer did not see completed: then it must not count again.

        Where that cannot be told, because the way up the tree is not known here, it is if anybody spoke for its cell.
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
        """The tokens and samples of this peer's that count in a round's result, as its own group's has them.

        Above level 0 they are not in ``body``: its contributors are delegates, with what they stand for.

        Returns:
            None if it cannot be told.
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
