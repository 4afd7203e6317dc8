"""int8a and int4a keep their error bounds wherever a block lies, and refuse headers that decode to too much."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from p2ptrain.codecs import Codec, CodecError, get_codec
from p2ptrain.codecs.blockwise import MAX_PEAK, MIN_PEAK, BlockwiseCodec
from tests.support.codecs import round_trip

INT8A, INT4A = get_codec("int8a"), get_codec("int4a")
both = pytest.mark.parametrize("codec", [INT8A, INT4A], ids=["int8a", "int4a"])


def assert_within_bound(codec: Codec, vector: torch.Tensor) -> None:
    assert isinstance(codec, BlockwiseCodec)
    out = round_trip(codec, vector)
    for start in range(0, len(vector), codec.block_size):
        block = vector[start : start + codec.block_size].double()
        span, peak = float(block.max() - block.min()), float(block.abs().max())
        bound = max(span, MIN_PEAK) / (2 * codec.levels) * (1 + 2.0**-11) + peak * 2.0**-23 if span else 0.0
        assert float((out[start : start + codec.block_size].double() - block).abs().max()) <= bound


def test_int8a_writes_golden_bytes() -> None:
    # From -1 to 4.1: scale 0.02, minimum -1; codes 0, 255, 100 and 50.
    vector = torch.tensor([-1.0, 4.1, 1.0, 0.0])
    assert INT8A.encode(vector).hex() == "0ad7a33c" + "000080bf" + "00ff6432"


def test_int4a_writes_golden_bytes() -> None:
    # Scale 1, minimum 3: codes 0, 15, 1 in low halves, and 2, 5 in high ones.
    vector = torch.tensor([3.0, 18.0, 4.0, 5.4, 7.6])
    assert INT4A.encode(vector).hex() == "0000803f" + "00004040" + "20" + "5f" + "01"


@both
def test_halves_round_to_even(codec: Codec) -> None:
    levels = 255.0 if codec is INT8A else 15.0
    vector = torch.tensor([10.0, 10.5, 11.5, 12.5, 10.0 + levels])
    assert round_trip(codec, vector).tolist() == [10.0, 10.0, 12.0, 12.0, 10.0 + levels]


@given(
    st.lists(st.floats(-MAX_PEAK, MAX_PEAK, width=32), min_size=1, max_size=20),
    st.integers(0, 600),
    st.floats(-MAX_PEAK, MAX_PEAK, width=32),
)
@example([1e-45], 0, 0.0)
@example([-1e-38, 1e-45], 255, 1e-45)
@example([MIN_PEAK], 256, 0.0)
@example([1.0, math.nextafter(1.0, 2.0) + 2**-23], 255, 1.0)
@example([MAX_PEAK, -MAX_PEAK, 1.0], 300, -MAX_PEAK)
def test_error_stays_within_the_stated_bound(values: list[float], padding: int, pad: float) -> None:
    for codec in (INT8A, INT4A):
        assert_within_bound(codec, torch.tensor(values + [pad] * padding + values, dtype=torch.float32))


@both
@pytest.mark.parametrize("exponent", [-149, -140, -126, -110, -101, -100, -99, -50, 0, 50, 118])
def test_error_stays_within_the_bound_at_every_magnitude(codec: Codec, exponent: int) -> None:
    uniform = torch.rand(1000, generator=torch.Generator().manual_seed(exponent % 97)) * 2 - 1
    for centre in (0.0, 0.5, -1.0):
        assert_within_bound(codec, torch.ldexp(uniform * 0.01 + centre, torch.tensor(exponent)))


@both
@given(value=st.floats(-MAX_PEAK, MAX_PEAK, width=32), length=st.integers(1, 600))
@example(value=-0.0, length=3)
@example(value=1e-45, length=300)
def test_equal_values_survive_exactly(codec: Codec, value: float, length: int) -> None:
    vector = torch.full((length,), value)
    assert torch.equal(round_trip(codec, vector), vector)


@both
def test_the_sign_of_zero_changes_no_byte(codec: Codec) -> None:
    zeros = torch.zeros(700)
    mixed = torch.where(torch.arange(700) % 2 == 0, -zeros, zeros)
    assert codec.encode(zeros) == codec.encode(-zeros) == codec.encode(mixed) == bytes(codec.encoded_bytes(700))


@pytest.mark.parametrize(("name", "most"), [("int8", 0.55), ("int4", 0.51)])
def test_what_is_all_positive_takes_half_the_steps_of_a_symmetric_code(name: str, most: float) -> None:
    generator = torch.Generator().manual_seed(0)
    moments = torch.rand(1 << 16, generator=generator) * 1e-6

    def error(codec: Codec) -> float:
        return float((round_trip(codec, moments) - moments).norm())

    assert error(get_codec(f"{name}a")) < most * error(get_codec(name))


@both
@pytest.mark.parametrize("value", [1.01 * MAX_PEAK, -1.01 * MAX_PEAK, 3e38, -3e38])
@pytest.mark.parametrize("length", [2, 600])
def test_values_beyond_the_limit_are_refused(codec: Codec, value: float, length: int) -> None:
    vector = torch.zeros(length)
    vector[-1] = value
    with pytest.raises(CodecError, match=r"2\*\*120"):
        codec.encode(vector)


@both
@pytest.mark.parametrize(
    ("scale", "low"),
    [
        *((scale, 0.0) for scale in (math.nan, math.inf, -math.inf, -1.0, -1e-45, 1.1 * MAX_PEAK / 15, 3e38)),
        *((1.0, low) for low in (math.nan, math.inf, -math.inf, 1.01 * MAX_PEAK, -1.01 * MAX_PEAK)),
        (0.5 * MAX_PEAK, 0.99 * MAX_PEAK),
        (3e38, -MAX_PEAK),
    ],
)
def test_received_headers_out_of_range_are_refused(codec: Codec, scale: float, low: float) -> None:
    for block in range(3):
        encoded = codec.encode(torch.ones(600))
        struct.pack_into("<ff", encoded, codec.encoded_bytes(block * codec.block_size), scale, low)
        with pytest.raises(CodecError, match="scale"):
            codec.validate(encoded, 600)


@both
def test_the_largest_encodable_values_validate(codec: Codec) -> None:
    for values in ([MAX_PEAK, -MAX_PEAK], [MAX_PEAK, MAX_PEAK], [-MAX_PEAK, 0.0], [MAX_PEAK, 1.0]):
        decoded = round_trip(codec, torch.tensor(values))  # Validates, which raises what it refuses.
        assert decoded.isfinite().all()
        assert decoded.tolist() == pytest.approx(values, abs=MAX_PEAK * 2.0**-20)


def test_int4a_refuses_what_hides_in_the_unused_half_of_a_byte() -> None:
    encoded = INT4A.encode(torch.linspace(0, 1, 131))
    encoded[-1] |= 16
    with pytest.raises(CodecError, match="int4a: the unused half"):
        INT4A.validate(encoded, 131)
