"""A thousand seeded schedules of crashes, stalls, losses, cuts, partitions, joins, slow peers and liars.

What must hold in each of them is said and checked in `tests.support.schedules`. A failure names its seed and the
command that runs it again, event by event; ``make schedules`` runs as many other seeds as one likes.
"""

from __future__ import annotations

import pytest

from tests.support.schedules import Schedule, draw_schedule, find_problems

BLOCK = 50
SMALL_SEEDS = range(0, 1000, BLOCK)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("first", SMALL_SEEDS)
def test_small_swarms_keep_every_promise_whatever_befalls_them(first: int) -> None:
    problems = [problem for seed in range(first, first + BLOCK) for problem in find_problems(draw_schedule(seed, 2, 6))]
    assert problems == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("min_peers", "max_peers", "max_events", "seeds"),
    [
        (7, 12, 8, range(10_000, 10_012)),
        (7, 12, 8, range(10_012, 10_024)),
        (4, 6, 16, range(11_000, 11_012)),
        (13, 24, 5, range(12_000, 12_005)),
        (25, 40, 4, range(13_000, 13_002)),
    ],
)
def test_larger_swarms_and_longer_schedules_do_so_too(
    min_peers: int, max_peers: int, max_events: int, seeds: range
) -> None:
    schedules = [draw_schedule(seed, min_peers, max_peers, max_events) for seed in seeds]
    assert [problem for schedule in schedules for problem in find_problems(schedule)] == []


@pytest.mark.timeout(600)
def test_so_does_the_largest_group() -> None:
    events = ((3.0, "crash", 5), (1.0, "join", 0))
    assert find_problems(Schedule(14_000, (64, 64, 2), 64, events, slow=1)) == []
