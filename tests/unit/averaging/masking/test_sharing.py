"""Shamir's sharing: enough shares recover a secret, although some lie; fewer tell nothing of it."""

import random

import pytest

from p2ptrain.averaging.masking.sharing import PRIME, SHARE_BYTES, combine, recover, split
from tests.support.masking import uniformity

COUNT, THRESHOLD = 9, 6
SECRET = bytes(range(32))


def shares(seed: int = 1) -> dict[int, bytes]:
    return dict(enumerate(split(SECRET, THRESHOLD, COUNT, random.Random(seed))))


def is_right(secret: bytes) -> bool:
    return secret == SECRET


def test_the_field_holds_every_secret() -> None:
    assert PRIME > 2**256
    assert all(pow(base, PRIME - 1, PRIME) == 1 for base in (2, 3, 5, 7, 11))
    assert PRIME.bit_length() <= 8 * SHARE_BYTES


@pytest.mark.parametrize("seed", range(20))
def test_any_threshold_of_shares_recovers_the_secret(seed: int) -> None:
    all_shares, generator = shares(seed), random.Random(seed)
    subset = generator.sample(range(COUNT), THRESHOLD)
    assert combine({index: all_shares[index] for index in subset}) == SECRET


@pytest.mark.parametrize("liars", [0, 1, 2, 3])
def test_liars_among_more_than_the_threshold_do_not_change_what_is_recovered(liars: int) -> None:
    told = shares()
    for index in range(liars):
        told[index] = bytes(reversed(told[index]))
    assert recover(told, THRESHOLD, is_right) == SECRET


def test_nothing_is_recovered_from_too_few_right_shares() -> None:
    told = shares()
    for index in range(COUNT - THRESHOLD + 1):
        told[index] = bytes(reversed(told[index]))
    assert recover(told, THRESHOLD, is_right) is None
    few = {index: shares()[index] for index in range(THRESHOLD - 1)}
    assert recover(few, THRESHOLD, is_right) is None


def test_fewer_shares_than_the_threshold_fit_every_secret() -> None:
    """For each candidate there is one last share with which it would be the secret."""
    few = {index: shares()[index] for index in range(THRESHOLD - 1)}
    for candidate in (bytes(32), bytes([255]) * 32, SECRET):
        # The polynomial through the candidate at 0 and the known shares, at the place of the missing one.
        points = {-1: int.from_bytes(candidate, "big"), **{at: int.from_bytes(each, "big") for at, each in few.items()}}
        missing, last = THRESHOLD - 1, 0
        for at, value in points.items():
            above = below = 1
            for other in points:
                if other != at:
                    above, below = above * (missing - other) % PRIME, below * (at - other) % PRIME
            last = (last + value * above * pow(below, -1, PRIME)) % PRIME
        assert combine({**few, missing: last.to_bytes(SHARE_BYTES, "big")}) == candidate


def test_a_share_is_uniform_whatever_the_secret() -> None:
    generator = random.Random(3)
    told = b"".join(split(SECRET, THRESHOLD, COUNT, generator)[0][1:] for _ in range(500))
    assert uniformity(told) > 1e-6
