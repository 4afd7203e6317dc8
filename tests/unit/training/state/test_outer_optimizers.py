"""Outer steps: bit for bit what the formula says, and for gradients what torch does on a large batch."""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from p2ptrain.errors import IncompatibleError
from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.state import adamw
from p2ptrain.training.state import outer_optimizers as outer
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.digest import byte_view
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.moments import BLOCK
from p2ptrain.training.state.outer_optimizers import AdamStep, AverageStep, GradientStep, NesterovStep
from tests.support.codecs import exact_values


def _layout(num_parameters: int = 1000) -> Layout:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(num_parameters))
    module.register_buffer("mean", torch.zeros(3))
    module.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    return Layout.from_module(module)


STEPS: dict[str, Callable[[Layout], outer.Stepper]] = {
    "nesterov": lambda layout: NesterovStep(layout, 0.7, 0.9),
    "adam": lambda layout: AdamStep(layout, 0.02, 0.9, 0.99, 1e-3),
    "average": lambda layout: AverageStep(layout, 0.5),
    "adamw": lambda layout: AdamWStep(layout, TrainingSpec(every=1, clip_norm=2.0)),
    "adamw 8 bit": lambda layout: AdamWStep(layout, TrainingSpec(every=1, clip_norm=2.0), "8bit"),
}
TORCH: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "nesterov": lambda parameter: torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True),
    "adam": lambda parameter: torch.optim.Adam([parameter], lr=0.02, betas=(0.9, 0.99), eps=1e-3),
}
GOLDEN = {
    "nesterov": "39c1bbd232db9cb66cf6422fa304bef31fb84930a72f2c8e25c7ee835ce24994",
    "adam": "f7914bb797f3c4a68dd061def0d3cc29d0b731ce3dadf5779b54d469eae53483",
}
Array = npt.NDArray[Any]


def run(stepper: outer.Stepper, layout: Layout, steps: int) -> torch.Tensor:
    """The vector after so many steps."""
    vector = exact_values(layout.num_values, 1)
    for seed in range(2, 2 + steps):
        stepper.step(vector, exact_values(layout.num_values, seed), 0)
    return vector


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bits(name: str) -> None:
    stepper = STEPS[name](_layout())
    digest = hashlib.sha256(byte_view(run(stepper, _layout(), 10)))
    for _, tensor in stepper.state_tensors():
        digest.update(byte_view(tensor))
    assert digest.hexdigest() == GOLDEN[name]


@pytest.mark.parametrize("name", TORCH)
def test_steps_agree_with_torch(name: str) -> None:
    layout = _layout()
    parameter = nn.Parameter(exact_values(layout.num_values, 1)[: layout.num_parameters])
    reference = TORCH[name](parameter)
    for seed in range(2, 40):
        parameter.grad = exact_values(layout.num_values, seed)[: layout.num_parameters]
        reference.step()
    found = run(STEPS[name](layout), layout, 38)[: layout.num_parameters]
    torch.testing.assert_close(found, parameter.data, rtol=1e-5, atol=1e-6)


@settings(max_examples=40)
@given(st.floats(0.01, 2.0), st.floats(0.0, 0.99), st.integers(1, 30))
def test_nesterov_rounds_every_operation_to_fp32(rate: float, momentum: float, size: int) -> None:
    layout = _layout(size)
    expected: Array = exact_values(layout.num_values, 1).numpy()[:size].copy()
    velocity: Array = np.zeros(size, np.float32)
    a, m = np.float32(rate), np.float32(momentum)
    for step in range(4):
        delta = exact_values(layout.num_values, step + 2).numpy()[:size]
        velocity = velocity * m + delta
        expected = expected - (velocity * m + delta) * a
    assert np.array_equal(run(NesterovStep(layout, rate, momentum), layout, 4).numpy()[:size], expected)


@settings(max_examples=40)
@given(st.floats(1e-4, 1.0), st.floats(0.0, 0.99), st.floats(0.0, 0.999), st.floats(1e-8, 1.0), st.integers(1, 30))
def test_adam_rounds_every_operation_to_fp32(
    rate: float, beta1: float, beta2: float, epsilon: float, size: int
) -> None:
    layout = _layout(size)
    expected: Array = exact_values(layout.num_values, 1).numpy()[:size].copy()
    first: Array = np.zeros(size, np.float32)
    second: Array = np.zeros(size, np.float32)
    b1, b2, c1, c2 = (np.float32(value) for value in (beta1, beta2, 1 - beta1, 1 - beta2))
    power1 = power2 = 1.0
    for step in range(3):  # Up to the third power, one order of multiplication gives the same bits as any other.
        delta = exact_values(layout.num_values, step + 2).numpy()[:size]
        first = first * b1 + delta * c1
        second = second * b2 + (delta * delta) * c2
        power1, power2 = power1 * beta1, power2 * beta2
        divisor = np.sqrt(second) / np.float32(math.sqrt(1 - power2)) + np.float32(epsilon)
        expected = expected - first * np.float32(rate / (1 - power1)) / divisor
    found = run(AdamStep(layout, rate, beta1, beta2, epsilon), layout, 3)
    assert np.array_equal(found.numpy()[:size], expected)


