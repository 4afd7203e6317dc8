"""`Swarm` and `SwarmOptimizer` in a researcher's own script: the same mathematics, and torch's usual manners."""

import copy
import itertools
import os
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from p2ptrain import Manifest, Swarm
from p2ptrain.errors import TemporaryError, UsageError
from p2ptrain.training import optimizer as optimizer_module
from p2ptrain.training.optimizer import KEEPS_BUDGET, SwarmOptimizer
from p2ptrain.training.sync.synchronizer import RoundResult
from tests.support.processes.swarmlet import Swarmlet, make_manifest, nothing_left_behind
from tests.support.processes.tellers import Event
from tests.support.processes.worker import loss_of, make_model, make_optimizer

LOCAL_BATCH = 4
GLOBAL_BATCH = 16


@contextmanager
def lone_swarm(directory: Path, averaging: dict[str, Any] | None = None, **training: Any) -> Iterator[Swarm]:
    averaging = {"codec": "fp32", **(averaging or {})}
    manifest = Manifest.model_validate(make_manifest(training=training, averaging=averaging))
    with nothing_left_behind(), Swarm.create(manifest, run_dir=directory, listen=("/ip4/127.0.0.1/tcp/0",)) as swarm:
        yield swarm


def wrap(swarm: Swarm, **options: Any) -> tuple[torch.nn.Module, SwarmOptimizer]:
    model = make_model(8)
    return model, swarm.optimizer(model, make_optimizer(model), **options)


def take_step(model: torch.nn.Module, opt: torch.optim.Optimizer, indices: list[int]) -> None:
    loss_of(model, indices).backward()  # type: ignore[no-untyped-call]
    opt.step()
    opt.zero_grad()


def values_of(model: torch.nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])


def test_two_peers_with_one_global_batch_step_like_one_process_on_all_their_samples(tmp_path: Path) -> None:
    num_rounds = 6
    training = {"every": 1, "global_batch": GLOBAL_BATCH, "local_batch": LOCAL_BATCH, "clip_norm": 0.5}
    averaging = {"codec": "fp32", "grace_seconds": 20.0, "min_peers": 2}
    with nothing_left_behind(), Swarmlet(tmp_path, training=training, averaging=averaging) as swarm:
        workers = [swarm.start(name, tell_values=True, step_seconds=0.02) for name in "ab"]
        for worker in workers:
            worker.wait_for_commit(2, after_round=num_rounds - 1)
        rounds = [committed_rounds(worker.rounds()) for worker in workers]
    model = make_model(8)
    opt = make_optimizer(model)
    shared = [number for number in range(1, num_rounds + 1) if all(number in told for told in rounds)]
    assert shared == list(range(1, num_rounds + 1)), "with min_peers = 2 both take part in every round"
    for number in shared:
        told = [of_one[number] for of_one in rounds]
        assert all(event["contributed"] and event["contributors"] == 2 for event in told)
        samples = [index for event in told for index in event["samples"]]
        assert len(samples) >= GLOBAL_BATCH
        assert len(set(samples)) == len(samples)
        opt.zero_grad()
        loss_of(model, samples).backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        opt.step()
        assert told[0]["values"] == told[1]["values"]
        torch.testing.assert_close(torch.tensor(told[0]["values"]), values_of(model), rtol=1e-4, atol=1e-6)


