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

from dataclasses import dataclass
from enum import Enum
from typing import Generic, TypeVar

from p2ptrain.pipeline.messages import MicrobatchId, OtherRoundError
from p2ptrain.pipeline.stage.budget import Amounts, Budget, Limits

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
        signature: The trainer's; another one with this id is another microbatch.
        kept: Data for its removal and for repeated replies; None unless it is counted.
        since: When it was counted, by the event loop's clock.
    """

    id: MicrobatchId
    samples: int
    tokens: int
    num_bytes: int
    signature: bytes
    state: State = State.RUNNING
    kept: Kept | None = None
    since: float = 0.0


class Ledger(Generic[Kept]):
    """The ledger of one stage on one host. ``is_closed`` is True once the round admits nothing more."""

    def __init__(self, limits: Limits, round: int) -> None:
        self.round = round
        self.is_closed = False
        most = Amounts(limits.max_running, limits.max_samples, limits.max_bytes)
        self._budget = Budget(most, limits.max_share, "are under way")
        self._unsettled: dict[MicrobatchId, Entry[Kept]] = {}
        self._settled: dict[MicrobatchId, Entry[Kept]] = {}

    def __len__(self) -> int:
        return len(self._unsettled) + len(self._settled)

    @property
    def num_bytes(self) -> int:
        """Bytes held for unsettled microbatches."""
        return self._budget.total.num_bytes

    @property
    def num_running(self) -> int:
        return self._budget.total.microbatches

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

    def admit(self, id: MicrobatchId, samples: int, tokens: int, num_bytes: int, signature: bytes) -> None:
        """Add a running microbatch.

        Raises:
            OtherRoundError: It is not for the round in progress.
            FullError: The host has no capacity for it.
        """
        assert self.find(id) is None
        self.check(id, samples, num_bytes)
        self._budget.add(id.trainer, Amounts(1, samples, num_bytes))
        self._unsettled[id] = Entry(id, samples, tokens, num_bytes, signature)

    def check(self, id: MicrobatchId, samples: int, num_bytes: int) -> None:
        """Raise what `admit` would raise now."""
        if id.round != self.round or self.is_closed:
            is_late = id.round <= self.round
            when = "late" if is_late else "early"
            raise OtherRoundError(f"{id} came too {when}: this host is in round {self.round}", is_late)
        self._budget.check(id.trainer, Amounts(1, samples, num_bytes))

    def counted(self, id: MicrobatchId, kept: Kept, now: float) -> None:
        """Mark a running microbatch as counted: its gradients are in the sum."""
        entry = self._unsettled[id]
        assert entry.state is State.RUNNING
        entry.state, entry.kept, entry.since = State.COUNTED, kept, now
        self._budget.remove(id.trainer, Amounts(1))

    def settle(self, id: MicrobatchId) -> bool:
        """Settle a microbatch; return whether it was counted here."""
        entry = self.find(id)
        if entry is None or entry.state is State.RUNNING:
            return False
        if entry.state is State.COUNTED:
            entry.state, entry.kept = State.SETTLED, None
            self._settled[id] = self._unsettled.pop(id)
            self._budget.remove(id.trainer, Amounts(0, entry.samples, entry.num_bytes))
        return True

    def abandon(self, id: MicrobatchId) -> Kept | None:
        """Remove an unsettled microbatch; return the data for its removal from the sum, if it was counted."""
        entry = self._unsettled.pop(id, None)
        if entry is None:
            return None
        self._budget.remove(id.trainer, Amounts(entry.state is State.RUNNING, entry.samples, entry.num_bytes))
        return entry.kept

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
