"""Sparse gradients train as their dense form does, in every kind of round."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.training.gradients import clip_gradients
from tests.support.lone import lone_peer

TOKENS = torch.tensor([[0, 1, 1], [3, 1, 4]])


class Bag(nn.Module):
    """An embedding and a linear layer; the former's gradients are sparse or dense."""

    def __init__(self, sparse: bool) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(1)
            self.embedding = nn.Embedding(6, 4, sparse=sparse)
            self.head = nn.Linear(4, 1)

    def loss(self, step: int) -> torch.Tensor:
        outputs: torch.Tensor = self.head(self.embedding((TOKENS + step) % 6).sum(1))
        return outputs.square().mean()


@pytest.mark.parametrize("clip_norm", [0.0, 0.1])
@pytest.mark.parametrize("training", [{"every": 1, "local_batch": 2, "global_batch": 4}, {"every": 2}], ids=str)
def test_sparse_gradients_train_as_dense_ones_do(tmp_path: Path, training: dict[str, Any], clip_norm: float) -> None:
    trained = []
    for sparse in (False, True):
        model = Bag(sparse)
        inner = torch.optim.SGD(model.parameters(), 0.1)
        with lone_peer(tmp_path, model, inner, clip_norm=clip_norm, **training) as peer:
            for step in range(6):
                model.loss(step).backward()  # type: ignore[no-untyped-call]
                assert model.embedding.weight.grad is not None
                assert model.embedding.weight.grad.is_sparse == sparse
                peer.optimizer.step()
                peer.optimizer.zero_grad()
            assert peer.synchronizer.head.round == 3
        trained.append(model.embedding.weight.detach().clone())
    torch.testing.assert_close(trained[1], trained[0])


def test_a_sparse_optimizer_is_an_inner_optimizer(tmp_path: Path) -> None:
    model = nn.Embedding(6, 4, sparse=True)
    start = model.weight.detach().clone()
    with lone_peer(tmp_path, model, torch.optim.SparseAdam(model.parameters(), 0.1), clip_norm=1.0, every=2) as peer:
        for _ in range(4):
            (model(TOKENS) ** 2).mean().backward()
            peer.optimizer.step()
            peer.optimizer.zero_grad()
        assert peer.synchronizer.head.round == 2
    moved = (model.weight != start).any(1)
    assert moved.tolist() == [True, True, False, True, True, False]


def test_clipping_sees_repeated_rows_once() -> None:
    sparse, dense = nn.Embedding(6, 4, sparse=True), nn.Embedding(6, 4)
    dense.load_state_dict(sparse.state_dict())
    for model in (sparse, dense):
        (100 * model(TOKENS)).sum().backward()
        clip_gradients(list(model.parameters()), 1.0)
    assert sparse.weight.grad is not None
    assert dense.weight.grad is not None
    torch.testing.assert_close(sparse.weight.grad.to_dense(), dense.weight.grad)
    torch.testing.assert_close(dense.weight.grad.norm(), torch.tensor(1.0))
