"""Steps of the shared state: bit for bit what the formula says, and for gradients what torch does on a large batch."""

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
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.state import adamw
from p2ptrain.training.state import outer_optimizers as outer
from p2ptrain.training.state.adamw import BETA1, BETA2, CODE_BLOCK, EPSILON, AdamWStep, Codes
from p2ptrain.training.state.digest import TensorSpec, byte_view
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import (
    MAX_TENSORS_PER_PARAMETER,
    AdamStep,
    AverageStep,
    GradientStep,
    NesterovStep,
)
from p2ptrain.training.state.shared_state import SharedState
from tests.support.codecs import exact_values

SPEC = TrainingSpec(every=1, learning_rate=0.02, weight_decay=0.1, warmup_steps=4, clip_norm=2.0)


def _layout(num_parameters: int = 1000, has_buffers: bool = True) -> Layout:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(num_parameters))
    if has_buffers:
        module.register_buffer("mean", torch.zeros(3))
        module.register_buffer("count", torch.zeros(2, dtype=torch.int64))
    return Layout.from_module(module)


STEPS: dict[str, Callable[[Layout], outer.Stepper]] = {
    "nesterov": lambda layout: NesterovStep(layout, 0.7, 0.9),
    "adam": lambda layout: AdamStep(layout, 0.02, 0.9, 0.99, 1e-3),
    "average": lambda layout: AverageStep(layout, 0.5),
    "adamw": lambda layout: AdamWStep(layout, SPEC),
    "adamw 8 bit": lambda layout: AdamWStep(layout, SPEC, "8bit"),
}
TORCH: dict[str, Callable[[nn.Parameter], torch.optim.Optimizer]] = {
    "nesterov": lambda parameter: torch.optim.SGD([parameter], lr=0.7, momentum=0.9, nesterov=True),
    "adam": lambda parameter: torch.optim.Adam([parameter], lr=0.02, betas=(0.9, 0.99), eps=1e-3),
}
GOLDEN = {
    "nesterov": "39c1bbd232db9cb66cf6422fa304bef31fb84930a72f2c8e25c7ee835ce24994",
    "adam": "f7914bb797f3c4a68dd061def0d3cc29d0b731ce3dadf5779b54d469eae53483",
    "adamw": "8b63c0156abba96b5e9492b0d6b15d8411bf2ad0ef0b29cbedd0336f02d0fa4f",
    "adamw 8 bit": "f25ddd71eaa444a5a470fdf7d894c1c98f242cfc99fc2eee2fbf0cce1dc21790",
}
Array = npt.NDArray[Any]


def run(stepper: outer.Stepper, num_values: int, steps: int, seed: int = 1) -> torch.Tensor:
    """The vector after so many rounds."""
    vector = exact_values(num_values, seed)
    for round_ in range(steps):
        stepper.step(vector, exact_values(num_values, seed + round_ + 1), round_)
    return vector


@pytest.mark.parametrize("name", GOLDEN)
def test_golden_bits(name: str) -> None:
    layout = _layout(has_buffers=not name.startswith("adamw"))
    stepper = STEPS[name](layout)
    digest = hashlib.sha256(byte_view(run(stepper, layout.num_values, 10)))
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
    found = run(STEPS[name](layout), layout.num_values, 38)[: layout.num_parameters]
    torch.testing.assert_close(found, parameter.data, rtol=1e-5, atol=1e-6)


sizes, data_seeds = st.integers(1, 30), st.integers(0, 1000)


@settings(max_examples=40)
@given(st.floats(0.01, 2.0), st.floats(0.0, 0.99), sizes, data_seeds)
def test_nesterov_rounds_every_operation_to_fp32(rate: float, momentum: float, size: int, seed: int) -> None:
    expected: Array = exact_values(size, seed).numpy().copy()
    velocity: Array = np.zeros(size, np.float32)
    a, m = np.float32(rate), np.float32(momentum)
    for step in range(4):
        delta = exact_values(size, seed + step + 1).numpy()
        velocity = velocity * m + delta
        expected = expected - (velocity * m + delta) * a
    found = run(NesterovStep(_layout(size, has_buffers=False), rate, momentum), size, 4, seed)
    assert np.array_equal(found.numpy(), expected)


