"""Sites' measurements pool to the measurement of all their samples, which stay where they are."""

import math
import statistics

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.network.records.evaluation import Evaluation, pooled
from p2ptrain.network.schema import from_wire, to_wire
from p2ptrain.training.evaluate import mean_and_error

VALUES = st.floats(-100, 100)
SITES = st.lists(
    st.sampled_from([1, 2, 4, 8]).flatmap(lambda size: st.lists(VALUES, min_size=size, max_size=size)),
    min_size=1,
    max_size=6,
)


def _of(values: list[float], metric: str = "loss", round: int = 3) -> Evaluation:
    found = Evaluation.of(metric, round, *mean_and_error(values), len(values))
    assert found is not None
    return found


@given(SITES)
def test_the_pooled_mean_is_that_of_all_samples(sites: list[list[float]]) -> None:
    found = pooled([_of(values) for values in sites])
    assert found is not None
    every = [value for values in sites for value in values]
    assert found.mean == pytest.approx(statistics.fmean(every), abs=1e-6)
    assert found.samples == len(every)
    assert (found.error is None) == any(len(values) == 1 for values in sites)
    if found.error is not None:  # The variance of a mean over strata.
        parts = [(len(values) / len(every)) ** 2 * statistics.variance(values) / len(values) for values in sites]
        assert found.error == pytest.approx(math.sqrt(sum(parts)), abs=1e-6)
    assert from_wire(Evaluation, to_wire(found)) == found


@given(st.integers(2, 1 << 20))
def test_a_report_hides_one_sample_but_at_powers_of_two(samples: int) -> None:
    found = Evaluation.of("loss", 0, 1.0, 0.1, samples)
    assert found is not None
    assert found.samples <= samples < 2 * found.samples
    assert found.samples & (found.samples - 1) == 0


def test_the_metric_of_most_sites_is_pooled_from_the_earliest_round() -> None:
    sites = [_of([1.0, 2.0], round=7), _of([0.5, 0.7], "accuracy"), _of([3.0, 4.0], round=5)]
    found = pooled(sites)
    assert found is not None
    assert (found.metric, found.mean, found.round) == ("loss", 2.5, 5)
    assert pooled([]) is None


@pytest.mark.parametrize("mean", [math.nan, math.inf, 3e13, -3e13])
def test_a_mean_that_no_record_can_carry_is_not_reported(mean: float) -> None:
    assert Evaluation.of("loss", 0, mean, 0.1, 5) is None


@pytest.mark.parametrize("error", [math.inf, 1e20])
def test_an_error_that_no_record_can_carry_is_unknown(error: float) -> None:
    found = Evaluation.of("loss", 0, 1.0, error, 1)
    assert found is not None
    assert found.interval is None