def test_below_the_minimum_of_peers_a_step_waits_and_ends_when_the_network_does(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    averaging = {"min_peers": 2, "below_min": "pause", "matchmaking_seconds": 1.0}
    with lone_swarm(tmp_path, averaging, every=1, global_batch=LOCAL_BATCH) as swarm:
        model, opt = wrap(swarm)
        before = values_of(model)
        pauses: list[RoundResult] = []
        rest: Callable[[RoundResult], bool] = opt.on_pause

        def lose_the_network_later(result: RoundResult) -> bool:
            pauses.append(result)
            if len(pauses) == 2:
                transport: Any = swarm._peer.network.transport
                os.kill(transport.daemon.process_id, signal.SIGKILL)
            return rest(result)

        opt.on_pause = lose_the_network_later
        with pytest.raises(TemporaryError, match="network daemon"):
            take_step(model, opt, [1, 2, 3, 4])
        assert all(result.paused and not result.committed for result in pauses)
        assert len(pauses) >= 2
        assert torch.equal(values_of(model), before)
    assert "1 of at least 2 peers are ready. This peer waits until that changes" in caplog.text


@pytest.mark.parametrize("has_run_dir", [True, False])
def test_the_creator_of_a_swarm_votes_before_it_has_an_optimizer_and_then_trains(
    tmp_path: Path, has_run_dir: bool
) -> None:
    """The founder's vote is needed from the first round on."""
    manifest = Manifest.model_validate(make_manifest(training={"every": 2}, averaging={"codec": "fp32"}))
    run_dir, listen = tmp_path if has_run_dir else None, ("/ip4/127.0.0.1/tcp/0",)
    with (
        nothing_left_behind(),
        Swarm.create(manifest, run_dir=run_dir, listen=listen) as creator,
        Swarm.join(creator.link, listen=listen) as other,
    ):
        model, opt = wrap(other)
        for number in range(4):
            take_step(model, opt, [number])
        assert opt.round == 2
        late_model, late = wrap(creator)
        with ThreadPoolExecutor() as pool:
            rounds = list(pool.map(train_to_round_four, (model, late_model), (opt, late)))
        assert rounds == [4, 4]
        assert late.synchronizer.head.digest == opt.synchronizer.head.digest
        assert late.synchronizer.replica.trained_rounds


def train_to_round_four(model: torch.nn.Module, opt: SwarmOptimizer) -> int:
    """Return the round after as many steps as that takes; those beside a round that is closing do not count."""
    for number in range(200):
        if opt.round < 4:
            take_step(model, opt, [number])
    return opt.round


def committed_rounds(events: list[Event]) -> dict[int, Event]:
    return {event["round"]: event for event in events if event["committed"]}


def test_alone_with_a_global_batch_it_is_the_wrapped_optimizer(tmp_path: Path) -> None:
    with lone_swarm(tmp_path, every=1, local_batch=4, global_batch=8, clip_norm=0.0) as swarm:
        (model, opt), reference = wrap(swarm), make_model(8)
        plain = make_optimizer(reference)
        for number in range(4):
            first, second = list(range(8 * number, 8 * number + 4)), list(range(8 * number + 4, 8 * number + 8))
            before = values_of(model)
            take_step(model, opt, first)
            assert opt.work.samples == 4
            assert torch.equal(values_of(model), before), "nothing moves before the global batch is full"
            take_step(model, opt, second)
            assert opt.work.samples == 0
            assert opt.committed
            take_step(reference, plain, [*first, *second])
            torch.testing.assert_close(values_of(model), values_of(reference), rtol=1e-5, atol=1e-6)
        assert opt.round == 4


def test_a_schedule_by_round_gives_what_a_torch_scheduler_gives_one_process(tmp_path: Path) -> None:
    with lone_swarm(tmp_path, every=1, local_batch=4, global_batch=4, clip_norm=0.0) as swarm:
        (model, opt), reference = wrap(swarm, schedule=lambda round_: 0.5**round_), make_model(8)
        plain = make_optimizer(reference)
        schedulers = [opt.scheduler(), torch.optim.lr_scheduler.ExponentialLR(plain, 0.5)]
        for number in range(4):
            samples = list(range(4 * number, 4 * number + 4))
            take_step(model, opt, samples)
            take_step(reference, plain, samples)
            for scheduler in schedulers:
                scheduler.step()
            assert opt.inner.param_groups[0]["lr"] == plain.param_groups[0]["lr"] == 0.01 * 0.5 ** (number + 1)
        torch.testing.assert_close(values_of(model), values_of(reference), rtol=1e-5, atol=1e-6)


def test_local_steps_are_clipped_and_the_outer_step_is_nesterov(tmp_path: Path) -> None:
    settings: dict[str, Any] = {"every": 2, "outer": "nesterov", "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    with lone_swarm(tmp_path, **settings) as swarm:
        model, reference = make_model(8), make_model(8)
        opt = swarm.optimizer(model, torch.optim.SGD(model.parameters(), 1.0), clip_norm=0.01)
        start = values_of(reference)
        velocity = torch.zeros_like(start)
        plain = torch.optim.SGD(reference.parameters(), 1.0)
        for number in range(3):
            for step in range(2):
                samples = [2 * number + step]
                take_step(model, opt, samples)
                loss_of(reference, samples).backward()  # type: ignore[no-untyped-call]
                torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.01)
                plain.step()
                plain.zero_grad()
            pseudo_gradient = start - values_of(reference)
            assert pseudo_gradient.norm() <= 0.0201
            velocity = 0.9 * velocity + pseudo_gradient
            start = start - 0.7 * (pseudo_gradient + 0.9 * velocity)
            torch.nn.utils.vector_to_parameters(start.clone(), reference.parameters())
            torch.testing.assert_close(values_of(model), start, rtol=1e-4, atol=1e-6)
        assert opt.round == 3


def test_whoever_watches_the_swarm_sees_loss_and_tokens_per_second(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 100.0
    monkeypatch.setattr(optimizer_module, "time", SimpleNamespace(monotonic=lambda: now))
    with lone_swarm(tmp_path, every=4, local_batch=4) as swarm:
        model, opt = wrap(swarm, tokens_per_step=30)
        assert (swarm._peer.record.describe().loss, swarm._peer.record.describe().tokens_per_second) == (None, 0.0)
        opt.loss = 2.5
        for _ in range(9):
            now += 0.5
            take_step(model, opt, [0, 1, 2, 3])
        record = swarm._peer.record.describe()
        assert (record.loss, record.tokens_per_second, record.round_tokens) == (2.5, 60.0, 30)

        def closure() -> torch.Tensor:
            loss = loss_of(model, [0, 1, 2, 3])
            loss.backward()  # type: ignore[no-untyped-call]
            return loss

        for _ in range(3):  # Slower steps than the time over which is counted.
            now += 20.0
            assert opt.step(closure) == opt.loss
        assert swarm._peer.record.describe().tokens_per_second == 1.5
        now += 60.0
        assert swarm._peer.record.describe().tokens_per_second < 1.5, "it stands still"


def test_its_state_dict_holds_the_wrapped_optimizer_and_what_is_not_contributed_yet(tmp_path: Path) -> None:
    with lone_swarm(tmp_path, every=1, local_batch=4, global_batch=8, clip_norm=0.0) as swarm:
        (model, opt), reference = wrap(swarm), make_model(8)
        plain = make_optimizer(reference)
        take_step(model, opt, [0, 1, 2, 3])
        take_step(model, opt, [4, 5, 6, 7])
        take_step(reference, plain, [0, 1, 2, 3, 4, 5, 6, 7])
        take_step(model, opt, [8, 9, 10, 11])
        saved = copy.deepcopy(opt.state_dict())
        bare = make_optimizer(make_model(8))
        bare.load_state_dict({key: value for key, value in saved.items() if key != "p2ptrain"})
        for parameter, other in zip(bare.param_groups[0]["params"], plain.param_groups[0]["params"], strict=True):
            for key in ("step", "exp_avg", "exp_avg_sq"):
                torch.testing.assert_close(bare.state[parameter][key], plain.state[other][key])
        lose_progress(opt)
        assert opt.work.samples == 0
        opt.load_state_dict(saved)
        assert opt.work.samples == 4
        take_step(model, opt, [12, 13, 14, 15])
        assert opt.round == 2
        take_step(reference, plain, [8, 9, 10, 11, 12, 13, 14, 15])
        torch.testing.assert_close(values_of(model), values_of(reference), rtol=1e-5, atol=1e-6)


def lose_progress(opt: SwarmOptimizer) -> None:
    opt.work.samples = opt.work.steps = 0
    opt.work.pending = [0]
    assert opt.work.accumulated is not None
    opt.work.accumulated.zero_()


def test_one_swarm_trains_one_model(tmp_path: Path) -> None:
    with lone_swarm(tmp_path) as swarm:
        wrap(swarm)
        with pytest.raises(UsageError, match="already"):
            wrap(swarm)


def test_closing_says_goodbye_and_later_steps_say_what_to_do(tmp_path: Path) -> None:
    with lone_swarm(tmp_path, every=1, local_batch=4, global_batch=4) as swarm:
        model, opt = wrap(swarm)
        take_step(model, opt, [0, 1, 2, 3])
        swarm.close()
        swarm.close()
        with pytest.raises(TemporaryError, match="closed"):
            take_step(model, opt, [4, 5, 6, 7])


def test_a_swarm_that_is_closed_says_so_before_it_makes_an_optimizer(tmp_path: Path) -> None:
    """As in a notebook, in a cell after the block."""
    with lone_swarm(tmp_path) as swarm:
        pass
    with pytest.raises(TemporaryError, match=r"closed: call Swarm\.join again"):
        wrap(swarm)


def test_a_script_that_is_alone_keeps_the_last_of_its_privacy_budget_and_is_told_so(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Else nobody could go on with the swarm that it founded."""
    private = {"private": {}, "differential_privacy": {"epsilon": 3.0}, "data": {"source": "custom"}}
    training = {"every": 2, "local_batch": LOCAL_BATCH, "warmup_steps": 0}
    made = make_manifest(training=training, averaging={"codec": "fp32"})
    manifest = Manifest.model_validate({**made, **private, "admission": {"mode": "invite"}})
    model, samples = torch.nn.Linear(4, 1), torch.randn(64, 4)
    with nothing_left_behind(), Swarm.create(manifest, run_dir=tmp_path, listen=("/ip4/127.0.0.1/tcp/0",)) as swarm:
        opt = swarm.optimizer(model, torch.optim.SGD(model.parameters(), 0.1), site_samples=len(samples))
        batches = swarm.batches(samples)

        def train(num_steps: int) -> None:
            for chosen in itertools.islice(batches, num_steps):
                model(samples[chosen]).square().mean().backward()
                opt.step()
                opt.zero_grad()

        for _ in range(1000):
            train(2)
            if opt.saves_budget:
                break
        before = opt.privacy
        train(3)
        assert (opt.privacy, opt.is_spent) == (before, False)
    assert caplog.text.count(KEEPS_BUDGET) == 1
