"""A site: this peer's part in training on private data (`p2ptrain.manifest.PrivateSpec`).

All sites take the same number of local steps a round. A site's update counts by its weight, which may follow from its
number of samples (FedAvg, McMahan et al., arXiv 1602.05629). A proximal term limits how far a site moves from the
shared parameters within a round (FedProx, Li et al., arXiv 1812.06127).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from p2ptrain.errors import UsageError
from p2ptrain.manifest import PrivateSpec
from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.state.shared_state import SharedState


@dataclass(frozen=True)
class Site:
    """This peer's weight and pull.

    Attributes:
        weight: Of its update, for each local step.
        proximal: Strength of the pull towards the shared parameters; 0 for none.
    """

    weight: int
    proximal: float = 0.0

    @classmethod
    def of(cls, spec: PrivateSpec | None, num_samples: int | None) -> Site | None:
        """Return the site of a peer with so many training samples; None in a swarm that is not private.

        Raises:
            UsageError: ``num_samples`` is missing or below one, or the swarm is not private.
        """
        if spec is None and num_samples is None:
            return None
        if spec is None or num_samples is None or num_samples < 1:
            wanted = "the swarm is not private: leave it out" if spec is None else "give a site's training samples"
            raise UsageError(f"site_samples = {num_samples}: {wanted}")
        weights = {"equal": 1, "samples": num_samples, "bucketed": 1 << (num_samples.bit_length() - 1)}
        return cls(weights[spec.weights], spec.proximal)

    @torch.no_grad()
    def pull(self, module: torch.nn.Module, state: SharedState) -> None:
        """Add the gradient of ``proximal / 2 * |live - shared|^2`` to the live gradients."""
        if not self.proximal:
            return
        for entry, parameter in state.layout.parameters_of(module):
            if parameter.grad is None:
                continue
            if is_sparse(parameter.grad):
                raise UsageError(f"private.proximal needs dense gradients, and {entry.name} has sparse ones")
            shared = state.vector[entry.offset : entry.end].view(entry.shape)
            parameter.grad.add_(parameter - shared.to(parameter.device, parameter.dtype), alpha=self.proximal)
