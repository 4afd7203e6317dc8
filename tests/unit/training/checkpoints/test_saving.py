"""What a peer saves and takes up again: it goes on as if it had not stopped, and drops what does not fit."""

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from p2ptrain.errors import CheckpointError, IntegrityError, ResourceError
from p2ptrain.training.checkpoints import SavePolicy, saving
from p2ptrain.training.checkpoints.files import load_newest_valid
from p2ptrain.training.checkpoints.saving import restore_shared, saved_layout
from tests.support.lone import LonePeer, lone_peer
from tests.support.processes.worker import loss_of, make_model, make_optimizer
from tests.support.settings import training_over

TRAINING: list[dict[str, Any]] = [
    {"every": 3},
    {"every": 4, "fragments": 2},
    {"every": 1, "global_batch": 12},
]


def _train(peer: LonePeer, first: int, last: int) -> None:
    for step in range(first, last):
        loss_of(peer.module, list(range(4 * step, 4 * step + 4))).backward()  # type: ignore[no-untyped-call]
        peer.optimizer.step()
        peer.optimizer.zero_grad()


def _values(module: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in module.parameters()])


def _resume(peer: LonePeer, directory: Path) -> None:
    checkpoint = load_newest_valid(directory, peer.saver._swarm)
    assert checkpoint is not None
    restore_shared(peer.synchronizer.state, checkpoint)
    peer.saver.restore(checkpoint)


@pytest.mark.parametrize("training", TRAINING, ids=str)
@pytest.mark.parametrize("stop_at", [3, 4])
def test_a_peer_that_starts_again_goes_on_as_if_it_had_not_stopped(
    tmp_path: Path, training: dict[str, Any], stop_at: int
) -> None:
    training = training_over({"local_batch": 4, "outer": "nesterov"}, training)
    whole = make_model(8)
    with lone_peer(tmp_path / "whole", whole, make_optimizer(whole), **training) as peer:
        _train(peer, 0, 10)
        expected_head = peer.synchronizer.head
    first, second = make_model(8), make_model(8)
    with lone_peer(tmp_path, first, make_optimizer(first), **training) as peer:
        _train(peer, 0, stop_at)
        peer.saver.save()
        waiting, is_waiting = peer.optimizer.work.samples, any(peer.optimizer.work.pending)
    with lone_peer(tmp_path, second, make_optimizer(second), **training) as peer:
        peer.synchronizer.feedback.residual.zero_()
        _resume(peer, tmp_path)
        assert (peer.optimizer.total_steps, peer.optimizer.work.samples) == (stop_at, waiting)
        assert bool(peer.synchronizer.forgot) == is_waiting
        assert torch.equal(peer.synchronizer.feedback.residual, torch.arange(len(peer.synchronizer.state.vector)))
        _train(peer, stop_at, 10)
        assert peer.synchronizer.head == expected_head
    assert torch.equal(_values(second), _values(whole))


@pytest.mark.parametrize("training", TRAINING, ids=str)
def test_a_script_that_ends_while_its_model_is_frozen_saves_all_the_same(
    tmp_path: Path, training: dict[str, Any]
) -> None:
    """As Ctrl-C in an evaluation, or in the other half of a step with two losses."""
    first, second = make_model(8), make_model(8)
    with lone_peer(tmp_path, first, make_optimizer(first), **training) as peer:
        _train(peer, 0, 4)
        first.requires_grad_(False)
        peer.saver.save_last()
    with lone_peer(tmp_path, second, make_optimizer(second), **training) as peer:
        _resume(peer, tmp_path)
    assert torch.equal(_values(second), _values(first))


