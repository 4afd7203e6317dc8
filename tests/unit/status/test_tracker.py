"""How fast a swarm trains: over whole rounds, whatever they last."""

import pytest

from p2ptrain.status.tracker import RATE_SECONDS, TokenRate


def observed(rate: TokenRate, now: float, tokens: int) -> float | None:
    """The rate after one more look."""
    rate.update(now, tokens)
    return rate.tokens_per_second


@pytest.mark.parametrize("seconds", [0.2, 1.0, 40.0], ids=str)
def test_the_speed_is_the_average_over_whole_rounds_however_long_they_last(seconds: float) -> None:
    rate = TokenRate()
    assert observed(rate, 0.0, 0) is None
    assert observed(rate, 0.5 * seconds, 0) is None
    for number in range(1, 100):
        assert observed(rate, number * seconds, number * 1000) == pytest.approx(1000 / seconds)
        # Between two rounds nothing new is known, so nothing changes.
        assert observed(rate, (number + 0.9) * seconds, number * 1000) == pytest.approx(1000 / seconds)


def test_the_speed_forgets_what_is_long_ago_and_a_lineage_that_was_given_up() -> None:
    rate = TokenRate()
    for second in range(60):
        observed(rate, second, second * 1000)
    for second in range(60, 60 + int(RATE_SECONDS) + 1):
        last = observed(rate, second, 60_000 + (second - 60) * 10)
    assert last is not None
    assert last < 100
    assert observed(rate, 100.0, 5000) is None


def test_a_first_look_in_the_middle_of_a_round_is_no_end_of_one() -> None:
    rate = TokenRate()
    assert observed(rate, 9.9, 7000) is None
    assert observed(rate, 10.0, 8000) is None
    assert observed(rate, 20.0, 9000) == pytest.approx(100.0)
