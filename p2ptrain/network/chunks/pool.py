"""Which source of a fetch is asked for which chunks next: bookkeeping alone, no network and no clock.

Sources *take* runs of chunks from one pool. A quick source gets longer runs, and all get shorter ones towards the end,
so that they finish together. When nothing is left to take, a source *steals* what another still owes: the chunk comes
from whoever is first. A source that is lost *gives back* what it owes.

A plan assigns chunks to sources instead. Then nothing is stolen, and the chunks of a source that leaves go to the first
one that is left.

What is done is kept by the target, as a flag a chunk; the pool only reads it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from p2ptrain.network.chunks.messages import MAX_ASKED
from p2ptrain.network.transport import PeerId

STOLEN_CHUNKS = 2
"""Most chunks stolen at once."""
MAX_HOLDERS = 2
"""Most sources that may owe the same chunk."""
QUICK_RUN_SECONDS = 1.0
"""A source that delivers a run faster gets a longer one next."""
SLOW_RUN_SECONDS = 3.0
"""A source that takes longer gets a shorter one."""


@dataclass
class _Share:
    """One source's part in the fetch.

    Attributes:
        span: The length of its next run.
        owed: Chunks that it was asked for and that are not in place, in the order of asking.
    """

    span: int
    owed: list[int] = field(default_factory=list)


class ChunkPool:
    """The chunks that are not there yet, and who owes which; empty until `fill`.

    Args:
        first_span: The length of a source's first run.
        plan: By source: the chunks that it is asked for; empty for a pool that all share.

    Attributes:
        is_filled: Whether it is known which chunks there are.
    """

    def __init__(self, first_span: int = 1, plan: Mapping[PeerId, Sequence[int]] | None = None) -> None:
        self._first_span = first_span
        self._plan = {source: deque(chunks) for source, chunks in (plan or {}).items()}
        self._is_planned = bool(self._plan)
        self._shares: dict[PeerId, _Share] = {}
        self._pending: deque[int] = deque()
        self._done: bytes | bytearray = b""
        self.is_filled = False

    def fill(self, done: bytes | bytearray) -> None:
        """Begin with all chunks that are not done.

        Args:
            done: For each chunk, 1 once it is in place; read again whenever that matters.
        """
        self._done, self.is_filled = done, True
        planned = {index for chunks in self._plan.values() for index in chunks}
        self._pending = deque(index for index, is_done in enumerate(done) if not is_done and index not in planned)

    def join(self, source: PeerId) -> None:
        """Let one more source take."""
        self._shares[source] = _Share(self._first_span)

    def leave(self, source: PeerId) -> None:
        """Let a source that gave back what it owed take no more."""
        self._shares.pop(source, None)
        self._pending.extend(self._plan.pop(source, ()))

    def take(self, source: PeerId) -> list[int]:
        """Return the next run of chunks to ask ``source`` for; empty for none."""
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
        """Smaller and smaller towards the end, so that all sources finish together."""
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
        """Note that ``source`` delivered a chunk; also one that it did not owe."""
        share = self._shares[source]
        if index in share.owed:
            share.owed.remove(index)

    def adapt(self, source: PeerId, seconds: float) -> None:
        """Fit the length of the next runs to how long the last one of ``source`` took."""
        share = self._shares[source]
        if seconds < QUICK_RUN_SECONDS:
            share.span = min(2 * share.span, MAX_ASKED)
        elif seconds > SLOW_RUN_SECONDS:
            share.span = max(1, share.span // 2)

    def give_back(self, source: PeerId) -> bool:
        """Take over what ``source`` owes and nobody else does; whether there is any of that. It begins anew."""
        share = self._shares[source]
        held = {index for other in self._shares.values() if other is not share for index in other.owed}
        lost = [index for index in share.owed if not self._done[index] and index not in held]
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
        # From its end: what was asked for last arrives last.
        return best[-min(thief.span, STOLEN_CHUNKS) :] if best else []
