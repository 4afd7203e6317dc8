"""A site of a private swarm adds to training its weight, its pull, and layers of its own."""

from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from p2ptrain.averaging.protocol.certificate import genesis
from p2ptrain.errors import CheckpointError, UsageError
from p2ptrain.manifest import Manifest, PrivateSpec
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.private.site import WEIGHT_FILE, Site
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import AverageStep
from p2ptrain.training.state.shared_state import SharedState


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(3, 4)
        self.norm = nn.BatchNorm1d(4)
        self.last = nn.Linear(4, 2, bias=False)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.last(self.norm(self.first(inputs)))
        return outputs


def _weight(spec: PrivateSpec, samples: int) -> int:
    site = Site.of(spec, samples)
    assert site is not None
    return site.weight


def _shared(module: nn.Module, *personal: str) -> SharedState:
    layout = Layout.from_module(module, personal=personal)
    return SharedState(module, layout, AverageStep(layout, 1.0))


@given(st.integers(1, 1 << 40))
def test_a_bucketed_weight_hides_one_sample_but_at_powers_of_two(samples: int) -> None:
    weight, next_weight = _weight(PrivateSpec(), samples), _weight(PrivateSpec(), samples + 1)
    assert weight <= samples < 2 * weight
    assert (next_weight == weight) == ((samples + 1) & samples != 0)


@pytest.mark.parametrize(("weights", "weight"), [("samples", 1000), ("bucketed", 512), ("equal", 1)])
def test_a_site_weighs_what_the_manifest_says(weights: str, weight: int) -> None:
    assert _weight(PrivateSpec.model_validate({"weights": weights}), 1000) == weight


@pytest.mark.parametrize(("weights", "later"), [("bucketed", [512, 512, 512]), ("samples", [512, 511, 2048])])
def test_a_bucketed_weight_stays_that_of_the_first_run(tmp_path: Path, weights: str, later: list[int]) -> None:
    values = {"name": "banks", "model": {"family": "custom"}, "training": {"every": 2}, "private": {"weights": weights}}
    manifest = Manifest.model_validate({**values, "data": {"source": "custom"}})
    sites = [Site.open(manifest, Net(0), samples, tmp_path) for samples in (512, 511, 2048)]
    assert [site.weight for site in sites if site] == later
    (tmp_path / WEIGHT_FILE).write_text("many")
    if weights == "bucketed":
        with pytest.raises(CheckpointError, match="delete it"):
            Site.open(manifest, Net(0), 512, tmp_path)


@pytest.mark.parametrize(
    ("spec", "samples", "words"),
    [
        (PrivateSpec(), 0, "give a site's"),
        (PrivateSpec(), None, "give a site's"),
        (None, 5, "the swarm is not private"),
    ],
)
def test_a_number_of_samples_is_given_where_it_is_used_alone(
    spec: PrivateSpec | None, samples: int | None, words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        Site.of(spec, samples)


def test_the_pull_is_the_gradient_of_the_proximal_term() -> None:
    module, state = Net(2), _shared(Net(1), "norm.*")
    inputs, strength = torch.randn(5, 3), 0.3
    term = torch.zeros(())
    for entry, parameter in state.layout.parameters_of(module):
        shared = state.vector[entry.offset : entry.end].view(entry.shape)
        term = term + strength / 2 * (parameter - shared).square().sum()
    (module(inputs).square().mean() + term).backward()
    expected = [parameter.grad for parameter in module.parameters()]
    module.zero_grad()
    module(inputs).square().mean().backward()
    Site(1, strength).pull(module, state)
    for parameter, gradient in zip(module.parameters(), expected, strict=True):
        assert torch.allclose(parameter.grad, gradient, atol=1e-6)  # type: ignore[arg-type]
    assert any(
        not torch.equal(shared, live) for shared, live in zip(Net(1).parameters(), module.parameters(), strict=True)
    )


def test_personal_tensors_are_neither_read_nor_written_nor_averaged() -> None:
    mine, theirs = Net(1), Net(2)
    for module in (mine, theirs):
        module(torch.randn(8, 3))  # Moves the running statistics.
        nn.init.normal_(module.norm.weight)
    before = {name: tensor.clone() for name, tensor in mine.state_dict().items()}
    layout = Layout.from_module(mine, personal=["norm.*"])
    vector = layout.new_vector()
    layout.read(theirs, vector)
    layout.write(vector, mine)
    for name, tensor in mine.state_dict().items():
        kept = before[name] if name.startswith("norm.") else theirs.state_dict()[name]
        assert torch.equal(tensor, kept), name
    assert layout.num_values == 3 * 4 + 4 + 4 * 2
    assert layout.fingerprint != Layout.from_module(mine).fingerprint


def test_personal_tensors_come_back_from_a_copy_as_a_whole_or_not_at_all() -> None:
    source, target = Net(1), Net(2)
    nn.init.normal_(source.norm.weight)
    layout = Layout.from_module(source, personal=["norm.*", "*.bias"])
    kept = layout.read_personal(source)
    layout.write_personal(kept, target)
    assert torch.equal(target.norm.weight, source.norm.weight)
    assert torch.equal(target.first.bias, source.first.bias)
    assert not torch.equal(target.first.weight, source.first.weight)
    before = {name: tensor.clone() for name, tensor in target.state_dict().items()}
    for broken in ({**kept, "personal.param.first.bias": torch.zeros(5)}, dict(list(kept.items())[:-1])):
        with pytest.raises(ValueError, match="personal tensor"):
            layout.write_personal({name: tensor + 1 for name, tensor in broken.items()}, target)
        assert all(torch.equal(tensor, before[name]) for name, tensor in target.state_dict().items())


def test_a_bad_batch_leaves_no_value_in_personal_buffers_that_is_not_finite() -> None:
    module = Net(1)
    state = _shared(module, "norm.*")
    state.head = genesis(bytes(32), state.tree().root)
    work = LocalContribution(module, state, accumulate=False)
    module(torch.randn(8, 3) + 5.0)
    work.adopt(True, None)  # The end of a round.
    kept = module.norm.running_mean.clone()  # type: ignore[union-attr]
    module(torch.full((8, 3), torch.nan))
    work.restore_buffers()
    assert torch.equal(module.norm.running_mean, kept)  # type: ignore[arg-type]
    module(torch.full((8, 3), torch.nan))
    work.adopt(True, None)  # A round that ends with a bad value keeps the one before.
    work.reset()
    assert torch.equal(module.norm.running_mean, kept)  # type: ignore[arg-type]


@pytest.mark.parametrize(("patterns", "words"), [(["bn*"], "'bn\\*' matches no"), (["*"], "no trainable parameter to")])
def test_patterns_that_leave_nothing_or_match_nothing_are_refused(patterns: list[str], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Layout.from_module(Net(1), personal=patterns)
