"""A journal returns any range of its rows, whatever chunks they came in."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.serving.journal import Journal


def row(position: int) -> bytes:
    return position.to_bytes(4, "little") * 3


@given(st.lists(st.integers(1, 9), max_size=12), st.data())
def test_rows_are_those_that_were_appended(chunks: list[int], data: Any) -> None:
    journal = Journal(row_bytes=12)
    for count in chunks:
        ids = list(range(journal.end, journal.end + count))
        journal.append(ids, b"".join(map(row, ids)))
    assert journal.ids == list(range(sum(chunks)))
    first = data.draw(st.integers(0, journal.end))
    stop = data.draw(st.integers(first, journal.end))
    assert journal.rows(first, stop) == b"".join(map(row, range(first, stop)))


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 4), st.booleans()), max_size=20), st.data())
def test_rows_that_were_trimmed_are_replaced(steps: list[tuple[int, int, bool]], data: Any) -> None:
    """Also for a reader that sent them: the trims say from where on it sends again."""
    journal, sent, trims, other = Journal(row_bytes=12), 0, 0, list[int]()
    wanted: list[int] = []
    for number, (count, back, reads) in enumerate(steps, 1):
        end = max(journal.known, journal.end - back)
        journal.trim(end)
        ids = list(range(1000 * number, 1000 * number + count))
        wanted[end:] = ids
        journal.append(ids, b"".join(map(row, ids)), max(journal.known, data.draw(st.integers(0, journal.end))))
        if reads:
            sent = min(sent, *journal.trims[trims:], journal.end)
            other[sent:] = journal.ids[sent:]
            sent, trims = journal.end, len(journal.trims)
            assert other == wanted
        assert journal.ids == wanted
        assert journal.rows(0, journal.end) == b"".join(map(row, wanted))


def test_a_journal_of_ids_alone_has_no_rows() -> None:
    journal = Journal([3, 1])
    journal.append([4])
    assert (journal.ids, journal.end, journal.rows(0, 3)) == ([3, 1, 4], 3, b"")


def test_rows_of_another_size_are_refused_and_change_nothing() -> None:
    journal = Journal(row_bytes=12)
    with pytest.raises(ValueError, match="11 bytes for 1 rows of 12 bytes"):
        journal.append([1], bytes(11))
    assert journal.end == 0


def test_a_change_wakes_all_who_wait() -> None:
    async def main() -> None:
        journal = Journal()
        waiting = [asyncio.ensure_future(journal.changed.wait()) for _ in range(3)]
        await asyncio.sleep(0)
        journal.append([1])
        async with asyncio.timeout(1.0):
            await asyncio.gather(*waiting)
        assert not journal.changed.is_set()

    asyncio.run(main())
