"""A check of the codec contract, for the tests of p2ptrain and of other packages, and at loading.

A package's codec runs on bytes of untrusted peers, and every peer must compute the same bits. So
`p2ptrain.codecs.get_codec` refuses a codec that fails `check_codec` on this machine. An author's test pins
`fingerprint`, and so finds machines with other bits.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import struct
from collections.abc import Callable, Iterator
from functools import partial

import numpy as np
import torch

from p2ptrain.codecs.base import ENERGY_VALUES, Codec, CodecError
from p2ptrain.extensions import require

MAX_VALUE_BYTES = 8
MAX_VALUES_PER_BYTE = 64
"""Bound on decoded values per byte, because receivers allocate memory by a sender's claim."""

FOREIGN_SLACK = 1.2
"""Bound on decoded values over `Codec.largest` for bytes that no encoder writes: int4 has a code -8 beside ±7."""


def check_codec(codec: Codec) -> None:
    """Check every promise of `Codec` on vectors of many lengths.

    Raises `ContractError` with the broken promise; the codec's own errors also propagate.
    """
    block = codec.block_size
    require(isinstance(codec.name, str) and isinstance(codec.version, int), "a name and a version")
    require(isinstance(block, int) and 0 < block <= 1 << 20, "a block size from 1 to 2**20")
    lengths = sorted({0, 1, 2, 255, 257, 1000, block - 1, block, block + 1, 3 * block + 7, 70_000})
    for num_values in lengths:
        _check_sizes(codec, num_values)
    for num_values in lengths:
        _check_round_trip(codec, _gaussian(num_values))
        _check_measures(codec, num_values)
    _check_pieces(codec)
    _check_memory(codec)
    _check_refusals(codec)
    _check_foreign_bytes(codec)


def fingerprint(codec: Codec) -> str:
    """Return a SHA-256 over one vector's encoded bytes, decoded bits and accumulated bits."""
    vector = _exact_vector(3 * codec.block_size + 130)
    encoded, summed = codec.encode(vector), vector.flip(0).contiguous()
    codec.accumulate_into(encoded, 1 / 3, summed)
    decoded = _decode(codec, encoded, len(vector))
    return hashlib.sha256(bytes(encoded) + _bits(decoded) + _bits(summed)).hexdigest()


def _check_sizes(codec: Codec, num_values: int) -> None:
    size, cut = codec.encoded_bytes(num_values), num_values // codec.block_size // 2 * codec.block_size
    require(num_values <= MAX_VALUES_PER_BYTE * size, f"at most {MAX_VALUES_PER_BYTE} values a byte")
    most = MAX_VALUE_BYTES * (num_values + codec.block_size) if num_values else 0
    require(size <= most, f"at most {MAX_VALUE_BYTES} bytes a value, and none for no values")
    pieces = codec.encoded_bytes(cut) + codec.encoded_bytes(num_values - cut)
    require(pieces == size, "the size of a vector is that of its blocks")


def _check_round_trip(codec: Codec, vector: torch.Tensor) -> None:
    before, num_values = vector.clone(), len(vector)
    encoded = codec.encode(vector)
    require(len(encoded) == codec.encoded_bytes(num_values), "encoded bytes have the announced size")
    require(_bits(vector) == _bits(before), "encoding does not change the vector")
    require(codec.encode(vector.clone().requires_grad_()) == encoded, "equal vectors encode to equal bytes")
    view = codec.encoded_view(vector)
    require(view is None or view == encoded, "the view of a vector's own memory has the encoded bytes")
    codec.validate(encoded, num_values)
    decoded = _decode(codec, encoded, num_values)
    require(bool(torch.isfinite(decoded).all()), "decoding overwrites all values, with finite numbers")
    require(float((decoded - vector).norm()) <= float(vector.norm()), "the error is no larger than the vector")
    require(codec.lossy or _bits(decoded) == _bits(vector), "a codec that is not lossy returns the same bits")
    require(not codec.sparse or num_values < 1000 or bool((decoded == 0).float().mean() > 0.5), "sparse: mostly zeros")
    start = _gaussian(num_values, seed=1)
    largest = decoded.abs().max() if num_values else torch.zeros((), dtype=torch.float32)
    for weight in (1.0, 0.0, 1 / 3, -2.5, 1e6):
        summed = start.clone()
        codec.accumulate_into(encoded, weight, summed)
        # Three fp32 roundings: scale times weight, the product, the sum.
        slack = 2.0**-21 * (abs(weight) * largest + start.abs()).double()
        off = (summed.double() - start.double() - weight * decoded.double()).abs()
        require(bool((off <= slack).all()), "accumulating adds the weighted decoded values")


