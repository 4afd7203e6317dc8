"""fp32 is exact; fp16 and bf16 round to the nearest number and refuse what does not fit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.codecs import Codec, CodecError, get_codec
from tests.support.codecs import round_trip

FP32, FP16, BF16 = get_codec("fp32"), get_codec("fp16"), get_codec("bf16")
VECTOR = torch.tensor([0.0, -0.0, 1.0, -2.5, 1 / 3, 65504.0, 6e-8, 1e-45])


@pytest.mark.parametrize(
    ("codec", "golden"),
    [
        (FP32, "00000000000000800000803f000020c0abaaaa3e00e07f4759d9803301000000"),
        (FP16, "00000080003c00c15535ff7b01000000"),
        (BF16, "00000080803f20c0ab3e804781330000"),
    ],
)
def test_each_writes_golden_bytes(codec: Codec, golden: str) -> None:
    assert codec.encode(VECTOR).hex() == golden


@pytest.mark.parametrize(
    ("codec", "most", "relative", "absolute"),
    [(FP16, 65504.0, 2.0**-11, 2.0**-25), (BF16, 2.0**127, 2.0**-8, 2.0**-134)],
)
@given(data=st.data())
def test_rounding_keeps_its_error_bound(
    codec: Codec, most: float, relative: float, absolute: float, data: st.DataObject
) -> None:
    vector = torch.tensor(data.draw(st.lists(st.floats(-most, most, width=32), max_size=50)), dtype=torch.float32)
    error = (round_trip(codec, vector).double() - vector.double()).abs()
    assert bool((error <= (vector.abs().double() * relative).clamp(min=absolute)).all())


@pytest.mark.parametrize(
    ("codec", "first_refused", "largest", "refusal"),
    [
        (FP16, torch.tensor(65520.0), 65504.0, "65504"),
        (
            BF16,
            torch.tensor(0x7F7F8000, dtype=torch.int32).view(torch.float32),
            (2 - 2.0**-7) * 2.0**127,
            "fp32",
        ),
    ],
)
def test_values_are_encoded_up_to_where_rounding_gives_infinity(
    codec: Codec, first_refused: torch.Tensor, largest: float, refusal: str
) -> None:
    last = torch.nextafter(first_refused, torch.tensor(0.0)).reshape(1)
    assert round_trip(codec, torch.cat([last, -last])).tolist() == [largest, -largest]
    for beyond in (first_refused, -first_refused, torch.tensor(3.4e38)):
        with pytest.raises(CodecError, match=refusal):
            codec.encode(torch.stack([torch.tensor(0.0), beyond]))
