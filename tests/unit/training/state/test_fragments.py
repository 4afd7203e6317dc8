"""Fragments: every value in exactly one, blocks dealt in turn, and steps that move one fragment alone."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.state.layout import Fragments, Layout
from p2ptrain.training.state.outer_optimizers import AdamStep, AverageStep, NesterovStep, Stepper
from p2ptrain.training.state.shared_state import SharedState


def _model(num_blocks: int = 5, width: int = 4) -> nn.Module:
    module = nn.Module()
    module.embedding = nn.Embedding(17, width)
    module.blocks = nn.ModuleList(
        nn.Sequential(nn.Linear(width, width), nn.BatchNorm1d(width)) for _ in range(num_blocks)
    )
    module.norm = nn.LayerNorm(width)
    return module


@settings(max_examples=30)
@given(st.integers(1, 9), st.integers(1, 9))
def test_every_value_is_in_exactly_one_fragment(num_blocks: int, count: int) -> None:
    layout = Layout.from_module(_model(num_blocks))
    if count > num_blocks + 3:
        with pytest.raises(ValueError, match="too few blocks"):
            Fragments(layout, count)
        return
    fragments = Fragments(layout, count)
    assert sum(fragment.num_values for fragment in fragments) == layout.num_values
    vector, seen = torch.arange(layout.num_values, dtype=torch.float32), []
    for number in range(count):
        packed = torch.empty(fragments.of_round(number + 3 * count).num_values)
        fragments.of_round(number).gather(vector, packed)
        assert torch.equal(packed, packed.sort().values)
        seen.append(packed)
    assert torch.equal(torch.cat(seen).sort().values, vector)


def test_blocks_are_dealt_in_turn_and_the_rest_goes_to_the_smallest() -> None:
    model = build_model(ModelSpec(layers=6, hidden=16, heads=2, kv_heads=2, intermediate=32, context=8))
    fragments = Fragments(Layout.from_module(model), 3)
    dealt = [{entry.name for entry in fragment.layout.entries} for fragment in fragments]
    for layer in range(6):
        names = {name for name, _ in model.named_parameters() if f".layers.{layer}." in name}
        assert names <= dealt[layer % 3]
    block = sum(p.numel() for name, p in model.named_parameters() if ".layers.0." in name)
    assert sorted(fragment.num_values for fragment in fragments) == [2 * block, 2 * block + 16, 2 * block + 256 * 16]


def test_one_fragment_is_the_vector_itself() -> None:
    layout = Layout.from_module(_model())
    (only,) = Fragments(layout)
    assert only.layout.entries == layout.entries
    assert only.parameter_spans == ((0, 0, layout.num_parameters),)


STEPPERS: dict[str, Callable[[Layout, int], Stepper]] = {
    "nesterov": lambda layout, _: NesterovStep(layout, 0.7, 0.9),
    "adam": lambda layout, count: AdamStep(layout, 0.02, 0.9, 0.99, 1e-3, count),
    "average": lambda layout, _: AverageStep(layout, 0.5),
}


@pytest.mark.parametrize("name", STEPPERS)
def test_fragments_in_turn_give_the_bits_of_whole_steps(name: str) -> None:
    layout, generator = Layout.from_module(_model()), torch.Generator().manual_seed(3)
    fragments = Fragments(layout, 3)
    at_once, in_turn = STEPPERS[name](layout, 1), STEPPERS[name](layout, 3)
    vector = torch.randn(layout.num_values, generator=generator)
    layout.round_integers(vector)
    other = vector.clone()
    for _ in range(3):
        mean = torch.randn(layout.num_values, generator=generator)
        at_once.step(vector, mean, 0)
        for fragment in fragments:
            packed, before, elsewhere = torch.empty(fragment.num_values), other.clone(), torch.ones(layout.num_values)
            fragment.gather(mean, packed)
            in_turn.step(other, packed, 0, fragment)
            for start, _, count in fragment.parameter_spans + fragment.buffer_spans:
                elsewhere[start : start + count] = 0
            assert torch.equal(other[elsewhere.bool()], before[elsewhere.bool()])
        assert torch.equal(vector, other)
    for (_, left), (_, right) in zip(at_once.state_tensors(), in_turn.state_tensors(), strict=True):
        assert set(left.tolist()) == set(right.tolist())


def _work(count: int) -> tuple[nn.Module, SharedState, LocalContribution]:
    module = _model()
    layout = Layout.from_module(module)
    state = SharedState(module, layout, AverageStep(layout, 1.0), Fragments(layout, count))
    return module, state, LocalContribution(module, state, accumulate=False)


def _drift(module: nn.Module, amount: float) -> None:
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(amount)


def test_a_contribution_to_one_fragment_leaves_the_work_on_the_others() -> None:
    module, state, work = _work(3)
    _drift(module, 0.5)
    work.add_step(2, 30)
    first, second, third = state.fragments
    assert [work.tokens_of(fragment) for fragment in state.fragments] == [10, 10, 10]
    contribution = torch.empty(first.num_values)
    work.collect(contribution, first)
    assert float((contribution[: first.layout.num_parameters] + 0.5).abs().max()) < 1e-6
    state.apply(contribution, 0, first)
    work.adopt(True, None, first)
    assert [work.tokens_of(fragment) for fragment in state.fragments] == [0, 10, 10]
    assert (work.tokens, work.samples, work.steps) == (20, 0, 0)
    for fragment, left in ((first, 0.0), (second, -0.5), (third, -0.5)):
        rest = torch.empty(fragment.num_values)
        work.collect(rest, fragment)
        assert float((rest[: fragment.layout.num_parameters] - left).abs().max()) < 1e-6
