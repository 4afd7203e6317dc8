"""Native codecs compute the bits that they compute with torch, refuse the same, and stay in bounds."""

import platform
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.masking import codec as masked
from p2ptrain.codecs import CODECS, CodecError, get_codec, warm_up
from p2ptrain.codecs.base import ENERGY_VALUES, NativeCodec
from p2ptrain.codecs.blockwise import BlockwiseCodec, Int4Codec
from p2ptrain.codecs.conformance import fingerprint
from p2ptrain.codecs.registry import agree
from p2ptrain.native import build, load
from p2ptrain.native.load import Function, Functions, load_functions
from tests.support.tools import needed

pytestmark = needed("" if load_functions() else "there is no native library", "kernels")

NAMES = [name for name in CODECS.own if isinstance(get_codec(name), NativeCodec)]
every_codec = pytest.mark.parametrize("name", NAMES)
KINDS = (
    "gaussian", "zeros", "tiny", "subnormal", "huge", "halves", "bits", "equal", "second moments", "ascending",
    "mostly zeros", "heavy tails",
)  # fmt: skip


@pytest.fixture(scope="module")
def functions() -> Functions:
    return load_functions()


def fresh(name: str) -> NativeCodec:
    """A codec of its own for the test, with torch."""
    codec = type(get_codec(name))()
    assert isinstance(codec, NativeCodec)
    assert not codec.functions
    return codec


def pair(name: str, functions: Functions) -> tuple[NativeCodec, NativeCodec]:
    """The codec with torch, and the native one."""
    plain, native = fresh(name), fresh(name)
    native.functions = functions[name]
    return plain, native


def longest(name: str) -> int:
    """So many values that there are whole blocks, and a shorter one."""
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
        "ascending": np.arange(length),
        "mostly zeros": gaussian * (uniform < 0.02),
        "heavy tails": gaussian**9,
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


def encoded_or_refusal(codec: NativeCodec, vector: torch.Tensor) -> bytes | str:
    try:
        return bytes(codec.encode(vector))
    except CodecError as error:
        return str(error)


@every_codec
@settings(max_examples=60)
@given(data=st.data())
def test_native_codecs_encode_the_same_bytes_and_refuse_the_same_values(
    name: str, functions: Functions, data: st.DataObject
) -> None:
    plain, native = pair(name, functions)
    vector = data.draw(vectors(longest(name)))
    before = vector.clone()
    assert encoded_or_refusal(native, vector) == encoded_or_refusal(plain, vector)
    assert same_bits(vector, before)


def received(codec: NativeCodec, generator: np.random.Generator, num_values: int) -> bytes:
    """Encoded values; in blocks, random codes, not only such as an encoder writes, under headers that it wrote."""
    kind = str(generator.choice(["gaussian", "equal", "mostly zeros", "zeros"]))
    data = codec.encode(torch.from_numpy(values_of(kind, num_values, generator)))
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
def test_native_codecs_decode_and_accumulate_the_same_bits_from_any_buffer(
    name: str, functions: Functions, fraction: float, seed: int, weight: float, shift: int
) -> None:
    plain, native = pair(name, functions)
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
    if "squares" in native.functions:
        step = 4 * plain.block_size
        assert plain.squared_norms(unaligned, num_values, step) == native.squared_norms(unaligned, num_values, step)
    assert bytes(unaligned) == data


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("value", [torch.nan, -torch.inf])
def test_native_codecs_refuse_received_values_that_are_not_finite(
    name: str, functions: Functions, value: float
) -> None:
    plain, native = pair(name, functions)
    kind = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[name]
    for where in (0, 127, 128, 1151, 1152, 1199):
        vector = torch.ones(1200, dtype=kind)
        native.validate(vector.view(torch.uint8).numpy().tobytes(), 1200)
        vector[where] = value
        for codec in (plain, native):
            with pytest.raises(CodecError, match="not finite"):
                codec.validate(vector.view(torch.uint8).numpy().tobytes(), 1200)


@every_codec
def test_encoding_into_read_only_memory_is_the_callers_mistake(name: str, functions: Functions) -> None:
    for codec in pair(name, functions):
        num_values = 2 * codec.native_values
        data = bytes(codec.encoded_bytes(num_values))
        with pytest.raises(ValueError, match="read-only"):
            codec.encode_into(torch.ones(num_values), memoryview(data))
        assert not any(data)


@pytest.fixture
def codecs(monkeypatch: pytest.MonkeyPatch) -> dict[str, NativeCodec]:
    """The codecs that are warmed up, with torch until then."""
    codecs = {name: fresh(name) for name in NAMES}
    monkeypatch.setattr("p2ptrain.codecs.registry.get_codec", codecs.__getitem__)
    return codecs


