"""Which way back is chosen, and which certificates lead from one lineage to another."""

from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.training.sync.catch_up import DOWNLOAD_BELOW, between, choose_way

BYTES = st.integers(1, 1 << 40)


def chain_of(lineages: str) -> list[Any]:
    """The part of certificates that `between` looks at, each of which leads from one letter to the next."""
    pairs = pairwise(letter.encode() for letter in lineages)
    return [SimpleNamespace(body=SimpleNamespace(lineage=one, next_lineage=other)) for one, other in pairs]


@given(BYTES, BYTES)
def test_the_way_chosen_moves_the_fewer_bytes_or_hardly_more(replay_bytes: int, download_bytes: int) -> None:
    is_download, reason = choose_way(3, replay_bytes, download_bytes)
    chosen = download_bytes if is_download else replay_bytes
    assert chosen * DOWNLOAD_BELOW <= min(replay_bytes, download_bytes)
    assert str(replay_bytes) in reason
    assert str(download_bytes) in reason


@given(BYTES)
def test_equal_bytes_and_unknown_sizes_are_replayed(num_bytes: int) -> None:
    assert not choose_way(1, num_bytes, num_bytes)[0]
    assert not choose_way(1, num_bytes, 0)[0]


@pytest.mark.parametrize(
    ("start", "end", "found"),
    [(b"a", b"e", slice(4)), (b"b", b"d", slice(1, 3)), (b"d", b"e", slice(3, 4)), (b"a", b"f", None),
     (b"e", b"a", None), (b"x", b"e", None), (b"c", b"c", None), (b"d", b"b", None)],
)  # fmt: skip
def test_the_certificates_between_two_lineages_are_those_on_the_way(
    start: bytes, end: bytes, found: slice | None
) -> None:
    chain = chain_of("abcde")
    assert between(chain, start, end) == (None if found is None else chain[found])
    assert between(chain[:2] + chain[3:], b"a", b"e") is None, "it does not connect"
    assert between([], start, end) is None
