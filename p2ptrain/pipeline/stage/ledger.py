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
from contextlib import ExitStack, contextmanager
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
        self._unsettled: dict[MicrobatchId, Entry[Kept]] = {}
        self._settled: dict[MicrobatchId, Entry[Kept]] = {}

    def __len__(self) -> int:
        return len(self._unsettled) + len(self._settled)

    @property
    def num_bytes(self) -> int:
        """Bytes held for unsettled microbatches."""
        return sum(entry.num_bytes for entry in self._unsettled.values())

    @property
    def num_running(self) -> int:
        return sum(entry.state is State.RUNNING for entry in self._unsettled.values())

    @property
    def num_unsettled(self) -> int:
        """Number of running and counted microbatches."""
        return len(self._unsettled)

    def samples(self, counted_after: float = 0.0) -> int:
        """Return the admitted samples, without those counted up to ``counted_after`` and still unsettled."""
        return self.settled_samples + sum(
            entry.samples
            for entry in self._unsettled.values()
            if entry.state is State.RUNNING or entry.since > counted_after
        )

    @property
    def settled_samples(self) -> int:
        return sum(entry.samples for entry in self._settled.values())

    @property
    def settled_tokens(self) -> int:
        return sum(entry.tokens for entry in self._settled.values())

    def find(self, id: MicrobatchId) -> Entry[Kept] | None:
        return self._unsettled.get(id) or self._settled.get(id)

    def admit(self, id: MicrobatchId, samples: int, tokens: int, num_bytes: int) -> None:
        """Add a running microbatch.

        Raises:
            OtherRoundError: It is not for the round in progress.
            FullError: The host has no capacity for it.
        """
        assert self.find(id) is None
        self.check(id, num_bytes)
        self._unsettled[id] = Entry(id, samples, tokens, num_bytes)

    def check(self, id: MicrobatchId, num_bytes: int) -> None:
        """Raise what `admit` would raise now."""
        if id.round != self.round or self.is_closed:
            is_late = id.round <= self.round
            when = "late" if is_late else "early"
            raise OtherRoundError(f"{id} came too {when}: this host is in round {self.round}", is_late)
        limits = self._limits
        if self.num_running >= limits.max_running or self.num_bytes + num_bytes > limits.max_bytes:
            raise FullError(f"{self.num_running} microbatches are under way: come again, or go to another host")
        own = [entry for entry in self._unsettled.values() if entry.id.trainer == id.trainer]
        own_running = sum(entry.state is State.RUNNING for entry in own)
        own_bytes = sum(entry.num_bytes for entry in own)
        too_many = own_running + 1 > max(1.0, limits.max_share * limits.max_running)
        too_much = own_bytes and own_bytes + num_bytes > limits.max_share * limits.max_bytes
        if too_many or too_much:
            raise FullError(f"{own_running} microbatches of this trainer are under way: wait for some of them")

    def counted(self, id: MicrobatchId, kept: Kept, now: float) -> None:
        """Mark a running microbatch as counted: its gradients are in the sum."""
        entry = self._unsettled[id]
        assert entry.state is State.RUNNING
        entry.state, entry.kept, entry.since = State.COUNTED, kept, now

    def settle(self, id: MicrobatchId) -> bool:
        """Settle a microbatch; return whether it was counted here."""
        entry = self.find(id)
        if entry is None or entry.state is State.RUNNING:
            return False
        if entry.state is State.COUNTED:
            entry.state, entry.kept = State.SETTLED, None
            self._settled[id] = self._unsettled.pop(id)
        return True

    def abandon(self, id: MicrobatchId) -> Kept | None:
        """Remove an unsettled microbatch; return the data for its removal from the sum, if it was counted."""
        entry = self._unsettled.pop(id, None)
        return entry.kept if entry is not None else None

    def close(self) -> list[Kept]:
        """Admit no more, and abandon all unsettled microbatches; return the data for their removal."""
        self.is_closed = True
        return [kept for id in list(self._unsettled) if (kept := self.abandon(id)) is not None]

    def settled(self) -> list[MicrobatchId]:
        """Return the microbatches settled in this round."""
        return list(self._settled)

    def begin(self, round: int) -> None:
        """Begin a round after `close`; the caller accounts for the settled microbatches."""
        assert self.is_closed
        assert not self._unsettled
        self._settled.clear()
        self.round, self.is_closed = round, False


class ReceiveBuffer:
    """Bytes of tensors that are being received, or wait for their round.

    Their announced size is reserved before anything is received. Admitted microbatches are in the ledger instead, to
    which the same limits apply separately.
    """

    def __init__(self, limits: Limits) -> None:
        self.held: Counter[str] = Counter()
        """Bytes by sender."""
        self._limits = limits

    @contextmanager
    def hold(self, sender: str, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Reserve bytes until the end of the block, or until the yielded function is called.

        Raises:
            FullError: There is no room now.
        """
        limits, mine = self._limits, self.held[sender]
        if self.held.total() + num_bytes > limits.max_bytes:
            raise FullError("too much is being sent here: come again, or go to another host")
        if mine and mine + num_bytes > limits.max_share * limits.max_bytes:
            raise FullError("too much of this peer's is on its way here: wait for some of it")
        self.held[sender] += num_bytes
        with ExitStack() as reservation:
            reservation.callback(self._release, sender, num_bytes)
            yield reservation.close

    def _release(self, sender: str, num_bytes: int) -> None:
        self.held[sender] -= num_bytes
        if not self.held[sender]:
            del self.held[sender]