Tensors = list[tuple[str, torch.Tensor]]
IMPOSSIBLE = {
    "outer.second": -1.0, "outer.steps": -1.0, "adamw.first": math.nan, "adamw.second": -1.0, "adamw.steps": -1.0,
    "adamw.first_exponents/256": 254.0,
}  # fmt: skip


def misfits(good: Tensors, others: Tensors) -> list[Tensors]:
    """State tensors that belong to no stepper like the one of ``good``."""
    first, *rest = good
    found = [[], rest, [(first[0], torch.zeros(3)), *rest], [("x", first[1]), *rest], others]
    if rest:
        found += [good[::-1], [*good[:-1], (good[-1][0], torch.zeros(2))]]
    for name in IMPOSSIBLE.keys() & dict(good).keys():
        wrong = torch.full_like(dict(good)[name], IMPOSSIBLE[name])
        found.append([(each, wrong if each == name else tensor) for each, tensor in good])
    return found


@pytest.mark.parametrize(
    ("name", "other"),
    [
        ("nesterov", "adam"),
        ("adam", "adamw"),
        ("average", "nesterov"),
        ("adamw", "adamw 8 bit"),
        ("adamw 8 bit", "adamw"),
    ],
)
def test_state_moves_to_another_peer_and_misfits_are_refused(name: str, other: str) -> None:
    layout = _layout()
    one, two = STEPS[name](layout), STEPS[name](layout)
    vector = run(one, layout, 3)
    two.load_state_tensors(one.state_tensors())
    vectors = [vector.clone(), vector.clone()]
    for stepper, each in zip((one, two), vectors, strict=True):
        stepper.step(each, exact_values(layout.num_values, 9), 3)
    assert torch.equal(*vectors)
    others = STEPS[other](layout).state_tensors()
    for bad in misfits(one.state_tensors(), others) if one.state_tensors() else [others]:
        with pytest.raises(IncompatibleError):
            two.load_state_tensors(bad)
    for (_, mine), (_, theirs) in zip(one.state_tensors(), two.state_tensors(), strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize("name", STEPS)
def test_blocks_do_not_change_bits(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    layout = _layout()
    whole = run(STEPS[name](layout), layout, 3)
    monkeypatch.setattr(outer, "BLOCK_VALUES", 77)
    monkeypatch.setattr(adamw, "BLOCK_VALUES", 2 * BLOCK)
    assert torch.equal(run(STEPS[name](layout), layout, 3), whole)


@pytest.mark.parametrize("name", STEPS)
def test_buffers_take_the_mean_and_integers_stay_whole(name: str) -> None:
    layout = _layout(2)
    vector = torch.tensor([0.0, 0.0, 1.0, 2.0, 3.0, 10.0, 20.0])
    mean = torch.tensor([1.0, 1.0, 0.25, -0.5, 0.0, -0.6, 1.5])
    kept = mean.clone()
    STEPS[name](layout).step(vector, mean, 0)
    assert vector[2:].tolist() == [0.75, 2.5, 3.0, 11.0, 18.0]
    assert torch.equal(mean, kept)


def test_average_at_rate_one_sets_the_mean_of_parameters() -> None:
    layout = _layout(4)
    start, *peers = (exact_values(layout.num_values, seed) for seed in (1, 2, 3))
    vector = start.clone()
    AverageStep(layout, 1.0).step(vector, torch.stack([start - peer for peer in peers]).mean(0), 0)
    torch.testing.assert_close(vector[:4], torch.stack(peers).mean(0)[:4])


class Net(nn.Module):
    """Two layers with batch statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.layers = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layers(x)
        return y


def _groups(module: nn.Module) -> list[dict[str, Any]]:
    parameters = list(module.parameters())
    return [{"params": parameters[2:], "lr": 1e-3}, {"params": parameters[:2]}]


OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda m: torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0.1),
    "amsgrad": lambda m: torch.optim.Adam(m.parameters(), 1e-2, amsgrad=True),
    "sgd": lambda m: torch.optim.SGD(m.parameters(), 0.1),
    "sgd-momentum": lambda m: torch.optim.SGD(m.parameters(), 0.1, momentum=0.9, nesterov=True),
    "adagrad": lambda m: torch.optim.Adagrad(m.parameters(), 0.1),
    "groups": lambda m: torch.optim.AdamW(_groups(m), 1e-2),
}


def _mean(layout: Layout, seed: int) -> torch.Tensor:
    mean = exact_values(layout.num_values, seed)
    mean[layout.num_parameters :] = 0
    return mean


def gradient_step(name: str = "adamw", clip: float = 0.0) -> tuple[Net, Layout, GradientStep, torch.Tensor]:
    """A model, its layout, the step around a new optimizer, and the vector."""
    net = Net()
    layout = Layout.from_module(net)
    vector = layout.new_vector()
    layout.read(net, vector)
    return net, layout, GradientStep(OPTIMIZERS[name](net), net, layout, clip), vector


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("clip", [0.0, 0.5])
def test_gradient_step_equals_torch_on_the_mean_gradient(name: str, clip: float) -> None:
    (shared, layout, stepper, vector), plain = gradient_step(name, clip), Net()
    reference = OPTIMIZERS[name](plain)
    for seed in range(4):
        mean = _mean(layout, seed)
        stepper.step(vector, mean, 0)
        for entry, parameter in layout.parameters_of(plain):
            parameter.grad = mean[entry.offset : entry.end].view(entry.shape).clone()
        if clip:
            nn.utils.clip_grad_norm_(plain.parameters(), clip)
        reference.step()
    for (key, one), two in zip(shared.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one, two, msg=key)
    live = layout.new_vector()
    layout.read(shared, live)
    assert torch.equal(live, vector)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_gradient_state_rebuilds_an_optimizer_that_has_not_stepped(name: str) -> None:
    (_, layout, first, vector), two = gradient_step(name), Net()
    for seed in range(3):
        first.step(vector, _mean(layout, seed), 0)
    optimizer = OPTIMIZERS[name](two)
    groups, container = optimizer.param_groups, optimizer.state
    second = GradientStep(optimizer, two, layout)
    second.load_state_tensors(copy.deepcopy(first.state_tensors()))
    assert optimizer.param_groups is groups
    assert optimizer.state is container
    layout.write(vector, two)
    other = vector.clone()
    for stepper, each in ((first, vector), (second, other)):
        stepper.step(each, _mean(layout, 9), 0)
    assert torch.equal(vector, other)
    for (key, left), (other_key, right) in zip(first.state_tensors(), second.state_tensors(), strict=True):
        assert key == other_key
        assert torch.equal(left, right)


def test_gradient_state_is_in_the_order_of_the_layout_whatever_the_groups() -> None:
    names = []
    for name in ("adamw", "groups"):
        _, layout, stepper, vector = gradient_step(name)
        stepper.step(vector, _mean(layout, 1), 0)
        names.append([key for key, _ in stepper.state_tensors()])
        assert all(tensor.dtype == torch.float32 for _, tensor in stepper.state_tensors())
    assert names[0] == names[1]
    assert names[0][:3] == [f"optim.layers.0.weight.{key}" for key in ("exp_avg", "exp_avg_sq", "step")]


def test_gradient_step_writes_buffers_live() -> None:
    net, layout, stepper, vector = gradient_step("sgd")
    mean = torch.zeros(layout.num_values)
    mean[layout.num_parameters :] = -2.0
    stepper.step(vector, mean, 0)
    buffers = dict(net.named_buffers())
    assert int(buffers["layers.1.num_batches_tracked"]) == 2
    assert buffers["layers.1.running_mean"].tolist() == [2.0] * 8


def test_numbers_in_an_optimizers_state_keep_their_type() -> None:
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    stepper = GradientStep(optimizer, net, Layout.from_module(net))
    first, state = next(net.parameters()), {"count": 3, "scale": 0.5, "on": True}
    optimizer.state[first] = dict(state)
    tensors = stepper.state_tensors()
    optimizer.state.clear()
    stepper.load_state_tensors(tensors)
    assert {key: (type(value), value) for key, value in optimizer.state[first].items()} == {
        key: (type(value), value) for key, value in state.items()
    }


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("optim.nowhere.exp_avg", torch.zeros(1)),
        ("layers.0.weight.exp_avg", torch.zeros(8, 4)),
        ("optim.layers.0.weight.exp_avg", torch.zeros(10_000)),
        ("optim.layers.0.weight.exp_avg", torch.zeros(8, 4, dtype=torch.float64)),
        ("optim.layers.0.weight.count:int", torch.tensor(float("nan"))),
        ("optim.layers.0.weight.count:list", torch.tensor(1.0)),
    ],
)
def test_state_that_does_not_fit_is_refused_and_changes_nothing(name: str, tensor: torch.Tensor) -> None:
    _, layout, stepper, vector = gradient_step()
    stepper.step(vector, _mean(layout, 1), 0)
    before = [(key, value.clone()) for key, value in stepper.state_tensors()]
    with pytest.raises(IncompatibleError):
        stepper.load_state_tensors([*before, (name, tensor)])
    for (_, old), (_, now) in zip(before, stepper.state_tensors(), strict=True):
        assert torch.equal(old, now)


def test_an_optimizer_of_another_module_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match="not the module"):
        GradientStep(OPTIMIZERS["adamw"](Net()), net, Layout.from_module(net))
