"""The contract of a codec: a flat fp32 vector to bytes and back; and of what can only be decoded."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class CodecError(ValueError):
    """Encoded bytes are not what this codec writes: wrong length, or values that are not finite."""


class Decoder(ABC):
    """Reads encoded flat fp32 vectors. Stateless; safe to call from any thread.

    Decoding is deterministic: equal bytes give equal bits on every machine.

    Attributes:
        block_size: The number of values that are encoded together: the bytes may be cut at multiples of it.
    """

    block_size: int = 1

    def part(self, low: int, high: int) -> Decoder:
        """Return the decoder of the values ``[low, high)`` of such vectors, encoded by themselves.

        Both are multiples of ``block_size`` or the vector's end. This is the same decoder, unless it treats values
        differently by their position, as `p2ptrain.codecs.mixed` does.

        Raises:
            ValueError: The slice is not a part of such vectors.
        """
        return self

    @abstractmethod
    def encoded_bytes(self, num_values: int) -> int:
        """The exact size in bytes of ``num_values`` encoded values, the first ones where positions matter."""

    @abstractmethod
    def decode_into(self, data: bytes | bytearray | memoryview, out: torch.Tensor) -> None:
        """Decode into ``out`` (fp32, shape ``[num_values]``, contiguous, CPU), overwriting it.

        Raises:
            CodecError: The length is wrong. Call `validate` first on bytes from the network.
        """

    @abstractmethod
    def validate(self, data: bytes | bytearray | memoryview, num_values: int) -> None:
        """Check that ``data`` decodes to ``num_values`` finite numbers.

        Raises:
            CodecError: It does not; the message says why.
        """

    @abstractmethod
    def largest(self, data: bytes | bytearray | memoryview, num_values: int) -> float:
        """A bound on the magnitudes of the decoded values; NaN or infinity when a value is not finite.

        Raises:
            CodecError: The length is wrong.
        """


class Codec(Decoder):
    """Encodes flat fp32 CPU vectors too, and accumulates them, as deterministically as it decodes.

    Encoding gives equal bytes for equal input on every machine.

    A vector may be split at any multiple of ``block_size`` values: encoding the pieces one by one, each with the codec
    that `part` gives for it, gives the same bytes as encoding the whole, piece by piece.

    Attributes:
        name: The name in the manifest.
        version: Raised whenever the bytes change; peers with another version are refused.
        lossy: Whether decoding can differ from the input, so that error feedback is needed.
        sparse: Whether most values decode to zero. The mean of several such vectors has other non-zeros than each of
            them, so this codec would lose most of it: see `p2ptrain.codecs.part_list`.
    """

    name: str
    version: int = 1
    lossy: bool = False
    sparse: bool = False

    def part(self, low: int, high: int) -> Codec:
        return self

    def encode(self, vector: torch.Tensor) -> bytearray:
        """Encode ``vector`` (fp32, shape ``[num_values]``, contiguous, CPU; it is not changed).

        Raises:
            CodecError: A value is not finite, or too large for the format.
        """
        encoded = bytearray(self.encoded_bytes(len(vector)))
        self.encode_into(vector, encoded)
        return encoded

    def encoded_view(self, vector: torch.Tensor) -> memoryview | None:
        """Return the vector's own memory if that is its encoding, else None. Values are not checked."""
        return None

    @abstractmethod
    def encode_into(self, vector: torch.Tensor, out: bytearray | memoryview) -> None:
        """Encode into ``out``, which is writable and has exactly ``encoded_bytes(num_values)`` bytes.

        Raises:
            CodecError: As `encode`; ``out`` then holds anything. Or its length is another.
        """

    @abstractmethod
    def accumulate_into(self, data: bytes | bytearray | memoryview, weight: float, out: torch.Tensor) -> None:
        """Add ``weight`` times the decoded values to ``out`` (fp32, ``[num_values]``) without large temporaries."""

    def largest(self, data: bytes | bytearray | memoryview, num_values: int) -> float:
        """The largest magnitude among the decoded values, or a bound at most some roundings above it.

        NaN or infinity when a value is not finite.

        Raises:
            CodecError: The length is wrong.
        """
        import torch

        peaks = [piece.abs().amax() for piece in self._decoded(data, num_values)]
        return float(torch.stack(peaks).amax()) if peaks else 0.0

    def squared_norm(self, data: bytes | bytearray | memoryview, num_values: int) -> float:
        """The sum of the squares of the decoded values, all of which are finite (see `validate`).

        See `p2ptrain.codecs.norms.sum_of_squares`.

        Raises:
            CodecError: The length is wrong.
        """
        from p2ptrain.codecs.norms import sum_of_squares

        return math.fsum(sum_of_squares(piece) for piece in self._decoded(data, num_values))

    def squared_norms(self, data: bytes | bytearray | memoryview, num_values: int, step: int) -> list[float]:
        """Return `squared_norm` of each ``step`` consecutive values; the last piece may be shorter.

        Args:
            data: The encoded values.
            num_values: How many.
            step: A multiple of ``block_size``; see `p2ptrain.codecs.norms.sums_of_squares` for what else.

        Raises:
            CodecError: The length is wrong.
        """
        import torch

        from p2ptrain.codecs.norms import CHUNK_VALUES, sums_of_squares

        scratch = torch.empty(min(num_values, CHUNK_VALUES), dtype=torch.float32)
        # No step lies across two of the pieces in which values are decoded.
        return [energy for piece in self._decoded(data, num_values) for energy in sums_of_squares(piece, step, scratch)]

    def _decoded(self, data: bytes | bytearray | memoryview, num_values: int) -> Iterator[torch.Tensor]:
        """The decoded values in pieces that fit a core's cache; each is overwritten by the next."""
        import torch

        from p2ptrain.codecs.norms import CHUNK_VALUES

        encoded = memoryview(data).cast("B")
        if encoded.nbytes != self.encoded_bytes(num_values):
            raise CodecError(
                f"{self.name}: got {encoded.nbytes} bytes where {self.encoded_bytes(num_values)} were expected"
            )
        step = max(self.block_size, CHUNK_VALUES // self.block_size * self.block_size)
        scratch = torch.empty(min(step, num_values), dtype=torch.float32)
        for low in range(0, num_values, step):
            high = min(low + step, num_values)
            piece = encoded[self.encoded_bytes(low) : self.encoded_bytes(high)]
            self.part(low, high).decode_into(piece, scratch[: high - low])
            yield scratch[: high - low]
