"""How long a round waits, for whom."""

from __future__ import annotations

import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.timing.deadlines import (
    attempt_seconds,
    beat_seconds,
    leader_dial_seconds,
    least_mask,
    patience_seconds,
    quiet_seconds,
    quorum_of_others,
)
from p2ptrain.manifest import AveragingSpec

SPEC = AveragingSpec(grace_seconds=3.0, round_seconds=60.0)
durations = st.lists(st.floats(0.01, 50.0), min_size=3, max_size=16)


@pytest.mark.parametrize(("others", "quorum", "expected"), [(1, 0.5, 1), (2, 0.5, 1), (3, 0.5, 2), (7, 0.5, 4),
                                                            (3, 0.01, 1), (3, 1.0, 3), (0, 0.5, 0)])  # fmt: skip
def test_a_quorum_of_the_others_has_at_least_one_of_them(others: int, quorum: float, expected: int) -> None:
    assert quorum_of_others(others, quorum) == expected


@given(st.integers(1, 64), st.floats(0.01, 1.0))
def test_an_honest_owner_that_refuses_a_minority_counts_enough(members: int, quorum: float) -> None:
    complete = 1 + quorum_of_others(members - 1, quorum)
    assert least_mask(members, quorum) <= complete
    if quorum >= 0.5:
        assert members < 3 or least_mask(members, quorum) >= members / 2, "nobody decides a round alone"


@given(st.floats(0, 1e4), st.floats(0, 600))
def test_the_rest_costs_at_most_a_fifth_more_and_the_grace_period(until_quorum: float, grace: float) -> None:
    assert until_quorum + patience_seconds(until_quorum, grace) == pytest.approx(1.2 * until_quorum + grace)


def test_a_beat_may_be_later_where_the_link_or_the_machine_is_slow() -> None:
    usual = quiet_seconds(8.0, 0.5, 0.01, 0.0)
    assert usual == beat_seconds(8.0) + 0.5
    assert quiet_seconds(8.0, 0.5, 1.0, 0.0) == usual + 3.5
    assert quiet_seconds(8.0, 0.5, 0.01, 2.0) == usual + 5.5


@given(durations)
def test_an_attempt_as_long_as_the_usual_ones_is_never_cut_short(history: list[float]) -> None:
    usual = statistics.median(history)
    assert min(SPEC.round_seconds, 2 * usual) <= attempt_seconds(history, SPEC) <= SPEC.round_seconds
    assert attempt_seconds(history[:2], SPEC) == SPEC.round_seconds, "the manifest's, without a history"
    assert attempt_seconds([1.0] * 8 + [40.0], SPEC) == attempt_seconds([1.0] * 9, SPEC), "whatever one outlier took"


@given(durations, st.floats(1.1, 5.0))
def test_slower_rounds_get_no_earlier_deadline(history: list[float], factor: float) -> None:
    assert attempt_seconds([factor * s for s in history], SPEC) >= attempt_seconds(history, SPEC) - 1e-9


def test_a_dial_of_a_leader_may_take_as_long_as_its_silence_or_longer_where_its_link_is_slow_or_unknown() -> None:
    assert leader_dial_seconds(3.0, None, 8.0) == 8.0
    assert leader_dial_seconds(3.0, 0.01, 8.0) < 3.0
    assert leader_dial_seconds(3.0, 1.0, 8.0) >= 4.0
    assert leader_dial_seconds(3.0, 60.0, 8.0) == 8.0
