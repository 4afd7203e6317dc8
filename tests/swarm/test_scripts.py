"""A script of one's own: it goes on where it ended, and it is told in one line what cannot work."""

import signal
from pathlib import Path

import pytest
import torch

from p2ptrain import Manifest, Swarm
from p2ptrain.errors import IncompatibleError, UsageError
from tests.support.processes.files import checkpoints, round_of
from tests.support.processes.swarmlet import Swarmlet, make_manifest, nothing_left_behind
from tests.support.processes.worker import loss_of, make_model, make_optimizer

LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)


def train(swarm: Swarm, first: int, last: int) -> tuple[torch.Tensor, int]:
    """Take some steps of one long run; returns the parameters, and the samples that wait."""
    model = make_model(8)
    opt = swarm.optimizer(model, make_optimizer(model))
    assert opt.total_steps == first
    for step in range(first, last):
        loss_of(model, list(range(4 * step, 4 * step + 4))).backward()  # type: ignore[no-untyped-call]
        opt.step()
        opt.zero_grad()
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()]), opt.work.samples


@pytest.mark.parametrize("every", [4, 1])
def test_a_script_that_starts_again_goes_on_as_if_it_had_not_stopped(tmp_path: Path, every: int) -> None:
    training = {"every": every, "local_batch": 4} | ({"global_batch": 16} if every == 1 else {})
    manifest = Manifest.model_validate(make_manifest(training=training, averaging={"codec": "fp32"}))
    with nothing_left_behind():
        with Swarm.create(manifest, run_dir=tmp_path / "whole", listen=LOOPBACK) as swarm:
            expected, _ = train(swarm, 0, 13)
        with Swarm.create(manifest, run_dir=tmp_path / "split", listen=LOOPBACK) as swarm:
            with pytest.raises(UsageError, match="nothing to save"):
                swarm.save()
            _, waiting = train(swarm, 0, 6)
            assert waiting == 8
            assert swarm.save().parent == tmp_path / "split" / "checkpoints"
        with Swarm.create(manifest, run_dir=tmp_path / "split", listen=LOOPBACK) as swarm:
            values, _ = train(swarm, 6, 13)
    assert torch.equal(values, expected)


def test_a_script_that_is_killed_goes_on_where_the_swarm_is_and_counts_nothing_twice(tmp_path: Path) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"codec": "int8", "min_peers": 2}) as swarm:
        a, b = swarm.start("a"), swarm.start("b", save_rounds=1)
        b.wait_for("training")
        b.order("hold 3")
        saved = b.wait_for_commit(2, after_round=2)
        b.signal_all(signal.SIGKILL)
        b.wait()
        again = swarm.start("b", save_rounds=1)
        told = again.wait_for_commit(2, after_round=saved["round"] + 2)
        assert "restored round" in b.run_dir.with_suffix(".log").read_text()
        same = a.wait_for("round", lambda event: event["committed"] and event["lineage"] == told["lineage"])
        assert same["digest"] == told["digest"]
        assert told["intact"]
        assert told["tokens"] <= same["made"] + saved["made"] + told["made"], "no token counts twice"


@pytest.mark.parametrize("at", ["steps", "round"])
def test_a_script_that_sigterm_ends_saves_and_takes_up_what_it_had(tmp_path: Path, at: str) -> None:
    with nothing_left_behind(), Swarmlet(tmp_path, averaging={"codec": "fp32", "min_peers": 2}) as swarm:
        a, b = swarm.start("a"), swarm.start("b")
        told = b.wait_for_commit(2)
        if at == "round":
            b.order("fault reduce SIGTERM")
            b.wait_for("fault")
        else:
            b.order(f"hold {told['round'] + 1}")
            b.wait_for_commit(2, after_round=told["round"])
            b.signal(signal.SIGTERM)
        assert b.wait() == 128 + signal.SIGTERM
        last = [event for event in b.rounds() if event["committed"]][-1]
        saved = max(map(round_of, checkpoints(b.run_dir)))
        assert saved >= last["round"], "the newest state, not that of the last automatic save"
        again = swarm.start("b")
        told = again.wait_for_commit(2, after_round=saved)
        assert "restored round" in b.run_dir.with_suffix(".log").read_text()
        same = a.wait_for("round", lambda event: event["committed"] and event["lineage"] == told["lineage"])
        assert same["digest"] == told["digest"]


def test_a_script_that_would_take_another_step_than_the_others_is_refused(tmp_path: Path) -> None:
    training = {"every": 1, "local_batch": 4, "global_batch": 4}
    manifest = Manifest.model_validate(make_manifest(training=training))
    with nothing_left_behind(), Swarm.create(manifest, listen=LOOPBACK) as first:
        model = make_model(8)
        first.optimizer(model, make_optimizer(model), clip_norm=1.0)
        with Swarm.join(first.link, listen=LOOPBACK) as second:
            with pytest.raises(UsageError, match="nowhere to save"):
                second.save()
            with pytest.raises(IncompatibleError, match=r"clip_norm 0\.0 here, 1\.0 there"):
                second.optimizer(model := make_model(8), make_optimizer(model))
        with Swarm.join(first.link, listen=LOOPBACK) as third:
            third.optimizer(model := make_model(8), make_optimizer(model), clip_norm=1.0)
