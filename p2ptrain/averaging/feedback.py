"""Error feedback: what a lossy codec dropped is added to the next contribution.

Two losses are kept: what encoding this peer's own parts dropped (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847), and what encoding the mean of its own share dropped. The second belongs to everybody; its owner adds
it to its next contribution scaled by (total weight) / (own weight), so that in the next mean it counts once.

What a rule of aggregation takes from a contribution, by clipping or by preferring others, is no loss of encoding and is
not kept: a peer that was clipped is not to bring the rest in the next round. Under rules by coordinate (`median`,
`trimmed` of `p2ptrain.averaging.robust`) the second loss is given up, because a value that one member alone brings
would be dropped as an outlier. Under ``norm_clip``, what an owner brings in this way counts towards its norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2ptrain.codecs import Codec

if TYPE_CHECKING:
    import torch


class ErrorFeedback:
    """The residual of one peer for one codec: fp32, shape ``[num_values]``; nothing for a lossless codec.

    Local to the peer: it is saved in its own checkpoint, handed to nobody, and reset when the peer jumps to a state
    that its residual does not belong to.
    """

    def __init__(self, num_values: int, codec: Codec) -> None:
        import torch

        self._codec = codec
        self.residual: torch.Tensor | None = torch.zeros(num_values, dtype=torch.float32) if codec.lossy else None

    def part(self, low: int, high: int, codec: Codec) -> ErrorFeedback:
        """The residual of the values ``[low, high)`` alone, for vectors in ``codec``; it shares this one's memory."""
        part = object.__new__(ErrorFeedback)
        part._codec = codec
        part.residual = self.residual[low:high] if self.residual is not None and codec.lossy else None
        return part

    def add_to(self, vector: torch.Tensor) -> None:
        """Add the residual to a contribution (fp32, ``[num_values]``), in place."""
        if self.residual is not None:
            vector.add_(self.residual)

    def reset(self) -> None:
        """Forget the residual."""
        if self.residual is not None:
            self.residual.zero_()

    def update(
        self,
        vector: torch.Tensor,
        bounds: tuple[int, ...],
        sent_parts: dict[int, bytearray],
        part_codec: Codec,
        own_index: int,
        own_mean_exact: torch.Tensor | None,
        own_mean: bytes | bytearray,
        own_mean_scale: float,
    ) -> None:
        """Replace the residual after a committed round to which this peer contributed.

        Args:
            vector: The contribution that was encoded, fp32, ``[num_values]``.
            bounds: Share offsets.
            sent_parts: By share: the encoded part of ``vector``; the own share was not encoded.
            part_codec: How they are encoded.
            own_index: The own share.
            own_mean_exact: The own share's mean before encoding; None when it was not reduced here.
            own_mean: The same, encoded.
            own_mean_scale: What the loss of ``own_mean`` is multiplied by; see
                `p2ptrain.averaging.robust.feedback_scale`.
        """
        if self.residual is None:
            return
        self.residual.zero_()
        for index, part in sent_parts.items():
            self._set_difference(part_codec, vector[bounds[index] : bounds[index + 1]], part, bounds[index], 1.0)
        if own_mean_exact is not None and own_mean_scale:
            self._set_difference(self._codec, own_mean_exact, own_mean, bounds[own_index], own_mean_scale)

    def _set_difference(
        self, codec: Codec, exact: torch.Tensor, encoded: bytes | bytearray, offset: int, scale: float
    ) -> None:
        assert self.residual is not None
        out = self.residual[offset : offset + exact.numel()]
        out.copy_(exact)
        codec.part(offset, offset + exact.numel()).accumulate_into(encoded, -1.0, out)
        if scale != 1.0:
            out.mul_(scale)
