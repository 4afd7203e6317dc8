"""DP-SGD at a site: per-sample gradients, clipping, noise, and a budget that outlives the process."""

from pathlib import Path

import pytest
import torch
from opacus.accountants import RDPAccountant
from scipy import stats
from torch import nn

from p2ptrain.errors import CheckpointError, ResourceError, UsageError
from p2ptrain.manifest import ModelSpec, PrivacySpec
from p2ptrain.models import get_family
from p2ptrain.models.blocks import Span
from p2ptrain.training.evaluate import language_model_loss
from p2ptrain.training.private import noise
from p2ptrain.training.private.budget import PrivacyBudget
from p2ptrain.training.private.gradients import PrivateGradients, sample_hooks

SAMPLES, BATCH = 40, 8
SPEC = PrivacySpec(epsilon=8.0, delta=1e-3, clip_norm=0.5, noise_multiplier=1.0)


class NoBudget:
    """Counts steps without a file."""

    taken = 0

    def spend(self) -> None:
        self.taken += 1


def _private(module: nn.Module, spec: PrivacySpec = SPEC) -> PrivateGradients:
    return PrivateGradients(sample_hooks(module), spec, SAMPLES, BATCH, NoBudget())  # type: ignore[arg-type]


def _budget(path: Path, spec: PrivacySpec = SPEC, reserve: int = 4) -> PrivacyBudget:
    return PrivacyBudget(spec, BATCH / SAMPLES, path, reserve)


def _language_model(family: str) -> nn.Module:
    torch.manual_seed(3)
    spec = ModelSpec(family=family, layers=1, hidden=8, heads=2, intermediate=8, context=6, vocabulary=16)
    module = get_family(spec).stage(spec, Span(0, spec.layers + 2))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.3)
    return module


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt2"])
def test_each_samples_gradient_is_clipped_as_a_loop_would(family: str) -> None:
    module = _language_model(family)
    parameters: list[torch.Tensor] = list(module.parameters())
    samples = torch.randint(16, (SAMPLES, 7))
    gradients = [torch.autograd.grad(language_model_loss(module, row[None]), parameters) for row in samples]
    norms = torch.stack([torch.stack([each.norm() for each in gradient]).norm() for gradient in gradients])
    clip_norm = float(norms.median())
    private = _private(module, SPEC.model_copy(update={"noise_multiplier": 0.0, "clip_norm": clip_norm}))
    chosen = private.draw()
    while private.drawn[-1] == 0 or not 0 < int((norms[chosen] > clip_norm).sum()) < len(chosen):
        private.drawn.clear()
        chosen = private.draw()
    language_model_loss(module, samples[chosen]).backward()  # type: ignore[no-untyped-call]
    private.privatise(parameters)
    private._hooks.remove_hooks()
    for number, parameter in enumerate(parameters):
        clipped = [gradients[sample][number] * min(1.0, clip_norm / float(norms[sample])) for sample in chosen]
        expected = torch.stack(clipped).sum(0) / BATCH
        assert parameter.grad is not None
        assert torch.allclose(parameter.grad, expected, atol=1e-6)


def _linear(multiplier: float) -> tuple[nn.Linear, PrivateGradients]:
    torch.manual_seed(1)
    module = nn.Linear(3, 2000, bias=False)
    return module, _private(module, SPEC.model_copy(update={"noise_multiplier": multiplier}))


def _step(module: nn.Linear, private: PrivateGradients, scale: float = 1.0) -> torch.Tensor:
    inputs = torch.randn(len(private.draw()), 3) * scale
    module.zero_grad()
    module(inputs).square().sum(1).mean().backward()
    private.privatise(list(module.parameters()))
    assert module.weight.grad is not None
    return module.weight.grad.clone()


def test_noise_has_the_deviation_that_the_accountant_assumes_and_no_seed() -> None:
    found = []
    for _ in range(2):  # Two sites with one seed.
        module, private = _linear(2.0)
        found.append(_step(module, private, scale=0.0) * BATCH)
    assert found[0].std() == pytest.approx(2.0 * SPEC.clip_norm, rel=0.05)
    assert abs(float((found[0] * found[1]).mean())) < 0.1, "they are independent"


@pytest.mark.parametrize("scale", [1e-3, 1e3, 1e30, float("nan")])
def test_one_sample_moves_a_step_by_the_clipping_norm_at_most_whatever_it_holds(scale: float) -> None:
    module, private = _linear(0.0)
    chosen = private.draw()
    inputs = torch.randn(len(chosen), 3)
    inputs[0] *= scale
    gradients = []
    for each in (inputs, inputs[1:]):
        private.drawn.clear()
        private.drawn.append(len(each))
        module.zero_grad()
        module(each).square().sum(1).mean().backward()
        private.privatise(list(module.parameters()))
        assert module.weight.grad is not None
        gradients.append(module.weight.grad * BATCH)
    assert torch.dist(gradients[0], gradients[1]) <= SPEC.clip_norm + 1e-5


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values * self.scale


def test_a_parameter_of_one_number_is_clipped_with_the_others() -> None:
    module = Scaled()
    private = _private(module, SPEC.model_copy(update={"noise_multiplier": 0.0}))
    count = len(private.draw())
    module(torch.full((count,), 3.0)).mean().backward()
    private.privatise([module.scale])
    assert module.scale.grad is not None
    assert float(module.scale.grad) == pytest.approx(count * SPEC.clip_norm / BATCH)


