"""Peers begin local batches so that the global batch is filled soon, and not overfilled."""

import heapq
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from p2ptrain.averaging.timing.goal import (
    HOLD_SECONDS,
    MAX_REPORTS,
    NO_PROGRESS_SECONDS,
    BatchProgress,
    GlobalBatch,
)

LOOK_AGAIN_SECONDS = 0.25


@dataclass
class Round:
    """Peers that compute batch after batch until the global batch is full, as events in time.

    Attributes:
        seconds: By peer: how long a local batch takes; infinite for one that is dead. Who waits tells it again and
            again.
        size: Samples in a local batch.
        foresight: Whether peers ask before each batch but the first.
    """

    seconds: dict[str, float]
    size: int
    target: int
    foresight: bool
    pace: dict[str, float] = field(default_factory=dict)
    batch: GlobalBatch = field(init=False)
    full_at: float = 0.0
    samples: dict[str, int] = field(default_factory=dict)

    def run(self) -> int:
        """Fill the batch; returns the samples that all have when whoever was computing has finished."""
        self.batch = GlobalBatch(self.target, self.pace)
        events = [(seconds, peer, True) for peer, seconds in self.seconds.items() if seconds < float("inf")]
        heapq.heapify(events)
        computing = dict.fromkeys((peer for _, peer, _ in events), True)
        while not self.batch.is_full:
            now, peer, done = heapq.heappop(events)
            assert now < 1e4, "it is never full"
            if done:
                self.samples[peer] = self.samples.get(peer, 0) + self.size
            self.batch.report(peer, BatchProgress(self.samples[peer], self.size, self.seconds[peer], now))
            computing[peer] = not self.foresight or self.batch.should_begin(peer, list(self.seconds), now)
            pause = self.seconds[peer] if computing[peer] else LOOK_AGAIN_SECONDS
            heapq.heappush(events, (now + pause, peer, computing[peer]))
            self.full_at = now
        in_hand = sum(self.size for other, busy in computing.items() if busy and other != peer)
        return sum(self.samples.values()) + in_hand


def test_equal_peers_that_need_one_batch_each_make_one_batch_each() -> None:
    speeds = {"a": 1.0, "b": 1.01, "c": 1.02}
    assert Round(speeds, 8, 24, foresight=True).run() == 24
    assert Round(speeds, 8, 24, foresight=False).run() == 40


def test_a_slow_peer_is_waited_for_two_batches_long_and_not_at_all_once_its_pace_is_known() -> None:
    speeds = {"a": 1.0, "b": 1.0, "slow": 100.0}
    unknown, known = (Round(speeds, 8, 24, foresight=True, pace=pace) for pace in ({}, dict(speeds)))
    unknown.run()
    known.run()
    assert unknown.full_at <= 4.0 + 2 * LOOK_AGAIN_SECONDS
    assert known.full_at == 2.0


def test_a_peer_that_takes_a_little_longer_than_usual_makes_nobody_overfill_the_batch() -> None:
    usual = {"a": 1.0, "b": 1.0, "c": 1.0}
    late = Round(usual | {"c": 2.5}, 8, 24, foresight=True, pace=usual)
    assert late.run() == 24


def test_a_dead_peer_holds_nobody_up_for_longer_than_two_batches() -> None:
    dead = Round({"a": 1.0, "b": 1.0, "dead": float("inf")}, 8, 24, foresight=True)
    dead.run()
    alone = Round({"a": 1.0, "b": 1.0}, 8, 24, foresight=False)
    alone.run()
    assert dead.full_at <= alone.full_at + 2.0 + 2 * LOOK_AGAIN_SECONDS


def test_who_is_alone_with_a_dead_peer_fills_the_batch() -> None:
    alone = Round({"a": 1.0, "dead": float("inf")}, 1, 16, foresight=True)
    alone.run()
    assert alone.full_at <= 18.0 + 2 * LOOK_AGAIN_SECONDS


def test_without_a_global_batch_everybody_computes_and_nothing_is_granted() -> None:
    batch = GlobalBatch(0)
    batch.report("a", BatchProgress(1000, 10, 1.0, 5.0))
    assert batch.should_begin("a", ["a", "b"], 5.0)
    assert not batch.is_full
    assert batch.grant("a", 0, 5, 0.0) == 0


def test_who_handed_in_computes_nothing_more() -> None:
    batch = GlobalBatch(24)
    batch.report("a", BatchProgress(8, 8, 1.0, 1.0))
    batch.report("b", BatchProgress(8, 8, 1.0, 1.0))
    assert not batch.should_begin("a", ["a", "b"], 1.0)
    batch.hand_in("b", 8)
    assert batch.should_begin("a", ["a", "b"], 1.0)


