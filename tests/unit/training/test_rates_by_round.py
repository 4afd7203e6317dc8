"""Learning rates follow the swarm's step: a peer that replays, joins late or loads has the rates of the others."""

import hashlib
import logging
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.errors import UsageError
from p2ptrain.manifest import Manifest, TrainingSpec
from p2ptrain.training.learning_rate import (
    LearningRates,
    WrappedOptimizer,
    by_round,
    learning_rate_factor,
    manifest_schedule,
)
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.shared_state import SharedState
from tests.support.lone import LoneOptimizer, lone_optimizer


def model() -> nn.Module:
    module = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3))
    with torch.no_grad():
        for seed, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed)))
    return module


def halves(round_: int) -> float:
    return 0.5**round_


Make = Callable[[nn.Module], WrappedOptimizer | None]


def scheduled_adam(module: nn.Module) -> WrappedOptimizer:
    return WrappedOptimizer(torch.optim.AdamW(module.parameters(), 0.1), halves, 1.0)


STEPS: dict[str, Make] = {"torch": scheduled_adam, "manifest": lambda module: None}


def peer(make: Make) -> tuple[SharedState, torch.optim.Optimizer | None]:
    module = model()
    wrapped = make(module)
    manifest = Manifest(name="rates", training=TrainingSpec(every=1, warmup_steps=5, learning_rate=0.1))
    state = initial_state(module, wrapped, manifest, manifest.digest)
    return state, wrapped.optimizer if wrapped is not None else None


@pytest.mark.parametrize("name", STEPS)
def test_the_round_changes_the_step(name: str) -> None:
    (one, _), (other, _) = peer(STEPS[name]), peer(STEPS[name])
    mean = torch.randn(one.layout.num_values, generator=torch.Generator().manual_seed(1))
    start = one.vector.clone()
    one.apply(mean, 0)
    other.apply(mean, 2)
    ratio = (other.vector - start)[: one.layout.num_parameters] / (one.vector - start)[: one.layout.num_parameters]
    expected = halves(2) if name == "torch" else 3.0
    torch.testing.assert_close(ratio, torch.full_like(ratio, expected), rtol=1e-3, atol=0)


def test_a_schedule_that_returns_no_factor_is_refused() -> None:
    for wrong in (math.nan, math.inf, -0.5):
        rates = LearningRates(torch.optim.SGD(model().parameters(), 0.1), lambda step, wrong=wrong: wrong)  # type: ignore[misc]
        with pytest.raises(UsageError, match="finite factor"):
            rates.set(3)


def test_rates_that_are_tensors_stay_tensors_and_groups_keep_their_base() -> None:
    first, second = (nn.Parameter(torch.zeros(1)) for _ in range(2))
    groups: list[dict[str, Any]] = [{"params": [first], "lr": torch.tensor(0.5)}, {"params": [second]}]
    optimizer = torch.optim.SGD(groups, lr=0.25)
    held = optimizer.param_groups[0]["lr"]
    rates = LearningRates(optimizer, by_round(halves, 4))
    rates.set(11)
    assert optimizer.param_groups[0]["lr"] is held
    assert rates.current() == [0.125, 0.0625]
    assert rates.change() == ""
    optimizer.param_groups[1]["lr"] = 0.1
    assert "group 1 went from 0.0625 to 0.1" in rates.change()
    assert rates.change() == ""


def test_an_optimizer_without_a_rate_of_its_own_is_left_alone() -> None:
    """As transformers' Adafactor by default: its steps have a relative size."""
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.25)
    optimizer.param_groups[0]["lr"] = None
    rates = LearningRates(optimizer, halves)
    rates.set(3)
    assert optimizer.param_groups[0]["lr"] is None
    assert (rates.current(), rates.change()) == ([None], "")


# --- in `SwarmOptimizer`


def rates_seen(lone: LoneOptimizer, num_steps: int, each: Callable[[], None] = lambda: None) -> list[float]:
    seen = []
    for _ in range(num_steps):
        lone.step()
        seen.append(lone.applied_rates[-1])
        each()
    return seen