def adam_by_hand(
    size: int, seed: int, rate: float, beta1: float, beta2: float, epsilon: float, decay: float = 0.0
) -> Array:
    """Three steps; every operation is rounded to fp32.

    Up to the third power, one order of multiplication gives the same bits as any other.
    """
    expected: Array = exact_values(size, seed).numpy().copy()
    first: Array = np.zeros(size, np.float32)
    second: Array = np.zeros(size, np.float32)
    b1, b2, c1, c2 = (np.float32(value) for value in (beta1, beta2, 1 - beta1, 1 - beta2))
    power1 = power2 = 1.0
    for step in range(3):
        gradient = exact_values(size, seed + step + 1).numpy()
        expected = expected - expected * np.float32(rate * decay)
        first = first * b1 + gradient * c1
        second = second * b2 + (gradient * gradient) * c2
        power1, power2 = power1 * beta1, power2 * beta2
        divisor = np.sqrt(second) / np.float32(math.sqrt(1 - power2)) + np.float32(epsilon)
        expected = expected - first * np.float32(rate / (1 - power1)) / divisor
    return expected


@settings(max_examples=40)
@given(
    st.floats(1e-4, 1.0), st.floats(0.0, 0.99), st.floats(0.0, 0.999), st.floats(1e-8, 1.0), sizes, data_seeds,
)  # fmt: skip
def test_adam_rounds_every_operation_to_fp32(
    rate: float, beta1: float, beta2: float, epsilon: float, size: int, seed: int
) -> None:
    found = run(AdamStep(_layout(size, has_buffers=False), rate, beta1, beta2, epsilon), size, 3, seed)
    assert np.array_equal(found.numpy(), adam_by_hand(size, seed, rate, beta1, beta2, epsilon))


@settings(max_examples=40)
@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), sizes, data_seeds)
def test_adamw_rounds_every_operation_to_fp32(rate: float, decay: float, size: int, seed: int) -> None:
    spec = TrainingSpec(every=1, learning_rate=rate, weight_decay=decay, warmup_steps=0, clip_norm=0.0)
    found = run(AdamWStep(_layout(size, has_buffers=False), spec), size, 3, seed)
    assert np.array_equal(found.numpy(), adam_by_hand(size, seed, rate, BETA1, BETA2, EPSILON, decay))


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
    for name, tensor in good:
        if (value := IMPOSSIBLE.get(name)) is not None and tensor.is_floating_point() != name.endswith("/256"):
            wrong = torch.full_like(tensor, value)
            found.append([(each, wrong if each == name else other) for each, other in good])
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
    vector = run(one, layout.num_values, 3)
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
    whole = run(STEPS[name](layout), layout.num_values, 3)
    monkeypatch.setattr(outer, "BLOCK_VALUES", 77)
    monkeypatch.setattr(adamw, "BLOCK_VALUES", 2 * CODE_BLOCK)
    assert torch.equal(run(STEPS[name](layout), layout.num_values, 3), whole)


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
    "nadam": lambda m: torch.optim.NAdam(m.parameters(), 1e-2),
    "asgd": lambda m: torch.optim.ASGD(m.parameters(), 1e-2),
}


def _mean(layout: Layout, seed: int) -> torch.Tensor:
    mean = exact_values(layout.num_values, seed)
    mean[layout.num_parameters :] = 0
    return mean


