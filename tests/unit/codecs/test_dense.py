"""fp32 is exact; fp16 and bf16 round to the nearest number and refuse what does not fit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.codecs import CodecError, get_codec

FP32, FP16, BF16 = get_codec("fp32"), get_codec("fp16"), get_codec("bf16")
VECTOR = torch.tensor([0.0, -0.0, 1.0, -2.5, 1 / 3, 65504.0, 6e-8, 1e-45])

floats = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_fp32_writes_golden_bytes() -> None:
    assert FP32.encode(VECTOR).hex() == "00000000000000800000803f000020c0abaaaa3e00e07f4759d9803301000000"


def test_fp16_writes_golden_bytes() -> None:
    assert FP16.encode(VECTOR).hex() == "00000080003c00c15535ff7b01000000"


def test_bf16_writes_golden_bytes() -> None:
    assert BF16.encode(VECTOR).hex() == "00000080803f20c0ab3e8047813300" + "00"


@given(st.lists(floats, max_size=50))
def test_fp32_decodes_to_the_same_bits(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    out = torch.full_like(vector, torch.nan)
    FP32.decode_into(FP32.encode(vector), out)
    assert torch.equal(out.view(torch.int32), vector.view(torch.int32))


@given(st.lists(st.floats(-65504, 65504, width=32), max_size=50))
def test_fp16_keeps_its_error_bound(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    out = torch.full_like(vector, torch.nan)
    FP16.decode_into(FP16.encode(vector), out)
    bound = torch.maximum(vector.abs().double() * 2.0**-11, torch.tensor(2.0**-25, dtype=torch.float64))
    assert bool(((out.double() - vector.double()).abs() <= bound).all())


@given(st.lists(st.floats(-(2.0**127), 2.0**127, width=32), max_size=50))
def test_bf16_keeps_its_error_bound(values: list[float]) -> None:
    vector = torch.tensor(values, dtype=torch.float32)
    out = torch.full_like(vector, torch.nan)
    BF16.decode_into(BF16.encode(vector), out)
    bound = torch.maximum(vector.abs().double() * 2.0**-8, torch.tensor(2.0**-134, dtype=torch.float64))
    assert bool(((out.double() - vector.double()).abs() <= bound).all())


def test_bf16_encodes_up_to_where_rounding_gives_infinity() -> None:
    first_refused = torch.tensor([0x7F7F8000], dtype=torch.int32).view(torch.float32)
    out = torch.zeros(1)
    BF16.decode_into(BF16.encode(torch.nextafter(first_refused, torch.zeros(1))), out)
    assert out.item() == torch.finfo(torch.bfloat16).max
    for beyond in (first_refused, -first_refused, torch.tensor([3.4e38])):
        with pytest.raises(CodecError, match="fp32"):
            BF16.encode(beyond)


def test_fp16_encodes_up_to_where_rounding_gives_infinity() -> None:
    largest = torch.nextafter(torch.tensor(65520.0), torch.tensor(0.0)).reshape(1)
    out = torch.zeros(1)
    FP16.decode_into(FP16.encode(-largest), out)
    assert out.item() == -65504.0
    for beyond in (65520.0, -65520.0, 1e30):
        with pytest.raises(CodecError, match="65504"):
            FP16.encode(torch.tensor([0.0, beyond]))
