"""Codecs with native functions for whole blocks; see `p2ptrain.native`."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from p2ptrain.codecs.base import Codec, CodecError
from p2ptrain.codecs.registry import codec_names, get_codec
from p2ptrain.native import Function, load_functions

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

ENERGY_VALUES = 1 << 14
"""The only native step of `Codec.squared_norms`: `p2ptrain.averaging.vector.chunks.CHUNK_VALUES`."""

NO_FUNCTIONS: Mapping[str, Function] = MappingProxyType({})
SAMPLE_BLOCKS = 12
_once = threading.Lock()


class NativeCodec(Codec):
    """A codec with native functions for whole blocks; torch or NumPy compute the rest with the same bits.

    Attributes:
        functions: Some or all of ``encode``, ``decode``, ``accumulate``, ``validate``, ``squares`` and ``energy``; set
            by `p2ptrain.codecs.warm_up` at any time.
        native_values: Values in a block of the functions.
    """

    functions: Mapping[str, Function] = NO_FUNCTIONS
    native_values: int
    refusal: str

    def squared_norms(self, data: bytes | bytearray | memoryview, num_values: int, step: int) -> list[float]:
        from p2ptrain.codecs.arrays import byte_array
        from p2ptrain.codecs.norms import HALVED_COLUMNS, halved

        add_squares = self.functions.get("energy")
        if add_squares is None or step != ENERGY_VALUES:
            return super().squared_norms(data, num_values, step)
        array, whole = byte_array(data, self.encoded_bytes(num_values), self.name), num_values // step
        columns = np.zeros((whole, HALVED_COLUMNS), np.float32)
        add_squares(array.ctypes.data, columns.ctypes.data, whole, 1.0)
        rest, start = num_values - whole * step, self.encoded_bytes(whole * step)
        with np.errstate(over="ignore"):
            energies = halved(columns)
        return [*energies, self.squared_norm(memoryview(data).cast("B")[start:], rest)] if rest else energies

    def _run_native(
        self, operation: str, source: int, target: int, num_values: int, weight: float = 1.0, refusal: str = ""
    ) -> int:
        """Run ``operation`` on all whole blocks among ``num_values`` values; return the number of values processed.

        ``source`` and ``target`` are addresses of checked sizes. Refused values raise `CodecError` with ``refusal``.
        """
        function = self.functions.get(operation)
        blocks = num_values // self.native_values
        if function is None or blocks == 0:
            return 0
        if function(source, target, blocks, weight):
            raise CodecError(f"{self.name}: {refusal or self.refusal}")
        return blocks * self.native_values

    def _spans(self, done: int, num_values: int) -> list[tuple[int, int, int]]:
        """Return (first value, rows, columns) of the whole blocks after ``done`` values, and of the shorter rest."""
        rows, rest = divmod(num_values - done, self.block_size)
        spans = [(done, rows, self.block_size)] if rows else []
        return [*spans, (num_values - rest, 1, rest)] if rest else spans


def warm_up() -> bool:
    """Switch all codecs to the native library, if there is one; True if every codec is native now.

    Idempotent, safe from any thread. Codecs work before and during the call, with the same bits. A missing library is
    built first, which takes seconds: call it off the event loop. Failures are logged.
    """
    with _once:
        codecs = [codec for name in codec_names() if isinstance(codec := get_codec(name), NativeCodec)]
        if not any(codec.functions for codec in codecs):
            found = load_functions()
            for codec in codecs:
                functions = found.get(codec.name, {})
                if agree(codec, functions):
                    codec.functions = functions
                else:
                    logger.error(
                        "the native %s differs from the plain code on this machine: it is not used", codec.name
                    )
        return all(codec.functions for codec in codecs)


def agree(codec: NativeCodec, functions: Mapping[str, Function]) -> bool:
    """True if ``functions`` give the plain codec's results on a sample with values of all magnitudes."""
    import torch

    plain, native = type(codec)(), type(codec)()
    native.functions = functions
    vector = _sample(codec.native_values)
    encoded = plain.encode(vector)
    start = vector.flip(0).contiguous()
    # Not `empty`, which may return memory with the right values of an earlier check.
    decoded, summed = [torch.full_like(vector, torch.nan) for _ in range(2)], [start.clone() for _ in range(2)]
    try:
        for index, one in enumerate((plain, native)):
            one.decode_into(encoded, decoded[index])
            one.accumulate_into(encoded, 1 / 3, summed[index])
        if "squares" in functions:
            norms = [each.squared_norms(encoded, len(vector), codec.block_size) for each in (plain, native)]
            if norms[0] != norms[1]:
                return False
        if "validate" in functions:
            native.validate(encoded, len(vector))
        if "encode" in functions and native.encode(vector) != encoded:
            return False
        if "energy" in functions and not _agree_on_norms(plain, native, vector):
            return False
    except CodecError:
        return False
    return all(torch.equal(one.view(torch.int32), other.view(torch.int32)) for one, other in (decoded, summed))


def _agree_on_norms(plain: NativeCodec, native: NativeCodec, vector: torch.Tensor) -> bool:
    wide = vector.repeat(5 * ENERGY_VALUES // 2 // len(vector) + 1)
    encoded = plain.encode(wide)
    found = [one.squared_norms(encoded, len(wide), ENERGY_VALUES) for one in (plain, native)]
    return found[0] == found[1]


def _sample(block_values: int) -> torch.Tensor:
    """Return blocks of twelve magnitudes, with zeros, halves and equal values among them, and a short last block."""
    import torch

    # NumPy computes on this thread alone.
    steps = np.arange(SAMPLE_BLOCKS * block_values, dtype=np.int64) * 2_654_435_761 % 65_536 - 32_768
    exponents = np.linspace(-155, -1, SAMPLE_BLOCKS).round().astype(np.int32)[:, None]
    values = np.ldexp(steps.astype(np.float32).reshape(SAMPLE_BLOCKS, block_values), exponents)
    values[1, ::3], values[2], values[3] = 0.0, -0.0, 0.7
    return torch.from_numpy(np.concatenate([values.ravel(), values[-1, :7]]))