def gradient_step(
    name: str = "adamw", clip: float = 0.0, dtype: torch.dtype = torch.float32
) -> tuple[Net, Layout, GradientStep, torch.Tensor]:
    """A model, its layout, the step around a new optimizer, and the vector."""
    net = Net().to(dtype)
    layout = Layout.from_module(net)
    vector = layout.new_vector()
    layout.read(net, vector)
    return net, layout, GradientStep(WrappedOptimizer(OPTIMIZERS[name](net), clip_norm=clip), net, layout), vector


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
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_gradient_state_rebuilds_an_optimizer_that_has_not_stepped(name: str, dtype: torch.dtype) -> None:
    (_, layout, first, vector), two = gradient_step(name, dtype=dtype), Net().to(dtype)
    for seed in range(3):
        first.step(vector, _mean(layout, seed), 0)
    optimizer = OPTIMIZERS[name](two)
    groups, container = optimizer.param_groups, optimizer.state
    second = GradientStep(WrappedOptimizer(optimizer), two, layout)
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
    stepper = GradientStep(WrappedOptimizer(optimizer), net, Layout.from_module(net))
    first, state = next(net.parameters()), {"count": 3, "scale": 0.5, "on": True}
    optimizer.state[first] = dict(state)
    tensors = stepper.state_tensors()
    optimizer.state.clear()
    stepper.load_state_tensors(tensors)
    assert {key: (type(value), value) for key, value in optimizer.state[first].items()} == {
        key: (type(value), value) for key, value in state.items()
    }


class Odd(torch.optim.SGD):
    """Keeps a number: for each parameter, for all of them together, or in its group."""

    def __init__(self, module: nn.Module, place: str) -> None:
        super().__init__(module.parameters(), 0.1)
        self.place = place

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            if self.place == "group":
                group["d"] = group.get("d", 0.1) + 0.1
            keys: dict[str, list[Any]] = {"parameter": group["params"], "all": ["all"], "group": []}
            for key in keys[self.place]:
                self.state[key]["d"] = self.state[key].get("d", 0.1) * 1.1
            group["lr"] = self.state[group["params"][0]].get("d", 0.1)
        return super().step(closure)


def test_a_number_of_each_parameter_has_the_same_bits_at_a_newcomer() -> None:
    one, two = Net(), Net()
    layout, vector = Layout.from_module(one), Layout.from_module(one).new_vector()
    layout.read(one, vector)
    first, second = (GradientStep(WrappedOptimizer(Odd(net, "parameter")), net, layout) for net in (one, two))
    first.step(vector, _mean(layout, 1), 0)
    other = vector.clone()
    second.load_state_tensors(copy.deepcopy(first.state_tensors()))
    layout.write(other, two)
    for seed in range(2, 12):
        first.step(vector, _mean(layout, seed), 0)
        second.step(other, _mean(layout, seed), 0)
    assert torch.equal(vector, other)


@pytest.mark.parametrize("place", ["group", "all"])
def test_an_optimizer_whose_numbers_a_newcomer_cannot_have_is_refused(place: str) -> None:
    net = Net()
    layout = Layout.from_module(net)
    state = SharedState(net, layout, GradientStep(WrappedOptimizer(Odd(net, place)), net, layout))

    def commit() -> None:
        state.apply(_mean(layout, 1), 0)
        state.tree()

    with pytest.raises(IncompatibleError, match="choose an optimizer"):
        commit()


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


def test_a_parameter_has_no_more_state_than_the_limit() -> None:
    _, layout, stepper, _ = gradient_step()
    most = [
        TensorSpec(f"optim.{entry.name}.{number}", "float32", tuple(entry.shape))
        for entry in layout.parameter_entries
        for number in range(MAX_TENSORS_PER_PARAMETER)
    ]
    stepper.check_specs(most)
    assert len(most) == stepper.max_tensors
    with pytest.raises(IncompatibleError, match="more than 8"):
        stepper.check_specs([*most, TensorSpec(f"{most[0].name}9", "float32", ())])


