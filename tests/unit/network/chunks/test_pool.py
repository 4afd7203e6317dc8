"""The pool hands out every chunk, fits runs to their sources, and loses nothing when a source is lost."""

import random

import pytest

from p2ptrain.network.chunks.messages import MAX_ASKED
from p2ptrain.network.chunks.pool import MAX_HOLDERS, SLOW_RUN_SECONDS, ChunkPool


def pool_of(sources: list[str]) -> ChunkPool:
    pool = ChunkPool(1, {})
    for source in sources:
        pool.join(source)
    return pool


def deliver(pool: ChunkPool, source: str, run: list[int], done: bytearray) -> None:
    """All of ``run`` arrives from ``source``."""
    for index in run:
        done[index] = 1
        pool.settle(source, index)


def test_nothing_is_handed_out_before_the_pool_is_filled() -> None:
    pool = pool_of(["a"])
    assert pool.take("a") == []
    assert not pool.give_back("a")


def test_quick_sources_get_longer_runs_up_to_what_may_be_asked_for_and_slow_ones_shorter() -> None:
    pool = pool_of(["a"])
    done = bytearray(1000)
    pool.fill(done)
    lengths = []
    for seconds in [0.1] * 6 + [2 * SLOW_RUN_SECONDS] * 6:
        run = pool.take("a")
        assert run == list(range(run[0], run[0] + len(run)))
        lengths.append(len(run))
        deliver(pool, "a", run, done)
        pool.adapt("a", seconds)
    assert lengths == [1, 2, 4, 8, MAX_ASKED, MAX_ASKED, MAX_ASKED, 8, 4, 2, 1, 1]


def test_runs_become_short_towards_the_end_so_that_all_finish_together() -> None:
    pool = pool_of(["a", "b"])
    done = bytearray(40)
    for _ in range(5):
        pool.adapt("a", 0.1)
    pool.fill(done)
    lengths = []
    while run := pool.take("a"):
        lengths.append(len(run))
        deliver(pool, "a", run, done)
    assert sum(lengths) == 40
    assert lengths[0] == 10
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[-3:] == [1, 1, 1]


def test_an_idle_source_steals_the_end_of_what_another_owes_but_no_chunk_has_three_holders() -> None:
    pool = pool_of(["a", "b", "c"])
    done = bytearray(6)
    pool.fill(done)
    for index in range(6):
        assert pool.take("a") == [index]
    assert pool.take("a") == [], "it does not steal from itself"
    pool.adapt("b", 0.1)
    pool.adapt("c", 0.1)
    assert pool.take("b") == [4, 5]
    assert pool.take("c") == [2, 3]
    assert pool.take("b") == [0, 1]
    assert pool.take("c") == []


def test_what_a_lost_source_owes_goes_back_unless_another_owes_it_too() -> None:
    pool = pool_of(["a", "b"])
    done = bytearray(2)
    pool.fill(done)
    assert [pool.take("a"), pool.take("a")] == [[0], [1]]
    assert pool.take("b") == [1]
    assert pool.give_back("a")
    assert pool.take("b") == [0]
    assert pool.give_back("b")
    assert [pool.take("a"), pool.take("a")] == [[0], [1]]
    done[0] = done[1] = 1
    assert not pool.give_back("a")


@pytest.mark.parametrize("seed", range(30))
def test_every_chunk_arrives_whatever_happens_as_long_as_one_source_lives(seed: int) -> None:
    chance = random.Random(seed)
    sources = ["a", "b", "c"]
    pool = pool_of(sources)
    done = bytearray(chance.choice([0, 0, 1]) for _ in range(chance.randrange(1, 200)))
    pool.fill(done)
    asked: dict[str, list[int]] = {source: [] for source in sources}
    for _ in range(5000):
        source = chance.choice(sources)
        if chance.random() < 0.05:
            pool.give_back(source)
            asked[source] = []
        elif asked[source] and chance.random() < 0.7:
            index = asked[source].pop(0)
            deliver(pool, source, [index], done)
            pool.adapt(source, chance.choice([0.1, 2.0, 10.0]))
        else:
            run = pool.take(source)
            assert len(run) <= MAX_ASKED
            assert not any(done[index] for index in run)
            asked[source] += run
        holders = [index for owed in asked.values() for index in owed]
        assert max(map(holders.count, holders), default=0) <= MAX_HOLDERS
        if all(done):
            return
    pytest.fail("chunks are missing")


def test_a_planned_chunk_comes_from_its_source_and_otherwise_from_the_first() -> None:
    pool = ChunkPool(1, {"a": [0, 3], "b": [1, 4], "c": [2, 5]})
    for source in "abc":
        pool.join(source)
    done = bytearray(6)
    pool.fill(done)
    assert [pool.take(source) for source in "abc"] == [[0, 3], [1, 4], [2, 5]]
    deliver(pool, "b", [1], done)
    pool.give_back("b")
    assert pool.take("b") == [4], "it is asked again"
    pool.give_back("b")
    pool.leave("b")
    assert pool.take("c") == []
    assert pool.take("a") == [4]
    pool.give_back("a")
    pool.leave("a")
    assert sorted(pool.take("c")) == [0, 3, 4]


def test_a_source_that_ends_after_its_receiver_was_closed_returns_nothing() -> None:
    pool, done = pool_of(["a"]), bytearray(4)
    pool.fill(done)
    assert pool.take("a")
    done.clear()
    assert not pool.give_back("a")
