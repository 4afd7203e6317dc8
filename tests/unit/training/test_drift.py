"""SCAFFOLD: unlike sites that take many local steps reach the optimum of all, whoever misses rounds."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.private.drift import DriftCorrection
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import AverageStep
from p2ptrain.training.state.shared_state import SharedState

STEPS, RATE = 20, 0.05
CURVATURES, CENTERS = (1.0, 9.0), (torch.tensor([4.0, 0.0]), torch.tensor([-1.0, 2.0]))
OPTIMUM = sum(a * b for a, b in zip(CURVATURES, CENTERS, strict=True)) / sum(CURVATURES)


class Sites:
    """Sites that minimise ``a / 2 * |w - b|^2`` each, and average their updates with equal weights."""

    def __init__(self, corrects: bool) -> None:
        self.modules = [nn.Linear(2, 1, bias=False) for _ in CENTERS]
        layout = Layout.from_module(self.modules[0])
        self.states = [SharedState(module, layout, AverageStep(layout, 1.0)) for module in self.modules]
        self.works = [
            LocalContribution(module, state, accumulate=False, corrects_drift=corrects)
            for module, state in zip(self.modules, self.states, strict=True)
        ]
        self.drifts = [work.drift for work in self.works]
        for state, module in zip(self.states, self.modules, strict=True):
            state.vector.zero_()
            layout.write(state.vector, module)

    def train(self, site: int) -> None:
        weight, drift = self.modules[site].weight, self.drifts[site]
        for _ in range(STEPS):
            with torch.no_grad():
                weight.sub_(RATE * CURVATURES[site] * (weight - CENTERS[site]))
            if drift is not None:
                drift.correct(self.modules[site])
            self.works[site].add_step(1, 1)

    def round(self, present: tuple[int, ...] = (0, 1)) -> None:
        updates = [self.states[0].layout.new_vector() for _ in present]
        for site, update in zip(present, updates, strict=True):
            self.train(site)
            self.works[site].collect(update)
        mean = torch.stack(updates).mean(0)
        for site, work in enumerate(self.works):
            self.states[site].vector.sub_(mean)
            work.adopt(site in present, None)

    @property
    def error(self) -> float:
        return float(torch.dist(self.states[0].vector, OPTIMUM))  # type: ignore[arg-type]


def test_many_local_steps_reach_the_optimum_of_all_sites_where_fedavg_does_not() -> None:
    fedavg, scaffold = Sites(corrects=False), Sites(corrects=True)
    for _ in range(200):
        fedavg.round()
        scaffold.round()
    assert fedavg.error > 0.5
    assert scaffold.error < 1e-3


def _lose(drift: DriftCorrection) -> None:
    drift.step.zero_()


def _spoil(drift: DriftCorrection) -> None:
    drift.step.fill_(0.1)


@pytest.mark.parametrize("change", [_lose, _spoil])
def test_a_correction_that_is_lost_or_wrong_leaves_no_trace(change: Callable[[DriftCorrection], None]) -> None:
    sites = Sites(corrects=True)
    for _ in range(50):
        sites.round()
    assert sites.drifts[0] is not None
    change(sites.drifts[0])
    for _ in range(200):
        sites.round()
    assert sites.error < 1e-3


def test_a_site_that_missed_rounds_comes_back_and_all_reach_the_optimum() -> None:
    sites = Sites(corrects=True)
    for _ in range(50):
        sites.round()
    for _ in range(10):
        sites.round((1,))
    for _ in range(200):
        sites.round()
    assert sites.error < 1e-3


def test_work_that_is_carried_is_without_corrections() -> None:
    sites = Sites(corrects=True)
    sites.round()
    sites.train(0)
    update, carried = sites.states[0].layout.new_vector(), sites.states[0].layout.new_vector()
    sites.works[0].collect(update)
    sites.works[0].adopt(False, update.clone())
    sites.works[0].collect(carried)
    assert torch.allclose(update, carried, atol=1e-6)


def test_pending_work_is_restored_with_its_corrections() -> None:
    sites = Sites(corrects=True)
    sites.round()
    sites.train(0)
    before, after = sites.states[0].layout.new_vector(), sites.states[0].layout.new_vector()
    sites.works[0].collect(before)
    counts, tensors = sites.works[0].to_save()
    assert sites.drifts[0] is not None
    sites.drifts[0].count = 0
    assert sites.works[0].restore(counts, tensors)
    sites.works[0].collect(after)
    assert torch.equal(before, after)
