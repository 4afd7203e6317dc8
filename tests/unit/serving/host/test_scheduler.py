"""Properties of batches, and what a session can wait at most."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.serving.host.scheduler import (
    ALONE_ROWS,
    LEAST_PREFILL_ROWS,
    MAX_DECODE_ROWS,
    TARGET_ROWS,
    Waiting,
    next_batch,
)

sessions = st.lists(
    st.one_of(
        st.builds(Waiting, st.integers(0, 1), st.just(False), st.floats(0, 100), st.booleans()),
        st.builds(Waiting, st.integers(2, 1000), st.just(True), st.floats(0, 100), st.booleans()),
    ),
    max_size=150,
)


@given(sessions)
def test_a_batch_has_each_session_once_with_rows_that_it_has(waiting: list[Waiting]) -> None:
    batch = dict(next_batch(waiting))
    assert len(batch) == len(next_batch(waiting))
    assert bool(batch) == bool(waiting)
    assert all(0 <= rows <= waiting[index].rows for index, rows in batch.items())
    assert all(rows or not waiting[index].rows for index, rows in batch.items())


@given(sessions)
def test_a_batch_is_bounded_and_serves_before_it_shadows(waiting: list[Waiting]) -> None:
    batch = dict(next_batch(waiting))
    served = [index for index, each in enumerate(waiting) if not each.is_shadow]
    decoding = [index for index in served if not waiting[index].is_prompt]
    decoded = sum(batch.get(index, 0) for index in decoding)
    assert decoded <= MAX_DECODE_ROWS
    if not served:
        assert len(batch) <= 1
        assert sum(batch.values()) <= TARGET_ROWS
        return
    assert set(batch) <= set(served)
    assert sum(batch.values()) <= (max(TARGET_ROWS, decoded + LEAST_PREFILL_ROWS) if decoding else ALONE_ROWS)
    prompts = [index for index in served if waiting[index].is_prompt]
    if prompts:  # The one that waits longest gets rows whatever else there is.
        first = min(prompts, key=lambda index: waiting[index].since)
        assert batch[first] >= min(waiting[first].rows, LEAST_PREFILL_ROWS)
    if decoding:
        assert min(decoding, key=lambda index: waiting[index].since) in batch


@given(st.lists(st.integers(1, 400), min_size=1, max_size=100), st.integers(0, 100))
def test_all_that_wait_are_computed_in_the_end(prompts: list[int], decoding: int) -> None:
    """Sessions that decode for ever starve neither each other nor any prompt."""
    rows, since = [*prompts, *[1] * decoding], [0.0] * (len(prompts) + decoding)
    turns = [0] * len(rows)
    for now in range(1, sum(-(-each // LEAST_PREFILL_ROWS) for each in prompts) + 2):
        left = [index for index, each in enumerate(rows) if each]
        batch = next_batch([Waiting(rows[index], rows[index] > 1, since[index]) for index in left])
        for place, (at, number) in enumerate(batch):
            index = left[at]
            turns[index] += 1
            since[index] = now + place / 1000  # Results are given out in the batch's order.
            if index < len(prompts):
                rows[index] -= number
    assert not any(rows[: len(prompts)])
    assert max(turns[len(prompts) :], default=0) - min(turns[len(prompts) :], default=0) <= 1 + len(prompts)
