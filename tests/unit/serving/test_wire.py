"""Rows between stages: a row's bytes depend on it alone, and on no machine."""

import hashlib

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.blockwise import Int8Codec
from p2ptrain.serving.host.sessions import Offer
from p2ptrain.serving.journal import Int8Wire, Wire, wire_of
from tests.support.codecs import exact_values

DIGEST = "e9bf452328e4fa7c0bb61e3565cdbd6560aba390f05e33df2f0563568fb1d1ee"
"""SHA-256 of three rows of 576 values in 8 bits."""


def rows_of(number: int, hidden: int) -> torch.Tensor:
    return exact_values(number * hidden, 1).view(number, hidden) * 3


@given(number=st.integers(1, 9), hidden=st.sampled_from([1, 4, 60, 255, 256, 257, 576, 768]))
def test_a_row_has_the_bytes_of_the_codec_whatever_rows_are_beside_it(number: int, hidden: int) -> None:
    rows, wire = rows_of(number, hidden), Int8Wire(hidden)
    encoded = wire.encode(rows)
    assert encoded == b"".join(bytes(Int8Codec().encode(row)) for row in rows)
    assert len(encoded) == number * wire.row_bytes
    decoded = wire.decode(bytearray(encoded))
    for row, own in zip(rows, decoded, strict=True):
        assert torch.equal(wire.decode(bytearray(wire.encode(row[None])))[0], own)
        assert float((row - own).abs().max()) <= float(row.abs().max()) / 254 * (1 + 2**-14)


def test_the_bits_are_those_of_the_repository() -> None:
    wire = Int8Wire(576)
    encoded = wire.encode(rows_of(3, 576))
    assert hashlib.sha256(encoded + wire.decode(encoded).numpy().tobytes()).hexdigest() == DIGEST


@pytest.mark.parametrize("hidden", [576, 2048, 4096])
def test_eight_bits_take_about_a_quarter_of_the_bytes(hidden: int) -> None:
    assert 3.9 < Wire(hidden).row_bytes / Int8Wire(hidden).row_bytes < 4


def test_fp32_keeps_all_bits() -> None:
    rows = rows_of(5, 7)
    assert torch.equal(Wire(7).decode(bytearray(Wire(7).encode(rows))), rows)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_values_without_a_code_are_refused(value: float) -> None:
    rows = rows_of(2, 300)
    rows[1, 299] = value
    with pytest.raises(CodecError):
        Int8Wire(300).encode(rows)


def test_bytes_that_are_no_rows_are_refused() -> None:
    wire = Int8Wire(300)
    encoded = bytearray(wire.encode(rows_of(2, 300)))
    encoded[-48:-44] = np.float32(np.nan).tobytes()
    with pytest.raises(CodecError, match="scale"):
        wire.decode(encoded)
    with pytest.raises(CodecError, match="not finite"):
        Wire(2).decode(bytearray(np.array([1, np.inf], np.float32).tobytes()))


@pytest.mark.parametrize("stage", ["exact-1/fp32", "exact-1/int8", "torch-1/int8"])
def test_the_arithmetic_names_the_wire(stage: str) -> None:
    offers = [Offer(0, num_stages, stage, 512).with_wire(wire) for num_stages in (1, 2) for wire in ("fp32", "int8")]
    assert [type(wire_of(offer.arithmetic, 8)) for offer in offers] == [Wire, Wire, Wire, Int8Wire]
    assert [offer.arithmetic for offer in offers[:3]] == [stage] * 3
