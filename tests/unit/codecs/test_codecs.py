"""What every codec promises: size, determinism, pieces, validation, accumulation."""

from __future__ import annotations

import math
import struct

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import Codec, CodecError, codec_names, get_codec
from p2ptrain.codecs.blockwise import BlockwiseCodec
from p2ptrain.codecs.norms import CHUNK_VALUES, SUM_COLUMNS, sum_of_squares
from p2ptrain.errors import IncompatibleError
from tests.support.codecs import decode, gaussian

CODECS = [get_codec(name) for name in codec_names()]
every_codec = pytest.mark.parametrize("codec", CODECS, ids=codec_names())
CLOSE_WITHIN = {"fp32": 0.02, "fp16": 0.02, "bf16": 0.02, "int8": 0.02, "int4": 0.35}
"""What each value of a Gaussian vector stays within; the other codecs only promise a smaller error than input."""
LENGTHS = [0, 1, 2, 255, 256, 257, 1000, 65_536, 65_537, 70_000]
WEIGHTS = [1.0, 0.0, 0.3, -2.5, 1e6]


def test_names_are_listed_from_exact_to_compact() -> None:
    assert codec_names() == ("fp32", "fp16", "bf16", "int8", "int4", "topk")
    assert [get_codec(name).name for name in codec_names()] == list(codec_names())


def test_an_unknown_name_is_refused_with_the_known_ones() -> None:
    with pytest.raises(IncompatibleError, match="fp32, fp16, bf16, int8, int4, topk"):
        get_codec("int3")


@every_codec
def test_encoding_has_the_announced_size_and_validates(codec: Codec) -> None:
    for num_values in LENGTHS:
        vector = gaussian(num_values)
        before = vector.clone()
        encoded = codec.encode(vector)
        assert isinstance(encoded, bytearray)
        assert len(encoded) == codec.encoded_bytes(num_values)
        codec.validate(encoded, num_values)
        assert torch.equal(vector, before)
        decoded = decode(codec, encoded, num_values)
        if codec.name in CLOSE_WITHIN:
            assert torch.allclose(decoded, vector, atol=CLOSE_WITHIN[codec.name]), num_values
        else:
            assert float((decoded - vector).norm()) <= float(vector.norm()), num_values


@every_codec
def test_a_vector_that_is_sent_as_it_is_is_what_encoding_gives(codec: Codec) -> None:
    for num_values in LENGTHS:
        vector = gaussian(num_values).requires_grad_()
        view = codec.encoded_view(vector)
        assert (view is None) == (codec.name != "fp32"), num_values
        assert view is None or view == codec.encode(vector), num_values


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_the_largest_is_no_number_if_a_value_is_none(name: str, kind: type) -> None:
    codec = get_codec(name)
    encoded = codec.encode(gaussian(70_000))
    encoded[-2:] = b"\xff\xff"
    assert math.isnan(codec.largest(kind(encoded), 70_000))


