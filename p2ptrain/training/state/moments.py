"""What AdamW remembers between steps: in fp32, or in 8 bits as in Dettmers et al. (arXiv 2110.02861), by other codes.

`SignedCodes` and `PositiveCodes` keep of each value the upper bits of its fp32 form, and leave out the exponent's part
that it has in common with the largest of its `BLOCK` neighbours. That takes integer operations alone, so it gives the
same bits on every machine, which bitsandbytes' kernels do not, and needs no GPU. Rounding is to the nearest code; codes
are close enough together that an average which gets nothing new still decays: by ``1 - beta`` a step, which has to be
more than half the distance of two codes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor
from torch.nn import functional

BLOCK = 256
"""Neighbours that have one largest exponent."""

_MANTISSA = 23
_LARGEST = 253
"""Biased exponent of the largest value of a block: what is rounded up from it is still finite."""


class Moment(ABC):
    """One fp32 value for each parameter, in some form."""

    @abstractmethod
    def tensors(self) -> list[tuple[str, Tensor]]:
        """The form, by the ends of names; the live tensors."""

    @abstractmethod
    def is_sound(self, tensors: Sequence[Tensor]) -> bool:
        """Whether tensors of these shapes and types are such a form of finite values."""

    @abstractmethod
    def open(self, block: slice) -> Tensor:
        """The values of a block, to be changed in place. It begins at a multiple of `BLOCK`."""

    @abstractmethod
    def close(self, block: slice, values: Tensor) -> None:
        """Keep what was made of them."""


class Floats(Moment):
    """As they are.

    Args:
        num: How many.
        is_positive: Whether none is below zero.
    """

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
        pass  # They are the same.


class _Codes(Moment):
    """Codes of 8 bits, and a biased exponent for each block of them."""

    kept_bits: ClassVar[int]
    """Of the mantissa."""
    largest: ClassVar[int]
    """Of the codes of magnitudes; 0 is zero."""

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
        """What the largest code of each block stands for: the power of two above its largest value. ``[blocks, 1]``."""
        exponents = self._exponents[block.start // BLOCK : -(-block.stop // BLOCK)].int()
        return ((exponents + 1) << self.kept_bits)[:, None]

    @abstractmethod
    def _ends(self, codes: Tensor, magnitudes: Tensor, bits: Tensor) -> Tensor:
        """Codes from what may be beyond them; int32 ``[blocks, BLOCK]``, as the others."""

    @abstractmethod
    def _with_signs(self, values: Tensor, codes: Tensor) -> Tensor:
        """Values from magnitudes."""


class SignedCodes(_Codes):
    """A sign and 7 bits: steps of an eighth, down to 2**-16 of the largest in a block; what is less is zero."""

    kept_bits = 3
    largest = 127

    def _ends(self, codes: Tensor, magnitudes: Tensor, bits: Tensor) -> Tensor:
        return codes.clamp_(0, self.largest) | ((bits < 0).int() << 7)

    def _with_signs(self, values: Tensor, codes: Tensor) -> Tensor:
        return torch.where(codes > self.largest, -values, values)


class PositiveCodes(_Codes):
    """8 bits: steps of a sixteenth, down to 2**-16 of the largest in a block.

    What is less, and not zero, counts as that much: it is divided by.
    """

    kept_bits = 4
    largest = 255

    def _ends(self, codes: Tensor, magnitudes: Tensor, bits: Tensor) -> Tensor:
        return codes.clamp_(1, self.largest).masked_fill_(magnitudes == 0, 0)

    def _with_signs(self, values: Tensor, codes: Tensor) -> Tensor:
        return values


def _in_blocks(values: Tensor) -> Tensor:
    """``[blocks, BLOCK]``, filled up with zeros."""
    missing = -len(values) % BLOCK
    return (functional.pad(values, (0, missing)) if missing else values).view(-1, BLOCK)
