"""`PrivateGradients`: differential privacy of each training sample (DP-SGD, Abadi et al., arXiv 1607.00133).

A step's batch is a Poisson sample: each training sample is in it with probability ``local_batch / num_samples``,
whatever the others are. Each sample's gradient is clipped to a norm C. The step follows the sum of the clipped
gradients and of Gaussian noise with a standard deviation of ``noise_multiplier * C``, divided by the expected batch.
What is computed from that is as private: moments, updates, residuals, a second transfer of the same update.
"""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import torch
from opacus.grad_sample import GradSampleHooks, register_grad_sampler
from torch import Tensor
from torch.utils.data import Sampler

from p2ptrain.errors import UsageError
from p2ptrain.manifest import Manifest, PrivacySpec
from p2ptrain.models.families.layers import Embedding
from p2ptrain.training.private.budget import PRIVACY_FILE, PrivacyBudget
from p2ptrain.training.private.noise import Keys, add_noise, fresh_key, uniform

MISMATCH = 0.05
"""Most by which per-sample gradients, summed, may differ from the batch's, in multiples of their norms' sum."""


def sample_hooks(module: torch.nn.Module) -> GradSampleHooks:
    """Return hooks of Opacus, which collect each sample's gradient in backward passes; a module takes them once.

    Raises:
        UsageError: The model mixes samples, or keeps what it has seen of them in buffers, such as `BatchNorm`.
    """
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # As for each layer that reads samples.
    # GradSampleHooks accepts modules without parameters of their own, such as BatchNorm(affine=False).
    mixing = [name for name, each in module.named_modules() if isinstance(each, torch.nn.modules.batchnorm._NormBase)]
    try:
        if mixing:
            raise NotImplementedError(f"{mixing[0]} normalises over samples")
        return GradSampleHooks(module)
    except NotImplementedError as error:
        raise UsageError(
            f"differential privacy needs each sample's gradient, and this model has none: {error}; use GroupNorm or"
            " LayerNorm in place of BatchNorm"
        ) from error


