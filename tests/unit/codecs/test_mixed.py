"""Small tensors have a codec of their own, wherever the vector is cut."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import CodecError, get_codec
from p2ptrain.codecs.mixed import MixedCodec, by_size
from tests.support.codecs import decode, gaussian, round_trip

INT8, FP16, FP32, TOPK = (get_codec(name) for name in ("int8", "fp16", "fp32", "topk"))
SIZES = [1000, 16, 300, 16, 700, 8]
NUM_VALUES = sum(SIZES)


def test_each_tensor_decodes_as_exactly_as_its_size_says() -> None:
    vector = gaussian(NUM_VALUES)
    out = round_trip(by_size(INT8, FP16, SIZES, 16), vector)
    for size, part, expected in zip(SIZES, torch.split(out, SIZES), torch.split(vector, SIZES), strict=True):
        if size <= 16:
            assert torch.equal(part, expected.half().float())
        else:
            assert not torch.equal(part, expected.half().float())
            assert torch.allclose(part, expected, atol=0.02)


def test_neighbours_of_one_codec_are_encoded_together() -> None:
    codec = by_size(INT8, FP16, [512, 512, 4, 4, 512], 4)
    head = 256 - 8  # up to where the vector's next block begins
    assert codec.encoded_bytes(1544) == 4 * (256 + 4) + 16 + (head + 4) + (256 + 4) + (8 + 4)
    first = INT8.encode(gaussian(1544)[:1024])
    assert codec.encode(gaussian(1544))[: len(first)] == first


def test_one_codec_for_all_stays_as_it_is() -> None:
    assert by_size(INT8, FP16, [500, 600], 16) is INT8
    assert by_size(INT8, FP16, [5, 6, 0], 16) is FP16
    assert by_size(INT8, INT8, SIZES, 16) is INT8


sizes = st.lists(st.one_of(st.integers(0, 20), st.integers(1, 9000)), min_size=1, max_size=8).filter(any)


@settings(max_examples=60)
@given(sizes=sizes, name=st.sampled_from(["int8", "int4", "topk"]), data=st.data())
def test_parts_cut_at_blocks_concatenate_to_the_whole(sizes: list[int], name: str, data: st.DataObject) -> None:
    codec = by_size(get_codec(name), FP16, sizes, 20)
    num_values, block = sum(sizes), codec.block_size
    cuts = sorted(cut * block for cut in data.draw(st.sets(st.integers(0, num_values // block), max_size=4)))
    bounds = [0, *cuts, num_values]
    vector = gaussian(num_values)
    whole = codec.encode(vector)
    assert len(whole) == codec.encoded_bytes(num_values)
    codec.validate(whole, num_values)
    expected = decode(codec, whole, num_values)
    total = gaussian(num_values, seed=1)
    summed = total.clone()
    codec.accumulate_into(whole, 0.3, summed)
    joined = bytearray()
    for low, high in itertools.pairwise(bounds):
        part = codec.part(low, high)
        piece = memoryview(whole)[codec.encoded_bytes(low) : codec.encoded_bytes(high)]
        assert part.encoded_bytes(high - low) == len(piece)
        joined += part.encode(vector[low:high])
        part.validate(piece, high - low)
        assert torch.equal(decode(part, piece, high - low), expected[low:high])
        part.accumulate_into(piece, 0.3, total[low:high])
    assert joined == whole
    assert torch.equal(total, summed)


@settings(max_examples=60)
@given(sizes=sizes, data=st.data())
def test_a_part_of_a_part_is_a_part_of_the_whole(sizes: list[int], data: st.DataObject) -> None:
    codec = by_size(INT8, FP16, sizes, 20)
    num_values, block = sum(sizes), 256
    bounds = st.integers(0, num_values // block).map(lambda blocks: blocks * block)
    low, inner, outer = sorted(data.draw(st.lists(bounds, min_size=3, max_size=3)))
    vector = gaussian(num_values)
    direct = codec.part(inner, outer).encode(vector[inner:outer])
    share = codec.part(low, num_values)
    assert share.part(inner - low, outer - low).encode(vector[inner:outer]) == direct
    first = share.encoded_bytes(inner - low)
    assert share.encode(vector[low:])[first : first + len(direct)] == direct


def test_a_slice_without_its_part_is_the_callers_mistake() -> None:
    codec = by_size(INT8, FP16, SIZES, 16)
    data = codec.encode(gaussian(NUM_VALUES))
    for action in (
        lambda: codec.encode(gaussian(256)),
        lambda: codec.decode_into(data, torch.zeros(256)),
        lambda: codec.accumulate_into(data, 1.0, torch.zeros(256)),
        lambda: codec.validate(data, 256),
    ):
        with pytest.raises(ValueError, match="use `part`"):
            action()
    with pytest.raises(ValueError, match="not 3000"):
        codec.encoded_bytes(3000)


def test_malformed_bytes_of_either_codec_are_refused() -> None:
    codec = by_size(INT8, FP16, SIZES, 16)
    vector = gaussian(NUM_VALUES)
    for at, value in ((3, 0x7F), (codec.part(0, 1024).encoded_bytes(1000) + 1, 0x7C)):
        data = codec.encode(vector)
        data[at] = value
        with pytest.raises(CodecError, match="not finite"):
            codec.validate(data, NUM_VALUES)
    with pytest.raises(CodecError, match="bytes where"):
        codec.validate(data[:-1], NUM_VALUES)
    vector[1005] = torch.inf
    with pytest.raises(CodecError, match="fp16: a value is not finite"):
        codec.encode(vector)


def test_it_is_named_lossy_and_cut_by_what_it_is_made_of() -> None:
    assert by_size(INT8, FP16, SIZES, 16).name == "mixed(int8/1,fp16/1)"
    assert by_size(INT8, FP16, SIZES, 16).block_size == 256
    assert by_size(TOPK, FP16, SIZES, 16).block_size == 4096
    assert by_size(INT8, FP32, SIZES, 16).lossy
    assert not MixedCodec([(0, 4, FP32), (4, 8, FP32)]).lossy
