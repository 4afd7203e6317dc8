"""A contribution and an owner's share under secure aggregation: the owner learns nothing from the masked integers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.averaging.commit.attempt import Contribution
from p2ptrain.averaging.masking.codec import MASKED, Words
from p2ptrain.averaging.masking.keys import Masking
from p2ptrain.averaging.vector.chunks import SumTree, cut
from p2ptrain.averaging.vector.reduce import EncodedStream, ExactMean, OwnShare
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.codecs.base import CHUNK_VALUES, NOT_FINITE, Codec, CodecError, chunks
from p2ptrain.hashing import EMPTY_HASH
from p2ptrain.runtime import Runtime


@dataclass(frozen=True, kw_only=True)
class MaskedContribution(Contribution):
    """One member's contribution, to which ``codec`` adds the masks of ``masking``."""

    masking: Masking

    @property
    def has_error(self) -> bool:
        """False: masked parts are exact but for the grid."""
        return False


class MaskedShare(OwnShare):
    """Adds masked parts modulo 2^32. None of them is judged or kept, because none tells anything."""

    def measure_own(self) -> None:
        """Raise `CodecError` if a value of the own part is not finite; `reduce` masks it where it is added up."""
        if len(self.own) and not math.isfinite(sum(map(float, self.own.aminmax()))):  # a NaN makes both NaN
            raise CodecError(f"masked: {NOT_FINITE}")
        self.trees[self._own_index] = SumTree([(EMPTY_HASH, 0.0)])

    async def reduce(
        self, runtime: Runtime, contributors: Sequence[int], claims: Sequence[Claim], mean: EncodedStream
    ) -> ExactMean | None:
        """Write the contributors' masked sum to ``mean``, piece by piece, and release the parts."""
        others = [index for index in contributors if index != self._own_index]
        parts = [MASKED.words(self.parts[index][1], len(self.own)) for index in others]
        own = self._own_codec if self._own_index in contributors else None
        for low, high in cut(len(self.own), MASKED.block_size):
            await runtime.offload(self._add, low, high, own, parts, memoryview(mean.data))
            mean.grow(MASKED.encoded_bytes(high))
        self.parts.clear()
        return None

    def _add(self, low: int, high: int, own: Codec | None, parts: Sequence[Words], out: memoryview) -> None:
        piece = out[MASKED.encoded_bytes(low) : MASKED.encoded_bytes(high)]
        total = MASKED.words(piece, high - low)
        if own is None:
            total[:] = 0
        else:
            own.part(low, high).encode_into(self.own[low:high], piece)
        for at in chunks(high - low, CHUNK_VALUES):
            for part in parts:
                np.add(total[at], part[low:high][at], out=total[at])
