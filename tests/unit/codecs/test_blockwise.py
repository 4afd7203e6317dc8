"""int8 keeps its error bound on every input and treats each block for itself."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import CodecError, get_codec
from p2ptrain.codecs.blockwise import BLOCK, MAX_PEAK, MIN_PEAK

INT8 = get_codec("int8")


def round_trip(vector: torch.Tensor) -> torch.Tensor:
    out = torch.full_like(vector, torch.nan)
    INT8.decode_into(INT8.encode(vector), out)
    return out


def assert_within_bound(vector: torch.Tensor) -> None:
    out = round_trip(vector)
    for start in range(0, len(vector), BLOCK):
        block = vector[start : start + BLOCK].double()
        peak = float(block.abs().max())
        bound = max(peak, MIN_PEAK) / 254 * (1 + 2.0**-14) if peak else 0.0
        assert float((out[start : start + BLOCK].double() - block).abs().max()) <= bound


def test_int8_writes_golden_bytes() -> None:
    # peak 2.54, scale 0.02: the third value is 0.5 steps and rounds to even.
    vector = torch.tensor([2.54, -2.54, 0.01, 1.0, -0.02, 0.0])
    assert INT8.encode(vector).hex() == "0ad7a33c7f810032ff00"


def test_halves_round_to_even() -> None:
    vector = torch.tensor([127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5])
    assert struct.unpack("<f7b", INT8.encode(vector)) == (1.0, 127, 0, 2, 2, 0, -2, -2)


@settings(deadline=None)
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
    assert_within_bound(torch.tensor(values + [0.0] * padding + values))


@pytest.mark.parametrize("exponent", [-149, -140, -126, -110, -101, -100, -99, -50, 0, 50, 119])
@pytest.mark.parametrize("num_values", [1, 255, 256, 257, 1000])
def test_error_stays_within_the_bound_at_every_magnitude(exponent: int, num_values: int) -> None:
    uniform = torch.rand(num_values, generator=torch.Generator().manual_seed(exponent % 97)) * 2 - 1
    assert_within_bound(torch.ldexp(uniform, torch.tensor(exponent)))


def test_a_block_of_zeros_has_scale_zero_and_decodes_to_zero() -> None:
    vector = torch.cat([torch.ones(BLOCK), torch.zeros(BLOCK), -torch.zeros(3)])
    encoded = INT8.encode(vector)
    assert encoded[260:] == bytes(260 + 7)
    assert torch.equal(round_trip(vector), vector)


@given(st.floats(MIN_PEAK, MAX_PEAK, width=32))
def test_a_single_value_survives_up_to_rounding(value: float) -> None:
    assert round_trip(torch.tensor([value])).item() == pytest.approx(value, rel=2**-22)


def test_a_large_block_does_not_coarsen_its_neighbours() -> None:
    vector = torch.cat([torch.full((BLOCK,), 1e6), torch.linspace(-1, 1, BLOCK)])
    error = (round_trip(vector)[BLOCK:] - vector[BLOCK:]).abs().max()
    assert error <= 1 / 253


def test_the_encoded_mean_of_four_gaussian_vectors_is_within_one_percent() -> None:
    generator = torch.Generator().manual_seed(0)
    vectors = [torch.randn(1 << 18, generator=generator) for _ in range(4)]
    total = torch.zeros(1 << 18)
    for vector in vectors:
        INT8.accumulate_into(INT8.encode(vector), 0.25, total)
    exact = torch.stack(vectors).double().mean(0)
    relative = (round_trip(total).double() - exact).norm() / exact.norm()
    assert 0.005 < relative < 0.01


@pytest.mark.parametrize("value", [1.01 * MAX_PEAK, -1.01 * MAX_PEAK, 3e38])
def test_values_beyond_the_limit_are_refused(value: float) -> None:
    with pytest.raises(CodecError, match=r"2\*\*120"):
        INT8.encode(torch.tensor([0.0, value]))


@pytest.mark.parametrize("scale", [math.nan, math.inf, -math.inf, -1.0, -1e-45, 1.1 * MAX_PEAK / 127, 3e38])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_received_scales_out_of_range_are_refused(scale: float, block: int) -> None:
    encoded = INT8.encode(torch.ones(600))
    struct.pack_into("<f", encoded, 260 * block, scale)
    with pytest.raises(CodecError, match="scale"):
        INT8.validate(encoded, 600)


def test_the_largest_encodable_values_validate() -> None:
    INT8.validate(INT8.encode(torch.tensor([MAX_PEAK, -MAX_PEAK])), 2)
