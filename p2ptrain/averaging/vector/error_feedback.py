"""Error feedback and worker momentum: what a peer keeps of its rounds for its next contribution.

**Error feedback**: the values that a lossy codec dropped are added to the next contribution, after the momentum. A peer
keeps two encoding errors (Seide et al. 2014; Karimireddy et al. 2019, arXiv 1901.09847):

- the error of its own parts;
- the error of its share's mean, scaled by (total weight) / (own weight), so that the next mean counts it once. A mean
  encoded as the list of its parts (`p2ptrain.codecs.part_list`) has no error.

Values that an aggregation rule removes, by clipping or voting, are not kept: a clipped peer must not bring the rest in
the next round. Rules by coordinate (`median`, `trimmed` of `p2ptrain.averaging.vector.rules`) discard the mean's
error, because they would drop a value from one member as an outlier. Under ``norm_clip``, an owner's feedback counts
towards its norm.

The residual may decay each round by ``averaging.feedback_decay`` (SparseLoCo, arXiv 2508.15706, algorithm 1; DeMo,
arXiv 2411.19870). A delegate also encodes its group's mean, and a share of the delegates' mean. It scales these errors,
because they belong to all members of its group.

**Worker momentum**: a peer contributes the mean of its recent updates, and not the last one alone. Honest updates
differ by the noise of their data, and a liar that stays within that noise is clipped by no rule. The noise of a mean
over rounds is smaller, and so is what such a liar may add (Karimireddy et al., arXiv 2012.10333, "Learning from
History"). The mean over peers of such means is the momentum of the mean: where nobody lies, training goes on as with an
outer momentum of this size.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector.rules import Claim, get_rule
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import Codec
from p2ptrain.manifest import AveragingSpec

if TYPE_CHECKING:
    import torch


def feedback_scale(spec: AveragingSpec, claims: Sequence[Claim], position: int) -> float:
    """Return the factor by which an owner adds its mean's encoding error, so that the next mean counts it once.

    Args:
        position: Index of the owner in ``claims``.

    Returns:
        1 / (the owner's share). 0 under rules by coordinate, which would drop a value from one member as an outlier,
        and of a newcomer among strangers, whose share of the next mean is another one.
    """
    rule = get_rule(spec)
    drops = rule.by_coordinate or claims[position].trust < FULL_TRUST
    return 0.0 if drops else 1 / rule.shares(spec, claims)[position]


@dataclass(frozen=True)
class Encoded:
    """One peer's encoded vector in one group.

    Attributes:
        vector: The contribution, fp32, ``[num_values]``.
        bounds: Share offsets.
        sent_parts: By share: the encoded part of ``vector``; includes the own share if its part was encoded.
        part_codec: Codec of ``sent_parts``.
        part_scale: Factor of the parts' error: 1 on the lowest level, then the ``mean_scale`` of the level below.
        own_index: Index of the own share.
        own_mean_exact: Pieces of the own share's mean before encoding: (first value, value after the last, values).
            None if this peer did not reduce it, or the encoding is lossless.
        own_mean: Encoded mean of the own share.
        mean_codec: Codec of ``own_mean``.
        mean_scale: Factor of the mean's error; see `feedback_scale`.
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


class Momentum:
    """The exponential mean of one peer's contributions to one fragment: fp32, the fragment's values.

    It is local, like the residual of `ErrorFeedback`, and no checkpoint has it: a peer that
    starts anew begins with its next update. Early means are corrected for their start at zero (Kingma and Ba, arXiv
    1412.6980, section 3).

    Buffers, behind the parameters, have none: a running variance that goes on in its direction becomes negative.
    """

    def __init__(self, decay: float, num_parameters: int | None = None) -> None:
        """``decay`` is the weight of the earlier mean, 0 to 1; 0 keeps nothing.

        ``num_parameters`` is the length of the first part of contributions that has momentum; None for all.
        """
        self.decay = decay
        self._part = slice(num_parameters)
        self._mean: torch.Tensor | None = None
        self._weight = 0.0

    def blend(self, update: torch.Tensor) -> None:
        """Replace an update by the mean that includes it, in place; the mean itself waits for `keep`."""
        if self._mean is not None:
            update[self._part].lerp_(self._mean, 1 - (1 - self.decay) / self._next_weight())

    def keep(self, blended: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Take the mean from a contribution that is in a result: ``blended`` less the ``residual`` that it carried."""
        if not self.decay:
            return
        self._weight = self._next_weight()
        if self._mean is None:
            self._mean = blended[self._part].clone()
        else:
            self._mean.copy_(blended[self._part])
        if residual is not None:
            self._mean.sub_(residual[self._part])

    def reset(self) -> None:
        self._mean, self._weight = None, 0.0

    def _next_weight(self) -> float:
        return self.decay * self._weight + 1 - self.decay


class ErrorFeedback:
    """The residual of one peer for one codec: fp32, shape ``[num_values]``; None for a lossless codec.

    The residual is local: the peer saves it in its own checkpoint and sends it to no other peer. The peer resets it
    when it loads a state to which the residual does not belong.

    Args:
        decay: Fraction of a round's error to keep, 0 to 1.
        momentum: Worker momentum, 0 to 1, and ``num_parameters``; see `Momentum`.
    """

    def __init__(
        self,
        num_values: int,
        codec: Codec,
        decay: float = 1.0,
        momentum: float = 0.0,
        num_parameters: int | None = None,
    ) -> None:
        import torch

        self._decay = decay
        self._momentum = Momentum(momentum, num_parameters)
        self.residual: torch.Tensor | None = torch.zeros(num_values, dtype=torch.float32) if codec.lossy else None

    def split(
        self, codecs: Sequence[Codec], sizes: Sequence[int], num_parameters: Sequence[int] = ()
    ) -> list[ErrorFeedback]:
        """Return the residuals of consecutive parts of the vector, of these sizes, as views of this one's memory."""
        if len(sizes) == 1:
            return [self]
        parts, low = [], 0
        for codec, size, trained in zip(codecs, sizes, num_parameters or sizes, strict=True):
            part = ErrorFeedback(0, codec, self._decay, self._momentum.decay, trained)
            if part.residual is not None and self.residual is not None:
                part.residual = self.residual[low : low + size]
            parts.append(part)
            low += size
        return parts

    def add_to(self, vector: torch.Tensor) -> None:
        """Make an update a contribution (fp32, ``[num_values]``), in place: blend in the momentum, add the residual."""
        self._momentum.blend(vector)
        if self.residual is not None:
            vector.add_(self.residual)

    def reset(self) -> None:
        self._momentum.reset()
        if self.residual is not None:
            self.residual.zero_()

    def update(self, encoded: Sequence[Encoded]) -> None:
        """Replace both after a committed round; ``encoded`` has one entry for each level of the tree."""
        if encoded:
            self._momentum.keep(encoded[0].vector, self.residual)
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
