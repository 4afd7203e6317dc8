"""When a round of local steps closes: the sum of the steps, whole steps of slow peers, and peers that say nothing."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.timing.goal import ALIGNED, MOST_ROUNDS, SILENT_SECONDS, LocalSteps, StepProgress

EVERY = 32


def closing_of(seconds: dict[str, float], now: float = 0.0, every: int = EVERY) -> LocalSteps:
    """A round in which these peers began a step together, and have said so."""
    closing = LocalSteps(every)
    for peer, each in seconds.items():
        closing.report(peer, StepProgress(0, each, 0.0, now, True))
    closing.foresee(list(seconds), now)
    return closing


@pytest.mark.parametrize("speeds", [(1, 1, 1), (1, 1, 8), (1, 2, 4, 8), (1, 3, 3, 7, 20)])
def test_a_round_takes_as_long_as_the_swarm_needs_for_the_steps_of_all(speeds: tuple[float, ...]) -> None:
    closing = closing_of({f"p{index}": 1 / speed for index, speed in enumerate(speeds)})
    exact = EVERY * len(speeds) / sum(speeds)
    assert closing.at is not None
    assert abs(closing.at - exact) <= 0.5, "it ends within half a step of the slowest peer"
    assert closing.at == pytest.approx(round(closing.at)), "and with one of its steps"


def test_a_peer_alone_and_a_round_without_local_steps_are_told_nothing() -> None:
    for closing in (closing_of({"a": 1.0}), closing_of({"a": 1.0, "b": 1.0}, every=0)):
        assert closing.at is None
        assert not closing.is_due(1e9)


def test_a_peer_that_has_not_reported_yet_is_taken_for_one_like_the_others() -> None:
    closing = closing_of({"a": 1.0, "b": 1.0})
    closing.foresee(["a", "b", "c"], 0.0)
    assert closing.at == pytest.approx(EVERY)


@pytest.mark.parametrize("has_reported", [True, False])
def test_a_peer_that_says_nothing_counts_no_more(has_reported: bool) -> None:
    closing, now = LocalSteps(128), SILENT_SECONDS + 1.0
    if has_reported:
        closing.report("silent", StepProgress(0, 0.1, 0.0, 0.0, True))
    closing.report("a", StepProgress(int(now), 1.0, 0.0, now, True))
    closing.report("b", StepProgress(int(4 * now), 0.25, 0.0, now, True))
    closing.foresee(["a", "b", "silent"], now)
    assert closing.at == pytest.approx(round(2 * 128 / 5)), "neither its steps nor its share of the goal"


def test_peers_that_wait_for_the_end_do_not_put_it_off() -> None:
    closing = closing_of({"a": 1.0, "b": 1.0, "c": 0.125})
    told = closing.at
    assert told is not None
    for now in (told - 0.5, told - 0.25):
        closing.report("a", StepProgress(int(told), 1.0, 0.0, now, False))
        closing.report("b", StepProgress(int(told), 1.0, 0.0, now, False))
        closing.report("c", StepProgress(int(8 * now), 0.125, 0.0, now, True))
        closing.foresee("abc", now)
        assert closing.at == pytest.approx(told, abs=0.5)
    assert closing.is_due(told + 0.5)


def test_a_round_stays_with_the_step_that_peers_were_told_of() -> None:
    """A slow peer that stopped at its end would otherwise wait, and one that began another step would be late."""
    closing = closing_of({"slow": 1.0, "fast": 0.125}, every=8)
    told = closing.at
    assert told == pytest.approx(2.0)
    closing.report("slow", StepProgress(1, 1.1, 0.0, 1.1, True))
    closing.report("fast", StepProgress(7, 0.14, 0.0, 1.1, True))
    closing.foresee(["slow", "fast"], 1.1)
    assert closing.at == pytest.approx(2.2), "the end of the same step"


def test_a_trainer_that_reports_late_puts_the_end_off() -> None:
    """Until the last step of the slowest peer begins, nobody plans by the announced time."""
    closing = closing_of({"slow": 1.0, "fast": 0.125})
    assert closing.at == pytest.approx(7.0)
    closing.report("slow", StepProgress(1, 1.0, 0.0, 1.0, True))
    closing.report("fast", StepProgress(8, 0.125, 0.0, 1.0, True))
    closing.report("late", StepProgress(1, 1.0, 0.0, 1.0, True))
    closing.foresee(["slow", "fast", "late"], 1.0)
    assert closing.at == pytest.approx(10.0), "when the three have done their steps"


def test_a_peer_far_ahead_closes_the_round_before_it_drifts_away() -> None:
    seconds = {f"p{index}": 1.0 for index in range(20)} | {"fast": 0.01}
    closing = closing_of(seconds)
    assert closing.at == pytest.approx(MOST_ROUNDS * EVERY * 0.01, rel=ALIGNED)


def test_who_is_in_a_step_that_lasts_longer_than_the_others_would_wait_is_not_waited_for() -> None:
    closing = closing_of({"a": 1.0, "b": 1.0, "slow": 100.0})
    assert closing.absentees(["a", "b", "slow"], (), 40.0, 3.0) == {"slow"}
    assert closing.absentees(["a", "b", "slow"], (), 98.0, 3.0) == set()


def test_who_has_said_nothing_in_this_round_and_is_in_an_earlier_one_is_not_waited_for() -> None:
    closing = closing_of({"a": 1.0, "b": 1.0})
    assert closing.absentees(["a", "b", "c"], ("c",), 40.0, 3.0) == {"c"}
    assert closing.absentees(["a", "b", "c"], (), 40.0, 3.0) == set(), "it may be new, or its report on the way"


def test_a_stuck_step_is_foreseen_to_take_as_long_again_as_it_is_late() -> None:
    report = StepProgress(3, 1.0, 5.0, 10.0, True)
    assert report.ends_at(4) == pytest.approx(14.0)


@given(
    seconds=st.lists(st.floats(0.05, 50.0), min_size=2, max_size=8),
    every=st.integers(1, 64),
    elapsed=st.floats(0.0, 1.0),
)
def test_a_round_ends_in_time_however_uneven_the_peers_are(seconds: list[float], every: int, elapsed: float) -> None:
    closing = closing_of({f"p{index}": each for index, each in enumerate(seconds)}, every=every)
    exact = every * len(seconds) / sum(1 / each for each in seconds)
    assert closing.at is not None
    assert 0 < closing.at <= (1 + ALIGNED) * exact + 1e-9
    now = elapsed * closing.at
    closing.foresee(list(closing.reports), now)
    assert now >= SILENT_SECONDS or closing.at is not None
    assert closing.at is None or closing.at >= now


def test_steps_that_take_no_time_do_not_break_the_leader() -> None:
    closing = LocalSteps(128)
    closing.report("a", StepProgress(1, 1.0, 0.0, 0.0, True))
    closing.report("liar", StepProgress(1, 5e-324, 0.0, 0.0, True))
    closing.foresee(["a", "liar"], 1.0)
    assert closing.at is not None
    assert 1.0 <= closing.at <= EVERY
