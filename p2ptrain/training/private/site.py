"""A site: this peer's part in training on private data (`p2ptrain.manifest.PrivateSpec`).

All sites take the same number of local steps a round. A site's update counts by its weight, which may follow from its
number of samples (FedAvg, McMahan et al., arXiv 1602.05629). A proximal term limits how far a site moves from the
shared parameters within a round (FedProx, Li et al., arXiv 1812.06127).
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from p2ptrain.disk import replace_file
from p2ptrain.errors import CheckpointError, UsageError
from p2ptrain.manifest import Manifest, PrivateSpec
from p2ptrain.training.gradients import is_sparse
from p2ptrain.training.state.shared_state import SharedState

if TYPE_CHECKING:
    from p2ptrain.training.private.gradients import PrivateGradients

logger = logging.getLogger(__name__)

WEIGHT_FILE = "weight"


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
        """Return the site of a peer with the privacy budget and bucketed weight that ``run_dir`` keeps; else as `of`.

        Raises:
            UsageError: As `of`; or differential privacy lacks a run directory, samples, a model or its package.
            CheckpointError: The spent budget or the weight cannot be read.
        """
        site, spec = cls.of(manifest.private, num_samples), manifest.differential_privacy
        if site is not None and run_dir is not None and manifest.private and manifest.private.weights == "bucketed":
            site = replace(site, weight=_kept_weight(run_dir / WEIGHT_FILE, site.weight))
        if site is None or spec is None or num_samples is None:
            return site
        if run_dir is None:
            raise UsageError("differential privacy needs a run_dir: what is spent is kept there")
        gradients = gradients_module()
        privacy = gradients.PrivateGradients.open(gradients.sample_hooks(module), manifest, num_samples, run_dir)
        loss, steps = privacy.budget.loss, privacy.budget.max_steps
        logger.info("differential privacy: %s; the budget is for %d steps of this site", loss, steps)
        return replace(site, privacy=privacy)

    def adjust(self, module: torch.nn.Module, state: SharedState, trained: list[torch.Tensor]) -> None:
        """Make the live gradients of the ``trained`` parameters private, and add the pull.

        Raises as `PrivateGradients.privatise` and `pull`.
        """
        if self.privacy is not None:
            self.privacy.privatise(trained)
        self.pull(module, state)

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


def _kept_weight(path: Path, weight: int) -> int:
    """Return the weight of the first run, which the file keeps: a new bucket would tell when one sample was added."""
    try:
        kept = int(path.read_text()) if path.exists() else 0
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path}: {error}; delete it to weigh this site by its present samples") from error
    if not kept:
        replace_file(path, b"%d" % weight)
    elif kept != weight:
        logger.warning(
            "this site weighs as in its first run, %d, and would weigh %d by its present samples; delete %s to change"
            " that, which tells others that the number of samples passed a power of two", kept, weight, path,
        )  # fmt: skip
    return kept or weight


def simulated_sites(manifest: Manifest, module: torch.nn.Module, seed: int) -> Callable[[str, int], Site]:
    """Return a function that makes a site of a name and a number of training samples, for a simulation.

    All sites share the model, and so its hooks. Noise and draws follow from the seed, and budgets are in memory alone.

    Raises:
        UsageError: As `Site.open`; the function raises so, too.
    """
    gradients = gradients_module() if manifest.differential_privacy is not None else None
    hooks = gradients.sample_hooks(module) if gradients is not None else None

    def make(name: str, num_samples: int) -> Site:
        site = Site.of(manifest.private, num_samples)
        assert site is not None
        if gradients is None:
            return site
        keys = random.Random(f"{seed} {name}")
        opened = gradients.PrivateGradients.open(hooks, manifest, num_samples, keys=lambda: keys.randbytes(32))
        return replace(site, privacy=opened)

    return make


def gradients_module() -> ModuleType:
    """Return `p2ptrain.training.private.gradients`; raise `UsageError` if its package is not installed."""
    try:
        from p2ptrain.training.private import gradients
    except ModuleNotFoundError as error:
        raise UsageError(f"differential privacy needs {error.name}: pip install 'p2ptrain[privacy]'") from error
    return gradients
