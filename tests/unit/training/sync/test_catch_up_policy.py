"""Which way back is chosen, and which certificates lead from one lineage to another."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.training.sync.catch_up import DOWNLOAD_BELOW, between, choose_way

BYTES = st.integers(1, 1 << 40)


@dataclass(frozen=True)
class FakeBody:
    """What `between` looks at."""

    lineage: bytes
    next_lineage: bytes


@dataclass(frozen=True)
class FakeCertificate:
    body: FakeBody


def chain_of(lineages: str) -> list[Certificate]:
    """Certificates that lead from each letter to the next."""
    names = [letter.encode() for letter in lineages]
    found = [FakeCertificate(FakeBody(one, other)) for one, other in pairwise(names)]
    return cast(list[Certificate], found)


@given(BYTES, BYTES)
def test_the_way_chosen_moves_the_fewer_bytes_or_hardly_more(replay_bytes: int, download_bytes: int) -> None:
    way = choose_way(3, replay_bytes, download_bytes)
    chosen = download_bytes if way.is_download else replay_bytes
    assert chosen * DOWNLOAD_BELOW <= min(replay_bytes, download_bytes)
    assert str(replay_bytes) in way.reason
    assert str(download_bytes) in way.reason


@given(BYTES)
def test_equal_bytes_and_unknown_sizes_are_replayed(num_bytes: int) -> None:
    assert not choose_way(1, num_bytes, num_bytes).is_download
    assert not choose_way(1, num_bytes, 0).is_download


def test_the_certificates_between_two_lineages_are_those_on_the_way() -> None:
    chain = chain_of("abcde")
    assert between(chain, b"a", b"e") == chain
    assert between(chain, b"b", b"d") == chain[1:3]
    assert between(chain, b"d", b"e") == chain[3:]


def test_a_chain_that_does_not_reach_or_does_not_connect_is_none() -> None:
    chain = chain_of("abcde")
    for start, end in ((b"a", b"f"), (b"e", b"a"), (b"x", b"e"), (b"c", b"c"), (b"d", b"b")):
        assert between(chain, start, end) is None
    assert between(chain[:1] + chain[2:], b"a", b"e") is None
    assert between([], b"a", b"b") is None
