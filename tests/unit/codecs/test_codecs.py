"""The promises of every codec: those of `check_codec`, and those that one machine's arithmetic cannot show."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch

from p2ptrain.codecs import CODECS, Codec, get_codec
from p2ptrain.codecs.base import CHUNK_VALUES, SUM_COLUMNS, NativeCodec, sum_of_squares
from p2ptrain.codecs.conformance import check_codec, fingerprint
from p2ptrain.codecs.dense import Fp32Codec
from p2ptrain.extensions import ContractError
from p2ptrain.native.load import load_functions
from tests.support.codecs import gaussian
from tests.support.tools import unavailable

FINGERPRINTS = {
    "fp32": "1 f88f32c564f343ce87d6081446a102781f1c650df01e0e0bbbd7ee2cdc7ec7f5",
    "fp16": "1 d8928cb2d00603de2c55cf2ca80d60d95290869947124b3b921ca8133d05ebac",
    "bf16": "1 96578fa9236ea7e0cdebb1c83e599d4cf9e0629898a11a0590dc5c8dfab28f21",
    "int8": "1 63d9d6355bd52f8b8955072faaa2d02ece82bb20f987e8b090a5488f5b7efe51",
    "int4": "1 cd5bc6d54d2f30d6d2034f27873820112143e89fd36576979e37244af5de2e76",
    "topk": "1 9361aa803b6654fafb209e87bce8819a8c5eb8e1f80da4da392c238b00d64233",
}
"""Of each codec's format. Raise the codec's version when one changes."""
LENGTHS = [0, 1, 255, 256, 257, 65_536, 65_537, 70_000]


@pytest.fixture(params=[(name, native) for name in CODECS.own for native in (False, True)], ids=str)
def codec(request: pytest.FixtureRequest) -> Codec:
    """A codec of its own for the test, with torch or native."""
    name, native = request.param
    found = type(get_codec(name))()
    assert isinstance(found, NativeCodec)
    if native:
        found.functions = load_functions().get(name, {})
        unavailable("" if found.functions else "this machine has no native library", "kernels")
    return found


def test_codecs_keep_their_contract(codec: Codec) -> None:
    check_codec(codec)


def test_bytes_and_decoded_bits_are_those_of_this_version(codec: Codec) -> None:
    assert f"{codec.version} {fingerprint(codec)}" == FINGERPRINTS[codec.name]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_a_script_s_default_dtype_changes_no_bit(codec: Codec, dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        check_codec(codec)
        assert f"{codec.version} {fingerprint(codec)}" == FINGERPRINTS[codec.name]
    finally:
        torch.set_default_dtype(torch.float32)


def test_bits_do_not_depend_on_the_number_of_threads(codec: Codec) -> None:
    vector, threads = gaussian(300_000), torch.get_num_threads()
    found = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            encoded = codec.encode(vector)
            found.append((encoded, codec.squared_norm(encoded, len(vector))))
    finally:
        torch.set_num_threads(threads)
    assert found[0] == found[1]


@pytest.mark.parametrize("name", ["fp32", "fp16", "bf16"])
@pytest.mark.parametrize("kind", [bytes, bytearray])
def test_the_largest_is_no_number_if_a_value_is_none(name: str, kind: type) -> None:
    encoded = get_codec(name).encode(gaussian(70_000))
    encoded[-2:] = b"\xff\xff"
    assert math.isnan(get_codec(name).largest(kind(encoded), 70_000))


@pytest.mark.parametrize("num_values", LENGTHS)
def test_squares_are_added_up_in_the_order_that_is_written_down(num_values: int) -> None:
    vector = gaussian(num_values)
    total = 0.0
    for start in range(0, num_values, CHUNK_VALUES):
        squares = (vector[start : start + CHUNK_VALUES] ** 2).numpy()
        columns = np.zeros(SUM_COLUMNS, np.float32)
        whole = len(squares) // SUM_COLUMNS * SUM_COLUMNS
        for row in squares[:whole].reshape(-1, SUM_COLUMNS):
            columns += row
        total += math.fsum([*columns.tolist(), *squares[whole:].tolist()])
    assert sum_of_squares(vector) == total


def test_squares_beyond_fp32_add_up_to_infinity() -> None:
    assert sum_of_squares(torch.full((1000,), 1e30)) == math.inf


# --- the check notices


def decodes(change: Callable[[torch.Tensor], object]) -> Callable[..., None]:
    def decode_into(self: Fp32Codec, data: bytes, out: torch.Tensor) -> None:
        Fp32Codec.decode_into(self, data, out)
        change(out)

    return decode_into


def accumulates(change: Callable[[float], float]) -> Callable[..., None]:
    def accumulate_into(self: Fp32Codec, data: bytes, weight: float, out: torch.Tensor) -> None:
        Fp32Codec.accumulate_into(self, data, change(weight), out)

    return accumulate_into


BROKEN: dict[str, tuple[str, Callable[..., object]]] = {
    "at most 8 bytes a value": ("encoded_bytes", lambda self, num: 40 * num),
    "at most 64 values a byte": ("encoded_bytes", lambda self, num: num // 1000),
    "the size of a vector is that of its blocks": ("encoded_bytes", lambda self, num: 4 * num + (4 if num else 0)),
    "encoding does not change": ("encode", lambda self, vector: Fp32Codec.encode(self, vector.detach().neg_())),
    "not lossy returns the same bits": ("decode_into", decodes(lambda out: out.mul_(1.0001))),
    "overwrites all values": ("decode_into", decodes(lambda out: out[:1].fill_(math.nan))),
    "adds the weighted": ("accumulate_into", accumulates(abs)),
    "the norm is that": ("squared_norm", lambda self, data, num: 1.0),
    "largest magnitude bounds": ("largest", lambda self, data, num: 0.0),
    "the same beside others": ("squared_norms", lambda self, data, num, step: [float(num)] * -(-num // step)),
    "not finite are not encoded": ("encode", lambda self, vector: bytearray(vector.detach().numpy().tobytes())),
    "another length are refused": ("validate", lambda self, data, num: None),
    "a weight is finite": ("accumulate_into", accumulates(lambda weight: weight if abs(weight) < 1e9 else 0.0)),
}


@pytest.mark.parametrize("promise", BROKEN)
def test_a_broken_promise_is_named(promise: str) -> None:
    member, wrong = BROKEN[promise]
    broken = type("Broken", (Fp32Codec,), {member: wrong})()
    with pytest.raises(ContractError, match=promise):
        check_codec(broken)
