"""Stages of a model: as even as contiguous blocks allow."""

from collections.abc import Sequence
from itertools import combinations, pairwise

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from p2ptrain.errors import ManifestError
from p2ptrain.models.blocks import Span
from p2ptrain.pipeline.partition import equal_work, explicit, within_memory

WORK = st.lists(st.integers(0, 50), min_size=1, max_size=9)


def heaviest(work: Sequence[int], spans: Sequence[Span]) -> int:
    return max(sum(work[slice(*span)]) for span in spans)


def least_possible(work: Sequence[int], num_stages: int) -> int:
    """By trying all cuts."""
    return min(
        heaviest(work, [Span(start, stop) for start, stop in pairwise([0, *cuts, len(work)])])
        for cuts in combinations(range(1, len(work)), num_stages - 1)
    )


@given(WORK, st.data())
def test_no_cuts_make_the_heaviest_stage_lighter(work: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(work)))
    spans = equal_work(work, num_stages)
    assert len(spans) == num_stages
    assert [number for span in spans for number in range(*span)] == list(range(len(work)))
    assert heaviest(work, spans) == least_possible(work, num_stages)


@given(WORK, st.integers(1, 200))
def test_as_few_stages_as_the_memory_allows(sizes: list[int], max_bytes: int) -> None:
    assume(max(sizes) <= max_bytes)
    spans = within_memory(sizes, max_bytes)
    assert heaviest(sizes, spans) <= max_bytes
    if len(spans) > 1:
        assert least_possible(sizes, len(spans) - 1) > max_bytes


def test_cuts_of_ones_own_are_taken_or_refused() -> None:
    assert explicit([2, 5], 7) == (Span(0, 2), Span(2, 5), Span(5, 7))
    assert explicit([], 3) == (Span(0, 3),)
    for cuts in ([0], [7], [3, 3], [4, 2], [-1]):
        with pytest.raises(ManifestError, match="from 1 to 6, in order"):
            explicit(cuts, 7)


@pytest.mark.parametrize("num_stages", [0, 4])
def test_as_many_stages_as_blocks_at_most(num_stages: int) -> None:
    with pytest.raises(ManifestError, match="3 blocks"):
        equal_work([1, 2, 3], num_stages)


def test_a_thousand_blocks_take_no_time() -> None:
    work = [100 + number * 37 % 91 for number in range(1026)]
    spans = equal_work(work, 64)
    assert heaviest(work, spans) < 1.1 * sum(work) / 64
