"""What `Swarm.optimizer` refuses in one line, what it says once, and by which rule peers have to agree."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.training.optimizer_checks import check_optimizer, differences, step_rule
from tests.support.processes.worker import make_model

REFUSED: dict[str, tuple[int, Callable[[nn.Module], torch.optim.Optimizer], str]] = {
    "another model's": (8, lambda model: torch.optim.SGD(make_model(8).parameters(), 0.1), "4 of 4 parameters"),
    "of an old layer": (8, lambda model: torch.optim.SGD([*model.parameters(), torch.zeros(3)], 0.1), "1 of 5"),
    "LBFGS": (8, lambda model: torch.optim.LBFGS(model.parameters()), "evaluates the loss again"),
    "sparse": (1, lambda model: torch.optim.SparseAdam(model.parameters()), "dense gradients"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_work_is_refused_in_one_line(name: str) -> None:
    every, make, message = REFUSED[name]
    model = make_model(8)
    with pytest.raises(UsageError, match=message) as caught:
        check_optimizer(model, make(model), every)
    assert "\n" not in str(caught.value)


def test_an_optimizer_of_frozen_parameters_alone_is_refused() -> None:
    model = make_model(8).requires_grad_(False)
    with pytest.raises(UsageError, match="no trainable parameter"):
        check_optimizer(model, torch.optim.SGD(model.parameters(), 0.1), 8)


def test_parameters_that_never_move_are_named_and_frozen_ones_are_fine() -> None:
    model = make_model(8)
    head = list(model.parameters())[2:]
    (oddity,) = check_optimizer(model, torch.optim.SGD(head, 0.1), 8)
    assert "2 trainable parameters" in oddity
    assert "0.weight, 0.bias" in oddity
    model[0].requires_grad_(False)  # type: ignore[index]
    assert not check_optimizer(model, torch.optim.SGD(head, 0.1), 8)
    assert not check_optimizer(model, torch.optim.SGD(model.parameters(), 0.1), 8)


def test_peers_agree_on_a_rule_exactly_if_their_steps_are_the_same() -> None:
    model, other = make_model(8), make_model(8)

    def adam(model: nn.Module, **changes: object) -> torch.optim.Optimizer:
        return torch.optim.AdamW(model.parameters(), **{"lr": 0.1, **changes})  # type: ignore[arg-type]

    rule = step_rule(model, adam(model), 1.0)
    assert rule == step_rule(other, adam(other), 1.0)
    assert rule == step_rule(other, adam(other, foreach=False), 1.0), "how it is computed is no part of it"
    different = {
        "clip_norm": step_rule(other, adam(other), 0.0),
        "optimizer": step_rule(other, torch.optim.Adam(other.parameters(), 0.1), 1.0),
        "groups.0.lr": step_rule(other, adam(other, lr=0.2), 1.0),
        "groups.0.betas": step_rule(other, adam(other, betas=(0.9, 0.95)), 1.0),
        "groups.0.amsgrad": step_rule(other, adam(other, amsgrad=True), 1.0),
        "groups.1.lr": step_rule(
            other, torch.optim.AdamW([{"params": other[0].parameters()}, {"params": other[2].parameters()}], 0.1), 1.0  # type: ignore[index]
        ),
    }  # fmt: skip
    for key, theirs in different.items():
        assert theirs != rule
        if "1" not in key:
            assert key in differences(rule, theirs)
    assert "clip_norm 1.0 here, 0.0 there" in differences(rule, different["clip_norm"])


@pytest.mark.parametrize("theirs", ["", "no json", "[" * 5000, json.dumps({"a": [{"b": 1}]}), json.dumps([1])])
def test_a_rule_that_another_peer_made_up_can_be_compared(theirs: str) -> None:
    model = make_model(8)
    assert len(differences(step_rule(model, torch.optim.SGD(model.parameters(), 0.1), 0.0), theirs)) < 400
