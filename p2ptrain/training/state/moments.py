"""AdamW's moments between steps: in fp32, or in 8 bits as in Dettmers et al. (arXiv 2110.02861) with other codes.

`SignedCodes` and `PositiveCodes` keep the upper bits of each fp32 value, with an exponent relative to the largest in
its block. That takes integer operations alone, so the bits are equal on every machine, unlike those of bitsandbytes'
kernels. Values are rounded to the nearest code. Without new input a moment loses ``1 - beta`` of its value a step. That
is more than half the distance of two codes, so rounding does not stop the decay.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
"""Values that share one exponent."""

_MANTISSA = 23
_LARGEST = 253
"""Limit of a block's biased exponent; keeps values finite when they are rounded up."""


class Moment(ABC):
    """One fp32 value per parameter, in some encoding."""

    @abstractmethod
    def tensors(self) -> list[tuple[str, Tensor]]:
        """Return the live tensors of the encoding, by suffix of their names."""

    @abstractmethod
    def is_sound(self, tensors: Sequence[Tensor]) -> bool:
        """True if tensors of these shapes and types encode valid finite values."""

    @abstractmethod
    def open(self, block: slice) -> Tensor:
        """Return the values of a block, to be changed in place; the block begins at a multiple of `BLOCK`."""

    @abstractmethod
    def close(self, block: slice, values: Tensor) -> None:
        """Store the changed values of a block."""


class Floats(Moment):
    """Unencoded fp32 values; none is negative if ``is_positive``."""

    def __init__(self, num: int, *, is_positive: bool = False) -> None:
        self._values = torch.zeros(num, dtype=torch.float32)
        self._is_positive = is_positive

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [("", self._values)]

    def is_sound(self, tensors: Sequence[Tensor]) -> bool:
        (values,) = tensors
        return bool(torch.isfinite(values).all()) and (not self._is_positive or bool((values >= 0).all()))

    def open(self, block: slice) -> Tensor:
        return self._values[block]

    def close(self, block: slice, values: Tensor) -> None:
        pass  # `open` gave the values themselves.


class _Codes(Moment):
    """8-bit codes, and a biased exponent per block."""

    kept_bits: ClassVar[int]
    """Mantissa bits in a code."""
    largest: ClassVar[int]
    """Largest code of a magnitude; code 0 is zero."""

    def __init__(self, num: int) -> None:
        self._codes = torch.zeros(num, dtype=torch.uint8)
        self._exponents = torch.zeros(-(-num // BLOCK), dtype=torch.uint8)

    def tensors(self) -> list[tuple[str, Tensor]]:
        return [("", self._codes), ("_exponents/256", self._exponents)]

    def is_sound(self, tensors: Sequence[Tensor]) -> bool:
        return bool((tensors[1] <= _LARGEST).all())

    def open(self, block: slice) -> Tensor:
        codes = _in_blocks(self._codes[block]).int()
        magnitudes = codes.clamp(max=self.largest) if self.largest == 255 else codes & self.largest
        shifted = magnitudes + (self._top(block) - self.largest)
        bits = shifted.clamp_(min=0) << (_MANTISSA - self.kept_bits)
        bits.masked_fill_(magnitudes == 0, 0)
        return self._with_signs(bits.view(torch.float32), codes).view(-1)[: block.stop - block.start]

    def close(self, block: slice, values: Tensor) -> None:
        bits = _in_blocks(values).contiguous().view(torch.int32)
        magnitudes = bits & 0x7FFFFFFF
        exponents = (magnitudes.amax(dim=1) >> _MANTISSA).clamp_(max=_LARGEST)
        self._exponents[block.start // BLOCK : -(-block.stop // BLOCK)] = exponents.to(torch.uint8)
        dropped = _MANTISSA - self.kept_bits
        rounded = (magnitudes + (1 << (dropped - 1))) >> dropped
        codes = rounded - (self._top(block) - self.largest)
        found = self._ends(codes, magnitudes, bits)
        self._codes[block] = found.to(torch.uint8).view(-1)[: block.stop - block.start]

    def _top(self, block: slice) -> Tensor:
        """Return what ``largest`` decodes to per block, as upper bits: the next power of two; ``[blocks, 1]``."""
        exponents = self._exponents[block.start // BLOCK : -(-block.stop // BLOCK)].int()
        return ((exponents + 1) << self.kept_bits)[:, None]

    @abstractmethod
    def _ends(self, codes: Tensor, magnitudes: Tensor, bits: Tensor) -> Tensor:
        """Clamp codes to the range; int32 ``[blocks, BLOCK]``, as the other arguments."""

    @abstractmethod
    def _with_signs(self, values: Tensor, codes: Tensor) -> Tensor:
        """Return values from magnitudes."""


class SignedCodes(_Codes):
    """A sign and 7 bits: steps of an eighth, down to 2**-16 of the largest value in a block.

    Smaller values become zero.
    """

    kept_bits = 3
    largest = 127

    def _ends(self, codes: Tensor, magnitudes: Tensor, bits: Tensor) -> Tensor:
        return codes.clamp_(0, self.largest) | ((bits < 0).int() << 7)

    def _with_signs(self, values: Tensor, codes: Tensor) -> Tensor:
        return torch.where(codes > self.largest, -values, values)


class PositiveCodes(_Codes):
    """8 bits: steps of a sixteenth, down to 2**-16 of the largest value in a block.

    Smaller values become the smallest code, not zero, because they are a divisor.
    """

    kept_bits = 4
    largest = 255

    def _ends(self, codes: Tensor, magnitudes: Tensor, bits: Tensor) -> Tensor:
        return codes.clamp_(1, self.largest).masked_fill_(magnitudes == 0, 0)

    def _with_signs(self, values: Tensor, codes: Tensor) -> Tensor:
        return values


def _in_blocks(values: Tensor) -> Tensor:
    missing = -len(values) % BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
