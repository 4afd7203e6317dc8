"""Worker momentum: a peer contributes the mean of its recent updates, and not the last one alone.

Honest updates differ by the noise of their data, and a liar that stays within that noise is clipped by no rule. The
noise of a mean over rounds is smaller, and so is what such a liar may add (Karimireddy et al., arXiv 2012.10333,
"Learning from History"). The mean over peers of such means is the momentum of the mean: where nobody lies, training
goes on as with an outer momentum of this size.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


class Momentum:
    """The exponential mean of one peer's contributions to one fragment: fp32, the fragment's values.

    It is local, like the residual of `p2ptrain.averaging.vector.error_feedback`, and no checkpoint has it: a peer that
    starts anew begins with its next update. Early means are corrected for their start at zero (Kingma and Ba, arXiv
    1412.6980, section 3).
    """

    def __init__(self, decay: float) -> None:
        """``decay`` is the weight of the earlier mean, 0 to 1; 0 keeps nothing."""
        self.decay = decay
        self._mean: torch.Tensor | None = None
        self._weight = 0.0

    def blend(self, update: torch.Tensor) -> None:
        """Replace an update by the mean that includes it, in place; the mean itself waits for `keep`."""
        if self._mean is not None:
            update.lerp_(self._mean, 1 - (1 - self.decay) / self._next_weight())

    def keep(self, blended: torch.Tensor, residual: torch.Tensor | None) -> None:
        """Take the mean from a contribution that is in a result: ``blended`` less the ``residual`` that it carried."""
        if not self.decay:
            return
        self._weight = self._next_weight()
        if self._mean is None:
            self._mean = blended.clone()
        else:
            self._mean.copy_(blended)
        if residual is not None:
            self._mean.sub_(residual)

    def reset(self) -> None:
        self._mean, self._weight = None, 0.0

    def _next_weight(self) -> float:
        return self.decay * self._weight + 1 - self.decay