def test_with_every_h_the_rate_follows_the_round_and_a_late_peer_has_it_too() -> None:
    lone = lone_optimizer(schedule=by_round(halves, 2), every=2)
    assert rates_seen(lone, 6) == [0.1, 0.1, 0.05, 0.05, 0.025, 0.025]
    late = lone_optimizer(schedule=by_round(halves, 2), every=2, round_=3)
    assert rates_seen(late, 3) == [0.0125, 0.0125, 0.00625]


def test_a_step_counts_within_its_round_and_no_further() -> None:
    warm_up = [learning_rate_factor(step, warmup_steps=8) for step in range(8)]
    lone = lone_optimizer(schedule=lambda step: learning_rate_factor(step, warmup_steps=8), every=3)
    assert rates_seen(lone, 6) == pytest.approx([0.1 * factor for factor in warm_up[:6]])
    held_up = lone_optimizer(schedule=lambda step: learning_rate_factor(step, warmup_steps=8), every=3)
    held_up.synchronizer.fail_rounds = True
    assert rates_seen(held_up, 5) == pytest.approx([0.1 * warm_up[step] for step in (0, 1, 2, 2, 2)])


def test_with_a_global_batch_the_shared_step_is_taken_at_the_rate_of_its_round() -> None:
    lone = lone_optimizer(schedule=halves, every=1, round_=2)
    assert rates_seen(lone, 3) == [0.025, 0.0125, 0.00625]


def step_with_scheduler(
    lone: LoneOptimizer, make: Callable[[torch.optim.Optimizer], Any], wraps_inner: bool
) -> list[float]:
    scheduler = make(lone.optimizer.inner if wraps_inner else lone.optimizer)
    return rates_seen(lone, 4, scheduler.step)


SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "decay": lambda optimizer: torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9),
    "warm-up": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10)),
    "cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, total_steps=20),
}


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
@pytest.mark.parametrize("wraps_inner", [False, True])
@pytest.mark.parametrize("schedule", [None, halves])
def test_with_a_global_batch_a_scheduler_of_one_peer_is_refused_in_one_line(
    make: Callable[[torch.optim.Optimizer], Any], wraps_inner: bool, schedule: Callable[[int], float] | None
) -> None:
    lone = lone_optimizer(schedule=schedule, every=1)
    with pytest.raises(UsageError, match="schedule=lambda round") as caught:
        step_with_scheduler(lone, make, wraps_inner)
    assert "\n" not in str(caught.value)


def test_a_refused_rate_counts_and_changes_nothing() -> None:
    lone = lone_optimizer(every=1, global_batch=3)
    lone.step()
    lone.optimizer.param_groups[0]["lr"] = 0.2
    before = lone.optimizer.work.tokens
    with pytest.raises(UsageError):
        lone.step()
    assert lone.optimizer.work.tokens == before


@pytest.mark.parametrize("make", SCHEDULERS.values(), ids=SCHEDULERS)
def test_with_every_h_a_scheduler_of_one_peer_is_told_of_once_and_keeps_its_effect(
    make: Callable[[torch.optim.Optimizer], Any], caplog: pytest.LogCaptureFixture
) -> None:
    lone, plain = lone_optimizer(every=2), torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1, momentum=0.9)
    with caplog.at_level(logging.WARNING):
        seen = step_with_scheduler(lone, make, wraps_inner=False)
    scheduler, expected = make(plain), []
    for _ in range(4):
        expected.append(plain.param_groups[0]["lr"])
        plain.step()
        scheduler.step()
    assert seen == pytest.approx(expected)
    assert [record.message.count("schedule=lambda round") for record in caplog.records] == [1]


