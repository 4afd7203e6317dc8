"""Reports of what was served: percentiles from counts, sums over peers, and what strangers may claim."""

import math
import re
from bisect import bisect_left
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import IntegrityError
from p2ptrain.network.records.record import MAX_RECORD_BYTES, PeerRecord, seal_record
from p2ptrain.network.records.serving import BOUNDS, MAX_TOTAL, Latencies, ServedStage, ServingReport, ServingTotals
from tests.support.signers import NamedSigner
from tests.support.web.served import served
from tests.support.web.watched import trainer

SAMPLES = st.lists(st.floats(0, 5000), min_size=1, max_size=60)
SHARES = (0.0, 0.01, 0.5, 0.9, 0.95, 0.99, 1.0)


def nearest_rank(samples: list[float], share: float) -> float:
    """The percentile of raw samples by its definition: so many of them are no larger."""
    return sorted(samples)[max(0, math.ceil(share * len(samples)) - 1)]


def bucket(seconds: float) -> tuple[float, float]:
    """The bounds between which it lies."""
    index = bisect_left(BOUNDS, seconds)
    return (BOUNDS[index - 1] if index else 0.0, BOUNDS[index] if index < len(BOUNDS) else math.inf)


@given(SAMPLES)
def test_a_percentile_lies_between_the_same_bounds_as_that_of_the_raw_samples(samples: list[float]) -> None:
    latencies = Latencies.of(samples)
    for share in SHARES:
        low, high = bucket(nearest_rank(samples, share))
        found = latencies.quantile(share)
        assert found is not None
        assert low * (1 - 1e-9) <= found <= min(high, BOUNDS[-1]) * (1 + 1e-9)


@given(st.lists(SAMPLES, min_size=1, max_size=5))
def test_percentiles_of_the_sum_are_those_of_all_samples_together(peers: list[list[float]]) -> None:
    together = sum(map(Latencies.of, peers), Latencies())
    everything = Latencies.of(sample for samples in peers for sample in samples)
    assert together.counts == everything.counts
    assert together.seconds == pytest.approx(everything.seconds)
    assert [together.quantile(share) for share in SHARES] == [everything.quantile(share) for share in SHARES]


@given(SAMPLES, SAMPLES)
def test_the_difference_of_two_moments_is_what_came_between(before: list[float], more: list[float]) -> None:
    early, late = Latencies.of(before), Latencies.of(before) + Latencies.of(more)
    grown = late.since(early)
    assert grown is not None
    assert grown.counts == Latencies.of(more).counts
    assert grown.seconds == pytest.approx(sum(more), abs=1e-6 * (1 + sum(before)))
    assert early.since(late) is None, "what became less is no continuation"


def test_nothing_has_no_percentile_and_negative_times_are_none() -> None:
    assert Latencies().quantile(0.5) is None
    assert Latencies.of([-1.0]) == Latencies.of([0.0])
    assert Latencies.of([1e9]).quantile(0.5) == BOUNDS[-1]


def test_the_largest_report_leaves_room_for_the_rest() -> None:
    most = Latencies((MAX_TOTAL // 64,) * (len(BOUNDS) + 1), MAX_TOTAL / 64 * sum(BOUNDS))
    totals = ServingTotals(MAX_TOTAL, MAX_TOTAL, MAX_TOTAL, MAX_TOTAL, most, most)
    largest = trainer("a", serving=ServingReport(10**6, totals))

    def size(record: PeerRecord) -> int:
        return len(seal_record(b"s" * 32, record.to_payload(), 1, 1.0, NamedSigner("a")))

    assert size(largest) - size(trainer("a")) < MAX_RECORD_BYTES // 3
    assert PeerRecord.from_payload("a", largest.to_payload()) == largest


def changed(place: str, value: Any) -> dict[str, Any]:
    """The payload of a record in which one value of ``serving`` is another one."""
    payload = trainer("a", serving=served(1000.0)).to_payload()
    *way, last = ["serving", *place.split(".")]
    inner = payload
    for name in way:
        inner = inner[name]
    inner[last] = value
    return payload


COUNTS = [0] * (len(BOUNDS) + 1)


@pytest.mark.parametrize(
    ("place", "value", "words"),
    [
        ("sessions", 10**6 + 1, "<= 1000000"),
        ("sessions", True, "Expected `int`"),
        ("totals.requests", MAX_TOTAL + 1, "<= "),
        ("totals.failed_requests", 10**9, "more requests failed"),
        ("totals.requests", 10, "more first tokens than requests"),
        ("totals.generated_tokens", 1, "more tokens were timed"),
        ("totals.cached_tokens", 10**9, "more cached tokens"),
        ("totals.accepted_tokens", 1, "more drafts were accepted"),
        ("totals.first_token.seconds", float("nan"), ">= 0"),
        ("totals.first_token.seconds", float("inf"), "<= 1e"),
        ("totals.first_token.seconds", 0.0, "its counts rule out"),
        ("totals.token.seconds", 1e17, "its counts rule out"),
        ("totals.first_token.counts", COUNTS[1:], "length"),
        ("totals.first_token.counts", [*COUNTS, 0], "length"),
        ("totals.first_token.counts", [-1, *COUNTS[1:]], ">= 0"),
        ("totals.token.counts", [MAX_TOTAL + 1, *COUNTS[1:]], "<= "),
        ("totals.token", None, "Expected `object`"),
    ],
)
def test_what_cannot_be_is_refused_by_name(place: str, value: Any, words: str) -> None:
    with pytest.raises(IntegrityError, match=f"serving.*{re.escape(words)}"):
        PeerRecord.from_payload("a", changed(place, value))


@pytest.mark.parametrize("place", [9, 10])
def test_costs_of_a_served_stage_are_bounded_and_earlier_versions_tell_none(place: int) -> None:
    told: list[Any] = [0, 2, [], "exact-1/fp32", 512, 5, 1, "", 64, 0.01, 0.002]
    for number in (8, 9, 11, 12):  # A later version tells more.
        record = PeerRecord.from_payload("a", changed("served", [*told, 7][:number]))
        assert record.serving is not None
        assert record.serving.served == ServedStage(0, 2, (), "exact-1/fp32", 512, 5, 1, "", *told[8 : min(number, 11)])
    for value in (-0.1, 61.0, float("nan"), "1"):
        with pytest.raises(IntegrityError, match=r"serving\.served"):
            PeerRecord.from_payload("a", changed("served", [*told[:place], value, *told[place + 1 :]]))


def test_totals_that_go_down_in_one_place_are_no_continuation() -> None:
    late = served(1000.0).totals
    early = served(500.0).totals
    assert late.since(early) is not None
    for field in ("requests", "failed_requests", "generated_tokens", "prompt_tokens", "cached_tokens"):
        assert replace(late, **{field: getattr(early, field) - 1}).since(early) is None
