"""``powersgd``: tiles of 256 by 256 values, each as a matrix of rank 8.

A tile ``M`` is sent as factors ``P`` and ``Q`` with ``M ~ P Q^T``, found by power iteration (PowerSGD,
https://arxiv.org/abs/1905.13727, algorithms 1 and 2). There a whole gradient matrix has one pair of factors, the
iteration goes on from the last step's ``Q``, and ``P`` is averaged before ``Q`` is computed. Here the codec knows no
matrices and holds no state, so each tile of the flat vector stands for itself and starts anew, with two iterations.

The 8 columns of ``P`` and then those of ``Q`` are each one block of `int8`: 4160 bytes, 63 times fewer than in fp32::

    | P column 0 (scale, 256 codes) | ... | P column 7 | Q column 0 (scale, 256 codes) | ... | Q column 7 |

Measured on the change of two small Llama models' parameters over 16 AdamW steps, the relative error for these bytes is
0.54 and 0.66; with fp16 factors of rank 4, as many bytes, it is 0.62 and 0.77, and with tiles of 512 by 512 and rank 16
0.57 and 0.69. (`topk` has 0.93 for a third of the bytes, `int4` 0.11 for 8 times as many.)

A last tile of ``n < 65536`` values has ``ceil(sqrt(n))`` columns and as many rows as that takes, padded with zeros, in
shorter blocks; below 4096 values it is sent in `int8` as it is.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import torch

from p2ptrain.codecs.arrays import Buffer, Bytes, Floats, byte_array, check_vector, check_weight, writable_byte_array
from p2ptrain.codecs.base import CodecError
from p2ptrain.codecs.native import KernelCodec
from p2ptrain.codecs.symmetric import Int8Codec

SIDE = 256
RANK = 8
MIN_TILE = 4096
"""Tiles of fewer values are not worth factors."""
TILES_AT_ONCE = 8
MAX_MAGNITUDE = 2.0**112
"""Larger values are refused: columns of Q, up to 16 times as large, must fit `int8`, and all sums must be finite."""
MAX_LEFT = 1.02
"""P is orthonormal before it is rounded, and the lowest code of `int8` is one step below -1."""

_INT8 = Int8Codec()


@functools.cache
def _start() -> torch.Tensor:
    """Where the iteration begins, ``[SIDE, RANK]``: fixed, and in no special position to anything."""
    return torch.randn(SIDE, RANK, generator=torch.Generator().manual_seed(1905_13727))


class PowerSgdCodec(KernelCodec):
    """Rank 8 of each tile of 256 by 256 values; `p2ptrain.codecs.powersgd` has the format.

    Error bound for a tile ``M`` of ``m <= 256`` rows and values of ``2**-90`` or more, with ``M_P`` its projection onto
    the span of the rounded ``P``::

        |decoded - M|^2 <= |M|^2 - 0.99 |M_P|^2 <= (1 - 0.98 / m) |M|^2

    ``Q`` is the least-squares solution for the rounded ``P``, so ``M - P Q^T`` is orthogonal to all that ``P`` spans,
    and what rounding ``Q`` by ``E`` adds to the squared error is ``|P E|^2``. `int8` rounds a column of 256 values with
    a relative error of at most ``16 / 254``. That makes ``|E| <= 0.063 |Q|``, and the singular values of ``P``, which
    are 1 before its rounding, stay within ``1 +- 0.063 sqrt(8)``, so ``|P E|^2 <= (0.063 * 1.18 / 0.82)^2 |M_P|^2``.
    The second step: where ``P`` captures less than the largest row holds, that row is sent alone (``P`` is a unit
    vector).

    So it is a contraction, as error feedback needs. A matrix of rank 8 or less comes back with the error of `int8`,
    typically 1 %. Decoding is a fixed sequence of fp32 operations and gives the same bits everywhere; encoding uses
    matrix products, whose last bits differ among machines: see `Codec`.
    """

    name = "powersgd"
    version = 1
    block_size = SIDE * SIDE
    kernel_values = SIDE * SIDE
    lossy = True
    reproducible = False
    refusal = "a value is not finite or beyond 2**112 in magnitude"

    def encoded_bytes(self, num_values: int) -> int:
        """4160 bytes a tile; a shorter last one takes fewer."""
        tiles, rest = divmod(num_values, self.block_size)
        return tiles * _tile_bytes(SIDE, SIDE) + _rest_bytes(rest)

    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """See `Codec.encode_into`; refuses values that are not finite or beyond ``2**112``."""
        values = check_vector(vector)
        encoded = writable_byte_array(out, self.encoded_bytes(len(values)), self.name)
        tiles, rest = divmod(len(values), self.block_size)
        width = _tile_bytes(SIDE, SIDE)
        for first in range(0, tiles, TILES_AT_ONCE):
            last = min(first + TILES_AT_ONCE, tiles)
            matrices = values[first * self.block_size : last * self.block_size].view(-1, SIDE, SIDE)
            _encode_tiles(matrices, encoded[first * width : last * width].reshape(last - first, width))
        if rest:
            tail, target = values[len(values) - rest :], encoded[tiles * width :]
            if rest < MIN_TILE:
                _peaks(tail.view(1, 1, -1))
                _INT8.encode_into(tail, target.data)
            else:
                rows, columns = _shape(rest)
                padded = torch.zeros(rows * columns)
                padded[:rest] = tail
                _encode_tiles(padded.view(1, rows, columns), target.reshape(1, -1))

    def decode_into(self, data: Buffer, out: torch.Tensor) -> None:
        """See `Codec.decode_into`."""
        self._decode("decode", data, 1.0, out)

    def accumulate_into(self, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Add ``weight`` times each decoded value; rounds once for the product and once for the sum."""
        self._decode("accumulate", data, check_weight(weight), out)

    def validate(self, data: Buffer, num_values: int) -> None:
        """Check length and scales, and that columns of P are no longer than an encoder's, so that sums are finite."""
        array = byte_array(data, self.encoded_bytes(num_values), self.name)
        tiles, rest = divmod(num_values, self.block_size)
        width = _tile_bytes(SIDE, SIDE)
        tail = array[tiles * width :]
        try:
            _INT8.validate(array[: tiles * width].data, tiles * 2 * RANK * SIDE)
            if 0 < rest < MIN_TILE:
                _INT8.validate(tail.data, rest)
            elif rest:
                rows, columns = _shape(rest)
                middle = RANK * _INT8.encoded_bytes(rows)
                for factor, length in ((tail[:middle], rows), (tail[middle:], columns)):
                    for block in factor.reshape(RANK, -1):
                        _INT8.validate(block.data, length)
        except CodecError as error:
            raise CodecError(f"powersgd: {error}") from error
        for first in range(0, tiles, TILES_AT_ONCE):
            last = min(first + TILES_AT_ONCE, tiles)
            _check_left(array[first * width : last * width].reshape(last - first, width), SIDE)
        if rest >= MIN_TILE:
            _check_left(tail[None], _shape(rest)[0])

    def encode_sample(self, vector: torch.Tensor) -> bytearray:
        """See `KernelCodec.encode_sample`: some of the values as factors, without a matrix product or decomposition."""
        end = len(vector) // self.block_size * self.block_size
        factors = vector[:end].view(-1, SIDE // (2 * RANK))[:, 0]
        return _INT8.encode(torch.cat([factors, vector[end:]]))

    def _decode(self, operation: str, data: Buffer, weight: float, out: torch.Tensor) -> None:
        """Decode or accumulate."""
        values = check_vector(out)
        array = byte_array(data, self.encoded_bytes(len(values)), self.name)
        done = self._run_kernel(operation, array.ctypes.data, values.data_ptr(), len(values), weight)
        write = _expand if operation == "decode" else functools.partial(_add, np.float32(weight))
        tiles, rest = divmod(len(values), self.block_size)
        width = _tile_bytes(SIDE, SIDE)
        for first in range(done // self.block_size, tiles, TILES_AT_ONCE):
            last = min(first + TILES_AT_ONCE, tiles)
            matrices = values[first * self.block_size : last * self.block_size].view(-1, SIDE, SIDE).numpy()
            write(*_read(array[first * width : last * width].reshape(last - first, width), SIDE, SIDE), matrices)
        if not rest:
            return
        tail, source = values[len(values) - rest :], array[tiles * width :]
        if rest < MIN_TILE:
            decoded = torch.empty(rest)
            _INT8.decode_into(source.data, decoded)
        else:
            rows, columns = _shape(rest)
            padded = np.empty((1, rows, columns), np.float32)
            _expand(*_read(source[None], rows, columns), padded)
            decoded = torch.from_numpy(padded.reshape(-1)[:rest])
        if operation == "decode":
            tail.copy_(decoded)
        else:
            tail.add_(decoded.mul_(weight))


def _shape(num_values: int) -> tuple[int, int]:
    """Rows and columns of a last tile, nearly square; the end of its last row may be padding."""
    columns = math.isqrt(num_values - 1) + 1
    return -(-num_values // columns), columns


def _tile_bytes(rows: int, columns: int) -> int:
    return RANK * (_INT8.encoded_bytes(rows) + _INT8.encoded_bytes(columns))


def _rest_bytes(num_values: int) -> int:
    return _INT8.encoded_bytes(num_values) if num_values < MIN_TILE else _tile_bytes(*_shape(num_values))


def _write(factor: torch.Tensor, out: Bytes) -> None:
    """Encode ``[tiles, RANK, length]`` to ``out`` [tiles, bytes], each column in a block of its own."""
    tiles, _, length = factor.shape
    if length == SIDE:
        out[...] = np.frombuffer(_INT8.encode(factor.reshape(-1)), np.uint8).reshape(tiles, -1)
        return
    for tile in range(tiles):
        blocks = [_INT8.encode(column) for column in factor[tile].contiguous()]
        out[tile] = np.frombuffer(b"".join(blocks), np.uint8)


def _read_factor(encoded: Bytes, length: int) -> torch.Tensor:
    """The reverse of `_write`: fp32 ``[tiles, RANK, length]``."""
    factor = torch.empty(len(encoded), RANK, length)
    if length == SIDE:
        _INT8.decode_into(encoded.tobytes(), factor.view(-1))
        return factor
    for tile in range(len(encoded)):
        for block, column in zip(encoded[tile].reshape(RANK, -1), factor[tile], strict=True):
            _INT8.decode_into(block.data, column)
    return factor


def _read(encoded: Bytes, rows: int, columns: int) -> tuple[Floats, Floats]:
    """P and Q of encoded tiles ``[tiles, bytes]``: ``[tiles, RANK, rows]`` and ``[tiles, RANK, columns]``."""
    middle = RANK * _INT8.encoded_bytes(rows)
    return _read_factor(encoded[:, :middle], rows).numpy(), _read_factor(encoded[:, middle:], columns).numpy()


def _expand(left: Floats, right: Floats, out: Floats) -> None:
    """Overwrite ``out`` [tiles, rows, columns] with sums of outer products, added in order, each operation rounded.

    Args:
        left: ``[tiles, RANK, rows]``.
        right: ``[tiles, RANK, columns]``.
    """
    np.multiply(left[:, 0, :, None], right[:, 0, None, :], out=out)
    terms = np.empty_like(out)
    for rank in range(1, RANK):
        np.multiply(left[:, rank, :, None], right[:, rank, None, :], out=terms)
        np.add(out, terms, out=out)


def _add(weight: np.float32, left: Floats, right: Floats, out: Floats) -> None:
    """Add ``weight`` times what `_expand` gives to ``out``."""
    terms = np.empty_like(out)
    _expand(left, right, terms)
    with np.errstate(over="ignore"):
        np.multiply(terms, weight, out=terms)
        np.add(out, terms, out=out)


def _check_left(encoded: Bytes, rows: int) -> None:
    """Refuse a P with values that no encoder writes."""
    left = _read_factor(encoded[:, : RANK * _INT8.encoded_bytes(rows)], rows)
    if not bool((left.abs_() <= MAX_LEFT).all()):
        raise CodecError(f"powersgd: a value of P is beyond {MAX_LEFT} in magnitude")


def _peaks(matrices: torch.Tensor) -> torch.Tensor:
    """Each tile's largest magnitude, ``[tiles, 1, 1]``.

    Raises:
        CodecError: It is too large, or a value is not finite.
    """
    peaks = matrices.abs().amax((1, 2), keepdim=True)
    # Written so that NaN, which amax hands on, fails too.
    if not bool((peaks <= MAX_MAGNITUDE).all()):
        raise CodecError(f"powersgd: {PowerSgdCodec.refusal}")
    return peaks


def _encode_tiles(matrices: torch.Tensor, out: Bytes) -> None:
    """Encode ``[tiles, rows, columns]`` to ``out`` [tiles, bytes]."""
    rows, peaks = matrices.shape[1], _peaks(matrices)
    # By a power of two, which rounds nothing, to values up to 1: squares must neither overflow nor vanish.
    exponents = torch.frexp(peaks).exponent.clamp(min=-100)
    tiles = matrices * torch.ldexp(torch.ones_like(peaks), -exponents)
    transposed = tiles.transpose(1, 2)
    right = transposed @ _start()[:rows]
    for _ in range(2):
        left = torch.linalg.qr(tiles @ right).Q
        right = transposed @ left
    middle = RANK * _INT8.encoded_bytes(rows)
    _write(left.transpose(1, 2), out[:, :middle])
    # From here on with the P that is decoded, so that Q makes up for its rounding.
    left = _read_factor(out[:, :middle], rows)
    projected = left @ tiles
    right = torch.linalg.solve(left @ left.transpose(1, 2), projected)
    captured = (projected * right).sum((1, 2))
    energies = torch.linalg.vector_norm(tiles, dim=2).square_()
    for tile in (captured < energies.amax(1)).nonzero().flatten().tolist():
        row = int(energies[tile].argmax())
        left, right[tile] = torch.zeros(1, RANK, rows), 0.0
        left[0, 0, row] = 1.0
        right[tile, 0] = tiles[tile, row]
        _write(left, out[tile : tile + 1, :middle])
    _write(right * torch.ldexp(torch.ones_like(peaks), exponents), out[:, middle:])
