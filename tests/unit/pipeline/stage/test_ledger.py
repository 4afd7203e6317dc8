"""A host's accounts: at most once for each microbatch, bounded, and nothing counts that is not settled."""

from collections import Counter
from typing import NamedTuple

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2ptrain.errors import P2PTrainError
from p2ptrain.pipeline.messages import FullError, MicrobatchId, OtherRoundError
from p2ptrain.pipeline.stage.budget import Limits
from p2ptrain.pipeline.stage.ledger import Ledger, State

LIMITS = Limits(max_bytes=100, max_running=4, max_share=0.5)
TRAINERS, NUMBERS = st.sampled_from("abc"), st.integers(0, 5)
SIZES = st.integers(1, 9) | st.integers(1, 90)
TOKENS = 10


class Share(NamedTuple):
    number: int
    running: int
    bytes: int


class Accounts(RuleBasedStateMachine):
    """A sum of gradients beside the ledger that says what is in it."""

    def __init__(self) -> None:
        super().__init__()
        self.ledger: Ledger[MicrobatchId] = Ledger(LIMITS, 0)
        self.sum: Counter[MicrobatchId] = Counter()
        self.settled: set[MicrobatchId] = set()
        self.sizes: dict[MicrobatchId, tuple[int, int]] = {}
        self.counted_at: dict[MicrobatchId, float] = {}
        self.now = 0.0

    @rule(trainer=TRAINERS, number=NUMBERS, samples=st.integers(1, 3), size=SIZES, off=st.integers(-1, 1))
    def arrive(self, trainer: str, number: int, samples: int, size: int, off: int) -> None:
        id = MicrobatchId(trainer, self.ledger.round + off, number)
        if self.ledger.find(id) is not None:
            return
        before = len(self.ledger), self.ledger.num_bytes, self.ledger.num_running
        refusal: P2PTrainError | None = None
        try:
            self.ledger.admit(id, samples, TOKENS * samples, size, b"")
        except (OtherRoundError, FullError) as error:
            refusal = error
        if refusal is None:
            assert not off
            assert not self.ledger.is_closed
            self.sizes[id] = samples, size
            return
        assert (len(self.ledger), self.ledger.num_bytes, self.ledger.num_running) == before
        if isinstance(refusal, OtherRoundError):
            assert off or self.ledger.is_closed
            assert refusal.is_late == (off <= 0)
        else:
            own = self.of(trainer)
            fills_host = self.ledger.num_running >= 4 or self.ledger.num_bytes + size > 100
            assert fills_host or own.running >= 2 or (own.bytes and own.bytes + size > 50)

    def of(self, trainer: str) -> Share:
        """What a trainer has here that is not settled."""
        held = {id: size for id, (_, size) in self.sizes.items() if id.trainer == trainer and id not in self.settled}
        return Share(len(held), sum(not self.sum[id] for id in held), sum(held.values()))

    @rule(trainer=TRAINERS, number=NUMBERS, seconds=st.floats(0.1, 5.0))
    def count(self, trainer: str, number: int, seconds: float) -> None:
        id = MicrobatchId(trainer, self.ledger.round, number)
        entry = self.ledger.find(id)
        if entry is not None and entry.state is State.RUNNING:
            self.now += seconds
            self.sum[id] += 1
            self.counted_at[id] = self.now
            self.ledger.counted(id, id, self.now)

    @rule(trainer=TRAINERS, number=NUMBERS)
    def settle(self, trainer: str, number: int) -> None:
        id = MicrobatchId(trainer, self.ledger.round, number)
        assert self.ledger.settle(id) == (self.sum[id] == 1)
        if self.sum[id]:
            self.settled.add(id)

    @rule(trainer=TRAINERS, number=NUMBERS)
    def abandon(self, trainer: str, number: int) -> None:
        id = MicrobatchId(trainer, self.ledger.round, number)
        taken = self.ledger.abandon(id)
        assert (taken is not None) == (self.sum[id] == 1 and id not in self.settled)
        if taken is not None:
            self.sum[taken] -= 1
        if id not in self.settled:
            self.sizes.pop(id, None)

    @rule()
    def stop_admitting(self) -> None:
        self.ledger.is_closed = True

    @rule(steps=st.integers(1, 3))
    def close(self, steps: int) -> None:
        for taken in self.ledger.close():
            self.sum[taken] -= 1
        assert self.ledger.is_closed
        assert {id for id, times in self.sum.items() if times} == self.settled == set(self.ledger.settled())
        assert (self.ledger.num_running, self.ledger.num_bytes, self.ledger.num_unsettled) == (0, 0, 0)
        assert self.ledger.close() == []
        self.ledger.begin(self.ledger.round + steps)
        assert (len(self.ledger), self.ledger.is_closed) == (0, False)
        self.sum.clear()
        self.settled.clear()
        self.sizes.clear()

    @invariant()
    def nothing_counts_twice_and_the_accounts_are_right(self) -> None:
        assert set(self.sum.values()) <= {0, 1}
        assert self.settled <= {id for id, times in self.sum.items() if times}
        assert self.ledger.settled_samples == sum(self.sizes[id][0] for id in self.settled)
        assert self.ledger.settled_tokens == TOKENS * self.ledger.settled_samples
        assert self.ledger.num_unsettled == len(self.sizes) - len(self.settled)
        assert self.ledger.num_bytes == sum(size for id, (_, size) in self.sizes.items() if id not in self.settled)
        assert self.ledger.num_running == sum(not self.sum[id] for id in self.sizes)

    @invariant()
    def what_nobody_settles_stops_to_keep_others_out(self) -> None:
        since = self.now - 6.0
        stale = {id for id in self.sizes if self.sum[id] and id not in self.settled and self.counted_at[id] <= since}
        assert self.ledger.samples(since) == sum(n for id, (n, _) in self.sizes.items() if id not in stale)

    @invariant()
    def it_is_bounded(self) -> None:
        assert self.ledger.num_running <= LIMITS.max_running
        assert self.ledger.num_bytes <= LIMITS.max_bytes
        for trainer in "abc":
            own = self.of(trainer)
            assert own.running <= 2
            assert own.bytes <= 50 or own.number == 1, "the first one fits where there is room at all"


TestAccounts = Accounts.TestCase
TestAccounts.settings = settings(max_examples=150, stateful_step_count=40)
