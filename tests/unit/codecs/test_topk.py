"""topk sends what its format says, keeps its error bound, and refuses what no encoder writes."""

import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import CodecError
from p2ptrain.codecs.topk import TopKCodec
from p2ptrain.native.load import load_functions
from tests.support.codecs import gaussian, round_trip
from tests.support.tools import unavailable

TOPK = TopKCodec()
CHUNK = TOPK.block_size


@pytest.fixture(scope="module")
def native() -> TopKCodec:
    """The native codec; `TOPK` is not."""
    codec = TopKCodec()
    codec.functions = load_functions().get("topk", {})
    unavailable("" if codec.functions else "this machine has no native library", "kernels")
    return codec


def reference_indices(chunk: list[float]) -> list[int]:
    by_size = sorted(range(len(chunk)), key=lambda index: (-abs(chunk[index]), index))
    return sorted(by_size[: math.ceil(len(chunk) / 64)])


def least_squared_error(magnitudes: list[float]) -> float:
    """Of two exact levels, by trying every split."""
    ordered = sorted(magnitudes)
    best = math.inf
    for split in range(1, len(ordered) + 1):
        groups = [group for group in (ordered[:split], ordered[split:]) if group]
        means = [math.fsum(group) / len(group) for group in groups]
        best = min(best, sum((v - m) ** 2 for group, m in zip(groups, means, strict=True) for v in group))
    return best


def assert_within_bound(vector: torch.Tensor) -> None:
    out = round_trip(TOPK, vector).double()
    for start in range(0, len(vector), CHUNK):
        chunk, decoded = vector[start : start + CHUNK].double(), out[start : start + CHUNK]
        kept = reference_indices(chunk.tolist())
        harmonic = sum(1 / i for i in range(1, len(kept) + 1))
        saved = float((chunk[kept] ** 2).sum()) / harmonic
        energy, lost = float((chunk**2).sum()), float(((decoded - chunk) ** 2).sum())
        rounding = energy * 2.0**-40 + len(kept) * 2.0**-200
        assert lost <= energy - (1 - 2.0**-16) * saved + rounding
        assert lost <= (1 - (1 - 2.0**-16) * len(kept) / (len(chunk) * harmonic)) * energy + rounding
        assert lost < energy or energy < 2.0**-190


chunks = st.one_of(
    st.lists(st.floats(-(2.0**120), 2.0**120, width=32), min_size=1, max_size=200),
    st.lists(st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.0, 1e-45, 3.0]), min_size=1, max_size=300),
    st.builds(
        lambda n, seed, power: (gaussian(n, seed=seed).sign() * gaussian(n, seed=seed).abs() ** power).tolist(),
        st.integers(1, 5000), st.integers(0, 9), st.sampled_from([0.1, 1.0, 5.0]),
    ),
)  # fmt: skip


def test_a_short_chunk_has_golden_bytes() -> None:
    # Of 130 values three are kept, 5 at 1, -1 at 64 and -5.5 at 129: buckets 0, 1, 2 (bits 0, 2, 4), places 1, 0, 1.
    vector = torch.zeros(130)
    vector[1], vector[64], vector[129] = 5.0, -1.0, -5.5
    # Levels 1 and 5.25; codes high, negative, negative and high.
    assert TOPK.encode(vector).hex() == "803fa840" + "15" + "36" + "011000"
    assert round_trip(TOPK, vector)[[1, 64, 129]].tolist() == [5.25, -1.0, -5.25]
    assert TOPK.encode(torch.tensor([-3.0])).hex() == "40404040" + "01" + "01" + "00"


@settings(max_examples=50)
@given(chunks)
@example([0.0] * 70)
@example([1.0] * 4096)
@example([2.0**120] * 4097)
def test_the_largest_magnitudes_are_kept_and_the_first_of_equals(values: list[float]) -> None:
    vector = torch.tensor(values)
    out = round_trip(TOPK, vector)
    for start in range(0, len(values), CHUNK):
        chunk = vector[start : start + CHUNK].tolist()
        decoded = out[start : start + CHUNK].tolist()
        kept = reference_indices(chunk)
        assert {index for index, value in enumerate(decoded) if value} <= set(kept)
        for index in kept:
            if abs(chunk[index]) > 1e-20:  # far from where levels become zero
                assert math.copysign(1, decoded[index]) == math.copysign(1, chunk[index])
                assert decoded[index] != 0


