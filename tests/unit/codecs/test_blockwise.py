"""int8 and int4 keep their error bounds on every input and treat each block for itself."""

import math
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.codecs import Codec, CodecError, get_codec
from p2ptrain.codecs.blockwise import MAX_PEAK, MIN_PEAK, BlockwiseCodec
from tests.support.codecs import round_trip

INT8, INT4 = get_codec("int8"), get_codec("int4")
both = pytest.mark.parametrize("codec", [INT8, INT4], ids=["int8", "int4"])


def assert_within_bound(codec: Codec, vector: torch.Tensor) -> None:
    assert isinstance(codec, BlockwiseCodec)
    out = round_trip(codec, vector)
    for start in range(0, len(vector), codec.block_size):
        block = vector[start : start + codec.block_size].double()
        peak = float(block.abs().max())
        bound = max(peak, MIN_PEAK) / (2 * codec.levels) * (1 + 2.0**-14) if peak else 0.0
        assert float((out[start : start + codec.block_size].double() - block).abs().max()) <= bound


@pytest.mark.parametrize(
    ("codec", "values", "golden"),
    [
        # peak 2.54, scale 0.02: the third value is 0.5 steps and rounds to even.
        (INT8, [2.54, -2.54, 0.01, 1.0, -0.02, 0.0], "0ad7a33c" + "7f810032ff00"),
        (INT8, [127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5], "0000803f" + "7f00020200fefe"),  # halves
        (INT8, [0.0, -0.0, 0.0], "00000000" + "000000"),
        # peak 7, scale 1: codes 15 1 9 8 10 7, the first three in low halves; then an odd block of one.
        (INT4, [7.0, -7.0, 1.0, 0.4, 2.5, -1.0], "0000803f" + "8fa179"),
        (INT4, [-14.0], "00000040" + "01"),
        (INT4, [1.0] * 128 + [-7.0, 7.0], "2549123e" + "ff" * 64 + "0000803f" + "f1"),
    ],
)
def test_blocks_have_golden_bytes(codec: Codec, values: list[float], golden: str) -> None:
    assert codec.encode(torch.tensor(values)).hex() == golden


def test_int4_refuses_what_hides_in_the_unused_half_of_a_byte() -> None:
    encoded = INT4.encode(torch.ones(131))
    INT4.validate(encoded, 131)
    encoded[-1] |= 16
    with pytest.raises(CodecError, match="unused half"):
        INT4.validate(encoded, 131)


@given(
    st.lists(st.floats(-MAX_PEAK, MAX_PEAK, width=32), min_size=1, max_size=20),
    st.integers(0, 600),
)
@example([1e-45], 0)
@example([-1e-38, 1e-45], 255)
@example([MIN_PEAK], 256)
@example([math.nextafter(MIN_PEAK, 0)], 255)
@example([MAX_PEAK, -MAX_PEAK, 1.0], 300)
def test_error_stays_within_the_stated_bound(values: list[float], padding: int) -> None:
    for codec in (INT8, INT4):
        assert_within_bound(codec, torch.tensor(values + [0.0] * padding + values))


@given(st.floats(MIN_PEAK, MAX_PEAK, width=32))
def test_a_single_value_survives_up_to_rounding(value: float) -> None:
    for codec in (INT8, INT4):
        assert round_trip(codec, torch.tensor([value])).item() == pytest.approx(value, rel=2**-22)


@both
@pytest.mark.parametrize("value", [1.01 * MAX_PEAK, -1.01 * MAX_PEAK, 3e38])
def test_values_beyond_the_limit_are_refused(codec: Codec, value: float) -> None:
    with pytest.raises(CodecError, match=r"2\*\*120"):
        codec.encode(torch.tensor([0.0, value]))


@both
@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45, 1.1 * MAX_PEAK / 7, 3e38])
def test_received_scales_out_of_range_are_refused(codec: Codec, scale: float) -> None:
    for block in range(3):
        encoded = codec.encode(torch.ones(600))
        struct.pack_into("<f", encoded, codec.encoded_bytes(block * codec.block_size), scale)
        with pytest.raises(CodecError, match="scale"):
            codec.validate(encoded, 600)
