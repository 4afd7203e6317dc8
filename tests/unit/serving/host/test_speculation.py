"""Properties of drafts: what is drafted, what is accepted, and what drafts may lose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.serving.host.meter import Meter
from p2ptrain.serving.host.speculation import (
    ALIKE,
    MAX_CANDIDATES,
    MAX_MATCH,
    MAX_OTHER_ROWS,
    MAX_SAVED,
    STAKE,
    Account,
    Lookup,
    Speculation,
    accept,
)
from p2ptrain.serving.messages import MAX_DRAFTS
from p2ptrain.serving.sampling import Drawn

texts = st.lists(st.integers(0, 3), min_size=2, max_size=60)


@given(texts, texts)
def test_tokens_are_accepted_up_to_the_first_that_differs(drafted: list[int], drawn: list[int]) -> None:
    rest = iter(drawn)
    found = [token.id for token in accept(drafted, (Drawn(id, 0.0, ()) for id in rest))]
    assert found == drawn[: len(found)]
    assert len(found) + len(list(rest)) == len(drawn)  # No more were drawn.
    assert found[:-1] == drafted[: len(found) - 1]
    assert len(found) == len(drawn) or found[-1:] != drafted[len(found) - 1 : len(found)]


@given(texts, st.integers(1, 20), st.data())
def test_a_draft_follows_the_earlier_place_that_is_most_alike(ids: list[int], count: int, data: st.DataObject) -> None:
    """However the text grew: by one token at a time, or by many."""
    lookup, end = Lookup(), 0
    while end < len(ids):
        end = data.draw(st.integers(end + 1, len(ids)))
        found = lookup.draft(ids[:end], 0 if end < len(ids) else count)

    def alike(at: int, end: int) -> int:
        return sum(ids[at - back] == ids[end - 1 - back] for back in range(min(at + 1, MAX_MATCH)))

    for skipped, least in ((0, 2), (1, ALIKE)):
        end = len(ids) - skipped
        places = [at for at in range(end - 2, 0, -1) if ids[at - 1 : at + 1] == ids[end - 2 : end]][:MAX_CANDIDATES]
        best = max(places, key=lambda at: (alike(at, end), at), default=-1)
        if best >= 0 and alike(best, end) >= least:
            whole, first = [*ids, *found], best + 1 + skipped
            assert found == whole[first : first + len(found)]
            assert len(found) == min(count, alike(best, end) // 4 if skipped else 3 * alike(best, end))
            return
    assert found == []


def test_a_copy_goes_on_after_a_word_that_was_replaced() -> None:
    text = list(range(100, 160))
    assert Lookup().draft([*text, *text[:40], 7], 20) == text[41:49]
    assert Lookup().draft([*text, *text[:20], 7], 20) == []  # Too little is alike.
    assert Lookup().draft([*text, *text[:20], 7, *text[21:40], 8, *text[41:43]], 4) == text[43:47]


def test_a_look_up_is_bounded_however_often_a_pair_occurred() -> None:
    class Text(list[int]):
        reads = 0

        def __getitem__(self, key: object) -> int:  # type: ignore[override]
            self.reads += 1
            return super().__getitem__(key)  # type: ignore[call-overload, no-any-return]

    lookup, ids = Lookup(), Text([7] * 5000)
    lookup.draft(ids, 0)
    ids.append(7)
    ids.reads = 0
    assert lookup.draft(ids, 5) == [7] * 5
    assert ids.reads < 1200


@given(
    st.lists(st.tuples(st.booleans(), st.integers(0, MAX_DRAFTS)), max_size=40),
    st.integers(1, 5),
    st.floats(0.01, 1.0),
    st.floats(0.001, 1.0),
)
def test_text_that_drafts_do_not_fit_loses_a_hundredth_of_its_time(
    before: list[tuple[bool, int]], every: int, plain: float, row: float
) -> None:
    """And a few tokens' time at most after any success; ``row`` is a row's share of a wave."""
    account = Account()
    for has_match, accepted in before:
        drafted = account.choose() if has_match else 0
        account.note(drafted, min(accepted, drafted), plain * (1 + row * drafted))
    lost = total = 0.0
    for wave in range(300):
        drafted = 0 if wave % every else account.choose()
        account.note(drafted, 0, plain * (1 + row * drafted))
        lost += plain * row * drafted
        total += plain * (1 + row * drafted)
    assert lost <= STAKE * total + plain * (MAX_SAVED + row * MAX_DRAFTS)


def test_text_that_fits_is_drafted_far_and_other_text_hardly() -> None:
    fits, differs = Account(), Account()
    drafted = 0
    for _ in range(100):
        fits.note(each := fits.choose(), each, 0.4 + 0.004 * each)
        differs.note(each := differs.choose(), 0, 0.4 + 0.004 * each)
        drafted += each
    assert fits.choose() == MAX_DRAFTS
    assert 0 < drafted <= 105


def test_a_first_stage_leaves_drafts_to_a_client_that_has_some() -> None:
    meter = Meter()
    speculation, ids = Speculation(meter), [1, 2, 3] * 10
    for now in range(10):
        ids.append(ids[-3])
        if now in (5, 6):
            speculation.leave_to_client(4)
        assert bool(speculation.next_drafts(ids, 7, 0, float(now))) == (now not in (0, 5, 6))
    ids.append(ids[-3])
    speculation.leave_to_client(4)
    assert speculation.next_drafts(ids, 7, 0, 10.0) == []
    before = meter.drafted_tokens, meter.accepted_tokens
    speculation.leave_to_client(4)
    ids += [ids[-3]] * 3
    assert speculation.next_drafts(ids, 7, 0, 11.0) == []
    assert (meter.drafted_tokens, meter.accepted_tokens) == (before[0] + 4, before[1] + 2)


def test_nothing_is_drafted_beside_many_others_or_beyond_the_end() -> None:
    meter = Meter()
    speculation, ids = Speculation(meter), [1, 2, 3] * 10
    assert speculation.next_drafts(ids, None, 0, 0.0) == []
    for now in range(1, 30):
        ids.append(ids[-3])
        drafts = speculation.next_drafts(ids, 5, 0, float(now))
    assert drafts
    assert len(drafts) <= 5
    assert drafts == [ids[-3], ids[-2], ids[-1], ids[-3], ids[-2]][: len(drafts)]
    assert speculation.next_drafts(ids, 5, 0, 31.0) == []  # No new token came.
    ids += [*drafts, (ids + drafts)[-3]]
    assert speculation.next_drafts(ids, 5, MAX_OTHER_ROWS + 1, 31.0) == []
    assert meter.drafted_tokens >= meter.accepted_tokens >= len(drafts)
    ids.append(ids[-3])
    assert speculation.next_drafts(ids, 0, 0, 32.0) == []
