"""Assignment of a fetch's chunks to its sources, without network or clock.

Sources take runs of chunks from one pool. Fast sources get longer runs, and all runs shrink towards the end so that
sources finish together. From an empty pool a source steals chunks that another still owes; the first delivery counts.
A lost source gives its chunks back.

With a plan, chunks are assigned to sources and never stolen. The first remaining source gets those of one that leaves.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.network.chunks.messages import MAX_ASKED
from p2ptrain.network.transport import PeerId

STOLEN_CHUNKS = 2
MAX_HOLDERS = 2
"""Most sources that owe the same chunk."""
QUICK_RUN_SECONDS = 1.0
"""A source that delivers a run faster gets longer runs."""
SLOW_RUN_SECONDS = 3.0
"""A source that delivers a run slower gets shorter runs; > `QUICK_RUN_SECONDS`."""


@dataclass
class _Share:
    """A source's next run length and requested chunks, in the order of the requests."""

    span: int
    owed: list[int] = field(default_factory=list)


class ChunkPool:
    """The missing chunks, and the sources that owe them; empty until `fill`.

    Arguments as in `p2ptrain.network.chunks.fetch.FetchOptions`.
    """

    def __init__(self, first_span: int, plan: Mapping[PeerId, Sequence[int]]) -> None:
        self._first_span = first_span
        self._plan = {source: deque(chunks) for source, chunks in plan.items()}
        self._is_planned = bool(self._plan)
        self._shares: dict[PeerId, _Share] = {}
        self._pending: deque[int] = deque()
        self._done: bytes | bytearray = b""
        self.is_filled = False

    def fill(self, done: bytes | bytearray) -> None:
        """Fill the pool with all chunks whose flag is 0, and keep a reference to the flags."""
        self._done, self.is_filled = done, True
        planned = {index for chunks in self._plan.values() for index in chunks}
        self._pending = deque(index for index, is_done in enumerate(done) if not is_done and index not in planned)

    def join(self, source: PeerId) -> None:
        self._shares[source] = _Share(self._first_span)

    def leave(self, source: PeerId) -> None:
        """Remove a source that owes nothing; its planned chunks return to the pool."""
        self._shares.pop(source, None)
        self._pending.extend(self._plan.pop(source, ()))

    def take(self, source: PeerId) -> list[int]:
        """Return the next run of chunks for ``source``; empty if it gets none."""
        share = self._shares[source]
        if planned := self._plan.get(source):
            run = self._next(planned, MAX_ASKED)
        elif not self._is_planned:
            run = self._next(self._pending, self._limit(share)) or self._steal(share)
        elif source == next(iter(self._shares)):
            run = self._next(self._pending, MAX_ASKED)
        else:
            run = []
        share.owed.extend(run)
        return run

    def _limit(self, share: _Share) -> int:
        if len(self._shares) == 1:
            return share.span
        return min(share.span, max(1, len(self._pending) // (2 * len(self._shares))))

    def _next(self, chunks: deque[int], limit: int) -> list[int]:
        run: list[int] = []
        while chunks and len(run) < limit:
            if not self._done[index := chunks.popleft()]:
                run.append(index)
        return run

    def settle(self, source: PeerId, index: int) -> None:
        """Record that ``source`` delivered a chunk, owed or not."""
        share = self._shares[source]
        if index in share.owed:
            share.owed.remove(index)

    def adapt(self, source: PeerId, seconds: float) -> None:
        share = self._shares[source]
        if seconds < QUICK_RUN_SECONDS:
            share.span = min(2 * share.span, MAX_ASKED)
        elif seconds > SLOW_RUN_SECONDS:
            share.span = max(1, share.span // 2)

    def give_back(self, source: PeerId) -> bool:
        """Return a source's owed chunks to the pool and reset its run length; True if chunks returned.

        Chunks that another source also owes do not return.
        """
        share = self._shares[source]
        held = {index for other in self._shares.values() if other is not share for index in other.owed}
        # The flags are gone if the receiver was closed first.
        lost = [
            index for index in share.owed if index not in held and index < len(self._done) and not self._done[index]
        ]
        share.owed.clear()
        share.span = self._first_span
        self._plan.get(source, self._pending).extendleft(sorted(lost, reverse=True))
        return bool(lost)

    def _steal(self, thief: _Share) -> list[int]:
        holders = Counter(index for share in self._shares.values() for index in share.owed)
        best: list[int] = []
        for share in self._shares.values():
            if share is not thief:
                owed = [index for index in share.owed if holders[index] < MAX_HOLDERS and not self._done[index]]
                best = max(best, owed, key=len)
        # Steal from the end: chunks requested last arrive last.
        return best[-min(thief.span, STOLEN_CHUNKS) :] if best else []
