"""Masks and the grid below them: exact sums that never overflow, of parts that look like noise."""

from itertools import pairwise

import numpy as np
import pytest
import torch

from p2ptrain.averaging.masking.codec import (
    MASKED,
    Clipped,
    Grid,
    MaskingCodec,
    Stream,
    add_by_openssl,
    add_natively,
    add_streams,
    native_masks,
)
from p2ptrain.codecs import CodecError
from tests.support.masking import uniformity

GRID = Grid(16.0)
STREAMS = [Stream(b"a" * 16), Stream(b"b" * 16, negative=True)]


def codec(share: float = 0.25, streams: list[Stream] = STREAMS) -> MaskingCodec:
    return MaskingCodec(GRID, share, streams, Clipped())


@pytest.mark.parametrize("length", [1, 3, 4, 1001, 65_536, 65_541, 200_003])
@pytest.mark.parametrize("start", [0, 1, 2, 3, 4, 1023, 65_537])
def test_a_part_has_the_masks_of_its_place(start: int, length: int) -> None:
    whole, part = np.zeros(start + length, np.uint32), np.zeros(length, np.uint32)
    add_streams(whole, STREAMS, 0)
    add_streams(part, STREAMS, start)
    assert np.array_equal(whole[start:], part)


@pytest.mark.parametrize("count", [1, 16, 17, 40])
@pytest.mark.parametrize("start", [0, 3, 127, 2**34 + 5])
def test_native_masks_are_those_of_openssl(start: int, count: int) -> None:
    native = native_masks()
    if native is None:
        pytest.skip("this machine has no native masks")
    streams = [Stream(bytes([1 + number]) * 16, number % 3 == 0) for number in range(count)]
    for length in (1, 4, 128, 1001, 70_001):
        found, right = np.tile(np.arange(length, dtype=np.uint32), (2, 1))
        add_natively(native, found, streams, start)
        add_by_openssl(right, streams, start)
        assert np.array_equal(found, right)


def test_native_masks_that_are_others_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("p2ptrain.averaging.masking.codec.load_functions", lambda: {"masked": {"add": lambda *_: 0}})
    assert native_masks.__wrapped__() is None


def test_pieces_and_parts_concatenate_to_the_whole() -> None:
    vector = torch.randn(3001, generator=torch.Generator().manual_seed(1))
    whole = codec().encode(vector)
    cuts = [0, 1, 7, 1000, 2999, 3001]
    pieces = [codec().part(low, high).encode(vector[low:high]) for low, high in pairwise(cuts)]
    nested = codec().part(7, 3001).part(993, 2994).encode(vector[1000:])
    assert b"".join(pieces) == whole
    assert bytes(nested) == bytes(whole[4000:])


def test_a_mask_and_its_negative_cancel() -> None:
    words = np.arange(70_001, dtype=np.uint32)
    add_streams(words, [Stream(b"k" * 16)], 5)
    assert not np.array_equal(words, np.arange(70_001, dtype=np.uint32))
    add_streams(words, [Stream(b"k" * 16, negative=True)], 5)
    assert np.array_equal(words, np.arange(70_001, dtype=np.uint32))


@pytest.mark.parametrize("sign", [1.0, -1.0])
@pytest.mark.parametrize("count", [3, 7, 32])
def test_the_largest_sum_does_not_overflow(count: int, sign: float) -> None:
    shares = np.random.default_rng(count).dirichlet([0.3] * count)
    total = np.zeros(4, np.uint32)
    values = np.full(4, sign * GRID.limit, np.float32)
    for share in shares:
        words = np.empty(4, np.uint32)
        assert GRID.to_words(values, float(share), words) == 0
        total += words
    mean = np.empty(4, np.float32)
    GRID.to_values(total, 1.0, mean)
    np.testing.assert_allclose(mean, values, rtol=1e-6)


def test_values_beyond_the_range_count_as_its_end_and_are_counted() -> None:
    masking = codec(share=1.0, streams=[])
    words = np.frombuffer(masking.encode(torch.tensor([1e9, -17.0, 16.0, 0.5])), np.uint32)
    mean = np.empty(4, np.float32)
    GRID.to_values(words, 1.0, mean)
    np.testing.assert_allclose(mean, [16.0, -16.0, 16.0, 0.5], rtol=1e-6)
    assert masking.clipped.number == 2


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_what_is_not_finite_is_refused(value: float) -> None:
    with pytest.raises(CodecError, match="not finite"):
        codec().encode(torch.tensor([0.0, value]))


@pytest.mark.parametrize("vector", [torch.zeros(20_000), torch.full((20_000,), 3.0), torch.linspace(-9, 9, 20_000)])
def test_masked_values_are_uniform_whatever_they_hide(vector: torch.Tensor) -> None:
    one, other = (np.frombuffer(codec(streams=[Stream(bytes([n]) * 16)]).encode(vector), np.uint32) for n in (1, 2))
    for words in (one, other, one - other, one + other):
        assert uniformity(words.view(np.uint8)) > 1e-6


def test_others_read_the_length_of_masked_values_alone() -> None:
    MASKED.validate(b"\xff" * 40, 10)
    assert MASKED.largest(b"\xff" * 40, 10) == 0.0
    assert MASKED.squared_norms(b"\xff" * 40, 10, 4) == [0.0] * 3
    with pytest.raises(CodecError):
        MASKED.validate(b"\xff" * 39, 10)
