"""`SwarmOptimizer` in loops that others wrote: the loss it sees, and the changes that it refuses."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.training import optimizer as optimizer_module
from tests.support.lone import lone_peer
from tests.support.processes.worker import make_model, make_optimizer


class Told(nn.Module):
    """A model whose outputs tell their loss, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(1))

    def forward(self, value: float, num_items_in_batch: int | None = None) -> Any:
        return SimpleNamespace(loss=(self.weight * value / (num_items_in_batch or 1)).sum())


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Time that passes ten seconds at each look."""
    now = iter(range(0, 10_000_000, 10))
    clock = SimpleNamespace(monotonic=lambda: float(next(now)))
    monkeypatch.setattr(optimizer_module, "time", clock)
    return clock


def test_the_loss_of_the_model_s_outputs_is_seen(tmp_path: Path, clock: SimpleNamespace) -> None:
    model = Told()
    with lone_peer(tmp_path, model, torch.optim.SGD(model.parameters(), 0.0), every=100) as peer:
        opt = peer.optimizer

        def step(*values: float, **options: int) -> float | None:
            for value in values:
                model(value, **options).loss.backward()
            opt.step()
            opt.zero_grad()
            return opt.loss

        assert opt.loss is None
        assert step(2.0) == 2.0
        assert step(2.0, 4.0) == 3.0, "the mean of its microbatches"
        assert step(2.0, 4.0, num_items_in_batch=2) == 3.0, "the sum of their parts"
        with torch.no_grad():
            model(50.0)
        model.eval()
        model(60.0)
        model.train()
        assert step(5.0) == 5.0, "an evaluation in between is no training"
        opt.loss = 1.5
        assert step(7.0) == 1.5, "what the caller sets counts more"
        assert opt.step(lambda: torch.tensor(2.5)) == opt.loss == 2.5
        opt.loss = None
        assert step(8.0) == 8.0


def test_parameters_cannot_be_added_frozen_or_unfrozen_later(tmp_path: Path) -> None:
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=100) as peer:
        with pytest.raises(UsageError, match="takes no more parameters"):
            peer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert len(peer.optimizer.param_groups) == len(peer.optimizer.inner.param_groups) == 1
        model[0].requires_grad_(False)  # type: ignore[index]
        with pytest.raises(UsageError, match=r"requires_grad of 0\.bias, 0\.weight changed"):
            peer.optimizer.synchronize()
