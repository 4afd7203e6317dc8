"""Dicts that forget, buffers that are lent again, and what becomes of their memory."""

import gc
import re
from pathlib import Path

from p2ptrain.buffers import LEAST_LENT_BYTES, Bounded, Pool, new_buffer

PACKAGE = Path(__file__).resolve().parents[2] / "p2ptrain"
SIZE = 3 * LEAST_LENT_BYTES


def test_memory_comes_back_when_nothing_refers_to_it_any_more() -> None:
    pool = Pool()
    lent = pool.lend(SIZE)
    piece = lent[5:10]
    piece[:] = b"hello"
    del lent
    gc.collect()
    assert pool.kept_bytes == 0
    assert bytes(piece) == b"hello"
    del piece
    assert pool.kept_bytes == SIZE
    assert bytes(pool.lend(SIZE - 7)[5:10]) == b"hello"
    assert pool.kept_bytes == SIZE


def test_a_bounded_dict_drops_its_oldest_entry_and_a_set_one_is_the_newest() -> None:
    kept = Bounded[str, int](3)
    for key, value in zip("abcad", range(5), strict=True):
        kept[key] = value
    assert list(kept.items()) == [("c", 2), ("a", 3), ("d", 4)]
    kept.update({"e": 5, "f": 6})
    assert kept.setdefault("g", 7) == 7
    assert [*kept] == ["e", "f", "g"]


def test_nothing_else_drops_its_oldest_entries() -> None:
    allowed = {
        "buffers.py",
        "averaging/commit/broadcast.py",  # cancels what it drops
        "averaging/commit/round_log.py",  # limits of bytes, and by round
        "averaging/verification/evidence.py",  # keeps an entry's place as it drops its content
        "serving/host/pool.py",  # limited by pages
        "serving/host/service.py",  # another limit at the end
    }
    drops = re.compile(r"popitem\(last=False\)|(del|pop)\b.*next\(iter\(|_forget\(next")
    found = {str(path.relative_to(PACKAGE)) for path in PACKAGE.rglob("*.py") if drops.search(path.read_text())}
    assert found <= allowed


def test_two_buffers_never_share_memory() -> None:
    pool = Pool()
    pool.lend(SIZE).release()
    first, second = pool.lend(SIZE), pool.lend(SIZE)
    first[:], second[:] = bytes([1]) * SIZE, bytes([2]) * SIZE
    assert set(bytes(first)) == {1}
    assert set(bytes(second)) == {2}


def test_what_is_kept_is_bounded() -> None:
    pool = Pool(max_kept_bytes=2 * SIZE)
    lent = [pool.lend(SIZE) for _ in range(5)]
    lent.clear()
    assert pool.kept_bytes == 2 * SIZE


def test_the_memory_that_was_idle_longest_goes_first() -> None:
    pool = Pool(max_kept_bytes=2 * SIZE)
    lent = {letter: pool.lend(SIZE) for letter in b"abc"}
    for letter, buffer in lent.items():
        buffer[:] = bytes([letter]) * SIZE
    del buffer
    for letter in b"abc":
        del lent[letter]
    again = [pool.lend(SIZE) for _ in range(2)]
    assert pool.kept_bytes == 0
    assert {bytes(buffer[:1]) for buffer in again} == {b"b", b"c"}


def test_a_buffer_beyond_the_bound_drops_no_idle_memory() -> None:
    pool = Pool(max_kept_bytes=2 * SIZE)
    small, large = pool.lend(SIZE), pool.lend(3 * SIZE)
    del small
    del large
    assert pool.kept_bytes == SIZE


def test_the_system_may_take_idle_memory() -> None:
    pool = Pool()
    pool.lend(SIZE)[:] = bytes([1]) * SIZE
    gc.collect()
    assert pool.kept_bytes == SIZE
    lazily = re.findall(r"^LazyFree:\s+(\d+) kB$", Path("/proc/self/smaps").read_text(), re.MULTILINE)
    assert sum(map(int, lazily)) << 10 > SIZE // 2  # the kernel counts them in batches


def test_a_large_buffer_is_not_lent_for_a_small_need() -> None:
    pool = Pool()
    large = pool.lend(8 * LEAST_LENT_BYTES)
    del large
    small = pool.lend(LEAST_LENT_BYTES)
    assert len(small) == LEAST_LENT_BYTES
    assert pool.kept_bytes == 8 * LEAST_LENT_BYTES


def test_buffers_have_the_length_that_is_asked_for_and_new_ones_are_zeroed() -> None:
    pool = Pool()
    for size in (0, 1, LEAST_LENT_BYTES - 1, LEAST_LENT_BYTES, SIZE + 1):
        assert len(pool.lend(size)) == size
        assert not any(new_buffer(size))