def _check_measures(codec: Codec, num_values: int) -> None:
    """Check norms and largest magnitudes, and that a chunk's norm has the same bits on its own."""
    step = math.lcm(ENERGY_VALUES, codec.block_size)
    for scale in (1e-3, 1e4):
        encoded = memoryview(codec.encode(_gaussian(num_values) * scale))
        decoded = _decode(codec, encoded, num_values).double()
        energy, largest = float(decoded.square().sum()), float(decoded.abs().max()) if num_values else 0.0
        squared = codec.squared_norm(encoded, num_values)
        require(math.isclose(squared, energy, rel_tol=1e-5), "the norm is that of the values")
        found = codec.largest(encoded, num_values)
        require(largest * (1 - 1e-6) <= found <= largest * 1.01, "the largest magnitude bounds the decoded values")
        alone: list[float] = []
        for low in range(0, num_values, step):
            high = min(low + step, num_values)
            piece = encoded[codec.encoded_bytes(low) : codec.encoded_bytes(high)]
            alone += codec.squared_norms(piece, high - low, step)
        require(codec.squared_norms(encoded, num_values, step) == alone, "a chunk's norm is the same beside others")


def _check_pieces(codec: Codec) -> None:
    num_values = max(200_000, 5 * codec.block_size + 3)
    vector = _gaussian(num_values, seed=2)
    whole = codec.encode(vector)
    decoded = _decode(codec, whole, num_values)
    for blocks in (1, 2, num_values // codec.block_size // 2):
        cut = blocks * codec.block_size
        pieces = codec.encode(vector[:cut]) + codec.encode(vector[cut:])
        require(pieces == whole, "pieces cut at blocks encode to the bytes of the whole")
        tail = _decode(codec, memoryview(whole)[codec.encoded_bytes(cut) :], num_values - cut)
        require(_bits(tail) == _bits(decoded[cut:]), "pieces cut at blocks decode to the bits of the whole")


def _check_memory(codec: Codec) -> None:
    num_values, margin = 3 * codec.block_size + 7, 67
    vector, size = _gaussian(num_values), codec.encoded_bytes(num_values)
    room = bytearray(b"\xaa" * (size + 2 * margin))
    codec.encode_into(vector, memoryview(room)[margin : margin + size])
    require(room[:margin] == room[margin + size :] == b"\xaa" * margin, "encoding writes into its target alone")
    encoded = bytes(room[margin : margin + size])
    require(encoded == codec.encode(vector), "encoding into a buffer gives the same bytes")
    shifted = memoryview(b"?" + encoded)[1:]  # Read-only and unaligned.
    codec.validate(shifted, num_values)
    decoded = [_bits(_decode(codec, data, num_values)) for data in (shifted, encoded)]
    require(decoded[0] == decoded[1], "any buffer decodes")
    wide = torch.full((num_values + 2 * margin,), 7.0, dtype=torch.float32)
    codec.decode_into(shifted, wide[margin : margin + num_values])
    codec.accumulate_into(shifted, 1.0, wide[margin : margin + num_values])
    outside = torch.cat([wide[:margin], wide[margin + num_values :]])
    require(bool((outside == 7).all()), "decoding writes into its target alone")


def _check_refusals(codec: Codec) -> None:
    num_values = 3 * codec.block_size + 7
    for bad in (math.nan, math.inf, -math.inf):
        for where in (0, codec.block_size, num_values - 1):
            vector = _gaussian(num_values)
            vector[where] = bad
            _raises(CodecError, "values that are not finite are not encoded", partial(codec.encode, vector))
    for change in (-1, 1):
        data, out = bytes(codec.encoded_bytes(300) + change), torch.full((300,), 7.0, dtype=torch.float32)
        for read in (codec.validate, codec.largest, codec.squared_norm):
            _raises(CodecError, "bytes of another length are refused", partial(read, data, 300))
        _raises(CodecError, "bytes of another length are refused", partial(codec.decode_into, data, out))
        _raises(CodecError, "bytes of another length are refused", partial(codec.accumulate_into, data, 1.0, out))
        require(bool((out == 7).all()), "bytes of another length are refused before anything is written")
    data = bytes(codec.encoded_bytes(4))
    for wrong in (
        torch.zeros(4, dtype=torch.float64),
        torch.zeros(2, 2, dtype=torch.float32),
        torch.zeros(8, dtype=torch.float32)[::2],
    ):
        for call in (codec.encode, partial(codec.decode_into, data)):
            _raises(ValueError, "only contiguous fp32 vectors are taken", partial(call, wrong))
    for weight in (math.nan, math.inf, 1e300):
        wrong_weight = partial(codec.accumulate_into, data, weight, torch.zeros(4, dtype=torch.float32))
        _raises(ValueError, "a weight is finite in fp32", wrong_weight)


def _check_foreign_bytes(codec: Codec) -> None:
    """Check that arbitrary bytes are refused, or decode to finite numbers within `Codec.largest`, in bounds."""
    generator = np.random.default_rng(0)
    for num_values in (1, 40, codec.block_size + 3):
        for data in _foreign(codec, num_values, generator):
            around = torch.full((num_values + 128,), 7.0, dtype=torch.float32)
            with contextlib.suppress(CodecError):
                codec.decode_into(data, around[64:-64])
            require(bool((around[:64] == 7).all() and (around[-64:] == 7).all()), "any bytes leave other memory alone")
            try:
                codec.validate(data, num_values)
            except CodecError:
                continue
            decoded = _decode(codec, data, num_values)
            require(bool(torch.isfinite(decoded).all()), "bytes that validate decode to finite numbers")
            bound = codec.largest(data, num_values) * FOREIGN_SLACK
            require(float(decoded.abs().max()) <= bound, "the largest magnitude bounds the values of any valid bytes")


def _foreign(codec: Codec, num_values: int, generator: np.random.Generator) -> Iterator[bytes]:
    """Yield random bytes, and encodings with flipped bits."""
    for _ in range(20):
        yield generator.bytes(codec.encoded_bytes(num_values))
    for _ in range(60):
        data = codec.encode(torch.from_numpy(generator.standard_normal(num_values).astype(np.float32)))
        for _ in range(generator.integers(1, 4)):
            data[generator.integers(len(data))] ^= 1 << int(generator.integers(8))
        yield bytes(data)


def _raises(kind: type[Exception], promise: str, action: Callable[[], object]) -> None:
    try:
        action()
    except kind:
        return
    require(False, promise)


def _decode(codec: Codec, data: bytes | bytearray | memoryview, num_values: int) -> torch.Tensor:
    out = torch.full((num_values,), torch.nan, dtype=torch.float32)
    codec.decode_into(data, out)
    return out


def _gaussian(num_values: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(num_values, generator=torch.Generator().manual_seed(seed), dtype=torch.float32)


def _bits(vector: torch.Tensor) -> bytes:
    return vector.detach().numpy().astype("<f4").tobytes()


def _exact_vector(num_values: int) -> torch.Tensor:
    """Return values from 2**-27 to 2**13 by integer arithmetic, among them zeros, equal ones and halves."""
    state, values = 1, []
    for index in range(num_values):
        state = (1_664_525 * state + 1_013_904_223) % 2**32
        magnitude = (100 + (state >> 24) % 40 if index % 256 < 200 else 126) << 23 | state % 2**23
        values.append(magnitude | state & 2**31)
    halves = [struct.unpack("<I", struct.pack("<f", step / 2))[0] for step in range(-30, 31)]
    run = [0, 2**31] * 8 + [0x3F333333] * 40 + halves  # 0.7, and rounding ties.
    values[8 : 8 + len(run)] = run
    return torch.frombuffer(bytearray(struct.pack(f"<{num_values}I", *values)), dtype=torch.float32)
