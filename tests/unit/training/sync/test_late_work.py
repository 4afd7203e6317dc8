"""Work that missed a round: what of it waits for the next one."""

import threading
from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import nn

from p2ptrain.pipeline.stage.contribution import Part, StageWork, unit_state
from p2ptrain.pipeline.stage.gradients import GradientSum
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import AverageStep
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.replica import Contribution
from tests.support.sim.stage_hosts import plan_of, stage_of

TOKENS = 40


def _local(accumulate: bool) -> tuple[Contribution, SharedState]:
    """A trainer's gradients, or its pseudo-gradient."""
    module = nn.Linear(3, 3)
    layout = Layout.from_module(module)
    state = SharedState(module, layout, AverageStep(layout, 1.0))
    work = LocalContribution(module, state, accumulate=accumulate)
    if accumulate:
        module(torch.ones(2, 3)).pow(2).sum().backward()
        work.add_gradients(module.parameters(), TOKENS)
    else:
        with torch.no_grad():
            module.weight.add_(torch.arange(9.0).reshape(3, 3))
    work.add_step(4, TOKENS)
    return work, state


def _stage() -> tuple[Contribution, SharedState]:
    plan = plan_of(2)
    stage, unit = stage_of(plan, 1), plan.units(1)[0]
    total = GradientSum([parameter for parameter in stage.parameters() if parameter.requires_grad])
    part = Part(stage, plan.local_names(1, unit))
    state = unit_state(part, plan.manifest.training, bytes(32))
    work = StageWork(part, state, total, threading.Lock(), unit.scale)
    total.values.copy_(torch.arange(float(len(total.values))))
    work.add(4, TOKENS)
    return work, state


@pytest.mark.parametrize(
    "make", [partial(_local, True), partial(_local, False), _stage], ids=["gradients", "steps", "stage"]
)
def test_work_that_missed_a_round_is_carried_on_as_much_as_is_kept(
    make: Callable[[], tuple[Contribution, SharedState]],
) -> None:
    work, state = make()
    fragment = state.layout.whole
    before = torch.empty(fragment.num_values)
    work.collect(before, fragment)
    assert before.abs().max() > 0

    work.adopt(False, before * 0.5, fragment)

    after = torch.empty(fragment.num_values)
    work.collect(after, fragment)
    torch.testing.assert_close(after, before * 0.5)
    assert work.tokens_of(fragment) == TOKENS
