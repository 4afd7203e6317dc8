"""A host's accounts of microbatches: each counts once, however often it comes, and only once it is settled.

::

    admit ─▶ running ──counted──▶ counted ──settle──▶ settled ──▶ contributed
               │                     │
               └──────abandon────────┴─ close ─▶ taken out again

A caller that repeats a hop (its own predecessor died) finds its microbatch running, and joins it, or counted, and gets
the answer that was kept. A microbatch whose caller is gone for good, or that is not settled when the round closes, is
taken out of the sum again (`p2ptrain.pipeline.stage.compute`); for that its input and what came back are kept until
then.

Pure accounts: no network, no arithmetic.
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
    """One microbatch on this host.

    Attributes:
        id: Which.
        samples: How many it has.
        tokens: Its weight.
        num_bytes: What is kept for it takes.
        state: How far it is.
        kept: What it takes to take it out again, and to answer once more; None while it runs.
        since: When it came to that state, by the event loop's clock.
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
    """Bounds of what a host takes on at a time.

    Attributes:
        max_bytes: Kept for all that is not settled.
        max_running: Microbatches that run.
        max_share: Of both for one trainer, so that one alone cannot fill a host; the first one always fits.
    """

    max_bytes: int = 1 << 30
    max_running: int = 64
    max_share: float = 0.5


class Ledger(Generic[Kept]):
    """The accounts of one stage on one host.

    Args:
        limits: Bounds.
        round: The round in progress.

    Attributes:
        round: As given; see `begin`.
        is_closed: Whether nothing more is admitted to it; see `close`.
    """

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
        """Kept for what is not settled."""
        return self._bytes.total()

    @property
    def num_running(self) -> int:
        """Microbatches that run."""
        return self._running.total()

    @property
    def num_unsettled(self) -> int:
        """Microbatches that run, or whose trainer has not said yet that it has the reply."""
        return sum(entry.state is not State.SETTLED for entry in self._entries.values())

    def samples(self, counted_after: float = 0.0) -> int:
        """Of all that is admitted and not given up, but for what was counted before a time and is not settled yet."""
        return sum(
            entry.samples
            for entry in self._entries.values()
            if entry.state is not State.COUNTED or entry.since > counted_after
        )

    @property
    def settled_samples(self) -> int:
        """Of what is settled in this round."""
        return sum(entry.samples for entry in self._settled)

    @property
    def settled_tokens(self) -> int:
        """The same in tokens."""
        return sum(entry.tokens for entry in self._settled)

    @property
    def _settled(self) -> list[Entry[Kept]]:
        return [entry for entry in self._entries.values() if entry.state is State.SETTLED]

    def find(self, id: MicrobatchId) -> Entry[Kept] | None:
        """Return the entry of a microbatch, if it is known."""
        return self._entries.get(id)

    def admit(self, id: MicrobatchId, samples: int, tokens: int, num_bytes: int) -> Entry[Kept]:
        """Take on a microbatch that is not known yet.

        Raises:
            OtherRoundError: It is not for the round in progress.
            FullError: There is no room for it.
        """
        assert id not in self._entries
        self.check(id, num_bytes)
        entry = self._entries[id] = Entry(id, samples, tokens, num_bytes)
        self._running[id.trainer] += 1
        self._bytes[id.trainer] += num_bytes
        return entry

    def check(self, id: MicrobatchId, num_bytes: int) -> None:
        """Raise what `admit` would raise now.

        Raises:
            OtherRoundError, FullError: As `admit`.
        """
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
        """Its gradients are in the sum now."""
        entry = self._entries[id]
        assert entry.state is State.RUNNING
        entry.state, entry.kept, entry.since = State.COUNTED, kept, now
        self._running[id.trainer] -= 1

    def settle(self, id: MicrobatchId) -> bool:
        """The trainer has its whole trail, with this host on it. Whether it was counted here; if so it stays."""
        entry = self._entries.get(id)
        if entry is None or entry.state is State.RUNNING:
            return False
        if entry.state is State.COUNTED:
            self._bytes[id.trainer] -= entry.num_bytes
            entry.state, entry.kept = State.SETTLED, None
        return True

    def abandon(self, id: MicrobatchId) -> Kept | None:
        """Forget a microbatch that failed, or that another host counted; what takes it out of the sum, if it is there.

        What is settled stays.
        """
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
        """Admit no more, and keep what is settled alone; what takes the rest out of the sum again."""
        self.is_closed = True
        unsettled = [id for id, entry in self._entries.items() if entry.state is not State.SETTLED]
        return [kept for id in unsettled if (kept := self.abandon(id)) is not None]

    def settled(self) -> list[MicrobatchId]:
        """Return the microbatches that are settled in this round."""
        return [entry.id for entry in self._settled]

    def begin(self, round: int) -> None:
        """Go on to another round after `close`; what was settled is the caller's to account for."""
        assert self.is_closed
        assert not self.num_unsettled
        self._entries.clear()
        self._bytes.clear()
        self._running.clear()
        self.round, self.is_closed = round, False


class ReceiveBuffer:
    """Accounts of what is being received, or waits for its round.

    A stranger has said no more than how much it is about to send, so nothing is received that there is no room for.
    What a host has taken on is in its ledger.

    Args:
        limits: As much again as the ledger may keep, and as much of it for one sender.
    """

    def __init__(self, limits: Limits) -> None:
        self._limits = limits
        self._held: Counter[str] = Counter()

    @property
    def num_bytes(self) -> int:
        """Held for all."""
        return self._held.total()

    @contextmanager
    def hold(self, sender: str, num_bytes: int) -> Iterator[Callable[[], None]]:
        """Room for so many bytes, until the end of the block or until the function that it gives is called.

        Raises:
            FullError: There is none now.
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
