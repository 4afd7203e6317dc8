"""Samples are a pure function, members never read one twice within a pass, and a restart reads on; scripts' too."""

import random
from collections import Counter
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain.errors import ConfigError
from p2ptrain.training.data.sampler import DataPosition, SwarmSampler
from p2ptrain.training.data.windows import ReadingPosition, Sampler, advance, permute, place_among


def sampler(num_windows: int, context: int = 3, seed: int = 1) -> Sampler:
    return Sampler(np.arange(num_windows * context + 1, dtype=np.uint32), context, seed)


@settings(max_examples=60)
@given(size=st.integers(1, 700), seed=st.integers(0, 1 << 62), data_pass=st.integers(0, 5))
def test_each_pass_reads_every_window_once(size: int, seed: int, data_pass: int) -> None:
    source = sampler(size, seed=seed)
    windows = [source.order.at(data_pass * size + slot) for slot in range(size)]
    assert sorted(windows) == list(range(size))


def test_permutation_of_a_huge_range_stays_inside_and_scatters() -> None:
    size = (1 << 40) + 7
    images = [permute(slot, size, (1, 2, 3, 4, 5, 6)) for slot in range(2000)]
    assert len(set(images)) == 2000
    assert all(0 <= image < size for image in images)
    assert abs(sum(images) / 2000 / size - 0.5) < 0.05


def test_passes_and_seeds_differ_in_order() -> None:
    first, other = sampler(500), sampler(500, seed=2)
    orders = [[first.order.at(p) for p in range(500)], [first.order.at(p) for p in range(500, 1000)]]
    orders.append([other.order.at(p) for p in range(500)])
    matches = [sum(a == b for a, b in zip(x, y, strict=True)) for x, y in pairwise(orders)]
    assert all(count < 10 for count in matches)


