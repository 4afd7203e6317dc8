"""`DriftCorrection`: local steps that follow all sites' gradient (SCAFFOLD, Karimireddy et al., arXiv 1910.06378).

A local step of SCAFFOLD is ``y <- y - r (g_i(y) - c_i + c)`` with the learning rate r. In option II, ``c_i`` is site
i's mean gradient over the K steps of its last round, and ``c`` the mean of all ``c_i``. A site sends ``u_i``, the sum
of its steps without corrections. So ``u_i = K r c_i``, and the certified mean is ``u = K r c``, which every site has.
The correction of one step is therefore ``(u_i - u) / K``: nothing more is sent.

Let ``x'`` be the new shared parameters, ``y`` the site's before them, and ``n`` the corrections ``a`` within ``y``.
Then ``x' = x - u`` and ``y = x - u_i + n a``, hence ``u_i - u = x' - y + n a``. No further vector is kept.

This equals SCAFFOLD for SGD at a constant rate, if all sites take part with equal weights and as many steps. With
another optimizer the correction stands for its steps. A site that misses rounds keeps its pair ``(u_i, u)`` until it
contributes again. Its corrections never enter ``u``, so a wrong or lost one disturbs that site's round alone.
"""

from __future__ import annotations

import torch

from p2ptrain.training.state.layout import Layout


class DriftCorrection:
    """One site's correction.

    Attributes:
        step: Added to the shared parameters after each local step, fp32, ``[num_parameters]``; zeros at first.
        count: Corrections within the live parameters since they were set from the shared ones.
    """

    def __init__(self, layout: Layout) -> None:
        self.step = torch.zeros(layout.num_parameters, dtype=torch.float32)
        self.count = 0
        self._layout = layout

    @torch.no_grad()
    def correct(self, module: torch.nn.Module) -> None:
        """Correct the live parameters after a local step."""
        self.count += 1
        for entry, parameter in self._layout.parameters_of(module):
            step = self.step[entry.offset : entry.offset + parameter.numel()].view(parameter.shape)
            parameter.add_(step.to(parameter.device, parameter.dtype))

    def add_to(self, update: torch.Tensor) -> None:
        """Take the corrections out of an update, shared minus live values, ``[num_values]``."""
        update[: len(self.step)].add_(self.step, alpha=self.count)

    def learn(self, shared: torch.Tensor, live: torch.Tensor, steps: int) -> None:
        """Set the correction from a contribution of ``steps`` local steps.

        Args:
            shared: Values with the contribution, fp32, ``[num_values]``.
            live: Values that the contribution was read from.
        """
        update = shared - live
        self.add_to(update)
        if steps:
            torch.div(update[: len(self.step)], steps, out=self.step)
        self.count = 0
