"""Seeded schedules of crashes, stalls, losses, cuts, partitions, joins, slow peers and liars.

What must hold in each of them is said and checked in `tests.support.sim.schedules`. Fifty seeds are always the same,
fifty change with the commit (`tests.support.seeds`). A failure names its seed and the command that runs it again, event
by event. ``make test-all`` tries thousands; ``make schedules`` runs as many other seeds as one likes.
"""

from collections.abc import Sequence

import pytest

from tests.support.seeds import changing_seeds
from tests.support.sim.schedules import Schedule, draw_schedule, find_problems

SMALL = 2, 6, 6
KINDS = {"small": (SMALL, 40), "medium": ((7, 12, 8), 6), "long": ((4, 6, 16), 3), "large": ((13, 24, 5), 1)}
"""By kind of schedule: least peers, most peers, most events; and of fifty seeds, how many are of that kind."""
BLOCK = 10
"""Seeds in one test, so that two processes share the work evenly."""


def find_all(seeds: Sequence[int], bounds: tuple[int, int, int]) -> list[str]:
    return [problem for seed in seeds for problem in find_problems(draw_schedule(seed, *bounds))]


@pytest.mark.fault(1, 2, 15, 16, 17, 19, 20)
@pytest.mark.timeout(600)
@pytest.mark.parametrize("changes", [False, True], ids=["fixed", "changing"])
@pytest.mark.parametrize(
    ("kind", "block"), [(kind, block) for kind, (_, count) in KINDS.items() for block in range(-(-count // BLOCK))]
)
def test_swarms_keep_every_promise_whatever_befalls_them(kind: str, block: int, changes: bool) -> None:
    bounds, count = KINDS[kind]
    first = 10_000 * list(KINDS).index(kind)
    seeds = changing_seeds(kind, count) if changes else range(first, first + count)
    assert find_all(seeds[BLOCK * block :][:BLOCK], bounds) == []


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("bounds", "seeds"),
    [
        *((SMALL, range(first, first + 50)) for first in range(0, 1000, 50)),
        ((7, 12, 8), range(10_000, 10_024)),
        ((4, 6, 16), range(11_000, 11_012)),
        ((13, 24, 5), range(12_000, 12_005)),
        ((25, 40, 4), range(13_000, 13_002)),
    ],
)
def test_they_do_so_in_a_thousand_schedules(bounds: tuple[int, int, int], seeds: range) -> None:
    assert find_all(seeds, bounds) == []


@pytest.mark.timeout(600)
@pytest.mark.parametrize("members", [32, pytest.param(64, marks=pytest.mark.slow)])
def test_so_does_a_large_group(members: int) -> None:
    events = ((3.0, "crash", 5), (1.0, "join", 0))
    assert find_problems(Schedule(14_000, (members, members, 2), members, events, slow=1)) == []
