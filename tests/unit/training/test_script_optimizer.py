"""`SwarmOptimizer` in loops that others wrote: the loss it sees, what is refused, and on which rule peers agree."""

import copy
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.training import optimizer as optimizer_module
from p2ptrain.training.evaluate import mean_and_error
from p2ptrain.training.optimizer_checks import check_optimizer, differences, step_rule
from p2ptrain.training.private.site import Site
from tests.support.lone import lone_peer
from tests.support.processes.worker import loss_of, make_model, make_optimizer


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


@pytest.mark.parametrize("right", [0, 5, 11, 13])
def test_an_accuracy_that_is_reported_does_not_tell_the_number_of_samples(tmp_path: Path, right: int) -> None:
    """11/13 has one denominator below 16. What is told of 13 samples could come from the 8 that the record tells."""
    model = Told()
    with lone_peer(tmp_path, model, torch.optim.SGD(model.parameters(), 0.0), every=100) as peer:
        values = [1.0] * right + [0.0] * (13 - right)
        told = peer.optimizer.report(values, "accuracy")
        assert told.samples == 8
        hits = told.mean * 8
        assert hits == int(hits)
        part = [1.0] * int(hits) + [0.0] * (8 - int(hits))
        assert (told.mean, told.error) == pytest.approx(mean_and_error(part))
        assert peer.optimizer.report(values, "accuracy") == told, "the same samples each time"


def test_a_round_does_not_tell_how_many_samples_a_site_reads(tmp_path: Path) -> None:
    model = Told()
    with lone_peer(tmp_path, model, torch.optim.SGD(model.parameters(), 0.0), every=100) as peer:
        peer.optimizer.site, peer.optimizer.samples_per_step = Site(weight=8), 13
        for size in (None, 11):  # A script may count a batch itself.
            model(1.0).loss.backward()
            if size is not None:
                peer.optimizer.count(size, 10 * size)
            peer.optimizer.step()
        assert (peer.optimizer.work.samples, peer.optimizer.work.tokens) == (2, 2 * 8)


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


@pytest.mark.filterwarnings("ignore:.*torch.jit.script:DeprecationWarning")
def test_a_model_of_torchscript_takes_no_hooks_and_trains(tmp_path: Path) -> None:
    model = torch.jit.script(make_model(8))
    with lone_peer(tmp_path, model, make_optimizer(model), every=1, local_batch=1, global_batch=1) as peer:
        loss_of(model, [0]).backward()  # type: ignore[no-untyped-call]
        peer.optimizer.step()
        assert peer.optimizer.round == 1


@pytest.mark.parametrize("kind", [float, torch.Tensor.clone, np.float32, nn.Parameter], ids=lambda kind: kind.__name__)
def test_a_loss_and_a_size_of_any_type_become_plain_numbers(tmp_path: Path, kind: Callable[[Any], Any]) -> None:
    """Others go into no record and into no checkpoint."""
    model = Told()
    with lone_peer(tmp_path, model, torch.optim.SGD(model.parameters(), 0.0), every=100) as peer:
        opt = peer.optimizer
        opt.loss = kind(torch.tensor(2.5))
        opt.count(kind(torch.tensor(4.0)), kind(torch.tensor(40.0)))
        opt.step()
        assert [type(each) for each in (opt.loss, opt.work.samples, opt.work.tokens)] == [float, int, int]
        assert (opt.loss, opt.work.samples, opt.total_tokens) == (2.5, 4, 40)


def test_a_state_of_an_earlier_round_does_not_replace_the_shared_one(tmp_path: Path) -> None:
    """A peer whose optimizer has another state than its round's takes itself for damaged, and commits nothing more."""
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=1, local_batch=1, global_batch=2) as peer:
        opt, saved = peer.optimizer, dict[str, Any]()
        for step in range(5):
            loss_of(model, [step]).backward()  # type: ignore[no-untyped-call]
            opt.step()
            opt.zero_grad()
            saved = copy.deepcopy(opt.state_dict()) if step == 2 else saved
        opt.load_state_dict(saved)
        assert peer.synchronizer.state.tree().root == peer.synchronizer.head.digest
        assert (opt.round, opt.work.samples) == (2, saved["p2ptrain"]["samples"])


ROUNDS: list[dict[str, Any]] = [
    {"every": 1, "local_batch": 1, "global_batch": 1},
    *({"every": 2, "outer": outer} for outer in ("nesterov", "adam", "average")),
]


@pytest.mark.parametrize("training", ROUNDS, ids=str)
def test_the_script_s_default_device_is_not_that_of_the_shared_state(tmp_path: Path, training: dict[str, Any]) -> None:
    model = make_model(8)
    opt = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    with torch.device("meta"), lone_peer(tmp_path, model, opt, **training) as peer:
        for _ in range(3):
            sum(each.sum() for each in model.parameters()).backward()  # type: ignore[union-attr]
            peer.optimizer.step()
            peer.optimizer.zero_grad()
        peer.saver.save()
        assert all(tensor.device.type == "cpu" for _, tensor in peer.synchronizer.state.tensors())


def test_parameters_cannot_be_added_frozen_or_unfrozen_later(tmp_path: Path) -> None:
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=100) as peer:
        with pytest.raises(UsageError, match="takes no more parameters"):
            peer.optimizer.add_param_group({"params": [nn.Parameter(torch.zeros(1))]})
        assert len(peer.optimizer.param_groups) == len(peer.optimizer.inner.param_groups) == 1
        model[0].requires_grad_(False)  # type: ignore[index]
        with pytest.raises(UsageError, match=r"requires_grad of 0\.bias, 0\.weight changed"):
            peer.optimizer.synchronize()


def test_parameters_frozen_within_a_global_batch_are_told_of_in_one_line(tmp_path: Path) -> None:
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=1, local_batch=1, global_batch=2) as peer:
        model[0].requires_grad_(False)  # type: ignore[index]
        with pytest.raises(UsageError, match=r"requires_grad of 0\.bias, 0\.weight changed"):
            peer.optimizer.step()


@pytest.mark.parametrize("training", [{"every": 2}, {"every": 1, "local_batch": 4, "global_batch": 8}], ids=str)
def test_gradients_that_the_optimizer_does_not_hold_change_no_step(tmp_path: Path, training: dict[str, Any]) -> None:
    """Its `zero_grad` leaves those of a body that is not frozen, so they add up from batch to batch."""
    trained = []
    for frozen in (True, False):
        model = make_model(8)
        model[0].requires_grad_(not frozen)  # type: ignore[index]
        inner = torch.optim.SGD(model[2].parameters(), 0.1)  # type: ignore[index]
        with lone_peer(tmp_path, model, inner, clip_norm=0.1, **training) as peer:
            for step in range(8):
                loss_of(model, [step, step + 1]).backward()  # type: ignore[no-untyped-call]
                peer.optimizer.step()
                peer.optimizer.zero_grad()
            assert peer.synchronizer.head.round == 4
        trained.append(model[2].weight.detach().clone())  # type: ignore[index]
    torch.testing.assert_close(trained[1], trained[0])


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
