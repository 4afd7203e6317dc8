"""The contracts of a codec (a flat fp32 vector to bytes and back) and of a decoder, and the base of native codecs.

At the end: what codecs share, such as norms with the same bits on every CPU, so that every peer can recompute decisions
that are based on them.
"""

from __future__ import annotations

import ctypes
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from p2ptrain.buffers import Buffer
from p2ptrain.native.load import Function

if TYPE_CHECKING:
    import torch

ENERGY_VALUES = 1 << 14
"""The only native step of `Codec.squared_norms`: `p2ptrain.averaging.vector.chunks.CHUNK_VALUES`."""
NOT_FINITE = "a value is not finite"
NO_FUNCTIONS: Mapping[str, Function] = MappingProxyType({})
CHUNK_VALUES = 65_536
"""Values per inner step: 256 KiB of fp32, so that several passes stay in a core's L2 cache. `sum_of_squares` adds the
squares of so many values in fp32."""
SUM_COLUMNS = 256
"""Partial sums of a chunk in `sum_of_squares`. A change of either number changes the order of roundings, and so the
norms."""
HALVED_COLUMNS = 1024
"""Partial sums in `sums_of_squares`; a power of two."""

Bytes = npt.NDArray[np.uint8]
Floats = npt.NDArray[np.float32]


class CodecError(ValueError):
    """Encoded bytes are malformed, or a value cannot be encoded."""


class Decoder(ABC):
    """Reads encoded flat fp32 vectors. Stateless; safe to call from any thread.

    Decoding is deterministic: equal bytes give equal bits on every machine. Methods that read bytes raise `CodecError`
    for a wrong length.

    Attributes:
        block_size: Number of values that are encoded together; the bytes may be cut at its multiples.
    """

    block_size: int = 1

    def part(self, low: int, high: int) -> Decoder:
        """Return the decoder for the values ``[low, high)`` of such vectors as a vector of their own.

        Both bounds are multiples of ``block_size`` or the vector's end; others raise `ValueError`. A decoder that
        depends on positions, as in `p2ptrain.codecs.mixed`, returns another decoder; all others return themselves.
        """
        return self

    @abstractmethod
    def encoded_bytes(self, num_values: int) -> int:
        """Return the exact size of ``num_values`` encoded values, the first ones if positions matter."""

    @abstractmethod
    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """Decode into ``out`` (fp32, shape ``[num_values]``, contiguous, CPU), overwriting it.

        Call `validate` first on bytes from the network.
        """

    @abstractmethod
    def validate(self, data: Buffer, num_values: int) -> None:
        """Raise `CodecError` unless ``data`` decodes to ``num_values`` finite numbers."""

    @abstractmethod
    def largest(self, data: Buffer, num_values: int) -> float:
        """Return a bound on the magnitudes of the decoded values; NaN or infinity if a value is not finite."""


