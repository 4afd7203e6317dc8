"""Numbers and times as people read them, whatever number it is."""

from collections.abc import Callable
from datetime import datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.status.formats import human_bytes, human_count, human_latency, human_seconds, iso, utc

SHOWN: dict[Callable[[float], str], dict[float, str]] = {
    human_bytes: {0: "0 B", 999: "999 B", 999.7: "1.0 kB", 1500: "1.5 kB", 99_960: "100 kB", 12_300_000: "12.3 MB",
                  999_700_000: "1.0 GB", 4.2e15: "4200.0 TB"},
    human_count: {0: "0", 940: "940", 12_345: "12.3k", 1_200_000: "1.2M"},
    human_seconds: {0.0: "0.0 s", 0.44: "0.4 s", 9.94: "9.9 s", 9.96: "10 s", 89.0: "89 s", 90.0: "2 min",
                    5399.0: "90 min", 5400.0: "1.5 h", 172_000.0: "47.8 h", 172_800.0: "2 days"},
    human_latency: {0.0: "0 s", 0.0001: "0.1 ms", 0.0034: "3.4 ms", 0.00996: "10 ms", 0.034: "34 ms",
                    0.0999: "0.10 s", 0.344: "0.34 s", 0.996: "1.0 s", 12.0: "12 s"},
}  # fmt: skip


@pytest.mark.parametrize("shown", SHOWN, ids=lambda shown: shown.__name__)
def test_numbers_have_two_or_three_digits_and_a_unit(shown: Callable[[float], str]) -> None:
    assert {number: shown(number) for number in SHOWN[shown]} == SHOWN[shown]


def test_times_are_shown_in_utc() -> None:
    assert utc(1_700_000_000.9) == "2023-11-14 22:13:20 UTC"
    assert iso(1_700_000_000.9) == "2023-11-14T22:13:20+00:00"


@given(st.floats(-1e18, 1e18))
def test_any_number_that_a_peer_may_claim_can_be_shown(number: float) -> None:
    assert utc(number).endswith(" UTC")
    assert datetime.fromisoformat(iso(number)).tzinfo is not None
    assert all(shown(abs(number)) for shown in (human_bytes, human_count, human_seconds))