def test_an_empty_draw_is_a_step_of_noise_alone() -> None:
    module, private = _linear(0.0)
    private.rate = 1e-9
    assert not _step(module, private).any()
    assert private.budget.taken == 1  # type: ignore[attr-defined]


def test_the_noise_is_gaussian_and_the_draws_are_uniform() -> None:
    for found, exact in ((noise.gaussian(200_001), "norm"), (noise.uniform(200_000), "uniform")):
        assert stats.kstest(found.numpy(), exact).pvalue > 1e-6
    assert noise.gaussian(1).shape == (1,)
    halves = noise.gaussian(200_000).view(2, -1)
    assert abs(float((halves[0] * halves[1]).mean())) < 0.02, "the two of a pair are independent"


def test_the_noise_of_a_large_tensor_repeats_nowhere(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(noise, "CHUNK", 1000)
    values = torch.full((70, 100), 3.0)
    noise.add_noise(values, 2.0)
    assert len(set(values.flatten().tolist())) > 6900
    assert float(values.mean()) == pytest.approx(3.0, abs=0.15)
    assert float(values.std()) == pytest.approx(2.0, rel=0.06)


def test_batches_that_were_not_drawn_are_refused() -> None:
    module, private = _linear(1.0)
    module(torch.randn(5, 3)).mean().backward()
    with pytest.raises(UsageError, match=r"batches\(dataset\)"):
        private.privatise(list(module.parameters()))
    assert not private.budget.taken  # type: ignore[attr-defined]


def test_a_batch_that_takes_no_step_leaves_those_that_a_loader_drew_ahead() -> None:
    module, private = _linear(1.0)
    drawn = list(private.batches(SAMPLES))
    for number, batch in enumerate(drawn):
        module.zero_grad()
        module(torch.randn(len(batch), 3)).square().sum(1).mean().backward()
        if number == 1:  # As while a site sits out a round.
            private.clear(list(module.parameters()))
        else:
            private.privatise(list(module.parameters()))
    assert private.budget.taken == len(drawn) - 1  # type: ignore[attr-defined]


def test_a_parameter_that_is_used_outside_of_its_layer_is_noticed() -> None:
    module, private = _linear(1.0)
    inputs = torch.randn(len(private.draw()), 3)
    (module(inputs).square().mean() + module.weight.square().sum()).backward()
    with pytest.raises(UsageError, match="not the mean of its samples"):
        private.privatise(list(module.parameters()))


@pytest.mark.parametrize("affine", [True, False])
def test_a_model_that_mixes_samples_is_refused(affine: bool) -> None:
    with pytest.raises(UsageError, match="GroupNorm"):
        _private(nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3, affine=affine)))


def test_batches_are_poisson_samples_of_all_samples() -> None:
    _, private = _linear(1.0)
    drawn = [private.draw() for _ in range(2000)]
    counts = torch.bincount(torch.tensor([index for each in drawn for index in each]), minlength=SAMPLES) / len(drawn)
    sizes = torch.tensor([float(len(each)) for each in drawn])
    assert torch.allclose(counts, torch.full((SAMPLES,), BATCH / SAMPLES), atol=0.05)
    assert sizes.var() == pytest.approx(BATCH * (1 - BATCH / SAMPLES), rel=0.2)
    assert len(private.batches(SAMPLES)) == SAMPLES / BATCH


def test_the_budget_is_the_accountants_and_no_step_exceeds_it(tmp_path: Path) -> None:
    budget = _budget(tmp_path / "privacy.json")
    taken = 0
    while not budget.is_spent:
        budget.spend()
        taken += 1
        assert budget.loss.epsilon <= SPEC.epsilon
    accountant = RDPAccountant()
    accountant.history = [(SPEC.noise_multiplier, BATCH / SAMPLES, taken)]
    assert budget.loss.epsilon == pytest.approx(accountant.get_epsilon(SPEC.delta))
    accountant.history = [(SPEC.noise_multiplier, BATCH / SAMPLES, taken + 1)]
    assert accountant.get_epsilon(SPEC.delta) > SPEC.epsilon


def test_what_is_spent_is_on_the_disk_before_the_step_and_outlives_the_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "privacy.json", list[int]()
    monkeypatch.setattr("os.fsync", synced.append)
    first = _budget(path)
    first.spend()
    assert len(synced) == 2, "the file and its folder: a power failure loses no count"
    after_a_kill = _budget(path)
    assert after_a_kill.loss.epsilon >= first.epsilon_of(1)
    left = 0
    while not after_a_kill.is_spent:
        after_a_kill.spend()
        left += 1
    assert left == first.max_steps - 4, "the reserve of the killed process counts as taken"
    assert _budget(path).is_spent
    other = PrivacySpec(**{**SPEC.model_dump(), "noise_multiplier": 50.0, "epsilon": 9.0})
    assert _budget(path, other).loss.epsilon >= first.epsilon_of(first.max_steps), "other noise adds to it"


def test_a_step_that_cannot_be_counted_is_not_taken(tmp_path: Path) -> None:
    budget = _budget(tmp_path / "missing" / "privacy.json")
    for _ in range(2):
        with pytest.raises(ResourceError, match="none is taken"):
            budget.spend()
    assert budget.loss.epsilon == 0.0
    (tmp_path / "privacy.json").write_text("[[1.0")
    with pytest.raises(CheckpointError, match="cannot be read"):
        _budget(tmp_path / "privacy.json")