@settings(max_examples=40)
@given(num_members=st.integers(1, 7), seed=st.integers(0, 1 << 30))
def test_members_read_nothing_twice_within_a_pass_whatever_their_speed(num_members: int, seed: int) -> None:
    chance = random.Random(seed)
    source = sampler(997, seed=seed)
    members = sorted(f"peer{index}" for index in range(num_members))
    read: set[tuple[int, int]] = set()
    cursor = 0
    for round in range(12):
        counts = [chance.randrange(0, 20) for _ in members]
        for peer, count in zip(members, counts, strict=True):
            for index in range(count):
                position = cursor + members.index(peer) + len(members) * index
                window = source.order.index(cursor, place_among(members, peer), peer, round, index)
                assert window == source.order.at(position)
                key = (position // source.num_windows, window)
                assert key not in read
                read.add(key)
        cursor = advance(cursor, counts)


def test_a_batch_resumes_anywhere_with_the_same_samples() -> None:
    source, members = sampler(300), ["a", "b"]
    whole = source.batch(40, place_among(members, "b"), "b", 3, 0, 12)
    pieces = [sampler(300).batch(40, place_among(members, "b"), "b", 3, first, 4) for first in (0, 4, 8)]
    assert np.array_equal(whole, np.concatenate(pieces))


def test_rows_are_windows_with_the_next_token_as_last_target() -> None:
    source = sampler(50, context=5)
    batch = source.batch(0, (0, 1), "a", 0, 0, 8)
    assert batch.shape == (8, 6)
    assert batch.dtype == np.int64
    starts = [source.order.at(position) * 5 for position in range(8)]
    assert np.array_equal(batch, np.array([range(start, start + 6) for start in starts]))


def test_newcomers_differ_by_peer_round_and_index_and_stay_pure() -> None:
    source = sampler(100_003)
    arguments = [("new", 1, 0), ("new", 1, 1), ("new", 2, 0), ("other", 1, 0)]
    windows = [source.order.index(10, None, *argument) for argument in arguments]
    assert len(set(windows)) == 4
    assert all(0 <= window < source.num_windows for window in windows)
    assert windows == [sampler(100_003).order.index(99, None, *argument) for argument in arguments]


def test_too_few_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few for a context of 8"):
        Sampler(np.arange(8, dtype=np.uint8), 8, 1)
    assert Sampler(np.arange(9, dtype=np.uint8), 8, 1).num_windows == 1


def test_a_round_in_which_nobody_read_does_not_move_the_cursor() -> None:
    assert advance(7, [0, 0]) == 7
    assert advance(7, []) == 7
    assert advance(7, [1, 5, 2]) == 22


def test_a_reader_that_saved_goes_on_at_the_next_position(tmp_path: Path) -> None:
    first = ReadingPosition(tmp_path / "reading.json", "a")
    assert [first.take(3), first.take(2)] == [0, 3]
    first.save()
    assert ReadingPosition(tmp_path / "reading.json", "a").take(1) == 5


@pytest.mark.parametrize("num_taken", [1, 1024, 1025, 5000])
def test_a_reader_that_was_killed_repeats_nothing_and_skips_little(tmp_path: Path, num_taken: int) -> None:
    killed = ReadingPosition(tmp_path / "reading.json", "a")
    for _ in range(num_taken):
        killed.take(1)
    again = ReadingPosition(tmp_path / "reading.json", "a").take(1)
    assert num_taken <= again <= num_taken + ReadingPosition.RESERVED


@pytest.mark.parametrize("content", ["", "[]", "{", '{"order": "b", "next": 7}', '{"order": "a", "next": -7}'])
def test_a_file_that_says_nothing_of_this_order_is_ignored(tmp_path: Path, content: str) -> None:
    (tmp_path / "reading.json").write_text(content)
    assert ReadingPosition(tmp_path / "reading.json", "a").take(1) == 0


def test_a_reader_goes_on_where_nothing_can_be_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    position = ReadingPosition(tmp_path / "missing" / "reading.json", "a")
    assert [position.take(1), position.take(1)] == [0, 1]
    assert caplog.text.count("a restart reads windows again") == 1


NUM_SAMPLES = 1000


class Reader:
    """One peer's loader, which reads some samples ahead of what is trained on."""

    def __init__(self, name: str, ahead: int) -> None:
        self.name = name
        self.ahead = ahead
        self.position = DataPosition(0, 0, None, 0)
        self.sampler = SwarmSampler(NUM_SAMPLES, 7, name, lambda: self.position)
        self.indices = iter(self.sampler)
        self.queue: list[int] = []
        self.trained: list[int] = []

    def train(self, count: int) -> None:
        """Train on so many samples."""
        while len(self.queue) < count + self.ahead:
            self.queue.append(next(self.indices))
        self.trained += self.queue[:count]
        del self.queue[:count]

    def move(self, round_: int, cursor: int, members: list[str], waiting: int = 0) -> None:
        """Begin a round."""
        self.position = DataPosition(round_, cursor, place_among(members, self.name), waiting)


@pytest.mark.parametrize("ahead", [0, 3, 40])
@pytest.mark.parametrize("speeds", [[4, 4, 4], [2, 5, 11], [7]], ids=str)
def test_no_sample_is_read_twice_in_a_pass_at_any_speed(speeds: list[int], ahead: int) -> None:
    names = [f"peer-{number}" for number in range(len(speeds))]
    readers = [Reader(name, ahead * (number + 1)) for number, name in enumerate(names)]
    cursor, rounds = 0, 0
    while cursor + (max(speeds) + 40 * len(speeds)) * len(speeds) < NUM_SAMPLES:
        for reader, speed in zip(readers, speeds, strict=True):
            reader.move(rounds, cursor, names)
            reader.train(speed)
        cursor, rounds = advance(cursor, speeds), rounds + 1
    read = [index for reader in readers for index in reader.trained]
    assert rounds > 3
    assert len(set(read)) == len(read) == rounds * sum(speeds)


def test_peers_of_one_speed_read_every_sample_once_in_each_pass() -> None:
    names = list("abcd")
    readers = [Reader(name, 5) for name in names]
    for round_ in range(2 * NUM_SAMPLES // 20):
        for reader in readers:
            reader.move(round_, 20 * round_, names)
            reader.train(5)
    assert set(Counter(index for reader in readers for index in reader.trained).values()) == {2}


def test_work_that_was_late_is_not_read_again() -> None:
    late, other = Reader("a", 0), Reader("b", 0)
    for reader in (late, other):
        reader.move(0, 0, ["a", "b"])
        reader.train(6)
    late.move(1, advance(0, [0, 6]), ["a", "b"], waiting=6)
    other.move(1, advance(0, [0, 6]), ["a", "b"])
    for reader in (late, other):
        reader.train(6)
    assert len({*late.trained, *other.trained}) == 24


def test_a_restarted_peer_goes_on_behind_what_waits() -> None:
    before, after = Reader("a", 0), Reader("a", 0)
    before.move(3, 500, ["a", "b"])
    before.train(8)
    after.move(3, 500, ["a", "b"], waiting=5)
    after.train(3)
    assert after.trained == before.trained[5:]


def test_when_peers_come_and_go_this_peer_reads_nothing_twice_itself() -> None:
    chance = random.Random(1)
    reader, cursor = Reader("a", 10), 0
    for round_ in range(12):
        members = ["a", *chance.sample("bcdef", chance.randrange(5))]
        reader.move(round_, cursor, members)
        reader.train(4)
        cursor = advance(cursor, [4] * len(members))
    assert len(set(reader.trained)) == len(reader.trained)


def test_an_iteration_is_as_long_as_the_data_and_the_next_goes_on() -> None:
    position = DataPosition(1, 0, (0, 1), 0)
    data = TensorDataset(torch.arange(30))
    loader = DataLoader(data, batch_size=4, sampler=SwarmSampler(len(data), 7, "a", lambda: position))
    first, second = ([int(i) for (batch,) in loader for i in batch] for _ in range(2))
    assert len(loader) == 8
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second, "each pass has an order of its own"


def test_an_empty_data_set_is_refused() -> None:
    with pytest.raises(ValueError, match="empty"):
        SwarmSampler(0, 7, "a", lambda: DataPosition(0, 0, None, 0))