@given(
    seconds=st.lists(st.floats(0.05, 20.0), min_size=1, max_size=6),
    size=st.integers(1, 16),
    target=st.integers(1, 200),
)
def test_foresight_makes_no_more_and_costs_little_time(seconds: list[float], size: int, target: int) -> None:
    speeds = {f"peer{index}": one for index, one in enumerate(seconds)}
    wise, greedy = (Round(speeds, size, target, foresight=foresight) for foresight in (True, False))
    made, most = wise.run(), greedy.run()
    assert target <= made <= max(most, target + size * len(seconds))
    assert wise.full_at <= greedy.full_at + 2 * max(seconds) + 2 * LOOK_AGAIN_SECONDS


# Samples that peers are asked to take on


@dataclass
class Holder:
    """A peer that takes on what it is granted, and gets it done or loses it.

    Attributes:
        held: Samples that it has taken on, done or not.
        done: Of which are done.
        is_silent: Whether it says nothing any more.
    """

    held: int = 0
    done: int = 0
    is_silent: bool = False


class Grants(RuleBasedStateMachine):
    """Peers of one round that ask for samples, do them, give some up, and fall silent."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.batch = GlobalBatch(20)
        self.peers = {name: Holder() for name in "abcd"}

    @rule(name=st.sampled_from("abcd"), wanted=st.integers(0, 30), seconds=st.floats(0.0, 1.0))
    def ask(self, name: str, wanted: int, seconds: float) -> None:
        peer = self.peers[name]
        if peer.is_silent:
            return
        self.tick(seconds)
        self.say(name, wanted)

    @rule(name=st.sampled_from("abcd"), samples=st.integers(1, 5))
    def finish(self, name: str, samples: int) -> None:
        peer = self.peers[name]
        peer.done = min(peer.held, peer.done + samples)

    @rule(name=st.sampled_from("abcd"), samples=st.integers(1, 5))
    def give_up(self, name: str, samples: int) -> None:
        peer = self.peers[name]
        peer.held = max(peer.done, peer.held - samples)

    @rule(name=st.sampled_from("abcd"))
    def fall_silent(self, name: str) -> None:
        self.peers[name].is_silent = True
        self.tick(HOLD_SECONDS + 0.1)

    def tick(self, seconds: float) -> None:
        """Time passes, and those that live say every few seconds how far they are."""
        self.now += seconds
        for name, peer in self.peers.items():
            if not peer.is_silent:
                self.say(name, 0)

    def say(self, name: str, wanted: int) -> None:
        peer = self.peers[name]
        self.batch.report(name, BatchProgress(peer.done, 0, 0.0, self.now))
        granted = self.batch.grant(name, peer.held, wanted, self.now)
        assert 0 <= granted <= wanted
        peer.held += granted
        assert granted == wanted or self.taken() == 20, "it is given what there is room for"

    def taken(self) -> int:
        """Samples that reporting peers hold, and that silent ones had done at their last report."""
        silent = [name for name, peer in self.peers.items() if peer.is_silent]
        spoken_for = sum(peer.held for peer in self.peers.values() if not peer.is_silent)
        return spoken_for + sum(self.batch.reports[name].samples for name in silent if name in self.batch.reports)

    @invariant()
    def all_together_never_hold_more_than_the_target(self) -> None:
        assert self.taken() <= 20


TestGrants = Grants.TestCase
TestGrants.settings = settings(max_examples=150, stateful_step_count=30)


def test_what_cannot_be_remembered_is_not_granted() -> None:
    batch = GlobalBatch(10 * MAX_REPORTS)
    for number in range(MAX_REPORTS - 1):
        batch.grant(str(number), 1, 0, 0.0)
    assert batch.grant("the last one", 0, 1, 0.0) == 1
    assert batch.grant("one more", 0, 1, 0.0) == 0


def test_what_a_peer_holds_and_never_does_is_granted_to_others_whatever_it_reports() -> None:
    batch, now = GlobalBatch(12), 0.0
    while now < 2 * NO_PROGRESS_SECONDS:
        for name, done in (("hoards", 0), ("works", int(now // NO_PROGRESS_SECONDS))):
            batch.report(name, BatchProgress(done, 0, 0.0, now))
        held, wanted = (6, 0) if now % 10 else (0, 6)  # It gives all back now and then, to begin anew.
        batch.grant("hoards", held, wanted, now)
        batch.grant("works", 6, 0, now)
        granted = batch.grant("another", 0, 12, now)
        batch.grant("another", 0, 0, now)
        assert granted == (0 if now < NO_PROGRESS_SECONDS else 6)
        now += HOLD_SECONDS / 2
