"""Routes: work in proportion to throughput, spread evenly, and never to a host that failed."""

from collections import Counter
from contextlib import suppress
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.pipeline.routing.router import NoHostError, Router, StageRouter


def router(*hosts: str, seed: int = 0) -> StageRouter:
    made = StageRouter(0, Random(seed))
    made.update(dict.fromkeys(hosts, 1))
    return made


def measured(speeds: dict[str, float], seed: int = 0) -> StageRouter:
    """After so many measurements that they are all known."""
    made = router(*speeds, seed=seed)
    for _ in range(200):
        for host, speed in speeds.items():
            made.measured(host, speed, 1.0, 1.0)
    return made


@given(st.lists(st.floats(0.1, 10), min_size=1, max_size=6), st.integers(0, 99))
def test_work_is_given_in_proportion_to_throughput_at_all_times(speeds: list[float], seed: int) -> None:
    made = measured({str(number): speed for number, speed in enumerate(speeds)}, seed)
    given_to = Counter[str]()
    for total in range(1, 200):
        given_to[made.draw(1.0)] += 1
        for number, speed in enumerate(speeds):
            fair = total * speed / sum(speeds)
            assert abs(given_to[str(number)] - fair) <= len(speeds)


def test_hosts_are_measured_from_the_first_microbatch_on() -> None:
    made = router("a", "slow")
    counts = Counter[str]()
    for _ in range(300):
        host = made.draw(5.0)
        seconds = 5.0 if host == "a" else 10.0
        made.measured(host, 5.0, seconds, seconds)
        counts[host] += 1
    assert counts["a"] == pytest.approx(200, abs=5)
    assert made.throughputs() == pytest.approx({"a": 1.0, "slow": 0.5}, rel=0.1)


def test_an_unmeasured_host_is_taken_for_the_measured_ones_median() -> None:
    made = router("a", "b", "c", "new")
    assert made.throughputs() == dict.fromkeys(("a", "b", "c", "new"), 1.0)
    made.measured("b", 100.0, 20.0, 10.0)
    assert made.throughputs() == pytest.approx(dict.fromkeys(("a", "b", "c", "new"), 10.0))
    assert {made.draw(100.0) for _ in range(4)} == {"a", "b", "c", "new"}


def test_what_was_given_before_the_first_measurement_weighs_as_much_as_afterwards() -> None:
    """Work is measured in thousands of tokens a second, and before that in nothing."""
    made = router("a", "b")
    first = made.draw(1000.0)
    made.measured(first, 1000.0, 1.0, 1.0)
    counts = Counter(made.draw(1000.0) for _ in range(9))
    assert counts[first] == 4


def test_claims_count_as_far_as_those_of_the_others_and_links_take_nothing_from_a_stage() -> None:
    made = router("a", "b", "slow", "liar")
    for _ in range(99):
        for host, seconds in (("a", 1.0), ("b", 1.2), ("slow", 4.0)):
            made.measured(host, 1.0, seconds + 2.0, seconds)
        made.measured("liar", 1.0, 3.0, 1e-6)
    rates = made.throughputs()
    assert rates["a"] == pytest.approx(1.0, rel=0.2)
    assert rates["slow"] == pytest.approx(0.25, rel=0.01)
    assert rates["liar"] == pytest.approx(1.0, rel=0.2)


@pytest.mark.parametrize("seconds", [0.0, -3.0, 1e-12, 1e6])
def test_one_strange_measurement_does_not_decide(seconds: float) -> None:
    """A reply from memory comes at once, and one that waited for its round comes late."""
    made = measured({"a": 1.0, "b": 1.0})
    made.measured("a", 1.0, seconds, seconds)
    assert made.throughputs()["a"] == pytest.approx(1.0, rel=0.25)


def test_a_newcomer_does_not_make_up_for_the_time_before() -> None:
    made = router("a")
    for _ in range(1000):
        made.draw(1.0)
    made.update({"a": 2, "new": 1})
    counts = Counter(made.draw(1.0) for _ in range(10))
    assert counts["new"] == pytest.approx(5, abs=1)


def test_a_host_that_fails_counts_once_until_it_is_back() -> None:
    made = Router(2, Random(0))
    states = [{"a": 1, "b": 1}, {"a": 1}]
    made.update(states)
    for _ in range(3):
        made.failed("a", "went silent")
    made.failed("nobody", "went silent")
    assert made.failovers == 1
    made.update([{"a": 2}, {}])
    made.failed("a", "went silent")
    assert made.failovers == 2


def test_a_failed_host_is_out_until_it_publishes_again() -> None:
    made = router("a", "b")
    made.failed("a", "went silent")
    assert {made.draw(1.0) for _ in range(20)} == {"b"}
    made.update({"a": 1, "b": 2})  # The record that was there already.
    assert {made.draw(1.0) for _ in range(20)} == {"b"}
    made.update({"a": 2, "b": 2})
    assert {made.draw(1.0) for _ in range(20)} == {"a", "b"}
    made.update({"b": 3})
    assert made.hosts == ("b",)


def test_who_is_out_of_the_question_is_not_drawn_and_loses_nothing() -> None:
    made = router("a", "b")
    assert {made.draw(1.0, without={"a"}) for _ in range(5)} == {"b"}
    assert [made.draw(1.0) for _ in range(4)] == ["a"] * 4


def test_without_a_host_the_error_names_stage_and_failures_and_nothing_is_counted() -> None:
    made = Router(3, Random(0))
    alive = {"a": 1}
    made.update([alive, {"b": 1}, alive])
    assert made.draw(1.0) == ["a", "b", "a"]
    made.failed("b", "cannot be dialled")
    given = [host.virtual_time for host in made.stages[0]._hosts.values()]
    with pytest.raises(NoHostError, match=r"stage 1 has no host \(b cannot be dialled\)") as caught:
        made.draw(1.0)
    assert caught.value.stage == 1
    assert [host.virtual_time for host in made.stages[0]._hosts.values()] == given
    made.update([alive, {"b": 2, "c": 1}, alive])
    assert {made.draw(1.0)[1] for _ in range(4)} == {"b", "c"}


def test_what_is_under_way_does_not_gather_at_a_host_that_is_slower_than_believed() -> None:
    made = router("a", "slow")
    for _ in range(100):
        host = made.draw(1.0)
        made.note_under_way(host, 1.0)
        if host == "a":
            made.note_under_way(host, -1.0)
    assert made.draw(1.0) == "a"
    made.note_under_way("slow", -2.0)
    assert made.draw(1.0) == "slow", "it has done what it had"


def test_a_route_is_under_way_until_its_block_ends_however_that_ends() -> None:
    made = Router(2, Random(0))
    made.update([{"a": 1, "b": 1}, {"c": 1}])
    with suppress(RuntimeError), made.sending(["a", "c"], 5.0):
        assert {made.stages[0].draw(1.0) for _ in range(9)} == {"b"}
        raise RuntimeError
    assert made.stages[0].draw(1.0) == "a"


def test_a_host_that_came_back_does_not_owe_what_was_under_way_before() -> None:
    made = Router(1, Random(0))
    made.update([{"a": 1, "b": 1}])
    with made.sending(["a"], 5.0):
        made.failed("a", "went silent")
        made.update([{"a": 2, "b": 1}])
    counts = Counter(made.draw(1.0)[0] for _ in range(10))
    assert counts["a"] == pytest.approx(5, abs=1)
