"""A site: this peer's part in training on private data (`p2ptrain.manifest.PrivateSpec`).

All sites take the same number of local steps a round. A site's update counts by its weight, which may follow from its
number of samples (FedAvg, McMahan et al., arXiv 1602.05629). A proximal term limits how far a site moves from the
shared parameters within a round (FedProx, Li et al., arXiv 1812.06127).
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from p2ptrain.errors import UsageError
from p2ptrain.manifest import Manifest, PrivateSpec
from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.state.shared_state import SharedState

if TYPE_CHECKING:
    from p2ptrain.training.private.gradients import PrivateGradients

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Site:
    """This peer's weight and pull.

    Attributes:
        weight: Of its update, for each local step.
        proximal: Strength of the pull towards the shared parameters; 0 for none.
        corrects_drift: True if local steps are corrected (see `p2ptrain.training.private.drift`).
        privacy: Makes gradients private; None without differential privacy.
    """

    weight: int
    proximal: float = 0.0
    corrects_drift: bool = False
    privacy: PrivateGradients | None = None

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
        return cls(weights[spec.weights], spec.proximal, spec.drift_correction)

    @classmethod
    def open(
        cls, manifest: Manifest, module: torch.nn.Module, num_samples: int | None, run_dir: Path | None
    ) -> Site | None:
        """Return the site of a peer with its privacy budget, which is kept in ``run_dir``; else as `of`.

        Raises:
            UsageError: As `of`; or differential privacy lacks a run directory, samples, a model or its package.
            CheckpointError: The spent budget cannot be read.
        """
        site, spec = cls.of(manifest.private, num_samples), manifest.differential_privacy
        if site is None or spec is None or num_samples is None:
            return site
        if run_dir is None:
            raise UsageError("differential privacy needs a run_dir: what is spent is kept there")
        if spec.delta * num_samples >= 1:
            raise UsageError(
                f"differential_privacy.delta = {spec.delta:g} and {num_samples} samples: a bound that may fail for one"
                " sample protects none; set delta below one in the smallest site's samples"
            )
        try:
            from p2ptrain.training.private.budget import PRIVACY_FILE, PrivacyBudget
            from p2ptrain.training.private.gradients import PrivateGradients
        except ModuleNotFoundError as error:
            raise UsageError(f"differential privacy needs {error.name}: pip install 'p2ptrain[privacy]'") from error
        training = manifest.training
        rate = min(1.0, training.local_batch / num_samples)
        budget = PrivacyBudget(spec, rate, run_dir / PRIVACY_FILE, training.steps_per_round)
        logger.info("differential privacy: %s; the budget is for %d steps of this site", budget.loss, budget.max_steps)
        return replace(site, privacy=PrivateGradients(module, spec, num_samples, training.local_batch, budget))

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
