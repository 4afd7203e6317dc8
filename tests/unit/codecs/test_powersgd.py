"""powersgd sends low-rank tiles as well as int8 can, never adds error, and decodes to the same bits everywhere."""

from __future__ import annotations

import math
import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import CodecError, get_codec
from p2ptrain.codecs import powersgd as powersgd_module
from p2ptrain.codecs.powersgd import MIN_TILE, RANK, SIDE, PowerSgdCodec
from p2ptrain.codecs.warm import kernels_of
from p2ptrain.kernels import load_kernels
from tests.support.codecs import gaussian, round_trip
from tests.support.tools import unavailable

POWERSGD, INT8 = PowerSgdCodec(), get_codec("int8")
TILE = SIDE * SIDE
FACTOR_BYTES = RANK * (SIDE + 4)


def relative_error(vector: torch.Tensor) -> float:
    return float((round_trip(POWERSGD, vector).double() - vector.double()).norm() / vector.double().norm())


def low_rank(rank: int, seed: int = 0) -> torch.Tensor:
    strengths = torch.logspace(0, -1, rank)
    return ((gaussian(SIDE, rank, seed=seed) * strengths) @ gaussian(rank, SIDE, seed=seed + 1)).flatten()


def assert_contraction(vector: torch.Tensor) -> None:
    """The last of the stated bounds, tile by tile."""
    out = round_trip(POWERSGD, vector).double()
    for start in range(0, len(vector), TILE):
        tile, decoded = vector[start : start + TILE].double(), out[start : start + TILE]
        rows = math.ceil(len(tile) / math.ceil(math.sqrt(len(tile))))
        energy, lost = float((tile**2).sum()), float(((decoded - tile) ** 2).sum())
        assert lost <= (1 - 0.98 / min(rows, SIDE)) * energy


def test_a_tile_takes_4160_bytes_63_times_fewer_than_fp32() -> None:
    assert POWERSGD.encoded_bytes(TILE) == 4160
    assert POWERSGD.encoded_bytes(3 * TILE) == 3 * 4160
    assert POWERSGD.encoded_bytes(MIN_TILE - 1) == INT8.encoded_bytes(MIN_TILE - 1)
    assert POWERSGD.encoded_bytes(MIN_TILE) == 2 * RANK * (64 + 4)
    assert POWERSGD.encoded_bytes(TILE + 100 * 100 - 50) == 4160 + 2 * RANK * (100 + 4)


@pytest.mark.parametrize("rank", [1, 2, RANK])
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e30])
def test_matrices_of_the_rank_come_back_with_the_error_of_int8(rank: int, scale: float) -> None:
    assert relative_error(low_rank(rank) * scale) < 0.02


def test_a_low_rank_tile_at_the_end_comes_back_too() -> None:
    short = (gaussian(100, RANK) @ gaussian(RANK, 100, seed=1)).flatten()
    assert relative_error(short) < 0.02
    assert relative_error(torch.cat([low_rank(4), short])) < 0.02
    assert relative_error(gaussian(MIN_TILE - 1)) < 0.01  # int8


def test_the_error_is_near_that_of_the_best_matrix_of_the_rank() -> None:
    spectrum = torch.arange(1, SIDE + 1).pow(-0.8)
    left, right = (torch.linalg.qr(gaussian(SIDE, SIDE, seed=seed)).Q for seed in (0, 1))
    best = float(spectrum[RANK:].norm() / spectrum.norm())
    assert best < relative_error(((left * spectrum) @ right.T).flatten()) < 1.03 * best