class Codec(Decoder):
    """Encodes, decodes and accumulates flat fp32 CPU vectors. Equal inputs give equal bytes and bits on every machine.

    A vector may be split at any multiple of ``block_size`` values. The encoded pieces, each from the codec of its
    `part`, concatenate to the encoding of the whole vector.

    Attributes:
        version: Increases with every change of the bytes; peers with another version are refused.
        lossy: True if decoding can differ from the input, so that error feedback is needed.
        sparse: True if most values decode to zero. The mean of such vectors has more non-zeros than each of them, so
            this codec would lose most of it; see `p2ptrain.codecs.part_list`.
    """

    name: str
    version: int = 1
    lossy: bool = False
    sparse: bool = False

    def part(self, low: int, high: int) -> Codec:
        return self

    def encode(self, vector: torch.Tensor) -> bytearray:
        """Return ``vector`` (fp32, shape ``[num_values]``, contiguous, CPU; unchanged) encoded.

        Raises `CodecError` if a value is not finite, or too large for the format.
        """
        encoded = bytearray(self.encoded_bytes(len(vector)))
        self.encode_into(vector, encoded)
        return encoded

    def encoded_view(self, vector: torch.Tensor) -> memoryview | None:
        """Return the vector's own memory if that is its encoding, else None. Values are not checked."""
        return None

    @abstractmethod
    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """Encode into ``out``, a writable buffer of exactly ``encoded_bytes(num_values)`` bytes.

        Raises `CodecError` as `encode`, and for another length of ``out``, whose content is then undefined.
        """

    @abstractmethod
    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Add ``weight`` times the decoded values to ``out`` (fp32, ``[num_values]``) without large temporaries."""

    def largest(self, data: Buffer, num_values: int) -> float:
        """Return the largest decoded magnitude, or a bound a few roundings above it."""
        import torch

        peaks = [piece.abs().amax() for piece in self._pieces(data, num_values)]
        return float(torch.stack(peaks).amax()) if peaks else 0.0

    def squared_norm(self, data: Buffer, num_values: int) -> float:
        """Return the sum of the squares of the decoded, finite values; see `sum_of_squares`."""
        return math.fsum(sum_of_squares(piece) for piece in self._pieces(data, num_values))

    def squared_norms(self, data: Buffer, num_values: int, step: int) -> list[float]:
        """Return `squared_norm` of each ``step`` consecutive values; the last piece may be shorter.

        ``step`` is a multiple of ``block_size``, with the bounds of `sums_of_squares`.
        """
        import torch

        if 0 < num_values < step:
            return [self.squared_norm(data, num_values)]
        scratch = torch.empty(min(num_values, CHUNK_VALUES), dtype=torch.float32)
        # No step crosses two decoded pieces.
        return [energy for piece in self._pieces(data, num_values) for energy in sums_of_squares(piece, step, scratch)]

    def _array(self, data: Buffer, num_values: int) -> Bytes:
        """Return encoded values as ``uint8``, without a copy; raises `CodecError` for a wrong length."""
        return byte_array(data, self.encoded_bytes(num_values), self.name)

    def _pieces(self, data: Buffer, num_values: int) -> Iterator[torch.Tensor]:
        """Yield the decoded values, to be read only, in pieces that fit a core's cache; each may overwrite the last."""
        import torch

        self._array(data, num_values)
        encoded = memoryview(data).cast("B")
        step = max(self.block_size, CHUNK_VALUES // self.block_size * self.block_size)
        scratch = torch.empty(min(step, num_values), dtype=torch.float32)
        for low in range(0, num_values, step):
            high = min(low + step, num_values)
            piece = encoded[self.encoded_bytes(low) : self.encoded_bytes(high)]
            self.part(low, high).decode_into(piece, scratch[: high - low])
            yield scratch[: high - low]


class NativeCodec(Codec):
    """A codec with native functions for whole blocks; torch or NumPy compute the rest with the same bits.

    Subclasses encode, decode and add the values from ``done`` on, which follow the whole blocks. A block of the
    functions is a block of the codec, or some of them.

    Attributes:
        functions: Some or all of ``encode``, ``decode``, ``accumulate``, ``validate``, ``squares`` and ``energy``; set
            by `p2ptrain.codecs.warm_up` at any time.
        native_values: Values in a block of the functions.
        refusal: The fault of values that cannot be encoded.
        refusal_of_bytes: The fault of bytes that cannot be decoded.
    """

    functions: Mapping[str, Function] = NO_FUNCTIONS
    native_values: int
    refusal: str
    refusal_of_bytes = NOT_FINITE

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        values = check_vector(vector)
        encoded = writable_byte_array(out, self.encoded_bytes(len(values)), self.name)
        done = self._run_native("encode", values.data_ptr(), encoded.ctypes.data, len(values))
        self._encode(values, encoded, done)

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        values = check_vector(out)
        encoded = self._array(data, len(values))
        done = self._run_native("decode", encoded.ctypes.data, values.data_ptr(), len(values))
        self._decode(encoded, values, done)

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        values, rounded_weight = check_vector(out), check_weight(weight)
        encoded = self._array(data, len(values))
        done = self._run_native("accumulate", encoded.ctypes.data, values.data_ptr(), len(values), rounded_weight)
        self._accumulate(encoded, rounded_weight, values, done)

    @abstractmethod
    def _encode(self, values: torch.Tensor, encoded: Bytes, done: int) -> None: ...

    @abstractmethod
    def _decode(self, encoded: Bytes, values: torch.Tensor, done: int) -> None: ...

    @abstractmethod
    def _accumulate(self, encoded: Bytes, weight: float, values: torch.Tensor, done: int) -> None: ...

    def squared_norms(self, data: Buffer, num_values: int, step: int) -> list[float]:
        add_squares = self.functions.get("energy")
        if add_squares is None or step != ENERGY_VALUES or num_values < step:
            return super().squared_norms(data, num_values, step)
        array, whole = self._array(data, num_values), num_values // step
        columns = np.zeros((whole, HALVED_COLUMNS), np.float32)
        add_squares(array.ctypes.data, columns.ctypes.data, whole, 1.0)
        rest, start = num_values - whole * step, self.encoded_bytes(whole * step)
        with np.errstate(over="ignore"):
            energies = halved(columns)
        return [*energies, self.squared_norm(memoryview(data).cast("B")[start:], rest)] if rest else energies

    def _run_native(self, operation: str, source: int, target: int, num_values: int, weight: float = 1.0) -> int:
        """Run ``operation`` on all whole blocks among ``num_values`` values; return the number of values processed.

        ``source`` and ``target`` are addresses of checked sizes. Refused values raise `CodecError`.
        """
        function = self.functions.get(operation)
        blocks = num_values // self.native_values
        if function is None or blocks == 0:
            return 0
        if function(source, target, blocks, weight):
            raise CodecError(f"{self.name}: {self.refusal if operation == 'encode' else self.refusal_of_bytes}")
        return blocks * self.native_values

    def _spans(self, done: int, num_values: int) -> list[tuple[int, int, int]]:
        """Return (first value, rows, columns) of the whole blocks after ``done`` values, and of the shorter rest."""
        rows, rest = divmod(num_values - done, self.block_size)
        spans = [(done, rows, self.block_size)] if rows else []
        return [*spans, (num_values - rest, 1, rest)] if rest else spans


# --- what codecs share ---------------------------------------------------------------------------------------------


def check_vector(vector: torch.Tensor) -> torch.Tensor:
    """Return ``vector`` detached; raises `ValueError` unless it is a contiguous, one-dimensional fp32 CPU tensor."""
    import torch

    if vector.dtype != torch.float32 or vector.dim() != 1 or vector.device.type != "cpu" or not vector.is_contiguous():
        raise ValueError(
            f"codecs take contiguous fp32 CPU vectors, not {vector.dtype} {tuple(vector.shape)} on {vector.device}"
        )
    return vector.detach()


def check_weight(weight: float) -> float:
    """Return ``weight`` rounded to fp32, as in every implementation; raises `ValueError` if it is not finite."""
    rounded = ctypes.c_float(weight).value
    if not math.isfinite(rounded):
        raise ValueError(f"a weight must be finite in fp32, not {weight}")
    return rounded


def byte_array(data: Buffer, expected_bytes: int, codec: str) -> Bytes:
    """Return ``data`` as ``uint8[expected_bytes]`` without a copy; raises `CodecError` for another length."""
    view = memoryview(data)
    if view.nbytes != expected_bytes:
        raise CodecError(f"{codec}: got {view.nbytes} bytes where {expected_bytes} were expected")
    return np.frombuffer(view, dtype=np.uint8)


def writable_byte_array(out: bytearray | memoryview, expected_bytes: int, codec: str) -> Bytes:
    """Return `byte_array` of ``out``; raises `ValueError` if it is read-only."""
    array = byte_array(out, expected_bytes, codec)
    if not array.flags.writeable:
        raise ValueError(f"{codec}: cannot encode into read-only memory")
    return array


def chunks(num_items: int, items_per_chunk: int) -> Iterator[slice]:
    """Yield consecutive slices of at most ``items_per_chunk`` that cover ``[0, num_items)``."""
    for start in range(0, num_items, items_per_chunk):
        yield slice(start, min(start + items_per_chunk, num_items))


def sum_of_squares(vector: torch.Tensor, scratch: torch.Tensor | None = None) -> float:
    """Return the sum of the squares of a finite fp32 vector, to about ``1e-5``, with the same bits on every CPU.

    The order of library reductions depends on the width of a CPU's registers. Here each square is rounded to fp32, 256
    columns are added row by row, and the columns are added exactly (`math.fsum`).

    Args:
        vector: fp32, shape ``[n]``, contiguous, CPU; not changed. A square beyond fp32 gives infinity.
        scratch: Buffer for the squares of a chunk: fp32, ``[min(n, CHUNK_VALUES)]`` or more.
    """
    if len(vector) < SUM_COLUMNS:
        return math.fsum((vector * vector).detach().numpy().tolist())
    values = vector.detach().numpy()
    room = np.empty(min(len(values), CHUNK_VALUES), np.float32) if scratch is None else scratch.numpy()
    total = 0.0
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, len(values), CHUNK_VALUES):
            piece = values[start : start + CHUNK_VALUES]
            squares = room[: len(piece)]
            np.multiply(piece, piece, out=squares)
            whole = len(squares) // SUM_COLUMNS * SUM_COLUMNS
            columns = np.add.reduce(squares[:whole].reshape(-1, SUM_COLUMNS), axis=0)
            total += math.fsum(columns.tolist() + squares[whole:].tolist())
    return total