def test_an_optimizer_of_another_module_is_refused() -> None:
    net = Net()
    with pytest.raises(ValueError, match="not the module"):
        GradientStep(WrappedOptimizer(OPTIMIZERS["adamw"](Net())), net, Layout.from_module(net))


def test_adamw_agrees_with_torch_through_warm_up_and_clipping() -> None:
    parameter = nn.Parameter(exact_values(1000, 1))
    reference = torch.optim.AdamW([parameter], betas=(BETA1, BETA2), eps=EPSILON, weight_decay=SPEC.weight_decay)
    for number in range(40):
        reference.param_groups[0]["lr"] = SPEC.learning_rate * min(1.0, (number + 1) / SPEC.warmup_steps)
        parameter.grad = exact_values(1000, number + 2)
        nn.utils.clip_grad_norm_([parameter], SPEC.clip_norm)
        reference.step()
    found = run(STEPS["adamw"](_layout(has_buffers=False)), 1000, 40)
    torch.testing.assert_close(found, parameter.data, rtol=1e-5, atol=1e-6)


def test_adamw_in_8_bits_goes_nearly_the_same_way() -> None:
    layout = _layout(5000, has_buffers=False)
    exact, found = (run(STEPS[name](layout), 5000, 40) for name in ("adamw", "adamw 8 bit"))
    way, off = (exact - exact_values(5000, 1)).norm(), (found - exact).norm()
    assert off < 0.15 * way  # Gradients are nearly noise here, of which AdamW's direction is made.


def sample(seed: int, size: int) -> torch.Tensor:
    """Values of many magnitudes, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(size, generator=generator) * torch.exp2(6 * torch.randn(size, generator=generator))
    return found * (torch.rand(size, generator=generator) < 0.9)


@pytest.mark.parametrize(("is_positive", "step"), [(False, 1 / 8), (True, 1 / 16)])
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 1000))
def test_codes_are_near_what_they_stand_for(is_positive: bool, step: float, seed: int, size: int) -> None:
    exact = sample(seed, size).square() if is_positive else sample(seed, size)
    moment, block = Codes(size, is_positive=is_positive), slice(0, size)
    moment.close(block, exact)
    found = moment.open(block)
    largest = torch.stack([part.abs().max() for part in exact.split(CODE_BLOCK) for _ in part])  # type: ignore[no-untyped-call]
    bound = torch.maximum(step / 2 * exact.abs(), largest * 2.0**-14)
    assert bool(((found - exact).abs() <= bound).all())
    assert torch.equal(found == 0, exact == 0) or not is_positive
    assert bool((found.sign() * exact.sign() >= 0).all())


@pytest.mark.parametrize(("is_positive", "kept"), [(False, BETA1), (True, BETA2)])
def test_what_gets_nothing_new_decays_whatever_its_code_is(is_positive: bool, kept: float) -> None:
    """Or a parameter that had a large gradient once would have small steps for ever."""
    size = 4 * CODE_BLOCK
    exact = sample(1, size).square()
    moment, block = Codes(size, is_positive=is_positive), slice(0, size)
    moment.close(block, exact)
    for _ in range(100):
        before = moment.open(block).clone()
        moment.close(block, before * kept)
        after = moment.open(block)
        assert bool(
            (after < before)[
                before > before.view(-1, CODE_BLOCK).amax(1).repeat_interleave(CODE_BLOCK) * 2.0**-14
            ].all()
        )


def test_adamw_follows_the_manifests_schedule() -> None:
    spec = TrainingSpec(every=1, warmup_steps=0, schedule="cosine", rounds=10, final_rate=0.0)
    stepper, vector = AdamWStep(_layout(64, has_buffers=False), spec), exact_values(64, 1)
    for round_, moves in ((0, True), (9, True), (10, False), (50, False)):
        before = vector.clone()
        stepper.step(vector, exact_values(64, 2), round_)
        assert torch.equal(vector, before) is not moves
