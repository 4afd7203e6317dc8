"""Error feedback: what a lossy codec dropped is added to the next contribution.

Two losses are kept: what encoding this peer's own parts dropped (Seide et al. 2014; Karimireddy et al. 2019,
arXiv 1901.09847), and what encoding the mean of its own share dropped, which is nothing if that is the list of the
parts (`p2ptrain.codecs.part_list`). The second belongs to everybody; its owner adds it to its next contribution scaled
by (total weight) / (own weight), so that in the next mean it counts once.

What a rule of aggregation takes from a contribution, by clipping or by preferring others, is no loss of encoding and is
not kept: a peer that was clipped is not to bring the rest in the next round. Under rules by coordinate (`median`,
`trimmed` of `p2ptrain.averaging.robust`) the second loss is given up, because a value that one member alone brings
would be dropped as an outlier. Under ``norm_clip``, what an owner brings in this way counts towards its norm.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from p2ptrain.codecs import Codec, dense_codec

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
            sent_parts: By share: the encoded part of ``vector``; the own share, if it was encoded too.
            part_codec: How they are encoded.
            own_index: The own share.
            own_mean_exact: The own share's mean before encoding; None when it was not reduced here, or its encoding
                lost nothing.
            own_mean: The same, encoded.
            own_mean_scale: What the loss of ``own_mean`` is multiplied by; see
                `p2ptrain.averaging.robust.feedback_scale`.
        """
        import torch

        if self.residual is None:
            return
        self.residual.zero_()
        for index, part in sent_parts.items():
            low, high = bounds[index], bounds[index + 1]
            _difference(part_codec.part(low, high), vector[low:high], part, 1.0, out=self.residual[low:high])
        if own_mean_exact is not None and own_mean_scale:
            low, high = bounds[own_index], bounds[own_index + 1]
            own, codec = self.residual[low:high], dense_codec(self._codec).part(low, high)
            if own_index in sent_parts:
                out = torch.empty_like(own)
                own.add_(_difference(codec, own_mean_exact, own_mean, own_mean_scale, out))
            else:
                _difference(codec, own_mean_exact, own_mean, own_mean_scale, out=own)


def _difference(
    codec: Codec, exact: torch.Tensor, encoded: bytes | bytearray, scale: float, out: torch.Tensor
) -> torch.Tensor:
    """What encoding dropped, times ``scale``; into ``out``, which is returned."""
    out.copy_(exact)
    codec.accumulate_into(encoded, -1.0, out)
    return out.mul_(scale) if scale != 1.0 else out
