"""Error feedback: what a lossy codec dropped is added to the next contribution.

Two losses are kept: what encoding this peer's own parts dropped (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847), and what encoding the mean of its own share dropped, which is nothing if that is the list of the
parts (`p2ptrain.codecs.part_list`). The second belongs to everybody; its owner adds it to its next contribution scaled
by (total weight) / (own weight), so that in the next mean it counts once.

What a rule of aggregation takes from a contribution, by clipping or by preferring others, is no loss of encoding and is
not kept: a peer that was clipped is not to bring the rest in the next round. Under rules by coordinate (`median`,
`trimmed` of `p2ptrain.averaging.vector.aggregation`) the second loss is given up, because a value that one member alone
brings would be dropped as an outlier. Under ``norm_clip``, what an owner brings in this way counts towards its norm.

Under a codec that keeps little (`topk`), a residual is rounds old by the time it leaves, and local training has tried
again meanwhile what it had not seen take effect. So what is kept may decay from round to round (SparseLoCo, arXiv
2508.15706, algorithm 1; DeMo, arXiv 2411.19870): the factor is ``averaging.feedback_decay``.

A delegate encodes more than its own: what its group's mean loses on the way up, and what a mean of delegates loses,
belongs to all that they stand for, and is scaled accordingly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Encoded:
    """One peer's encoded vector in one group.

    Attributes:
        vector: The contribution, fp32, ``[num_values]``.
        bounds: Share offsets.
        sent_parts: By share: the encoded part of ``vector``; the own share, if it was encoded too.
        part_codec: How they are encoded.
        part_scale: What their loss is multiplied by: 1, or more where the peer brought more than its own.
        own_index: The own share.
        own_mean_exact: The own share's mean before encoding, in pieces: first value, value after the last, and the
            values; None when it was not reduced here, or its encoding lost nothing.
        own_mean: The same, encoded.
        mean_codec: How.
        mean_scale: What its loss is multiplied by; see `p2ptrain.averaging.vector.rules.feedback_scale`.
    """

    vector: torch.Tensor
    bounds: tuple[int, ...]
    sent_parts: Mapping[int, Buffer]
    part_codec: Codec
    part_scale: float
    own_index: int
    own_mean_exact: Iterable[tuple[int, int, torch.Tensor]] | None
    own_mean: Buffer
    mean_codec: Codec
    mean_scale: float


class ErrorFeedback:
    """The residual of one peer for one codec: fp32, shape ``[num_values]``; nothing for a lossless codec.

    Local to the peer: it is saved in its own checkpoint, handed to nobody, and reset when the peer jumps to a state
    that its residual does not belong to.
    """

    def __init__(self, num_values: int, codec: Codec, decay: float = 1.0) -> None:
        """
        Args:
            num_values: Of the contributions.
            codec: How they are encoded.
            decay: How much is kept of what a round dropped: 1 keeps all of it, 0 nothing.
        """
        import torch

        self._decay = decay
        self.residual: torch.Tensor | None = torch.zeros(num_values, dtype=torch.float32) if codec.lossy else None

    def split(self, codecs: Sequence[Codec], sizes: Sequence[int]) -> list[ErrorFeedback]:
        """The residuals of parts of the vector alone, which share this one's memory.

        Args:
            codecs: By part, in order: how it is encoded.
            sizes: By part: its number of values; all values together.
        """
        if len(sizes) == 1:
            return [self]
        parts, low = [], 0
        for codec, size in zip(codecs, sizes, strict=True):
            part = ErrorFeedback(0, codec, self._decay)
            if part.residual is not None and self.residual is not None:
                part.residual = self.residual[low : low + size]
            parts.append(part)
            low += size
        return parts

    def add_to(self, vector: torch.Tensor) -> None:
        """Add the residual to a contribution (fp32, ``[num_values]``), in place."""
        if self.residual is not None:
            vector.add_(self.residual)

    def reset(self) -> None:
        """Forget the residual."""
        if self.residual is not None:
            self.residual.zero_()

    def update(self, encoded: Sequence[Encoded]) -> None:
        """Replace the residual after a committed round to which this peer contributed.

        Args:
            encoded: What it encoded, on each level of the tree.
        """
        if self.residual is None:
            return
        self.residual.zero_()
        for each in encoded:
            bounds = each.bounds
            for index, part in each.sent_parts.items():
                exact = each.vector[bounds[index] : bounds[index + 1]]
                self._add_loss(each.part_codec, exact, part, bounds[index], each.part_scale)
            if each.own_mean_exact is not None and each.mean_scale:
                offset = bounds[each.own_index]
                codec = each.mean_codec.part(offset, bounds[each.own_index + 1])
                for low, high, exact in each.own_mean_exact:
                    mean = memoryview(each.own_mean)[codec.encoded_bytes(low) : codec.encoded_bytes(high)]
                    self._add_loss(each.mean_codec, exact, mean, offset + low, each.mean_scale)
        if self._decay != 1.0:
            self.residual.mul_(self._decay)

    def _add_loss(self, codec: Codec, exact: torch.Tensor, encoded: Buffer, offset: int, scale: float) -> None:
        assert self.residual is not None
        if scale:
            out = self.residual[offset : offset + exact.numel()]
            out.add_(exact, alpha=scale)
            codec.part(offset, offset + exact.numel()).accumulate_into(encoded, -scale, out)