def test_work_on_a_buffer_that_grew_is_left_out_and_the_rest_is_saved(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(8)
    model.register_buffer("seen", torch.zeros(1))
    with lone_peer(tmp_path, model, make_optimizer(model), every=3) as peer:
        _train(peer, 0, 4)
        model.register_buffer("seen", torch.zeros(2))
        peer.saver.save_last()
        checkpoint = load_newest_valid(tmp_path, peer.saver._swarm)
        assert checkpoint is not None
        assert checkpoint.head == peer.synchronizer.head
    assert "a buffer that grows needs persistent=False" in caplog.text


def test_a_state_that_has_another_digest_is_not_restored(tmp_path: Path) -> None:
    module = make_model(8)
    with lone_peer(tmp_path, module, make_optimizer(module), every=4) as peer:
        _train(peer, 0, 2)
        peer.saver.save()
        checkpoint = load_newest_valid(tmp_path, peer.saver._swarm)
        assert checkpoint is not None
        other = replace(checkpoint, head=replace(checkpoint.head, digest=b"d" * 32))
        with pytest.raises(IntegrityError, match="does not have its digest"):
            restore_shared(peer.synchronizer.state, other)


def test_hyperparameters_stay_as_the_script_sets_them(tmp_path: Path) -> None:
    first, second = make_model(8), make_model(8)
    with lone_peer(tmp_path, first, torch.optim.AdamW(first.parameters(), 0.5), every=4) as peer:
        _train(peer, 0, 2)
        peer.saver.save()
    with lone_peer(tmp_path, second, torch.optim.AdamW(second.parameters(), 0.25), every=4) as peer:
        _resume(peer, tmp_path)
        assert [group["lr"] for group in peer.optimizer.param_groups] == [0.25]
        peer.optimizer.param_groups[0]["lr"] = 0.125
        assert peer.optimizer.inner.param_groups[0]["lr"] == 0.125, "the wrapped optimizer has the same groups"
        assert all(state["step"] == 2 for state in peer.optimizer.inner.state.values())


def test_what_is_not_finite_is_not_saved(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=8) as peer:
        start = _values(model)
        _train(peer, 0, 2)
        with torch.no_grad():
            next(model.parameters())[0, 0] = torch.nan
        next(iter(peer.optimizer.inner.state.values()))["exp_avg"].fill_(torch.inf)
        peer.synchronizer.feedback.residual[0] = torch.nan
        peer.saver.save()
        assert caplog.text.count("not finite") == 3
        assert "the residual has values that are not finite" in caplog.text
        checkpoint = load_newest_valid(tmp_path, peer.saver._swarm)
        assert checkpoint is not None
        assert "residual" not in checkpoint.local
        _resume(peer, tmp_path)
        assert torch.equal(_values(model), start), "it begins again at the shared state"


@pytest.mark.parametrize(
    ("name", "part"),
    [("residual", "the residual"), ("optimizer", "the inner optimizer's state"), ("live", "the work that waits")],
)
def test_what_is_not_finite_in_a_checkpoint_is_not_restored(
    tmp_path: Path, name: str, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_model(8), make_model(8)
    with lone_peer(tmp_path, first, make_optimizer(first), every=8) as peer:
        _train(peer, 0, 2)
        live = _values(first)
        peer.saver.save()
    with lone_peer(tmp_path, second, make_optimizer(second), every=8) as peer:
        start = _values(second)
        residual = peer.synchronizer.feedback.residual.clone()
        checkpoint = load_newest_valid(tmp_path, peer.saver._swarm)
        assert checkpoint is not None
        for key, tensor in checkpoint.local.items():
            if key.startswith(name):
                tensor.view(-1)[-1] = torch.nan
        restore_shared(peer.synchronizer.state, checkpoint)
        peer.saver.restore(checkpoint)
        assert caplog.text.count(f"{part} has values that are not finite") == 1
        assert torch.equal(_values(second), start if name == "live" else live)
        assert bool(peer.optimizer.inner.state) == (name != "optimizer")
        assert torch.equal(peer.synchronizer.feedback.residual, residual)


def test_another_optimizer_begins_anew_and_the_rest_is_restored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = make_model(8), make_model(8)
    with lone_peer(tmp_path, first, make_optimizer(first), every=2) as peer:
        _train(peer, 0, 5)
        peer.saver.save()
        live = _values(first)
    with lone_peer(tmp_path, second, torch.optim.SGD(second.parameters(), 0.1, momentum=0.9), every=2) as peer:
        _resume(peer, tmp_path)
        assert torch.equal(_values(second), live)
        assert peer.synchronizer.head.round == 2
        _train(peer, 5, 6)


def test_saving_in_the_background_is_of_one_moment_and_keeps_a_bounded_number(tmp_path: Path) -> None:
    model = make_model(8)
    policy = SavePolicy(every_rounds=2, every_minutes=0, keep_last=2)
    with lone_peer(tmp_path, model, make_optimizer(model), policy, every=1, local_batch=4, global_batch=4) as peer:
        rounds = []
        for step in range(12):
            _train(peer, step, step + 1)
            if peer.saver.is_due():
                rounds.append(peer.synchronizer.head.round)
                peer.saver.save_in_background()
                _train(peer, step, step + 1)  # It goes on while that is being written.
                peer.saver.wait()
    assert rounds[:3] == [2, 4, 6]
    assert [int(path.name.rpartition("-")[2]) for path in sorted(tmp_path.glob("0*"))] == rounds[-2:]
    newest = load_newest_valid(tmp_path, peer.saver._swarm)
    assert newest is not None
    assert newest.head.round == rounds[-1]


def test_a_save_that_fails_is_not_tried_again_in_each_round(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, policy = make_model(8), SavePolicy(every_rounds=2, every_minutes=0)
    with lone_peer(tmp_path, model, make_optimizer(model), policy, every=1, local_batch=4, global_batch=4) as peer:
        _train(peer, 0, 2)
        with monkeypatch.context() as full:
            full.setattr(saving, "save_checkpoint", _refuse)
            assert peer.saver.is_due()
            with pytest.raises(ResourceError):
                peer.saver.save()
            _train(peer, 2, 3)
            assert not peer.saver.is_due()
            full.setattr(saving, "RETRY_SECONDS", 0.0)
            with pytest.raises(ResourceError):
                peer.saver.save()
        assert peer.saver.is_due()
        peer.saver.save()
        assert not peer.saver.is_due()


def _refuse(*arguments: Any, **options: Any) -> Path:
    raise ResourceError("the disk is full")


def test_a_save_that_fails_in_the_background_is_logged_and_the_next_one_is_made(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=2) as peer:
        right = peer.synchronizer.state.vector[0].clone()
        peer.synchronizer.state.vector[0] += 1.0  # Damaged memory: not the digest of the head.
        with caplog.at_level(logging.ERROR):
            peer.saver.save_in_background()
            peer.saver.wait()
        assert "digest" in caplog.text
        peer.synchronizer.state.vector[0] = right
        peer.saver.save_in_background()
    assert len(list(tmp_path.glob("0*"))) == 1


@pytest.mark.parametrize(
    ("odd", "words"),
    [
        (object(), "of type object"),
        (torch.zeros(2, dtype=torch.complex64), "complex64"),
        (torch.zeros(2).to(torch.float8_e4m3fn), "float8"),
    ],
    ids=["object", "complex", "float8"],
)
def test_state_that_a_checkpoint_cannot_hold_is_an_error_and_not_a_crash(
    tmp_path: Path, odd: object, words: str, caplog: pytest.LogCaptureFixture
) -> None:
    model = make_model(8)
    with lone_peer(tmp_path, model, make_optimizer(model), every=2) as peer:
        peer.optimizer.inner.state[next(model.parameters())]["odd"] = odd
        with pytest.raises(CheckpointError, match=words):
            peer.saver.save()
        for _ in range(2):  # Each save waits for the one before.
            peer.saver.save_in_background()
    assert len([record for record in caplog.records if words in record.message]) == 2


@pytest.mark.parametrize("values", [{"every_rounds": -1}, {"every_minutes": -1.0}, {"keep_last": 0}])
def test_a_policy_out_of_range_is_refused(values: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="save policy"):
        SavePolicy(**values)


def test_each_checkpoint_names_the_tensors_of_its_model(tmp_path: Path) -> None:
    module = make_model(8)
    with lone_peer(tmp_path, module, make_optimizer(module), every=4) as peer:
        for save in (peer.saver.save, peer.saver.save_shared):
            save()
            checkpoint = load_newest_valid(tmp_path, peer.saver._swarm)
            assert checkpoint is not None
            found = saved_layout(checkpoint).tensors(checkpoint.tensors[0][1], checkpoint.local)
            assert found.keys() == module.state_dict().keys()
            assert all(torch.equal(found[name], value) for name, value in module.state_dict().items())
    assert checkpoint is not None
    with pytest.raises(CheckpointError, match="an earlier version saved it: start the script again"):
        saved_layout(replace(checkpoint, extra={"steps": 1}))