@settings(max_examples=50)
@given(chunks)
@example([2.0**-100])
@example([math.nextafter(2.0**-100, 0)])
@example([1e-45] * 100)
@example([2.0**120, -(2.0**120), 1.0] * 100)
@example([1 / rank for rank in range(1, 65)] + [0.0] * (CHUNK - 64))  # The proof's steps lose least: it is tight.
def test_the_error_stays_within_the_stated_bound(values: list[float]) -> None:
    assert_within_bound(torch.tensor(values))


@pytest.mark.parametrize("power", [0.1, 1.0, 3.0, 9.0])
@pytest.mark.parametrize("num_values", [1, 64, 65, 4096])
def test_no_two_levels_have_less_error(num_values: int, power: float) -> None:
    vector = gaussian(num_values, seed=num_values).abs().pow(power)
    out = round_trip(TOPK, vector)
    kept = reference_indices(vector.tolist())
    lost = float(((out - vector).double()[kept] ** 2).sum())
    energy = float((vector[kept].double() ** 2).sum())
    assert len(set(out[kept].tolist())) <= 2
    assert lost <= least_squared_error(vector[kept].tolist()) + energy * 2.0**-15


def test_values_that_do_not_fit_are_refused(native: TopKCodec) -> None:
    for bad in (math.nan, -math.nan, math.inf, -math.inf, 1.01 * 2.0**120, -3e38):
        for where in (0, 255, 256, 4095, 4096, 4999, slice(None)):
            vector = gaussian(5000)
            vector[where] = bad
            for codec in (TOPK, native):
                with pytest.raises(CodecError, match=r"2\*\*120"):
                    codec.encode(vector)


def refusal(codec: TopKCodec, operation: str, data: bytes, num_values: int) -> str | None:
    try:
        if operation == "validate":
            codec.validate(data, num_values)
        else:
            codec.decode_into(data, torch.zeros(num_values))
    except CodecError as error:
        return str(error)
    return None


def test_both_find_the_same_faults_in_random_bytes(native: TopKCodec) -> None:
    generator = np.random.default_rng(0)
    faults = set()
    for trial in range(400):
        data = TOPK.encode(gaussian(2 * CHUNK, seed=trial))
        for _ in range(trial % 3):
            # Bytes of levels at times, which are few, and of the field of buckets.
            at = generator.integers([len(data), 20, 4, 84][trial % 4])
            data[at] ^= 1 << generator.integers(8)
        found = [refusal(codec, "validate", bytes(data), 2 * CHUNK) for codec in (TOPK, native)]
        assert found[0] == found[1]
        decoded = [refusal(codec, "decode", bytes(data), 2 * CHUNK) for codec in (TOPK, native)]
        assert decoded[0] == decoded[1]
        faults.add(found[0])
    assert len(faults) == 3  # Nothing wrong, levels, indices.


def faulty(num_values: int, at: int, change: int) -> bytearray:
    """An encoding of distinct falling values, of which the first of each 64 are kept, with some bits flipped."""
    vector = torch.zeros(num_values)
    vector[::64] = torch.linspace(2, 1, len(vector[::64]))
    encoded = TOPK.encode(vector)
    TOPK.validate(encoded, num_values)
    encoded[at] ^= change
    return encoded


@pytest.mark.parametrize(
    ("num_values", "at", "change", "reason"),
    [
        (CHUNK, 1, 0x80, "level"),  # a negative one
        (CHUNK, 1, 0x40, "level"),  # 2 with another bit of its exponent: infinity or so
        (CHUNK, 4, 0x02, "indices"),  # one more kept value than there is room for
        (CHUNK, 4, 0x01, "indices"),  # one fewer
        (CHUNK, 19, 0xC0, "indices"),  # the last in the bucket after the last
        (100, 4, 0x06, "indices"),  # the second in the first's bucket: not ascending
        (100, 7, 0x0A, "indices"),  # place 40 of the second bucket: value 104
        (100, 4, 0x10, "unused"),
        (100, 5, 0x80, "unused"),
        (100, 7, 0x10, "unused"),
    ],
)
def test_malformed_bytes_are_refused(num_values: int, at: int, change: int, reason: str, native: TopKCodec) -> None:
    for codec in (TOPK, native):
        with pytest.raises(CodecError, match=reason):
            codec.validate(faulty(num_values, at, change), num_values)