def sums_of_squares(vector: torch.Tensor, step: int, scratch: torch.Tensor | None = None) -> list[float]:
    """Return the sum of the squares of each ``step`` consecutive values; the last piece may be shorter.

    As `sum_of_squares`, with the same bits on every CPU, but fast for many short pieces: the columns are added by
    halves in fp64. ``step`` is a multiple of `HALVED_COLUMNS`, at most `CHUNK_VALUES`.
    """
    values = vector.detach().numpy()
    whole, at_once = len(values) // step * step, CHUNK_VALUES // step * step
    room = np.empty(min(len(values), CHUNK_VALUES), np.float32) if scratch is None else scratch.numpy()
    energies: list[float] = []
    with np.errstate(over="ignore", under="ignore"):
        for start in range(0, whole, at_once):
            piece = values[start : min(start + at_once, whole)]
            squares = room[: len(piece)]
            np.multiply(piece, piece, out=squares)
            energies += halved(np.add.reduce(squares.reshape(-1, step // HALVED_COLUMNS, HALVED_COLUMNS), axis=1))
    return [*energies, sum_of_squares(vector[whole:], scratch)] if whole < len(values) else energies


def halved(columns: Floats) -> list[float]:
    """Return the sum of each row of fp32 ``[rows, HALVED_COLUMNS]``, added by halves in fp64."""
    sums = columns.astype(np.float64)
    while sums.shape[1] > 1:
        half = sums.shape[1] // 2
        sums = sums[:, :half] + sums[:, half:]
    found: list[float] = sums[:, 0].tolist()
    return found
