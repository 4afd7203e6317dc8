"""A script's share of the data: peers never overlap, whatever their loaders read ahead, and a restart goes on."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from p2ptrain.training.data.sampler import DataPosition, SwarmSampler
from p2ptrain.training.data.windows import advance, place_among

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


def test_a_newcomer_reads_samples_of_its_own_and_others_in_each_round() -> None:
    one, other = Reader("a", 0), Reader("b", 0)
    for reader in (one, other):
        for round_ in (1, 2):
            reader.move(round_, 0, ["c"])
            reader.train(10)
    assert len({*one.trained, *other.trained}) >= 38, "drawn at random of a thousand"


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