@settings(max_examples=40)
@given(
    st.integers(MIN_TILE, TILE + 5000),
    st.integers(0, 9),
    st.sampled_from([1.0, 3.0, 9.0]),
    st.sampled_from([2.0**-90, 1e-10, 1.0, 2.0**80]),
)
def test_it_is_a_contraction(num_values: int, seed: int, power: float, scale: float) -> None:
    vector = gaussian(num_values, seed=seed)
    vector = vector.sign() * vector.abs().pow(power).clamp(2.0**-10, 2.0**12)
    assert_contraction(vector[: num_values // TILE * TILE or num_values] * scale)


def spikes(count: int) -> torch.Tensor:
    vector = torch.zeros(TILE)
    vector[torch.randperm(TILE, generator=torch.Generator().manual_seed(count))[:count]] = 1.0
    return vector


@pytest.mark.parametrize(
    "vector",
    [
        spikes(1),
        spikes(300),
        torch.eye(SIDE).flatten(),
        torch.ones(TILE),
        torch.full((TILE,), 2.0**112),
        -torch.ones(5000),
    ],
    ids=["one", "few", "identity", "constant", "largest", "short"],
)
def test_it_is_a_contraction_in_corner_cases(vector: torch.Tensor) -> None:
    assert_contraction(vector)


def test_where_the_iteration_finds_nothing_the_largest_row_is_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    # From zeros it comes to the first rows, and stays there when they are zero.
    monkeypatch.setattr(powersgd_module, "_start", lambda: torch.zeros(SIDE, RANK))
    tile = gaussian(SIDE, SIDE)
    tile[:RANK] = 0.0
    largest = int(tile.norm(dim=1).argmax())
    out = round_trip(POWERSGD, torch.cat([tile.flatten(), low_rank(1)]))[:TILE].view(SIDE, SIDE)
    assert out.any(dim=1).nonzero().flatten().tolist() == [largest]
    assert torch.allclose(out[largest], tile[largest], atol=0.02)
    assert_contraction(tile.flatten())


def test_zeros_come_back_as_zeros() -> None:
    vector = torch.zeros(TILE + MIN_TILE + 10)
    assert torch.equal(round_trip(POWERSGD, vector), vector)
    vector[:TILE] = low_rank(2)
    assert not round_trip(POWERSGD, vector)[TILE:].any()


@pytest.mark.parametrize("native", [False, True], ids=["plain", "kernels"])
def test_decoding_adds_the_products_of_rounded_factors_one_by_one(native: bool) -> None:
    """Against single fp32 operations done here: no other order, no fused multiply-add."""
    codec = PowerSgdCodec()
    if native:
        codec.kernels = kernels_of(codec, load_kernels())
        unavailable("" if codec.kernels else "this machine has no kernels", "kernels")
    encoded = POWERSGD.encode(gaussian(TILE))
    left, right = torch.empty(RANK * SIDE), torch.empty(RANK * SIDE)
    INT8.decode_into(encoded[:FACTOR_BYTES], left)
    INT8.decode_into(encoded[FACTOR_BYTES:], right)
    left, right = left.view(RANK, SIDE), right.view(RANK, SIDE)
    expected = torch.outer(left[0], right[0])
    fused = expected.clone()
    for rank in range(1, RANK):
        expected = expected + torch.outer(left[rank], right[rank])
        fused = (fused.double() + torch.outer(left[rank].double(), right[rank].double())).float()
    out = torch.empty(TILE)
    codec.decode_into(encoded, out)
    assert torch.equal(out, expected.flatten())
    assert not torch.equal(out, fused.flatten())
    start = gaussian(TILE, seed=1)
    total = start.clone()
    codec.accumulate_into(encoded, 0.3, total)
    assert torch.equal(total, start + expected.flatten() * torch.tensor(0.3))


@pytest.mark.parametrize("num_values", [100, 5000, TILE, TILE + 100])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, 1.01 * 2.0**112, -3e38])
def test_values_that_do_not_fit_are_refused(num_values: int, bad: float) -> None:
    vector = gaussian(num_values)
    vector[-3] = bad
    with pytest.raises(CodecError, match=r"2\*\*112"):
        POWERSGD.encode(vector)


@pytest.mark.parametrize("num_values", [5000, TILE, TILE + 5000])
def test_factors_that_no_encoder_writes_are_refused(num_values: int) -> None:
    for at in (0, POWERSGD.encoded_bytes(num_values // TILE * TILE) if num_values % TILE else FACTOR_BYTES):
        for scale in (math.nan, math.inf, -1.0):
            encoded = POWERSGD.encode(gaussian(num_values))
            struct.pack_into("<f", encoded, at, scale)
            with pytest.raises(CodecError, match="powersgd: int8: a block's scale"):
                POWERSGD.validate(encoded, num_values)
    encoded = POWERSGD.encode(gaussian(num_values))
    struct.pack_into("<f", encoded, 0, 1.0)
    with pytest.raises(CodecError, match="a value of P is beyond"):
        POWERSGD.validate(encoded, num_values)


def test_the_largest_factors_that_are_accepted_decode_to_finite_numbers() -> None:
    encoded = bytearray(struct.pack("<f", 1.02 / 128) + b"\x80" * SIDE) * RANK
    encoded += bytearray(struct.pack("<f", 2.0**120 / 127) + b"\x80" * SIDE) * RANK
    POWERSGD.validate(encoded, TILE)
    out = torch.empty(TILE)
    POWERSGD.decode_into(encoded, out)
    assert bool(torch.isfinite(out).all())