def test_with_every_h_and_a_schedule_the_schedule_counts(caplog: pytest.LogCaptureFixture) -> None:
    lone = lone_optimizer(schedule=by_round(halves, 2), every=2)
    with caplog.at_level(logging.WARNING):
        seen = step_with_scheduler(lone, SCHEDULERS["decay"], wraps_inner=False)
    assert seen == [0.1, 0.1, 0.05, 0.05]
    assert len(caplog.records) == 1


@pytest.mark.parametrize("every", [1, 2])
def test_the_swarms_own_scheduler_may_be_stepped_by_any_loop(every: int, caplog: pytest.LogCaptureFixture) -> None:
    lone = lone_optimizer(schedule=by_round(halves, every), every=every)
    scheduler = lone.optimizer.scheduler()
    assert isinstance(scheduler, torch.optim.lr_scheduler.LRScheduler)

    def step_it_often() -> None:
        for _ in range(3):
            scheduler.step()
        scheduler.load_state_dict(scheduler.state_dict())
        assert scheduler.get_last_lr() == [0.1 * halves(lone.optimizer.round)]

    with caplog.at_level(logging.WARNING):
        seen = rates_seen(lone, 2 * every, step_it_often)
    assert seen == [0.1 * halves(step // every) for step in range(2 * every)]
    assert caplog.records == []


@pytest.mark.parametrize("every", [1, 2])
def test_a_loaded_optimizer_has_the_rates_of_the_round_that_it_is_at(
    every: int, caplog: pytest.LogCaptureFixture
) -> None:
    early = lone_optimizer(schedule=by_round(halves, every), every=every)
    early.step()
    saved = early.optimizer.state_dict()
    late = lone_optimizer(schedule=by_round(halves, every), every=every, round_=3)
    late.step()
    late.optimizer.load_state_dict({**saved, "p2ptrain": None})
    with caplog.at_level(logging.WARNING):
        late.step()
    assert late.applied_rates[-1] == 0.1 * halves(4 if every == 1 else 3)
    assert caplog.records == []


def test_warm_up_is_linear_and_never_zero_and_the_rate_stays() -> None:
    assert [learning_rate_factor(step, warmup_steps=4) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert learning_rate_factor(0, warmup_steps=0) == 1.0
    schedule = manifest_schedule(TrainingSpec(warmup_steps=4))
    assert [schedule(step) for step in (0, 3, 4, 10**6)] == [0.25, 1.0, 1.0, 1.0]


@pytest.mark.parametrize("training", [{"every": 1, "rounds": 110}, {"every": 20, "fragments": 2, "rounds": 11}])
def test_a_manifest_s_cosine_falls_from_one_to_its_end_with_its_rounds(training: dict[str, Any]) -> None:
    schedule = manifest_schedule(TrainingSpec(warmup_steps=10, schedule="cosine", final_rate=0.2, **training))
    assert [schedule(step) for step in (0, 9, 10)] == [0.1, 1.0, 1.0]
    factors = [schedule(step) for step in range(10, 150)]
    assert factors == sorted(factors, reverse=True)
    assert factors[50] == pytest.approx(0.6)
    assert factors[100:] == pytest.approx([0.2] * 40)


def test_the_cosine_has_the_same_bits_on_every_machine() -> None:
    schedule = manifest_schedule(TrainingSpec(every=1, warmup_steps=0, schedule="cosine", rounds=1000))
    found = [schedule(step) for step in range(1001)]
    exact = [0.1 + 0.45 * (1 + math.cos(math.pi * step / 1000)) for step in range(1001)]
    assert found == pytest.approx(exact, abs=1e-15)
    digest = hashlib.sha256("".join(value.hex() for value in found).encode()).hexdigest()
    assert digest == "acbcf2095c46191216c492a123393ccc96e404cf542f6bd4de3b704ec244f527"


def test_impossible_schedules_are_refused() -> None:
    with pytest.raises(ValueError, match="negative"):
        learning_rate_factor(-1, warmup_steps=4)
    with pytest.raises(ValueError, match="above warmup_steps"):
        learning_rate_factor(0, warmup_steps=4, schedule="cosine", total_steps=4)
