"""Which source of a download is asked for which chunks next: bookkeeping alone, no network and no clock.

Sources *take* runs of chunks from one pool. A quick source gets longer runs, and all get shorter ones towards the end,
so that they finish together. When nothing is left to take, a source *steals* what another still owes: the chunk comes
from whoever is first. A source that is lost *gives back* what it owes.

What is done is kept by the download, as a flag a chunk; the pool only reads it.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from p2ptrain.network.transport import PeerId
from p2ptrain.training.sync.state_server import MAX_RANGE_CHUNKS

STOLEN_CHUNKS = 2
"""What is stolen at once at the most."""
MAX_HOLDERS = 2
"""How many sources may owe the same chunk."""
QUICK_RANGE_SECONDS = 1.0
"""A source that delivers a run faster gets a longer one next."""
SLOW_RANGE_SECONDS = 3.0
"""A source that takes longer gets a shorter one."""


@dataclass
class _Share:
    """What one source has to do with the pool."""

    span: int = 1
    """The length of its next run."""
    owed: list[int] = field(default_factory=list)
    """Chunks that it was asked for and that are not in place, in the order of asking."""


class ChunkPool:
    """The chunks that are not there yet, and who owes which; empty until `fill`.

    Args:
        sources: Who may take.
    """

    def __init__(self, sources: Iterable[PeerId] = ()) -> None:
        self._shares = {source: _Share() for source in sources}
        self._pending: deque[int] = deque()
        self._done: bytes | bytearray = b""

    def fill(self, done: bytes | bytearray) -> None:
        """Begin with all chunks that are not done.

        Args:
            done: For each chunk, 1 once it is in place; read again whenever that matters.
        """
        self._done = done
        self._pending = deque(index for index, is_done in enumerate(done) if not is_done)

    def join(self, source: PeerId) -> None:
        """Let one more source take."""
        self._shares[source] = _Share()

    def leave(self, source: PeerId) -> None:
        """Let a source that gave back what it owed take no more."""
        self._shares.pop(source, None)

    def take(self, source: PeerId) -> list[int]:
        """The next run of chunks to ask ``source`` for; at the end, some that another still owes; empty for none."""
        share = self._shares[source]
        # Smaller and smaller towards the end, so that all sources finish together.
        limit = min(share.span, max(1, len(self._pending) // (2 * len(self._shares))))
        run: list[int] = []
        while self._pending and len(run) < limit and (not run or self._pending[0] == run[-1] + 1):
            run.append(self._pending.popleft())
        if not run:
            run = self._steal(share)
        share.owed.extend(run)
        return run

    def settle(self, source: PeerId, index: int) -> None:
        """Note that ``source`` delivered a chunk; also one that it did not owe."""
        share = self._shares[source]
        if index in share.owed:
            share.owed.remove(index)

    def adapt(self, source: PeerId, seconds: float) -> None:
        """Fit the length of the next runs to how long the last one of ``source`` took."""
        share = self._shares[source]
        if seconds < QUICK_RANGE_SECONDS:
            share.span = min(2 * share.span, MAX_RANGE_CHUNKS)
        elif seconds > SLOW_RANGE_SECONDS:
            share.span = max(1, share.span // 2)

    def give_back(self, source: PeerId) -> bool:
        """Take over what ``source`` owes and nobody else does; whether there is any of that. It begins anew."""
        share = self._shares[source]
        held = {index for other in self._shares.values() if other is not share for index in other.owed}
        lost = [index for index in share.owed if not self._done[index] and index not in held]
        share.owed.clear()
        share.span = 1
        if lost:
            self._pending = deque(sorted({*self._pending, *lost}))
        return bool(lost)

    def _steal(self, thief: _Share) -> list[int]:
        holders = Counter(index for share in self._shares.values() for index in share.owed)
        best: list[int] = []
        for share in self._shares.values():
            if share is not thief:
                owed = [index for index in share.owed if holders[index] < MAX_HOLDERS and not self._done[index]]
                best = max(best, owed, key=len)
        # From its end: what was asked for last arrives last.
        run: list[int] = []
        for index in sorted(best, reverse=True):
            if len(run) == min(thief.span, STOLEN_CHUNKS) or (run and index != run[-1] - 1):
                break
            run.append(index)
        return run[::-1]
