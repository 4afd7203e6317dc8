"""No page belongs to two sessions, and all are free again in the end."""

import numpy as np
import pytest

from p2ptrain.serving.host.pool import PagePool, PoolFullError, pages_for


def test_what_is_too_large_is_refused_and_takes_nothing() -> None:
    pool = PagePool(3)
    pages = pool.reserve(2)
    with pytest.raises(PoolFullError, match="needs 2 pages, and 1 of 3 are free"):
        pool.reserve(2)
    assert pool.num_free == 1
    pool.free(pages)
    pool.free(pages)
    assert pool.num_free == 3


def test_trimming_keeps_the_pages_of_earlier_positions() -> None:
    pool = PagePool(4)
    pages = pool.reserve(4)
    for position, kept in ((256, 4), (193, 4), (192, 3), (65, 2), (64, 1), (1, 1), (64, 1), (0, 0)):
        pool.trim(pages, position)
        assert pages.numbers == tuple(range(kept))
        assert pool.num_free == 4 - kept


def test_random_sessions_share_no_page_and_return_all() -> None:
    rng, pool, held = np.random.default_rng(0), PagePool(20), []
    for _ in range(2000):
        match rng.integers(3):
            case 0:
                try:
                    held.append(pool.reserve(int(rng.integers(6))))
                except PoolFullError:
                    assert pool.num_free < 5
            case 1 if held:
                pool.trim(held[rng.integers(len(held))], int(rng.integers(400)))
            case 2 if held:
                pool.free(held.pop(rng.integers(len(held))))
        numbers = [number for pages in held for number in pages.numbers]
        assert len(set(numbers)) == len(numbers) == pool.num_pages - pool.num_free
    for pages in held:
        pool.free(pages)
    assert sorted(pool.reserve(20).numbers) == list(range(20))


def test_positions_need_whole_pages() -> None:
    assert [pages_for(each) for each in (0, 1, 64, 65)] == [0, 1, 1, 2]
