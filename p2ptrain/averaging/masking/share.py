"""A contribution and an owner's share under secure aggregation: the owner learns nothing from the masked integers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from p2ptrain.averaging.commit.attempt import Contribution
from p2ptrain.averaging.masking.codec import MASKED
from p2ptrain.averaging.masking.keys import Masking
from p2ptrain.averaging.vector.chunks import cut
from p2ptrain.averaging.vector.reduce import EncodedStream, ExactMean, OwnShare
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.codecs.base import CHUNK_VALUES, chunks
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

    async def reduce(
        self, runtime: Runtime, contributors: Sequence[int], claims: Sequence[Claim], mean: EncodedStream
    ) -> ExactMean | None:
        """Write the contributors' masked sum to ``mean``, piece by piece, and release the parts."""
        assert self.own_part is not None
        self.parts[self._own_index] = MASKED, self.own_part
        for low, high in cut(len(self.own), MASKED.block_size):
            await runtime.offload(self._add, low, high, contributors, mean.data)
            mean.grow(MASKED.encoded_bytes(high))
        self.parts.clear()
        return None

    def _add(self, low: int, high: int, contributors: Sequence[int], out: bytearray | memoryview) -> None:
        size = len(self.own)
        parts = [MASKED.words(self.parts[index][1], size)[low:high] for index in contributors]
        total = MASKED.words(out, size)[low:high]
        for piece in chunks(high - low, CHUNK_VALUES):
            np.copyto(total[piece], parts[0][piece])
            for part in parts[1:]:
                np.add(total[piece], part[piece], out=total[piece])
