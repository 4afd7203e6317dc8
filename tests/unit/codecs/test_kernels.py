"""With kernels, codecs compute the bits that they compute without, refuse the same, and stay in bounds."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.codecs import CodecError, codec_names, get_codec, warm
from p2ptrain.codecs.blockwise import BlockwiseCodec, Int4Codec
from p2ptrain.codecs.native import ENERGY_VALUES, KernelCodec
from p2ptrain.kernels import Kernel, load_kernels
from p2ptrain.kernels.build import build_image, target_machine
from p2ptrain.kernels.load import pack, unpack
from tests.support.tools import needed

pytestmark = needed("" if platform.machine() == "x86_64" else "there are kernels for x86-64 only", "kernels")

NAMES = [name for name in codec_names() if isinstance(get_codec(name), KernelCodec)]
every_codec = pytest.mark.parametrize("name", NAMES)
KINDS = ("gaussian", "zeros", "tiny", "subnormal", "huge", "halves", "bits", "equal", "second moments")


@pytest.fixture(scope="module")
def kernels() -> Mapping[str, Kernel]:
    found = load_kernels()
    assert found, "no kernels were made; the log says why"
    return found


def fresh(name: str) -> KernelCodec:
    """A codec of its own for the test, without kernels."""
    codec = type(get_codec(name))()
    assert isinstance(codec, KernelCodec)
    assert not codec.kernels
    return codec


def pair(name: str, kernels: Mapping[str, Kernel]) -> tuple[KernelCodec, KernelCodec]:
    """The codec without kernels, and with them."""
    plain, native = fresh(name), fresh(name)
    native.kernels = warm.kernels_of(native, kernels)
    assert "accumulate" in native.kernels
    return plain, native


def longest(name: str) -> int:
    """So many values that there are whole blocks of the kernels, and a shorter one."""
    size = get_codec(name).block_size
    return 2000 if size <= 256 else max(9000, size + size // 8)


def values_of(kind: str, length: int, generator: np.random.Generator) -> np.ndarray:
    gaussian = generator.standard_normal(length).astype(np.float32)
    signs = np.sign(gaussian)
    uniform = generator.random(length).astype(np.float32)
    made = {
        "gaussian": gaussian * np.float32(2.0 ** float(generator.integers(-60, 10))),
        "zeros": signs * np.float32(0.0),
        "tiny": gaussian * np.float32(2.0**-101),
        "subnormal": gaussian * np.float32(2.0**-140),
        "huge": signs * np.minimum(uniform * np.float32(2.0**120.5), np.float32(2.0**120)),
        "halves": np.round(gaussian * 20) / 2,
        "bits": generator.integers(0, 2**32, length, dtype=np.uint32).view(np.float32),
        "equal": np.full(length, gaussian[:1].sum(), dtype=np.float32),
        "second moments": gaussian**2 * uniform,
    }[kind]
    return np.asarray(made, dtype=np.float32)


@st.composite
def vectors(draw: st.DrawFn, longest: int) -> torch.Tensor:
    """Runs of values of all kinds, at times with one that is not finite or too large."""
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    with np.errstate(all="ignore"):
        runs = [
            values_of(draw(st.sampled_from(KINDS)), draw(st.integers(0, longest // 4)), generator)
            for _ in range(draw(st.integers(0, 4)))
        ]
    vector = np.concatenate([*runs, np.empty(0, dtype=np.float32)])
    if len(vector) and draw(st.booleans()):
        vector[draw(st.integers(0, len(vector) - 1))] = draw(
            st.sampled_from([np.nan, -np.nan, np.inf, -np.inf, 2.0**120, -(2.0**120), 1.01 * 2.0**120, 65520.0, 3.4e38])
        )
    return torch.from_numpy(vector)


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.view(torch.int32), other.view(torch.int32))


def encoded_or_refusal(codec: KernelCodec, vector: torch.Tensor) -> bytes | str:
    try:
        return bytes(codec.encode(vector))
    except CodecError as error:
        return str(error)


@every_codec
@settings(max_examples=60)
@given(data=st.data())
def test_kernels_encode_the_same_bytes_and_refuse_the_same_values(
    name: str, kernels: Mapping[str, Kernel], data: st.DataObject
) -> None:
    plain, native = pair(name, kernels)
    vector = data.draw(vectors(longest(name)))
    before = vector.clone()
    assert encoded_or_refusal(native, vector) == encoded_or_refusal(plain, vector)
    assert same_bits(vector, before)


def received(codec: KernelCodec, generator: np.random.Generator, num_values: int) -> bytes:
    """Encoded values; in blocks, random codes, not only such as an encoder writes, under headers that it wrote."""
    data = codec.encode(torch.from_numpy(values_of("gaussian", num_values, generator)))
    if isinstance(codec, BlockwiseCodec):
        for start in range(0, num_values, codec.block_size):
            length = min(codec.block_size, num_values - start)
            end = codec.encoded_bytes(start + length)
            codes = generator.bytes(codec.code_bytes(length))
            data[end - len(codes) : end] = codes
            if length % 2 and isinstance(codec, Int4Codec):
                data[end - 1] &= 15  # The unused half of a byte.
    return bytes(data)


@every_codec
@settings(max_examples=40)
@given(
    fraction=st.floats(0, 1),
    seed=st.integers(0, 2**32),
    weight=st.sampled_from([1.0, -1.0, 0.0, -0.0, 1 / 3, 2.0**-130, 1e30]),
    shift=st.integers(0, 7),
)
def test_kernels_decode_and_accumulate_the_same_bits_from_any_buffer(
    name: str, kernels: Mapping[str, Kernel], fraction: float, seed: int, weight: float, shift: int
) -> None:
    plain, native = pair(name, kernels)
    generator, num_values = np.random.default_rng(seed), round(fraction * longest(name))
    data = received(plain, generator, num_values)
    unaligned = memoryview(bytes(shift) + data)[shift:]
    assert unaligned.readonly
    start = torch.from_numpy(values_of("gaussian", num_values, generator))
    decoded, summed = [], []
    for codec in (plain, native):
        codec.validate(unaligned, num_values)
        decoded.append(torch.full((num_values,), torch.nan))
        codec.decode_into(unaligned, decoded[-1])
        summed.append(start.clone())
        codec.accumulate_into(unaligned, weight, summed[-1])
    assert same_bits(*decoded)
    assert same_bits(*summed)
    if "squares" in native.kernels:
        step = 4 * plain.block_size
        assert plain.squared_norms(unaligned, num_values, step) == native.squared_norms(unaligned, num_values, step)
    assert bytes(unaligned) == data


@every_codec
def test_kernels_write_nothing_outside_of_their_target(name: str, kernels: Mapping[str, Kernel]) -> None:
    _, native = pair(name, kernels)
    for num_values in (1, 127, 128, 256, 257, 640, 1000, 4096, 8500, 65_536, 71_000):
        vector = torch.linspace(-1, 1, num_values)
        size, margin = native.encoded_bytes(num_values), 67
        room = bytearray(b"\xaa" * (size + 2 * margin))
        native.encode_into(vector, memoryview(room)[margin : margin + size])
        assert room[:margin] == room[margin + size :] == b"\xaa" * margin
        wide = torch.full((num_values + 2 * margin,), 7.0)
        data = bytes(room[margin : margin + size])
        native.decode_into(data, wide[margin : margin + num_values])
        native.accumulate_into(data, 1.0, wide[margin : margin + num_values])
        assert bool((wide[:margin] == 7).all()), num_values
        assert bool((wide[margin + num_values :] == 7).all()), num_values


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_kernels_refuse_received_values_that_are_not_finite(
    name: str, kernels: Mapping[str, Kernel], value: float
) -> None:
    plain, native = pair(name, kernels)
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    for where in (0, 127, 128, 1151, 1152, 1199):
        vector = torch.ones(1200, dtype=kind)
        native.validate(vector.view(torch.uint8).numpy().tobytes(), 1200)
        vector[where] = value
        for codec in (plain, native):
            with pytest.raises(CodecError, match="not finite"):
                codec.validate(vector.view(torch.uint8).numpy().tobytes(), 1200)


@every_codec
def test_encoding_into_read_only_memory_is_the_callers_mistake(name: str, kernels: Mapping[str, Kernel]) -> None:
    for codec in pair(name, kernels):
        num_values = 2 * codec.kernel_values
        data = bytes(codec.encoded_bytes(num_values))
        with pytest.raises(ValueError, match="read-only"):
            codec.encode_into(torch.ones(num_values), memoryview(data))
        assert not any(data)


def test_kernels_that_compute_something_else_are_not_used(
    kernels: Mapping[str, Kernel], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    wrong = {**kernels, "accumulate_int8": kernels["decode_int8"]}
    codecs = {name: fresh(name) for name in NAMES}
    monkeypatch.setattr(warm, "get_codec", codecs.__getitem__)
    monkeypatch.setattr(warm, "load_kernels", lambda: wrong)
    assert not warm.warm_up()
    assert [name for name in codecs if not codecs[name].kernels] == ["int8"]
    assert "int8 differ" in caplog.text


def test_warming_up_gives_every_codec_its_kernels_and_is_done_once(
    kernels: Mapping[str, Kernel], monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load() -> Mapping[str, Kernel]:
        calls.append("load")
        return kernels

    codecs = {name: fresh(name) for name in NAMES}
    monkeypatch.setattr(warm, "get_codec", codecs.__getitem__)
    monkeypatch.setattr(warm, "load_kernels", load)
    assert warm.warm_up()
    assert warm.warm_up()
    assert len(calls) == 1


def test_without_kernels_codecs_work_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    codecs = {name: fresh(name) for name in NAMES}
    monkeypatch.setattr(warm, "get_codec", codecs.__getitem__)
    monkeypatch.setattr(warm, "load_kernels", dict)
    assert not warm.warm_up()
    assert codecs["int8"].encode(torch.ones(512)) == get_codec("int8").encode(torch.ones(512))


@every_codec
def test_kernels_that_compute_something_else_are_noticed(name: str, kernels: Mapping[str, Kernel]) -> None:
    codec = fresh(name)
    own = warm.kernels_of(codec, kernels)
    assert warm.agree(codec, own)
    for operation in own.keys() - {"validate"}:
        # That write nothing, and refuse nothing (xor eax, eax; ret) or everything (mov eax, 1; ret).
        for code in (b"\x31\xc0\xc3", b"\xb8\x01\x00\x00\x00\xc3"):
            assert not warm.agree(codec, {**own, **unpack(pack({operation: 0}, code))})


@pytest.mark.parametrize(("cpu", "flag"), [("x86-64", "sse2"), ("x86-64-v3", "avx2"), ("x86-64-v4", "avx512vl")])
def test_kernels_for_other_cpus_compute_the_same_bits(cpu: str, flag: str) -> None:
    if flag not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {flag}")
    found = unpack(build_image(target_machine(cpu)))
    for name in NAMES:
        codec = fresh(name)
        kernels = warm.kernels_of(codec, found)
        assert kernels
        assert warm.agree(codec, kernels), name


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("length", [1, ENERGY_VALUES, 3 * ENERGY_VALUES, 5 * ENERGY_VALUES + 777])
def test_kernels_find_the_same_norms(name: str, length: int, kernels: Mapping[str, Kernel]) -> None:
    plain, native = pair(name, kernels)
    generator = np.random.default_rng(length)
    values = np.float32(generator.standard_normal(length) * 10.0 ** generator.integers(-20, 20))
    encoded = plain.encode(torch.from_numpy(values))
    assert native.squared_norms(encoded, length, ENERGY_VALUES) == plain.squared_norms(encoded, length, ENERGY_VALUES)
    with pytest.raises(CodecError):
        native.squared_norms(encoded[:-1], length, ENERGY_VALUES)


def test_a_square_beyond_fp32_is_infinite_with_kernels_too(kernels: Mapping[str, Kernel]) -> None:
    _, native = pair("fp32", kernels)
    values = torch.ones(2 * ENERGY_VALUES)
    values[5] = 1e30
    assert native.squared_norms(native.encode(values), len(values), ENERGY_VALUES) == [float("inf"), ENERGY_VALUES]