class PrivateGradients:
    """Replaces a batch's gradient by a private one, computed from the samples' gradients that ``hooks`` collect.

    Each sample's gradient takes as much memory as the model's. The loss is a mean over samples, and no layer mixes
    samples. Batches come from `draw`.

    Attributes:
        drawn: Sizes of the batches that were drawn and not used.
        rate: Probability with which each sample is in a step's batch.
    """

    def __init__(
        self,
        hooks: GradSampleHooks,
        spec: PrivacySpec,
        num_samples: int,
        batch: int,
        budget: PrivacyBudget,
        keys: Keys = fresh_key,
    ) -> None:
        """
        Args:
            num_samples: Training samples, each of which is drawn alike.
            batch: Expected samples of a step.
            keys: Of noise and draws.
        """
        self.budget = budget
        self.num_samples = num_samples
        self.rate = min(1.0, batch / num_samples)
        self._clip_norm, self._deviation = spec.clip_norm, spec.noise_multiplier * spec.clip_norm
        self.drawn: deque[int] = deque()
        self._hooks, self._keys = hooks, keys

    @classmethod
    def open(
        cls,
        hooks: GradSampleHooks,
        manifest: Manifest,
        num_samples: int,
        run_dir: Path | None = None,
        keys: Keys = fresh_key,
    ) -> PrivateGradients:
        """Return those of a site, whose budget is kept in ``run_dir``, or in memory alone.

        Raises:
            UsageError: ``differential_privacy.delta`` is too large for so many samples.
            CheckpointError: The spent budget cannot be read.
        """
        spec, training = manifest.differential_privacy, manifest.training
        assert spec is not None
        if spec.delta * num_samples >= 1:
            raise UsageError(
                f"differential_privacy.delta = {spec.delta:g} and {num_samples} samples: a bound that may fail for one"
                " sample protects none; set delta below one in the smallest site's samples"
            )
        rate, path = min(1.0, training.local_batch / num_samples), run_dir / PRIVACY_FILE if run_dir else None
        budget = PrivacyBudget(spec, rate, path, training.steps_per_round)
        return cls(hooks, spec, num_samples, training.local_batch, budget, keys)

    # --- batches

    def draw(self) -> list[int]:
        """Return the samples of the next step, by secret randomness.

        If none is drawn, return sample 0, whose gradient then counts nothing: the step follows noise alone.
        """
        found: list[int] = torch.nonzero(uniform(self.num_samples, self._keys) <= self.rate).flatten().tolist()
        self.drawn.append(len(found))
        return found or [0]

    def batches(self, num_samples: int) -> PoissonBatches:
        """Return the batches of a data set; raise `UsageError` unless it has as many samples as the site."""
        if num_samples != self.num_samples:
            raise UsageError(f"the data set has {num_samples} samples, and site_samples = {self.num_samples}")
        return PoissonBatches(self)

    # --- gradients

    @torch.no_grad()
    def privatise(self, parameters: list[Tensor]) -> None:
        """Count a step in the budget, and replace the gradients of these parameters.

        Raises:
            UsageError: The gradients are not those of the batch that was drawn.
            ResourceError: The step cannot be counted.
        """
        passes = self._take(parameters)
        drawn = self.drawn.popleft() if self.drawn else -1
        found = sum(len(next(each for each in one if each is not None)) for one in passes)
        if found != max(drawn, 1):
            raise UsageError(
                f"this step has gradients of {found} samples, and {max(drawn, 0)} were drawn: differential privacy"
                " holds for model.train() and for all batches of one call of swarm.batches(dataset), a step each"
            )
        self.budget.spend()
        sums = [torch.zeros(parameter.shape, dtype=torch.float32, device=parameter.device) for parameter in parameters]
        for one in passes if drawn else ():
            for total, part in zip(sums, self._clipped(one), strict=True):
                total.add_(part)
        expected = self.rate * self.num_samples
        for parameter, total in zip(parameters, sums, strict=True):
            add_noise(total, self._deviation, self._keys)
            parameter.grad = total.div_(expected).to(parameter.dtype)

    def clear(self, parameters: list[Tensor]) -> None:
        """Drop the samples' gradients of a batch that takes no step; a data loader may have drawn later ones."""
        self._take(parameters)
        if self.drawn:
            self.drawn.popleft()

    def _take(self, parameters: list[Tensor]) -> list[list[Tensor | None]]:
        """Return the samples' gradients by backward pass and parameter, ``[batch, *shape]``; forget them."""
        held = [getattr(parameter, "grad_sample", None) for parameter in parameters]
        self._hooks.set_grad_sample_to_none()
        lists = [each if isinstance(each, list) else [] if each is None else [each] for each in held]
        count = max(map(len, lists), default=0)
        passes: list[list[Tensor | None]] = [[one[i] if one else None for one in lists] for i in range(count)]
        if any(one and len(one) != count for one in lists):
            raise UsageError(
                "backward passes of one step reach different parameters: differential privacy needs one pass"
            )
        for index, parameter in enumerate(parameters):
            parts = [part for one in passes if (part := one[index]) is not None]
            total = sum((part.sum(0) / len(part) for part in parts), torch.zeros(()))
            size = sum(float(part.reshape(len(part), -1).norm(dim=1).mean()) for part in parts)
            if parameter.grad is not None and torch.dist(parameter.grad, total) > MISMATCH * size:
                raise UsageError(
                    f"the gradient of a parameter of shape {tuple(parameter.shape)} is not the mean of its samples': a"
                    " layer uses it outside of its forward pass, or along another dimension than the first"
                )
        return passes

    def _clipped(self, parts: list[Tensor | None]) -> Iterator[Tensor]:
        """Yield the sum of the clipped gradients of each parameter; a sample with values that are not finite is 0."""
        held = [part for part in parts if part is not None]
        norms = torch.stack([part.reshape(len(part), -1).float().norm(dim=1) for part in held]).norm(dim=0)
        factors = torch.where(norms.isfinite(), (self._clip_norm / norms.clamp(min=1e-12)).clamp(max=1.0), 0.0)
        for part in parts:
            if part is None:
                yield torch.zeros(())
            else:
                yield torch.einsum("n,n...->...", factors, part.float().nan_to_num(0.0, 0.0, 0.0))


@register_grad_sampler(Embedding)  # type: ignore[untyped-decorator]
def _of_embedding(layer: Embedding, given: list[Tensor], gradient: Tensor) -> dict[Tensor, Tensor]:
    """Return the samples' gradients of a table, ``[batch, entries, width]``, for either use of it."""
    inputs, count = given[0], len(gradient)
    if inputs.is_floating_point():
        return {layer.weight: torch.einsum("nto,nti->noi", gradient.flatten(1, -2), inputs.flatten(1, -2))}
    found = gradient.new_zeros(count, *layer.weight.shape)
    rows = inputs.flatten(1) + len(layer.weight) * torch.arange(count, device=inputs.device).unsqueeze(1)
    found.flatten(0, 1).index_add_(0, rows.flatten(), gradient.flatten(0, -2))
    return {layer.weight: found}


class PoissonBatches(Sampler[list[int]]):
    """Yields the samples of one step after another, for one pass on average; made by `Swarm.batches`."""

    def __init__(self, gradients: PrivateGradients) -> None:
        self._gradients = gradients
        self._count = round(1 / gradients.rate)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[list[int]]:
        self._gradients.drawn.clear()  # Of an earlier pass that was left.
        for _ in range(self._count):
            yield self._gradients.draw()
