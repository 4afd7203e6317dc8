"""Arithmetic of stages: the whole model's gradients, and microbatches that are taken out again."""

import itertools

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import Span, build_model, build_stage, model_blocks
from p2ptrain.models.stage import Stage
from p2ptrain.pipeline.messages import BadMicrobatchError
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.gradients import GradientSum

SPEC = ModelSpec(
    layers=3, hidden=32, heads=4, kv_heads=2, intermediate=48, context=16, vocabulary=50, tied_embeddings=False
)


class Summed(StageCompute):
    """A stage with its sum."""

    def __init__(self, stage: Stage) -> None:
        super().__init__(stage)
        self.total = GradientSum(self.parameters)


def stages(*cuts: int) -> list[Summed]:
    ends = [0, *cuts, len(model_blocks(SPEC))]
    return [Summed(build_stage(SPEC, Span(start, stop))) for start, stop in itertools.pairwise(ends)]


def tokens(seed: int) -> torch.Tensor:
    return torch.randint(SPEC.vocabulary, (2, 11), generator=torch.Generator().manual_seed(seed))


def run(pipeline: list[Summed], sample: torch.Tensor, weight: float) -> float:
    """One microbatch, there and back; its loss."""
    inputs = [sample[:, :-1]]
    for stage in pipeline[:-1]:
        inputs.append(stage.forward(inputs[-1]))
    found = last = pipeline[-1].loss(inputs[-1], sample[:, 1:])
    pipeline[-1].total.add(last.parameters, weight)
    for stage, entry in zip(pipeline[-2::-1], inputs[-2::-1], strict=True):
        assert found.inputs is not None
        found = stage.backward(entry, found.inputs)
        stage.total.add(found.parameters, weight)
    assert found.inputs is None
    return last.loss


@pytest.mark.parametrize("cuts", [(), (1,), (2, 4), (1, 2, 3, 4)])
def test_sums_are_the_whole_models_gradients_weighted_by_tokens(cuts: tuple[int, ...]) -> None:
    model, expected = build_model(SPEC), torch.tensor(0.0)
    pipeline = stages(*cuts)
    for seed, weight in ((0, 3.0), (1, 5.0)):
        sample = tokens(seed)
        model.zero_grad()
        loss = functional.cross_entropy(model(sample[:, :-1]).flatten(0, 1), sample[:, 1:].flatten())
        torch.autograd.backward(loss)
        gradient = parameters_to_vector([p.grad for p in model.parameters() if p.grad is not None])
        expected = expected + weight * gradient
        assert run(pipeline, sample, weight) == pytest.approx(float(loss.detach()), rel=1e-6)
    found = torch.cat([stage.total.values for stage in pipeline])
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-6)


def test_a_microbatch_that_is_taken_out_leaves_what_was_there_before() -> None:
    pipeline = stages(2, 4)
    run(pipeline, tokens(1), 7.0)
    run(pipeline, tokens(1), -7.0)
    assert not any(stage.total.values.any() for stage in pipeline), "out of nothing it leaves exactly nothing"
    run(pipeline, tokens(0), 3.0)
    before = [stage.total.values.clone() for stage in pipeline]
    run(pipeline, tokens(1), 1000.0)
    assert all(
        not torch.allclose(stage.total.values, kept, atol=1e-3) for stage, kept in zip(pipeline, before, strict=True)
    )
    run(pipeline, tokens(1), -1000.0)
    for stage, kept in zip(pipeline, before, strict=True):
        assert torch.allclose(stage.total.values, kept, rtol=0, atol=1e-6 * 1000)


def test_passes_leave_no_gradients_and_no_graph_behind() -> None:
    (stage,) = stages()
    output = stage.forward(tokens(0))
    assert not output.requires_grad
    run([stage], tokens(0), 1.0)
    assert all(parameter.grad is None for parameter in stage.stage.parameters())


def test_what_is_not_finite_is_refused() -> None:
    first, middle, last = stages(2, 4)
    entry = first.forward(tokens(0)[:, :-1])
    with pytest.raises(BadMicrobatchError, match="output"):
        middle.forward(entry * torch.inf)
    with pytest.raises(BadMicrobatchError, match="gradient"):
        middle.backward(entry, torch.full_like(entry, torch.nan))
    with pytest.raises(BadMicrobatchError, match="loss"):
        last.loss(entry * torch.nan, tokens(0)[:, 1:])
