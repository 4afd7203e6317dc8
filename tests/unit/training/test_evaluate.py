"""Held-out loss is right, repeatable, bounded, and leaves the model as it was."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.training.evaluate import held_out_loss, language_model_loss, mean_and_error

TOKENS = np.random.default_rng(1).integers(0, 256, 5000).astype(np.uint8)


class Uniform(nn.Module):
    """Gives every token the same probability."""

    def __init__(self) -> None:
        super().__init__()
        self.dropout = nn.Dropout()
        self.seen: list[torch.Tensor] = []

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        assert not self.training
        assert not torch.is_grad_enabled()
        self.seen.append(input_ids)
        return torch.zeros(*input_ids.shape, 256)


def test_a_uniform_model_loses_log_of_the_vocabulary() -> None:
    measured = held_out_loss(Uniform(), TOKENS, 32)
    assert measured.loss == pytest.approx(math.log(256), rel=1e-6)
    assert measured.num_windows == 128


def test_windows_are_distinct_fixed_and_spread_over_the_text() -> None:
    first, second = Uniform(), Uniform()
    for model in (first, second):
        held_out_loss(model, TOKENS, 10, max_windows=20, batch_size=6)
    rows = torch.cat(first.seen)
    assert torch.equal(rows, torch.cat(second.seen))
    assert len(torch.unique(rows, dim=0)) == 20
    windows = {tuple(TOKENS[start : start + 10]): start for start in range(0, 4990, 10)}
    starts = sorted(windows[tuple(row.numpy().astype(np.uint8))] for row in rows)
    assert {start // 1000 for start in starts} == {0, 1, 2, 3, 4}


def test_loss_equals_the_whole_text_in_one_batch_when_all_windows_are_read() -> None:
    model = build_model(ModelSpec(layers=1, hidden=16, heads=2, kv_heads=2, intermediate=32, context=16))
    tokens = TOKENS[: 16 * 20 + 1]
    measured = held_out_loss(model, tokens, 16, batch_size=3, max_windows=1000)
    rows = np.stack([tokens[start : start + 17] for start in range(0, 16 * 20, 16)]).astype(np.int64)
    with torch.no_grad():
        expected = float(language_model_loss(model, torch.from_numpy(rows)))
    assert measured.loss == pytest.approx(expected, rel=1e-5)
    assert measured.num_windows == 20


def test_modes_are_restored_even_when_the_loss_fails() -> None:
    model = Uniform()
    model.train()
    model.dropout.eval()

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    model.register_forward_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        held_out_loss(model, TOKENS, 32)
    assert model.training
    assert not model.dropout.training


def test_the_loss_has_the_standard_error_of_its_windows_whatever_the_batches() -> None:
    model = build_model(ModelSpec(layers=1, hidden=16, heads=2, kv_heads=2, intermediate=32, context=16))
    tokens = TOKENS[: 16 * 5 + 1]
    rows = [torch.from_numpy(tokens[start : start + 17].astype(np.int64))[None] for start in range(0, 16 * 5, 16)]
    with torch.no_grad():
        losses = torch.tensor([float(language_model_loss(model, row)) for row in rows], dtype=torch.float64)
    for batch_size in (1, 2, 5):
        measured = held_out_loss(model, tokens, 16, batch_size=batch_size)
        assert measured.loss == pytest.approx(float(losses.mean()), rel=1e-5)
        assert measured.error == pytest.approx(float(losses.std()) / math.sqrt(5), rel=1e-3)
    assert held_out_loss(model, tokens, 16, max_windows=1).error == math.inf


def test_values_that_are_not_finite_give_a_mean_that_is_not() -> None:
    for values in ([math.nan, 1.0], [math.inf, 1.0], [math.nan]):
        assert not math.isfinite(mean_and_error(values)[0])


def test_time_is_bounded_to_one_more_batch_and_too_little_text_is_refused() -> None:
    assert held_out_loss(Uniform(), TOKENS, 32, batch_size=4, max_seconds=0.0).num_windows == 4
    with pytest.raises(ValueError, match="too few"):
        held_out_loss(Uniform(), TOKENS[:32], 32)
