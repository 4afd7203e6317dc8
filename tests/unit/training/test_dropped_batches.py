"""Batches and contributions that cannot count: dropped before they leave a trace, told of, and in the end fatal."""

import copy
import logging
import math
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.errors import DivergedError
from p2ptrain.training.optimizer import DROPS_TO_RESET, MAX_DROPS
from tests.support.lone import LoneOptimizer, lone_optimizer

BAD = (math.nan, math.inf, -math.inf)
MODES: dict[str, dict[str, Any]] = {
    "every = 4": {"every": 4},
    "every = 4, clipped": {"every": 4, "clip_norm": 1.0},
    "every = 1": {"every": 1, "global_batch": 3},
}
modes = pytest.mark.parametrize("training", MODES.values(), ids=MODES)


def model() -> nn.Module:
    module = nn.Linear(3, 2)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.fill_(0.5)
    return module


def adamw(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), 0.1)


def make(training: dict[str, Any], **options: Any) -> LoneOptimizer:
    return lone_optimizer(**{"make": adamw, "module": model(), **options, **training})


def everything(lone: LoneOptimizer) -> list[torch.Tensor]:
    """What a step may change, but for counts."""
    moments = [value for state in lone.optimizer.inner.state.values() for value in state.values()]
    accumulated = lone.optimizer.work.accumulated
    tensors = [lone.synchronizer.state.vector, *lone.module.state_dict().values(), *moments]
    return [tensor.clone() for tensor in (tensors if accumulated is None else [*tensors, accumulated])]


@modes
@pytest.mark.fault(53)
@pytest.mark.parametrize("bad", BAD)
def test_a_batch_whose_gradient_is_not_finite_leaves_no_trace(
    training: dict[str, Any], bad: float, caplog: pytest.LogCaptureFixture
) -> None:
    spoiled, clean = make(training), make(training)
    for lone in (spoiled, clean):
        lone.step(0.5)
    before = everything(spoiled)
    spoiled.optimizer.count(7, 77)
    with caplog.at_level(logging.WARNING):
        for parameter in spoiled.module.parameters():
            parameter.grad = torch.ones_like(parameter)
        next(spoiled.module.parameters()).grad[0, 0] = bad  # type: ignore[index]
        spoiled.optimizer.step()
        spoiled.optimizer.zero_grad()
    assert all(torch.equal(*pair) for pair in zip(before, everything(spoiled), strict=True))
    counts = spoiled.optimizer
    assert (counts.work.samples, counts.work.tokens, counts.total_tokens, counts.total_steps) == (1, 10, 10, 1)
    assert counts.dropped_batches == 1
    assert [("not finite" in record.message, "dropped" in record.message) for record in caplog.records] == [
        (True, True)
    ]
    for lone in (spoiled, clean):
        for gradient in (0.25, -1.0, 2.0, 0.5, 1.0):
            lone.step(gradient)
    assert spoiled.optimizer.round == clean.optimizer.round > 0
    assert all(torch.equal(*pair) for pair in zip(everything(clean), everything(spoiled), strict=True))


@modes
def test_many_bad_batches_are_told_of_sparsely_and_do_not_add_up_if_good_ones_come_between(
    training: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    lone = make(training)
    with caplog.at_level(logging.WARNING):
        for _ in range(MAX_DROPS):
            lone.step(math.nan)
            lone.step(0.5)
    assert lone.optimizer.dropped_batches == MAX_DROPS
    assert [record.args[1] for record in caplog.records] == [1, 2, 4, 8, 16]  # type: ignore[index]
    assert lone.optimizer.total_steps == MAX_DROPS


@modes
def test_bad_batches_that_never_end_end_training_with_one_line(training: dict[str, Any]) -> None:
    lone = make(training)
    lone.step(0.5)
    start = lone.synchronizer.state.vector.clone()
    for _ in range(MAX_DROPS - 1):
        lone.step(math.nan)
    with pytest.raises(DivergedError, match=f"{MAX_DROPS} batches in a row are not finite") as caught:
        lone.step(math.nan)
    assert "\n" not in str(caught.value)
    assert torch.equal(lone.synchronizer.state.vector, start)
    assert lone.optimizer.dropped_batches == MAX_DROPS


@modes
def test_a_live_model_that_broke_begins_anew_and_counts_again(training: dict[str, Any]) -> None:
    lone, fresh = make(training), make(training)
    lone.step(0.5)
    with torch.no_grad():
        next(lone.module.parameters()).fill_(math.nan)
    for _ in range(DROPS_TO_RESET):
        lone.step(math.nan)
    assert lone.optimizer.work.tokens == 0
    assert lone.optimizer.inner.state == {}
    for each in (lone, fresh):
        for gradient in (1.0, 2.0, 3.0, 4.0):
            each.step(gradient)
    assert all(torch.equal(*pair) for pair in zip(everything(fresh), everything(lone), strict=True))


def test_an_optimizer_that_cannot_make_its_first_state_again_gets_it_back() -> None:
    lone = lone_optimizer(
        make=lambda module: torch.optim.Adagrad(module.parameters(), 0.1, initial_accumulator_value=0.25), every=8
    )
    first = copy.deepcopy(list(lone.optimizer.inner.state.values()))
    lone.step()
    for _ in range(DROPS_TO_RESET):
        lone.step(math.nan)
    for expected, found in zip(first, lone.optimizer.inner.state.values(), strict=True):
        assert {key: value.tolist() for key, value in expected.items()} == {k: v.tolist() for k, v in found.items()}
    lone.step()
    assert lone.optimizer.work.tokens == 10


@pytest.mark.parametrize("training", [MODES["every = 4"], MODES["every = 1"]], ids=str)
def test_running_means_that_a_bad_batch_spoiled_are_set_back_and_sound_ones_stay(training: dict[str, Any]) -> None:
    norm = nn.BatchNorm1d(3)
    mean, variance = (tensor for name, tensor in norm.named_buffers() if name.startswith("running"))
    lone = lone_optimizer(module=norm, **training)
    norm(torch.randn(4, 3))
    before = mean.clone()
    lone.step(math.nan)
    assert torch.equal(mean, before)
    norm(torch.full((4, 3), math.nan))
    assert not bool(mean.isfinite().all())
    lone.step(math.nan)
    assert bool(mean.isfinite().all() and variance.isfinite().all())


def test_gradients_are_clipped_by_the_norm_of_all_of_them() -> None:
    lone = lone_optimizer(make=lambda m: torch.optim.SGD(m.parameters(), 1.0), module=model(), clip_norm=0.5, every=4)
    lone.step(3.0)
    moved = torch.cat([(parameter.detach() - 0.5).flatten() for parameter in lone.module.parameters()])
    assert float(moved.norm()) == pytest.approx(0.5, rel=1e-5)


@modes
def test_a_sparse_gradient_that_is_not_finite_is_dropped_too(training: dict[str, Any]) -> None:
    embedding = nn.Embedding(6, 2, sparse=True)
    lone = make(training, module=embedding, make=lambda module: torch.optim.SGD(module.parameters(), 0.1))
    before = embedding.weight.detach().clone()
    (embedding(torch.tensor([1, 3])) * math.nan).sum().backward()
    lone.optimizer.step()
    assert lone.optimizer.dropped_batches == 1
    assert torch.equal(embedding.weight, before)
    assert lone.optimizer.work.tokens == 0
