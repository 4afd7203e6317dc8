"""The list of the parts gives the mean of SparseLoCo, bit for bit, and is refused when it is not well-formed."""

import math
import struct
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import Codec, CodecError, PartList, get_codec
from p2ptrain.codecs.base import Floats
from p2ptrain.codecs.mixed import by_size
from tests.support.codecs import decode, gaussian

TOPK = get_codec("topk")
CHUNK = 4096


def sparse_values(encoded: bytes | bytearray, num_values: int) -> dict[int, np.float32]:
    """What a vector in `topk` holds, read from its bytes with whole numbers of any length: value by index."""
    values, start = {}, 0
    for offset in range(0, num_values, CHUNK):
        kept = -(-min(CHUNK, num_values - offset) // 64)
        ends = np.cumsum([start, 4, -(-kept // 4), -(-kept // 4), -(-6 * kept // 8)]).tolist()
        levels, buckets, codes, places = (int.from_bytes(encoded[a:b], "little") for a, b in pairwise(ends))
        start = ends[-1]
        for rank, bit in enumerate(bit for bit in range(2 * kept) if buckets >> bit & 1):
            sign, level = codes >> 2 * rank & 1, codes >> 2 * rank + 1 & 1
            number = struct.unpack("<f", struct.pack("<I", (levels >> 16 * level & 0xFFFF) << 16 | sign << 31))[0]
            values[offset + (bit - rank) * 64 + (places >> 6 * rank & 63)] = np.float32(number)
    return values


def reference(parts: list[bytearray], weights: list[float], num_values: int) -> Floats:
    """SparseLoCo's mean: each peer's kept values times its weight, added up peer by peer in fp32."""
    mean = np.zeros(num_values, np.float32)
    for part, weight in zip(parts, weights, strict=True):
        for index, value in sparse_values(part, num_values).items():
            mean[index] += np.float32(weight) * value
    return mean


def vectors(count: int, num_values: int, seed: int = 0) -> list[torch.Tensor]:
    return [vector**3 for vector in gaussian(count, num_values, seed=seed)]


def listed(parts: list[bytearray], weights: list[float], num_values: int, codec: Codec = TOPK) -> bytearray:
    reader = PartList(codec, len(parts))
    encoded = bytearray(reader.encoded_bytes(num_values))
    reader.write(weights, parts, encoded)
    return encoded


@st.composite
def shares(draw: st.DrawFn) -> tuple[list[float], int, int]:
    """Weights of a group, the length of a share, and a seed."""
    tokens = draw(st.lists(st.integers(1, 1 << 30), min_size=1, max_size=12))
    factors = [draw(st.floats(0.001, 1)) for _ in tokens]
    weights = [count / sum(tokens) * factor for count, factor in zip(tokens, factors, strict=True)]
    return weights, draw(st.integers(1, 2 * CHUNK + 100)), draw(st.integers(0, 1 << 20))


@settings(max_examples=40)
@given(shares())
def test_everybody_decodes_the_mean_of_sparseloco_bit_for_bit(share: tuple[list[float], int, int]) -> None:
    weights, size, seed = share
    parts = [TOPK.encode(vector) for vector in vectors(len(weights), size, seed)]
    encoded = listed(parts, weights, size)
    PartList(TOPK, len(weights)).validate(encoded, size)
    found = decode(PartList(TOPK, len(weights)), encoded, size)
    assert found.numpy().tobytes() == reference(parts, weights, size).tobytes()


def test_parts_are_in_it_unchanged_and_in_order() -> None:
    parts, weights = [TOPK.encode(vector) for vector in vectors(3, 5000)], [0.5, 0.25, 0.125]
    encoded = listed(parts, weights, 5000)
    assert encoded == struct.pack("<3f", *weights) + b"".join(parts)
    found, pieces = PartList(TOPK, 3).split(encoded, 5000)
    assert (found, [bytes(piece) for piece in pieces]) == (weights, [bytes(part) for part in parts])


def test_small_tensors_in_another_codec_are_listed_too() -> None:
    codec = by_size(TOPK, get_codec("fp32"), [CHUNK, 100, 3 * CHUNK], 100)
    size, weights = 4 * CHUNK + 100, [0.5, 0.5]
    inputs = vectors(2, size)
    found = decode(PartList(codec, 2), listed([codec.encode(v) for v in inputs], weights, size, codec), size)
    assert torch.equal(found[CHUNK : CHUNK + 100], (inputs[0] / 2 + inputs[1] / 2)[CHUNK : CHUNK + 100])
    low, high = CHUNK, 2 * CHUNK  # A share.
    part, reader = codec.part(low, high), PartList(codec, 2).part(low, high)
    share = listed([part.encode(v[low:high]) for v in inputs], weights, CHUNK, part)
    reader.validate(share, CHUNK)
    assert torch.equal(decode(reader, share, CHUNK), found[low:high])


def test_a_mean_is_never_larger_than_the_bound_on_its_parts() -> None:
    inputs = vectors(4, 10_000)
    encoded = listed([TOPK.encode(vector) for vector in inputs], [0.25] * 4, 10_000)
    bound = PartList(TOPK, 4).largest(encoded, 10_000)
    assert float(decode(PartList(TOPK, 4), encoded, 10_000).abs().max()) <= bound
    assert bound <= (1 + 2**-8) * max(float(vector.abs().max()) for vector in inputs)


def test_no_values_take_no_bytes_and_no_parts_are_no_mean() -> None:
    reader = PartList(TOPK, 3)
    assert reader.encoded_bytes(0) == 0
    reader.validate(b"", 0)
    reader.decode_into(b"", torch.empty(0))
    assert reader.largest(b"", 0) == 0
    with pytest.raises(ValueError, match="one contributor at least"):
        PartList(TOPK, 0)


@pytest.mark.parametrize(
    "weights",
    [[math.nan, 0.1], [math.inf, 0.1], [-math.inf, 0.1], [-0.1, 0.5], [0.6, 0.5], [1.00001, 0.0], [-3.0, 3.5]],
    ids=str,
)
def test_weights_that_no_mean_has_are_refused_and_not_written(weights: list[float]) -> None:
    parts = [TOPK.encode(vector) for vector in vectors(2, 5000)]
    encoded = listed(parts, [0.5, 0.5], 5000)
    encoded[:8] = struct.pack("<2f", *weights)
    with pytest.raises(CodecError, match="weights of a mean's parts"):
        PartList(TOPK, 2).validate(encoded, 5000)
    with pytest.raises(CodecError, match="weights of a mean's parts"):
        listed(parts, weights, 5000)


@pytest.mark.parametrize("count", [1, 7, 256])
def test_weights_of_a_whole_group_pass_whatever_rounding_does(count: int) -> None:
    tokens = [3**i % 1_000_003 for i in range(count)]
    parts = [TOPK.encode(torch.ones(10))] * count
    encoded = listed(parts, [n / sum(tokens) for n in tokens], 10)
    PartList(TOPK, count).validate(encoded, 10)
    part = decode(TOPK, parts[0], 10)
    assert torch.allclose(
        decode(PartList(TOPK, count), encoded, 10), part, rtol=1e-5
    )  # All brought the same, so that is the mean.


@pytest.mark.parametrize("change", [-1, 1, -84, 84])
def test_a_list_of_another_length_or_number_of_parts_is_refused(change: int) -> None:
    encoded = bytes(listed([TOPK.encode(vector) for vector in vectors(2, 5000)], [0.5, 0.5], 5000))
    wrong = encoded[:change] if change < 0 else encoded + bytes(change)
    reader, out = PartList(TOPK, 2), torch.empty(5000)
    for refuse in (reader.validate, reader.largest, reader.split):
        with pytest.raises(CodecError, match="bytes where"):
            refuse(wrong, 5000)
    with pytest.raises(CodecError, match="bytes where"):
        reader.decode_into(wrong, out)
    for count in (1, 3):
        with pytest.raises(CodecError, match=f"list of {count} parts: got"):
            PartList(TOPK, count).validate(encoded, 5000)


def test_parts_or_weights_of_another_number_or_length_are_not_written() -> None:
    parts, reader = [TOPK.encode(vector) for vector in vectors(2, 5000)], PartList(TOPK, 2)
    out = bytearray(reader.encoded_bytes(5000))
    for weights, given_parts in (([0.5], parts), ([0.5, 0.5], parts[:1])):
        with pytest.raises(CodecError, match="cannot hold"):
            reader.write(weights, given_parts, out)
    with pytest.raises(CodecError, match="no room"):
        reader.write([0.5, 0.5], [parts[0], parts[1][:-1]], out)


def test_a_part_that_its_codec_refuses_is_refused_in_a_list() -> None:
    parts = [TOPK.encode(vector) for vector in vectors(3, 5000)]
    parts[1][84:86] = struct.pack("<H", 0x7F80)  # A level of its second chunk.
    encoded = listed(parts, [0.25] * 3, 5000)
    with pytest.raises(CodecError, match="part 2 of 3: topk"):
        PartList(TOPK, 3).validate(encoded, 5000)
    assert PartList(TOPK, 3).largest(encoded, 5000) == math.inf
