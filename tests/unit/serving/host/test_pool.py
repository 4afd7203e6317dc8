"""No page belongs to two sessions but as a prefix, none changes under its users, and all are free again in the end."""

import hashlib
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from p2ptrain.models.exact import PAGE
from p2ptrain.serving.host.pool import PageKey, PagePool, Pages, PoolFullError, pages_for
from p2ptrain.serving.messages import Version
from p2ptrain.serving.prefix import MAX_PREFIX_PAGES, next_hash, page_hashes


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


def test_a_hash_is_of_all_tokens_up_to_the_end_of_a_full_page() -> None:
    ids = [number % 50 for number in range(3 * PAGE + 5)]
    found = page_hashes(ids)
    assert len(found) == 3 == len(set(found))
    assert found[0] == next_hash(b"", ids[:PAGE]) == hashlib.sha256(np.array(ids[:PAGE], "<u4").tobytes()).digest()
    assert page_hashes([*ids[:PAGE], 49, *ids[PAGE + 1 :]])[0] == found[0]
    assert not set(page_hashes([49, *ids[1:]])) & set(found)
    assert len(page_hashes([1] * (MAX_PREFIX_PAGES + 2) * PAGE)) == MAX_PREFIX_PAGES


def keys(*numbers: int, round_: int = 1) -> list[PageKey]:
    version = Version(round_, (bytes(32),), "a")
    return [PageKey("client", b"", version, bytes([number]) * 32) for number in numbers]


def share(pool: PagePool, pages: Pages, index: int, key: PageKey) -> None:
    pool.share(pages, index, key, range(PAGE), key.hash)


def test_the_least_recently_used_prefix_page_goes_first_and_later_ones_before_earlier_ones() -> None:
    pool = PagePool(4)
    for numbers in ((1, 2), (3, 4), (1, 2)):
        pages = pool.reserve(2, keys(*numbers))
        for index, key in enumerate(keys(*numbers)):
            share(pool, pages, index, key)
        pool.free(pages)
    assert pool.num_free == len(pool._shared) == 4
    gone: list[int] = []
    while len(pool._shared):
        pool.reserve(1)
        left = [each for each in (1, 2, 3, 4) if keys(each)[0] in pool._prefixes]
        gone += [each for each in (1, 2, 3, 4) if each not in left and each not in gone]
    assert gone == [4, 3, 2, 1]


def test_a_prefix_makes_no_session_refused() -> None:
    pool = PagePool(3)
    pages = pool.reserve(3)
    for index, key in enumerate(keys(1, 2, 3)):
        share(pool, pages, index, key)
    other = pool.reserve(3, keys(1, 2, 3))
    assert other.numbers == pages.numbers
    pool.free(pages)
    with pytest.raises(PoolFullError):
        pool.reserve(1)
    pool.free(other)
    assert len(set(pool.reserve(3, keys(7)).numbers)) == 3
    assert len(pool._shared) == 0


class Schedule(RuleBasedStateMachine):
    """Sessions begin, share, trim and end, and versions go, in any order; a model knows each page's content."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = PagePool(7)
        self.held: list[tuple[list[PageKey], Pages]] = []
        self.content: dict[int, PageKey | None] = {}
        """Of each page of an open session: its prefix key once it is immutable."""

    @rule(
        chain=st.lists(st.integers(0, 1), max_size=3),
        others=st.integers(0, 2),
        round_=st.sampled_from([1, 1, 1, 2]),
        is_quick=st.booleans(),
    )
    def begin(self, chain: list[int], others: int, round_: int, is_quick: bool) -> None:
        wanted: list[PageKey] = []
        for number in chain:
            before = wanted[-1].hash if wanted else b""
            wanted.append(keys(0, round_=round_)[0]._replace(hash=hashlib.sha256(before + bytes([number])).digest()))
        needed, free = len(wanted) + others, self.pool.num_free
        try:
            pages = self.pool.reserve(needed, wanted)
        except PoolFullError:
            assert self.pool.num_free == free < needed
            return
        assert len(pages.numbers) == len(set(pages.numbers)) == needed
        for index, number in enumerate(pages.numbers):
            if index < len(pages.found):
                assert pages.found[index].key == wanted[index]
                assert (pages.found[index].number, pages.found[index].outputs) == (number, wanted[index].hash)
                assert self.content.get(number, wanted[index]) == wanted[index]
                self.content[number] = wanted[index]
            else:
                assert number not in self.content  # Nobody else has a page that this session will write to.
                self.content[number] = None
        self.held.append((wanted, pages))
        if is_quick:
            self._share(wanted, pages)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def share(self, data: Any) -> None:
        self._share(*self.held[data.draw(st.integers(0, len(self.held) - 1))])

    def _share(self, wanted: list[PageKey], pages: Pages) -> None:
        for index in range(min(len(wanted), len(pages.numbers))):
            share(self.pool, pages, index, wanted[index])
            number = pages.numbers[index]
            if number in self.pool._shared:
                self.content[number] = self.pool._shared[number].key
                assert self.content[number] == wanted[index]

    @precondition(lambda self: self.held)
    @rule(data=st.data(), kept=st.sampled_from([0, 0, 0, 1, 3]))
    def trim(self, data: Any, kept: int) -> None:
        index = data.draw(st.integers(0, len(self.held) - 1))
        pages = self.held[index][1]
        self.pool.trim(pages, kept * PAGE)
        if not pages.numbers:
            self.pool.free(pages)
            del self.held[index]
        users = {number for _, each in self.held for number in each.numbers}
        self.content = {number: key for number, key in self.content.items() if number in users}

    @rule(round_=st.integers(1, 8))
    def drop(self, round_: int) -> None:
        self.pool.drop(lambda key: key.version.round == round_)
        assert not any(key.version.round == round_ for key in self.pool._prefixes)

    @invariant()
    def every_page_is_counted_once(self) -> None:
        pool = self.pool
        users = [number for _, pages in self.held for number in pages.numbers]
        assert len(pool._free) == len(set(pool._free))
        assert not set(pool._free) & {*users, *pool._shared}
        assert len(pool._free) + len({*users, *pool._shared}) == pool.num_pages
        assert pool.num_free == pool.num_pages - len(set(users))
        for number, page in pool._shared.items():
            assert page.users == users.count(number)
        for number in set(users) - pool._shared.keys():
            assert users.count(number) == 1


Schedule.TestCase.settings = settings(max_examples=100, stateful_step_count=60)
TestSchedule = Schedule.TestCase
