"""Gathering pays for few peers and compact codecs; the border is where both move as many bytes."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.codecs import Codec, codec_names, get_codec
from p2ptrain.codecs.traffic import fewer_bytes_gathered, fewer_bytes_listed

NUM_VALUES = 10 * 4096


class SizedCodec(Codec):
    """Knows its size only: so many bytes for each 4096 values."""

    def __init__(self, chunk_bytes: int) -> None:
        self.chunk_bytes = chunk_bytes

    def encoded_bytes(self, num_values: int) -> int:
        return num_values * self.chunk_bytes // 4096

    def encode_into(self, vector: torch.Tensor, out: object) -> None: ...
    def decode_into(self, data: object, out: torch.Tensor) -> None: ...
    def accumulate_into(self, data: object, weight: float, out: torch.Tensor) -> None: ...
    def validate(self, data: object, num_values: int) -> None: ...


def most_peers(codec: Codec, dense: Codec) -> int:
    """The largest number of peers for which gathering pays."""
    return max((n for n in range(1, 1000) if fewer_bytes_gathered(codec, dense, NUM_VALUES, n)), default=0)


@pytest.mark.parametrize(("dense_bytes", "most"), [(4096, 73), (2048, 36)], ids=["8 bits", "4 bits"])
def test_published_borders_are_met_with_the_published_sizes(dense_bytes: int, most: int) -> None:
    assert most_peers(SizedCodec(112), SizedCodec(dense_bytes)) == most


def test_shorter_indices_move_the_borders_out() -> None:
    assert most_peers(get_codec("topk"), get_codec("int8")) == 99
    assert most_peers(get_codec("topk"), get_codec("int4")) == 51


@pytest.mark.parametrize("peers", [2, 3, 98, 99, 100, 400])
def test_it_compares_the_bytes_that_each_peer_receives(peers: int) -> None:
    sparse, dense = (get_codec(name).encoded_bytes(NUM_VALUES) for name in ("topk", "int8"))
    gathered = (peers - 1) * sparse
    butterfly = 2 * (peers - 1) * dense / peers
    assert fewer_bytes_gathered(get_codec("topk"), get_codec("int8"), NUM_VALUES, peers) == (gathered < butterfly)


@pytest.mark.parametrize("name", codec_names())
def test_no_codec_is_worth_gathering_against_itself_nor_alone(name: str) -> None:
    codec = get_codec(name)
    assert most_peers(codec, codec) == 0
    assert not fewer_bytes_gathered(codec, get_codec("fp32"), NUM_VALUES, 1)
    with pytest.raises(ValueError, match="0 peers"):
        fewer_bytes_gathered(codec, codec, NUM_VALUES, 0)


@pytest.mark.parametrize("peers", [1, 2, 49, 50, 400])
def test_a_list_is_compared_by_the_bytes_that_owners_send(peers: int) -> None:
    codec, dense = get_codec("topk"), get_codec("int8")
    to_owners = (peers - 1) / peers * codec.encoded_bytes(NUM_VALUES)
    lists = to_owners + (peers - 1) / peers * peers * codec.encoded_bytes(NUM_VALUES)
    means = to_owners + (peers - 1) / peers * dense.encoded_bytes(NUM_VALUES)
    assert fewer_bytes_listed(codec, dense, NUM_VALUES, peers) == (peers == 1 or lists < means)


def test_a_list_of_one_dense_part_is_not_shorter_and_of_none_refused() -> None:
    codec = get_codec("int8")
    assert not fewer_bytes_listed(codec, codec, NUM_VALUES, 1)
    with pytest.raises(ValueError, match="0 peers"):
        fewer_bytes_listed(codec, codec, NUM_VALUES, 0)