@every_codec
@settings(max_examples=30)
@given(data=st.data())
def test_pieces_cut_at_blocks_concatenate_to_the_whole(codec: Codec, data: st.DataObject) -> None:
    num_values = data.draw(st.integers(1, 3000))
    cut = data.draw(st.integers(0, num_values // codec.block_size)) * codec.block_size
    vector = gaussian(num_values, seed=num_values)
    whole = codec.encode(vector)
    assert codec.encode(vector[:cut]) + codec.encode(vector[cut:]) == whole
    border = codec.encoded_bytes(cut)
    tail = decode(codec, memoryview(whole)[border:], num_values - cut)
    assert torch.equal(tail, decode(codec, whole, num_values)[cut:])


@every_codec
def test_cutting_at_blocks_across_inner_chunks_changes_nothing(codec: Codec) -> None:
    vector = gaussian(200_000)
    cut = 100_096 // codec.block_size * codec.block_size
    assert codec.encode(vector[:cut]) + codec.encode(vector[cut:]) == codec.encode(vector)


@every_codec
def test_bytes_do_not_depend_on_the_number_of_threads(codec: Codec) -> None:
    vector, threads = gaussian(300_000), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = codec.encode(vector)
        torch.set_num_threads(2)
        assert codec.encode(vector) == alone
    finally:
        torch.set_num_threads(threads)


@every_codec
def test_any_buffer_decodes_even_read_only_and_unaligned(codec: Codec) -> None:
    vector = gaussian(1000)
    encoded = codec.encode(vector)
    shifted = memoryview(b"?" + encoded)[1:]
    for kind in (bytes, bytearray, memoryview):
        assert torch.equal(decode(codec, kind(bytes(encoded)), 1000), decode(codec, shifted, 1000)), kind
    codec.validate(shifted, 1000)
    out = torch.zeros(1000)
    codec.accumulate_into(shifted, 1.0, out)
    assert torch.equal(out, decode(codec, encoded, 1000))


@every_codec
def test_accumulating_adds_the_weighted_decoded_values(codec: Codec) -> None:
    for num_values in LENGTHS:
        encoded = codec.encode(gaussian(num_values))
        decoded, start = decode(codec, encoded, num_values), gaussian(num_values, seed=1)
        # Three fp32 roundings at most of numbers no larger than these: scale * weight, the product, sums.
        size = decoded.abs().max() if num_values else torch.zeros(())
        for weight in WEIGHTS:
            out = start.clone()
            codec.accumulate_into(encoded, weight, out)
            expected = start.double() + weight * decoded.double()
            slack = 2.0**-21 * (abs(weight) * size + start.abs()).double()
            assert bool(((out.double() - expected).abs() <= slack).all()), (num_values, weight)


@every_codec
def test_accumulating_uses_separately_rounded_multiply_and_add(codec: Codec) -> None:
    """A fused multiply-add would keep the product's low bits, and so differ on some of these values."""
    encoded = codec.encode(gaussian(4096))
    start = gaussian(4096, seed=1)
    out = start.clone()
    codec.accumulate_into(encoded, 1 / 3, out)
    third = torch.tensor(1 / 3)
    if isinstance(codec, BlockwiseCodec):
        step = codec.encoded_bytes(codec.block_size)
        scales = torch.tensor([struct.unpack_from("<f", encoded, at) for at in range(0, len(encoded), step)])
        codes = decode(codec, encoded, 4096).view(-1, codec.block_size).double().div(scales).round().float()
        products = codes.mul(scales.mul(third)).flatten()
    else:
        products = decode(codec, encoded, 4096).mul(third)
    assert torch.equal(out, (start.double() + products.double()).float())
    fused = (start.double() + decode(codec, encoded, 4096).double() * third.double()).float()
    assert not torch.equal(out, fused)


@every_codec
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_values_that_are_not_finite_are_not_encoded(codec: Codec, bad: float) -> None:
    for where in (0, 255, 256, 66_000, 69_999):
        vector = gaussian(70_000)
        vector[where] = bad
        with pytest.raises(CodecError, match="not finite"):
            codec.encode(vector)


@every_codec
def test_another_length_is_refused(codec: Codec) -> None:
    for change in (-1, 1):
        size = codec.encoded_bytes(300) + change
        data, out = bytes(size), torch.full((300,), 7.0)
        with pytest.raises(CodecError, match=f"got {size} bytes"):
            codec.validate(data, 300)
        with pytest.raises(CodecError, match="bytes"):
            codec.decode_into(data, out)
        with pytest.raises(CodecError, match="bytes"):
            codec.accumulate_into(data, 1.0, out)
        assert bool((out == 7.0).all())


@every_codec
@given(data=st.data())
def test_bytes_that_validate_decode_to_finite_numbers(codec: Codec, data: st.DataObject) -> None:
    num_values = data.draw(st.integers(0, 40))
    size = codec.encoded_bytes(num_values)
    encoded = data.draw(st.binary(min_size=size, max_size=size))
    try:
        codec.validate(encoded, num_values)
    except CodecError:
        return
    assert bool(torch.isfinite(decode(codec, encoded, num_values)).all())


@every_codec
def test_tensors_that_are_not_flat_fp32_are_the_callers_mistake(codec: Codec) -> None:
    data = bytes(codec.encoded_bytes(4))
    for wrong in (torch.zeros(4, dtype=torch.float64), torch.zeros(2, 2), torch.zeros(8)[::2]):
        with pytest.raises(ValueError, match="contiguous fp32 CPU vectors"):
            codec.encode(wrong)
        with pytest.raises(ValueError, match="contiguous fp32 CPU vectors"):
            codec.decode_into(data, wrong)
        with pytest.raises(ValueError, match="contiguous fp32 CPU vectors"):
            codec.accumulate_into(data, 1.0, wrong)


@every_codec
def test_weights_beyond_fp32_are_the_callers_mistake(codec: Codec) -> None:
    for weight in (math.nan, math.inf, 1e300):
        with pytest.raises(ValueError, match="weight"):
            codec.accumulate_into(bytes(codec.encoded_bytes(4)), weight, torch.zeros(4))


@every_codec
def test_parameters_that_require_gradients_encode(codec: Codec) -> None:
    vector = gaussian(300)
    assert codec.encode(vector.clone().requires_grad_()) == codec.encode(vector)


@every_codec
@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_norm_and_largest_are_those_of_the_decoded_values(codec: Codec, scale: float) -> None:
    for num_values in LENGTHS:
        encoded = codec.encode(gaussian(num_values) * scale)
        decoded = decode(codec, encoded, num_values).double()
        assert codec.squared_norm(encoded, num_values) == pytest.approx(float(decoded.square().sum()), rel=1e-5)
        largest = float(decoded.abs().max()) if num_values else 0.0
        assert largest * (1 - 1e-6) <= codec.largest(encoded, num_values) <= largest * (1 + 1e-2), num_values


@every_codec
def test_the_norm_of_a_chunk_is_that_of_its_values_and_the_same_whatever_lies_beside_it(codec: Codec) -> None:
    for num_values in (1, 1000, 65_536, 3 * 65_536, 3 * 65_536 + 5000):
        encoded, step = memoryview(codec.encode(gaussian(num_values))), math.lcm(16_384, codec.block_size)
        decoded = decode(codec, encoded, num_values).double()
        norms = codec.squared_norms(encoded, num_values, step)
        chunks = [(low, min(low + step, num_values)) for low in range(0, num_values, step)]
        assert norms == pytest.approx([float(decoded[low:high].square().sum()) for low, high in chunks], rel=1e-5)
        pieces = [encoded[codec.encoded_bytes(low) : codec.encoded_bytes(high)] for low, high in chunks]
        alone = [codec.squared_norms(p, high - low, step) for p, (low, high) in zip(pieces, chunks, strict=True)]
        assert norms == [energy for energies in alone for energy in energies], num_values


@every_codec
def test_a_norm_has_the_same_bits_whoever_computes_it(codec: Codec) -> None:
    encoded, threads = codec.encode(gaussian(300_000)), torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = codec.squared_norm(encoded, 300_000)
        torch.set_num_threads(2)
        assert codec.squared_norm(bytes(encoded), 300_000) == alone
    finally:
        torch.set_num_threads(threads)


@pytest.mark.parametrize("num_values", LENGTHS)
def test_squares_are_added_up_in_the_order_that_is_written_down(num_values: int) -> None:
    vector = gaussian(num_values)
    total = 0.0
    for start in range(0, num_values, CHUNK_VALUES):
        squares = (vector[start : start + CHUNK_VALUES] ** 2).numpy()
        columns = np.zeros(SUM_COLUMNS, np.float32)
        whole = len(squares) // SUM_COLUMNS * SUM_COLUMNS
        for row in squares[:whole].reshape(-1, SUM_COLUMNS):
            columns += row
        total += math.fsum([*columns.tolist(), *squares[whole:].tolist()])
    assert sum_of_squares(vector) == total


def test_squares_beyond_fp32_add_up_to_infinity() -> None:
    assert sum_of_squares(torch.full((1000,), 1e30)) == math.inf
