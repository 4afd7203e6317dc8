"""Who hosts what: the slowest stage is helped, nothing goes back and forth, and no stage is left alone."""

from dataclasses import replace
from itertools import product
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import ResourceError
from p2ptrain.pipeline.placement import Host, StageNeed, best_move, choose, counted, rates

NEEDS = st.lists(st.builds(StageNeed, work=st.floats(0.5, 4), memory=st.integers(0, 8)), min_size=1, max_size=4)


def hosts_of(stages: list[int], speeds: list[float], memory: list[int] | None = None) -> list[Host]:
    sizes = memory or [100] * len(stages)
    return [
        Host(f"peer{number}", stage, speed, size)
        for number, (stage, speed, size) in enumerate(zip(stages, speeds, sizes, strict=True))
    ]


def settled(needs: list[StageNeed], hosts: list[Host], limit: int = 1000) -> tuple[list[Host], int]:
    """Hosts after all moves, and how many those were."""
    for moves in range(limit):
        move = best_move(needs, hosts)
        if move is None:
            return hosts, moves
        assert move.source == next(host.stage for host in hosts if host.peer == move.peer)
        hosts = [replace(host, stage=move.target) if host.peer == move.peer else host for host in hosts]
    raise AssertionError("moves never end")


@given(NEEDS, st.data())
def test_moves_end_leave_no_stage_uncovered_and_never_slow_the_swarm(
    needs: list[StageNeed], data: st.DataObject
) -> None:
    stages = data.draw(st.lists(st.integers(0, len(needs) - 1), min_size=1, max_size=12))
    speeds = data.draw(st.lists(st.floats(0.1, 10), min_size=len(stages), max_size=len(stages)))
    memory = [max(8, needs[stage].memory) for stage in stages]
    hosts = hosts_of(stages, speeds, memory)
    after, _ = settled(needs, hosts)
    before_rates, after_rates = rates(needs, hosts), rates(needs, after)
    assert min(after_rates) >= min(before_rates) * (1 - 1e-9)
    assert all(rate > 0 for rate, before in zip(after_rates, before_rates, strict=True) if before > 0)


@pytest.mark.parametrize("seed", range(20))
def test_equal_hosts_end_up_as_well_as_any_placement_could(seed: int) -> None:
    random = Random(seed)
    needs = [StageNeed(random.choice([1.0, 2.0, 3.0])) for _ in range(3)]
    count = random.randrange(4, 9)
    hosts = hosts_of([0] * count, [1.0] * count)
    after, _ = settled(needs, hosts)
    best = max(
        min(rates(needs, hosts_of(list(placement), [1.0] * count))) for placement in product(range(3), repeat=count)
    )
    assert min(rates(needs, after)) >= best / 1.05


def test_a_newcomer_hosts_what_nobody_does_else_the_slowest() -> None:
    needs = [StageNeed(1.0), StageNeed(2.0), StageNeed(1.0)]
    chosen = choose(needs, hosts_of([0, 2], [1.0, 1.0]), 1.0, 100)
    assert (chosen.stage, chosen.reason) == (1, "nobody hosts it")
    chosen = choose(needs, hosts_of([0, 1, 1, 2], [5.0, 1.0, 1.0, 3.0]), 1.0, 100)
    assert (chosen.stage, chosen.reason) == (1, "it is the slowest, with 2 hosts")


def test_a_newcomer_hosts_only_what_it_has_room_for_and_is_told_what_fits_nowhere() -> None:
    needs = [StageNeed(1.0, 3_000_000_000), StageNeed(1.0, 1_000_000_000)]
    chosen = choose(needs, hosts_of([1], [9.0]), 1.0, 2_000_000_000)
    assert chosen.stage == 1
    chosen = choose(needs, hosts_of([0, 1], [1.0, 9.0]), 1.0, 2_000_000_000)
    assert chosen.reason == "it is the slowest that fits into 2.00 GB, with 1 host"
    with pytest.raises(ResourceError, match=r"smallest, stage 1, takes 1.00 GB"):
        choose(needs, [], 1.0, 500_000_000)


def test_the_last_host_of_a_stage_stays() -> None:
    needs = [StageNeed(1.0), StageNeed(1.0)]
    assert best_move(needs, hosts_of([0], [5.0])) is None
    move = best_move(needs, hosts_of([0, 0], [5.0, 1.0]))
    assert move is not None
    assert (move.peer, move.target) == ("peer1", 1)  # Either would do; the slower one is missed less.
    assert move.reason == "nobody hosts it; stage 0 keeps 1 host"


def test_many_hosts_of_a_stage_are_balanced_to_the_last_one() -> None:
    needs = [StageNeed(1.0), StageNeed(1.0)]
    move = best_move(needs, hosts_of([0] * 26 + [1] * 24, [1.0] * 50))
    assert move is not None
    assert (move.source, move.target) == (0, 1)
    assert best_move(needs, hosts_of([0] * 26 + [1] * 25, [1.0] * 51)) is None


def test_who_stays_counts_but_another_one_moves() -> None:
    needs = [StageNeed(1.0), StageNeed(1.0)]
    hosts = hosts_of([0, 0, 0, 1], [1.0, 1.0, 1.0, 1.0])
    bound = [replace(hosts[0], stays=True), *hosts[1:]]
    assert (first := best_move(needs, hosts)) is not None
    assert (second := best_move(needs, bound)) is not None
    assert (first.peer, second.peer) == ("peer0", "peer1")
    assert best_move(needs, [replace(host, stays=True) for host in hosts]) is None


def test_small_differences_move_nobody() -> None:
    needs = [StageNeed(1.0), StageNeed(1.0)]
    assert best_move(needs, hosts_of([0, 0, 1], [1.0, 0.04, 1.0])) is None
    assert best_move(needs, hosts_of([0, 0, 1], [1.02, 0.04, 1.0])) is None, "it helps, but hardly"
    assert best_move(needs, hosts_of([0, 0, 1], [1.2, 1.1, 1.0])) is not None


def going(host: Host, target: int) -> Host:
    """The host as others see it once it has said where it goes."""
    return replace(host, stage=target, leaves=host.stage, stays=True)


@given(st.sets(st.integers(0, 4), min_size=1))
def test_of_hosts_that_say_at_the_same_time_that_they_go_the_one_with_the_smallest_id_does(numbers: set[int]) -> None:
    needs = [StageNeed(1.0), StageNeed(1.0)]
    before = hosts_of([0, 0, 0, 0, 0, 1, 1, 1], [1.0] * 8)
    now = [going(host, 1) if number in numbers else host for number, host in enumerate(before)]
    goes = []
    for number in numbers:
        own = replace(before[number], speed=0.99)  # Each takes itself for the slowest.
        others = counted([host for host in now if host.peer != own.peer], before, own.peer)
        move = best_move(needs, [*others, own])
        if move is not None and move.peer == own.peer:
            goes.append(number)
    assert goes == [min(numbers)]


def test_who_was_on_its_way_before_counts_where_it_goes_whatever_its_id() -> None:
    hosts = hosts_of([0, 0, 1], [1.0] * 3)
    going_already = [going(hosts[0], 1), hosts[1], going(hosts[2], 0)]
    assert counted(going_already, going_already, "peer1") == going_already
    found = counted(going_already, hosts, "peer1")
    assert [host.stage for host in found] == [1, 0, 1], "what was said since by one with a larger id does not count"
    assert all(host.stays for host in found if host.peer != "peer1")
