"""Properties of batches, and what a session can wait at most."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.serving.host.scheduler import (
    ALONE_ROWS,
    DECODING_SECONDS,
    FIRST_ROWS,
    HOLD_SHARE,
    MAX_DECODE_ROWS,
    MAX_PROMPT_ROWS,
    TARGET_STEPS,
    Costs,
    Waiting,
    hold_until,
    next_batch,
)

sessions = st.lists(
    st.one_of(
        st.builds(Waiting, st.integers(0, 1), st.just(False), st.floats(0, 100), st.booleans()),
        st.builds(Waiting, st.integers(2, 1000), st.just(True), st.floats(0, 100), st.booleans()),
    ),
    max_size=150,
)
seconds = st.floats(0, 1, allow_subnormal=False)


def measured(base: float, row: float) -> Costs:
    """Return the costs of batches that take ``base`` and ``row`` a row."""
    costs = Costs()
    for rows in (1, 2, 9, 64, 4) * 3:
        costs.note(rows, base + row * rows)
    return costs


all_costs = st.one_of(st.just(Costs()), st.builds(measured, seconds, seconds))


@given(sessions, all_costs, st.lists(st.floats(0, 100)))
def test_a_batch_has_each_session_once_with_rows_that_it_has(
    waiting: list[Waiting], costs: Costs, decoded_at: list[float]
) -> None:
    found = next_batch(waiting, costs, decoded_at, 100.0)
    batch = dict(found)
    assert len(batch) == len(found)
    assert bool(batch) == bool(waiting)
    assert all(0 <= rows <= waiting[index].rows for index, rows in batch.items())
    assert all(rows or not waiting[index].rows for index, rows in batch.items())


@given(sessions, all_costs, st.booleans())
def test_a_batch_is_bounded_and_serves_before_it_shadows(
    waiting: list[Waiting], costs: Costs, has_recent: bool
) -> None:
    batch = dict(next_batch(waiting, costs, [99.5] * has_recent, 100.0))
    served = [index for index, each in enumerate(waiting) if not each.is_shadow]
    decoding = [index for index in served if not waiting[index].is_prompt]
    decoded = sum(batch.get(index, 0) for index in decoding)
    assert decoded <= MAX_DECODE_ROWS
    if not served:
        assert len(batch) <= 1
        assert sum(batch.values()) <= MAX_PROMPT_ROWS
        return
    assert set(batch) <= set(served)
    is_decoding = has_recent or bool(decoding)
    assert sum(batch.values()) - decoded <= (MAX_PROMPT_ROWS if is_decoding else ALONE_ROWS)
    prompts = [index for index in served if waiting[index].is_prompt]
    if prompts:  # The one that waits longest gets rows whatever else there is.
        first = min(prompts, key=lambda index: waiting[index].since)
        assert batch[first] >= 1
    if decoding:
        assert min(decoding, key=lambda index: waiting[index].since) in batch


@given(seconds, seconds, st.integers(1, MAX_DECODE_ROWS))
def test_rows_of_prompts_delay_a_token_within_the_target(base: float, row: float, decoding: int) -> None:
    """The costs are found, and no further row would fit."""
    costs = measured(base, row)
    assert costs.row == pytest.approx(row, abs=1e-6)
    assert costs.base == pytest.approx(base, abs=1e-6)
    waiting = [*[Waiting(1, False, 0.0)] * decoding, Waiting(1000, True, 0.0)]
    rows = dict(next_batch(waiting, costs))[decoding]
    alone = base + row * decoding
    assert rows == 1 or alone + row * rows <= TARGET_STEPS * alone + 1e-5
    assert rows == MAX_PROMPT_ROWS or alone + row * (rows + 1) >= TARGET_STEPS * alone - 1e-5


def test_a_rows_cost_is_known_from_batches_of_several_sizes_and_kept() -> None:
    costs = Costs()
    for _ in range(9):
        costs.note(2, 0.05)
    assert costs.row is None
    assert costs.prompt_rows(2) == FIRST_ROWS
    costs.note(10, 0.13)
    assert costs.row == pytest.approx(0.01)
    for _ in range(500):
        costs.note(2, 0.05)
    assert costs.row == pytest.approx(0.01)
    assert costs.base == pytest.approx(0.03)


@pytest.mark.parametrize("is_shadow", [False, True])
def test_a_session_counts_as_decoding_while_its_next_token_may_be_on_its_way(is_shadow: bool) -> None:
    """Its row would come in the middle of a long batch; one that stopped an hour ago delays no prompt."""
    costs, prompt = measured(0.02, 0.005), [Waiting(1000, True, 0.0, is_shadow)]
    ((_, beside),) = next_batch(prompt, costs, [100.0, 0.0], 100.0 + 0.9 * DECODING_SECONDS)
    assert beside == costs.prompt_rows(1) < 5
    ((_, alone),) = next_batch(prompt, costs, [100.0, 0.0], 100.0 + 1.1 * DECODING_SECONDS)
    assert alone == (MAX_PROMPT_ROWS if is_shadow else ALONE_ROWS)


@given(st.floats(0.001, 1), st.floats(0.0001, 0.1), st.integers(1, 2000), st.integers(1, 9))
def test_a_prompt_s_batches_let_the_last_stage_end_soonest(base: float, row: float, number: int, later: int) -> None:
    """No other number of rows would, of those that a batch may have."""
    ((_, rows),) = next_batch([Waiting(number, True, 0.0)], measured(base, row), (), 0.0, later)

    def seconds(rows: int) -> float:
        return (number / rows + later) * (base + row * rows)

    least = min(map(seconds, range(MAX_PROMPT_ROWS, ALONE_ROWS + 1)))
    assert rows == number or seconds(rows) <= 1.001 * least
    assert rows >= min(number, MAX_PROMPT_ROWS)


def test_a_prompt_s_first_batches_are_short_where_later_stages_wait() -> None:
    prompt = [Waiting(1000, True, 0.0)]
    assert next_batch(prompt, Costs(), (), 0.0, 3) == [(0, MAX_PROMPT_ROWS)]
    assert next_batch(prompt, Costs()) == [(0, ALONE_ROWS)]


@given(st.lists(st.integers(1, 400), min_size=1, max_size=100), st.integers(0, 100))
def test_all_that_wait_are_computed_in_the_end(prompts: list[int], decoding: int) -> None:
    """Sessions that decode for ever starve neither each other nor any prompt."""
    rows, since = [*prompts, *[1] * decoding], [0.0] * (len(prompts) + decoding)
    turns = [0] * len(rows)
    for now in range(1, sum(-(-each // FIRST_ROWS) for each in prompts) + 2):
        left = [index for index, each in enumerate(rows) if each]
        batch = next_batch([Waiting(rows[index], rows[index] > 1, since[index]) for index in left], Costs())
        for place, (at, number) in enumerate(batch):
            index = left[at]
            turns[index] += 1
            since[index] = now + place / 1000  # Results are given out in the batch's order.
            if index < len(prompts):
                rows[index] -= number
    assert not any(rows[: len(prompts)])
    assert max(turns[len(prompts) :], default=0) - min(turns[len(prompts) :], default=0) <= 1 + len(prompts)


def test_drafts_beside_other_sessions_are_computed_a_few_at_a_time() -> None:
    drafted, other = Waiting(32, False, 0.0), Waiting(1, False, 0.0)
    assert next_batch([drafted], Costs()) == [(0, 32)]
    assert next_batch([drafted, other], Costs()) == [(0, 8), (1, 1)]
    assert next_batch([drafted], Costs(), [0.0, 0.0], DECODING_SECONDS / 2) == [(0, 8)]


@given(st.lists(st.floats(0, 100), min_size=1, max_size=20), st.integers(1, 5), all_costs)
def test_a_batch_waits_for_rows_that_come_together_and_only_a_part_of_its_time(
    since: list[float], missing: int, costs: Costs
) -> None:
    number = len(since)
    held = [Waiting(1, False, each, together=number + missing) for each in since]
    assert hold_until(held, costs) == min(since) + HOLD_SHARE * costs.base
    assert hold_until([each._replace(together=number) for each in held], costs) == 0.0
    others = [Waiting(30, True, 0.0, together=99), Waiting(1, False, 0.0, is_shadow=True, together=99)]
    assert hold_until(others, costs) == 0.0


@given(st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), min_size=1), all_costs)
def test_a_batch_of_prompts_alone_waits_for_decoding_rows_that_come_back_at_once(
    returning: list[tuple[float, float]], costs: Costs
) -> None:
    patience = HOLD_SHARE * costs.base
    prompt, soon = Waiting(30, True, 0.0), [at for at, usual in returning if usual < patience]
    assert hold_until([prompt], costs, returning) == (max(soon) + patience if soon else 0.0)
    assert hold_until([prompt, Waiting(1, False, 0.0)], costs, returning) == 0.0
    assert hold_until([Waiting(1, False, 0.0, is_shadow=True)], costs, returning) == 0.0
