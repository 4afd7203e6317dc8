"""A host's ledger of microbatches: each counts once, however often it arrives, and only once it is settled.

::

    admit ─▶ running ──counted──▶ counted ──settle──▶ settled ──▶ contributed
               │                     │
               └──────abandon────────┴─ close ─▶ taken out again

A repeated request (its previous caller died) joins a running microbatch, or gets the stored reply of a counted one. An
abandoned microbatch, or one unsettled when the round closes, is removed from the sum
(`p2ptrain.pipeline.stage.gradients`). Until then the ledger keeps the data for its removal.

The ledger does no I/O and no arithmetic.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from p2ptrain.pipeline.messages import FullError, MicrobatchId, OtherRoundError

Kept = TypeVar("Kept")


class State(Enum):
    """State of a microbatch on this host."""

    RUNNING = "running"
    COUNTED = "counted"
    SETTLED = "settled"


@dataclass
class Entry(Generic[Kept]):
    """One microbatch on this host; ``tokens`` is its weight.

    Attributes:
        num_bytes: Memory held for it until it is settled.
        kept: Data for its removal and for repeated replies; None unless it is counted.
        since: When it was counted, by the event loop's clock.
    """

    id: MicrobatchId
    samples: int
    tokens: int
    num_bytes: int
    state: State = State.RUNNING
    kept: Kept | None = None
    since: float = 0.0


@dataclass(frozen=True)
class Limits:
    """Bounds of a host's concurrent work.

    Attributes:
        max_bytes: Held for all unsettled microbatches.
        max_share: Of both bounds, for one trainer, so that none can fill a host; its first microbatch always fits.
    """

    max_bytes: int = 1 << 30
    max_running: int = 64
    max_share: float = 0.5


class Ledger(Generic[Kept]):
    """The ledger of one stage on one host. ``is_closed`` is True once the round admits nothing more."""

    def __init__(self, limits: Limits, round: int) -> None:
        self.round = round
        self.is_closed = False
        self._limits = limits
        self._entries: dict[MicrobatchId, Entry[Kept]] = {}
        self._bytes: Counter[str] = Counter()
        self._running: Counter[str] = Counter()

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_bytes(self) -> int:
        """Bytes held for unsettled microbatches."""
        return self._bytes.total()

    @property
    def num_running(self) -> int:
        return self._running.total()

    @property
    def num_unsettled(self) -> int:
        """Number of running and counted microbatches."""
        return sum(entry.state is not State.SETTLED for entry in self._entries.values())

    def samples(self, counted_after: float = 0.0) -> int:
        """Return the admitted samples, without those counted up to ``counted_after`` and still unsettled."""
        return sum(
            entry.samples
            for entry in self._entries.values()
            if entry.state is not State.COUNTED or entry.since > counted_after
        )

    @property
    def settled_samples(self) -> int:
        return sum(entry.samples for entry in self._settled)

    @property
    def settled_tokens(self) -> int:
        return sum(entry.tokens for entry in self._settled)

    @property
    def _settled(self) -> list[Entry[Kept]]:
        return [entry for entry in self._entries.values() if entry.state is State.SETTLED]

    def find(self, id: MicrobatchId) -> Entry[Kept] | None:
        return self._entries.get(id)

    def admit(self, id: MicrobatchId, samples: int, tokens: int, num_bytes: int) -> Entry[Kept]:
        """Add a running microbatch.

        Raises:
            OtherRoundError: It is not for the round in progress.
            FullError: The host has no capacity for it.
        """
        assert id not in self._entries
        self.check(id, num_bytes)
        entry = self._entries[id] = Entry(id, samples, tokens, num_bytes)
        self._running[id.trainer] += 1
        self._bytes[id.trainer] += num_bytes
        return entry

    def check(self, id: MicrobatchId, num_bytes: int) -> None:
        """Raise what `admit` would raise now."""
        if id.round != self.round or self.is_closed:
            is_late = id.round <= self.round
            when = "late" if is_late else "early"
            raise OtherRoundError(f"{id} came too {when}: this host is in round {self.round}", is_late)
        limits, mine = self._limits, id.trainer
        if self.num_running >= limits.max_running or self.num_bytes + num_bytes > limits.max_bytes:
            raise FullError(f"{self.num_running} microbatches are under way: come again, or go to another host")
        too_many = self._running[mine] + 1 > max(1.0, limits.max_share * limits.max_running)
        too_much = self._bytes[mine] and self._bytes[mine] + num_bytes > limits.max_share * limits.max_bytes
        if too_many or too_much:
            raise FullError(f"{self._running[mine]} microbatches of this trainer are under way: wait for some of them")

    def counted(self, id: MicrobatchId, kept: Kept, now: float) -> None:
        """Mark a running microbatch as counted: its gradients are in the sum."""
        entry = self._entries[id]
        assert entry.state is State.RUNNING
        entry.state, entry.kept, entry.since = State.COUNTED, kept, now
        self._running[id.trainer] -= 1

    def settle(self, id: MicrobatchId) -> bool:
        """Settle a microbatch; return whether it was counted here."""
        entry = self._entries.get(id)
        if entry is None or entry.state is State.RUNNING:
            return False
        if entry.state is State.COUNTED:
            self._bytes[id.trainer] -= entry.num_bytes
            entry.state, entry.kept = State.SETTLED, None
        return True

    def abandon(self, id: MicrobatchId) -> Kept | None:
        """Remove an unsettled microbatch; return the data for its removal from the sum, if it was counted."""
        entry = self._entries.get(id)
        if entry is None or entry.state is State.SETTLED:
            return None
        del self._entries[id]
        self._bytes[id.trainer] -= entry.num_bytes
        if entry.state is State.RUNNING:
            self._running[id.trainer] -= 1
            return None
        return entry.kept

    def close(self) -> list[Kept]:
        """Admit no more, and abandon all unsettled microbatches; return the data for their removal."""
        self.is_closed = True
        unsettled = [id for id, entry in self._entries.items() if entry.state is not State.SETTLED]
        return [kept for id in unsettled if (kept := self.abandon(id)) is not None]

    def settled(self) -> list[MicrobatchId]:
        """Return the microbatches settled in this round."""
        return [entry.id for entry in self._settled]

    def begin(self, round: int) -> None:
        """Begin a round after `close`; the caller accounts for the settled microbatches."""
        assert self.is_closed
        assert not self.num_unsettled
        self._entries.clear()
        self._bytes.clear()
        self._running.clear()
        self.round, self.is_closed = round, False


class ReceiveBuffer:
    """Bytes of tensors that are being received, or wait for their round.

    Their announced size is reserved before anything is received. Admitted microbatches are in the ledger instead, to
    which the same limits apply separately.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Bytes held for all senders."""
        return self._held.total()

    @contextmanager
    def hold(self, sender: str, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Reserve bytes until the end of the block, or until the yielded function is called.

        Raises:
            FullError: There is no room now.
        """
        limits, mine = self._limits, self._held[sender]
        if self.num_bytes + num_bytes > limits.max_bytes:
            raise FullError("too much is being sent here: come again, or go to another host")
        if mine and mine + num_bytes > limits.max_share * limits.max_bytes:
            raise FullError("too much of this peer's is on its way here: wait for some of it")
        self._held[sender] += num_bytes
        is_held = True

        def release() -> None:
            nonlocal is_held
            if is_held:
                is_held = False
                self._held[sender] -= num_bytes
                if not self._held[sender]:
                    del self._held[sender]

        try:
            yield release
        finally:
            release()