def test_functions_that_compute_something_else_are_not_used(
    functions: Functions, codecs: dict[str, NativeCodec], monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    wrong = {**functions, "int8": {**functions["int8"], "accumulate": functions["int8"]["decode"]}}
    monkeypatch.setattr("p2ptrain.codecs.registry.load_functions", lambda: wrong)
    assert not warm_up()
    assert [name for name in codecs if not codecs[name].functions] == ["int8"]
    assert "int8 differs" in caplog.text


@pytest.mark.parametrize("has_library", [True, False])
def test_warming_up_is_done_once_and_without_a_library_codecs_work_all_the_same(
    functions: Functions, codecs: dict[str, NativeCodec], has_library: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []

    def load_once() -> Functions:
        calls.append("load")
        return functions if has_library else {}

    monkeypatch.setattr("p2ptrain.codecs.registry.load_functions", load_once)
    assert [warm_up(), warm_up()] == [has_library] * 2
    assert not has_library or len(calls) == 1
    assert codecs["int8"].encode(torch.ones(512)) == get_codec("int8").encode(torch.ones(512))


def idle(refused: int) -> Function:
    """A function that writes nothing."""

    def run(source: int, target: int, count: int, weight: float) -> int:
        return refused

    return run


@every_codec
def test_functions_that_compute_something_else_are_noticed(name: str, functions: Functions) -> None:
    codec, own = fresh(name), functions[name]
    assert agree(codec, own)
    for operation in own.keys() - {"validate"}:
        for refused in (0, 1):
            wrong = {**own, operation: idle(refused)}
            assert not agree(codec, wrong), operation


@pytest.mark.skipif(platform.machine() != "x86_64", reason="other machines have one version of each function")
@pytest.mark.parametrize(
    ("flag", "options"),
    [
        ("sse2", ("-march=x86-64",)),
        ("avx2", ("-march=x86-64-v3",)),
        ("avx512vl", ("-march=x86-64-v4",)),
        ("sse2", ("-DCLONES", "-DHAS_AVX512=0", "-DHAS_AVX2=0")),
        ("f16c", ("-DCLONES", "-DHAS_AVX512=0", "-DHAS_AVX2=1")),
        ("avx512vl", ("-DCLONES", "-DHAS_AVX512=1", "-DHAS_AVX2=1")),
    ],
    ids=str,
)
def test_native_codecs_of_other_cpus_compute_the_same_bits(
    flag: str, options: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if flag not in Path("/proc/cpuinfo").read_text():
        pytest.skip(f"this CPU has no {flag}")
    monkeypatch.setattr(build, "VARIANTS", (options,))
    library = tmp_path / "codecs.so"
    library.write_bytes(build.build_library())
    found = load.open_library(library)
    monkeypatch.setattr(masked, "load_functions", lambda: found)
    has_masks = "-DCLONES" in options and " aes " in Path("/proc/cpuinfo").read_text()
    assert (masked.native_masks.__wrapped__() is not None) is has_masks
    for name in NAMES:
        assert agree(fresh(name), found[name]), name
        codec = fresh(name)
        codec.functions = found[name]
        assert fingerprint(codec) == fingerprint(fresh(name))
        if name in ("fp16", "bf16"):
            check_all_16_bit_numbers(fresh(name), codec)


@every_codec
def test_native_codecs_compute_the_same_in_several_threads(name: str, functions: Functions) -> None:
    plain, native = pair(name, functions)
    vectors = [torch.from_numpy(values_of("gaussian", 300_001, np.random.default_rng(seed))) for seed in range(4)]

    def run(codec: NativeCodec, vector: torch.Tensor) -> tuple[bytes, bytes]:
        encoded, total = codec.encode(vector), vector.clone()
        codec.accumulate_into(encoded, 1 / 3, total)
        return bytes(encoded), total.numpy().tobytes()

    with ThreadPoolExecutor(len(vectors)) as pool:
        found = list(pool.map(lambda vector: run(native, vector), vectors))
    assert found == [run(plain, vector) for vector in vectors]


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_all_numbers_of_16_bits_decode_and_encode_alike(name: str, functions: Functions) -> None:
    check_all_16_bit_numbers(*pair(name, functions))


def check_all_16_bit_numbers(plain: NativeCodec, native: NativeCodec) -> None:
    every = np.arange(1 << 16, dtype=np.uint16)
    decoded = [torch.empty(1 << 16) for _ in range(2)]
    for codec, out in zip((plain, native), decoded, strict=True):
        codec.decode_into(every.tobytes(), out)
    finite = ~torch.isnan(decoded[0])
    assert torch.equal(finite, ~torch.isnan(decoded[1]))
    assert same_bits(decoded[0][finite], decoded[1][finite])
    # Each number, the halves between two, and what lies right beside a half.
    below = decoded[0][torch.isfinite(decoded[0]) & (decoded[0].abs() < 6e4)]
    halves = (below + torch.from_numpy((every + 1).astype(np.uint16).view(np.float16)).float()[: len(below)]) / 2
    for values in (below, halves, halves * (1 + 2.0**-23), halves * (1 - 2.0**-23)):
        chosen = values[values.abs() < 6e4].contiguous()
        assert native.encode(chosen) == plain.encode(chosen)


@pytest.mark.parametrize("name", ["fp32", "int8"])
@pytest.mark.parametrize("length", [1, ENERGY_VALUES, 3 * ENERGY_VALUES, 5 * ENERGY_VALUES + 777])
def test_native_codecs_find_the_same_norms(name: str, length: int, functions: Functions) -> None:
    plain, native = pair(name, functions)
    generator = np.random.default_rng(length)
    values = torch.from_numpy(np.float32(generator.standard_normal(length) * 10.0 ** generator.integers(-20, 20)))
    for factor in (1.0, 1e30):  # Squares beyond fp32 are infinite.
        encoded = plain.encode((values * factor).clamp(-(2.0**119), 2.0**119))
        expected = plain.squared_norms(encoded, length, ENERGY_VALUES)
        assert native.squared_norms(encoded, length, ENERGY_VALUES) == expected
    with pytest.raises(CodecError):
        native.squared_norms(encoded[:-1], length, ENERGY_VALUES)
