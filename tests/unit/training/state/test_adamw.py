"""AdamW of stages: what torch's computes, in bits that are the formula's on every machine."""

from __future__ import annotations

import hashlib
import math
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from p2ptrain.manifest import TrainingSpec
from p2ptrain.training.state.adamw import BETA1, BETA2, EPSILON, AdamWStep
from p2ptrain.training.state.digest import byte_view
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.moments import BLOCK, PositiveCodes, SignedCodes
from tests.support.codecs import exact_values

Moments = Literal["fp32", "8bit"]
SPEC = TrainingSpec(every=1, learning_rate=0.02, weight_decay=0.1, warmup_steps=4, clip_norm=2.0)


def layout_of(size: int) -> Layout:
    module = nn.Module()
    module.weight = nn.Parameter(torch.zeros(size))
    return Layout.from_module(module)


def run(size: int, steps: int, moments: Moments = "fp32") -> tuple[torch.Tensor, AdamWStep]:
    stepper, vector = AdamWStep(layout_of(size), SPEC, moments), exact_values(size, 1)
    for round_ in range(steps):
        stepper.step(vector, exact_values(size, round_ + 2), round_)
    return vector, stepper


GOLDEN: dict[Moments, str] = {
    "fp32": "8b63c0156abba96b5e9492b0d6b15d8411bf2ad0ef0b29cbedd0336f02d0fa4f",
    "8bit": "f25ddd71eaa444a5a470fdf7d894c1c98f242cfc99fc2eee2fbf0cce1dc21790",
}


@pytest.mark.parametrize(("moments", "golden"), GOLDEN.items())
def test_golden_bits(moments: Moments, golden: str) -> None:
    vector, stepper = run(1000, 10, moments)
    digest = hashlib.sha256(byte_view(vector))
    for _, tensor in stepper.state_tensors():
        digest.update(byte_view(tensor))
    assert digest.hexdigest() == golden


@settings(max_examples=40)
@given(st.floats(1e-4, 1.0), st.floats(0.0, 1.0), st.integers(1, 30), st.integers(0, 1000))
def test_every_operation_is_rounded_to_fp32(rate: float, decay: float, size: int, seed: int) -> None:
    spec = TrainingSpec(every=1, learning_rate=rate, weight_decay=decay, warmup_steps=0, clip_norm=0.0)
    stepper, vector = AdamWStep(layout_of(size), spec), exact_values(size, seed)
    expected: npt.NDArray[Any] = vector.numpy().copy()
    first: npt.NDArray[Any] = np.zeros(size, np.float32)
    second: npt.NDArray[Any] = np.zeros(size, np.float32)
    b1, b2, c1, c2 = (np.float32(value) for value in (BETA1, BETA2, 1 - BETA1, 1 - BETA2))
    power1 = power2 = 1.0
    for step in range(3):  # Up to the third power, one order of multiplication gives the same bits as any other.
        mean = exact_values(size, seed + step + 1)
        stepper.step(vector, mean, step)
        gradient = mean.numpy()
        expected = expected - expected * np.float32(rate * decay)
        first = first * b1 + gradient * c1
        second = second * b2 + (gradient * gradient) * c2
        power1, power2 = power1 * BETA1, power2 * BETA2
        divisor = np.sqrt(second) / np.float32(math.sqrt(1 - power2)) + np.float32(EPSILON)
        expected = expected - first * np.float32(rate / (1 - power1)) / divisor
    assert np.array_equal(vector.numpy(), expected)


def test_it_agrees_with_torch_through_warm_up_and_clipping() -> None:
    vector, _ = run(1000, 40)
    parameter = nn.Parameter(exact_values(1000, 1))
    reference = torch.optim.AdamW([parameter], betas=(BETA1, BETA2), eps=EPSILON, weight_decay=SPEC.weight_decay)
    for number in range(40):
        reference.param_groups[0]["lr"] = SPEC.learning_rate * min(1.0, (number + 1) / SPEC.warmup_steps)
        parameter.grad = exact_values(1000, number + 2)
        nn.utils.clip_grad_norm_([parameter], SPEC.clip_norm)
        reference.step()
    torch.testing.assert_close(vector, parameter.data, rtol=1e-5, atol=1e-6)


def test_with_8_bits_it_goes_nearly_the_same_way() -> None:
    fp32, _ = run(5000, 40)
    vector, _ = run(5000, 40, "8bit")
    way, off = (fp32 - exact_values(5000, 1)).norm(), (vector - fp32).norm()
    assert off < 0.15 * way  # Gradients are nearly noise here, of which AdamW's direction is made.


def sample(seed: int, size: int) -> torch.Tensor:
    """Values of many magnitudes, and zeros."""
    generator = torch.Generator().manual_seed(seed)
    found = torch.randn(size, generator=generator) * torch.exp2(6 * torch.randn(size, generator=generator))
    return found * (torch.rand(size, generator=generator) < 0.9)


@pytest.mark.parametrize(("kind", "step"), [(SignedCodes, 1 / 8), (PositiveCodes, 1 / 16)])
@settings(max_examples=30, deadline=None)
@given(st.integers(0, 10_000), st.integers(1, 1000))
def test_codes_are_near_what_they_stand_for(
    kind: type[SignedCodes | PositiveCodes], step: float, seed: int, size: int
) -> None:
    exact = sample(seed, size) if kind is SignedCodes else sample(seed, size).square()
    moment, block = kind(size), slice(0, size)
    moment.close(block, exact)
    found = moment.open(block)
    largest = torch.stack([part.abs().max() for part in exact.split(BLOCK) for _ in part])  # type: ignore[no-untyped-call]
    bound = torch.maximum(step / 2 * exact.abs(), largest * 2.0**-14)
    assert bool(((found - exact).abs() <= bound).all())
    assert torch.equal(found == 0, exact == 0) or kind is SignedCodes
    assert bool((found.sign() * exact.sign() >= 0).all())


@pytest.mark.parametrize(("kind", "kept"), [(SignedCodes, BETA1), (PositiveCodes, BETA2)])
def test_what_gets_nothing_new_decays_whatever_its_code_is(
    kind: type[SignedCodes | PositiveCodes], kept: float
) -> None:
    """Or a parameter that had a large gradient once would have small steps for ever."""
    size = 4 * BLOCK
    exact = sample(1, size).square()
    moment, block = kind(size), slice(0, size)
    moment.close(block, exact)
    for _ in range(100):
        before = moment.open(block).clone()
        moment.close(block, before * kept)
        after = moment.open(block)
        assert bool((after < before)[before > before.view(-1, BLOCK).amax(1).repeat_interleave(BLOCK) * 2.0**-14].all())


def test_the_step_follows_the_manifests_schedule() -> None:
    spec = TrainingSpec(every=1, warmup_steps=0, schedule="cosine", rounds=10, final_rate=0.0)
    stepper, vector = AdamWStep(layout_of(64), spec), exact_values(64, 1)
    for round_, moves in ((0, True), (9, True), (10, False), (50, False)):
        before = vector.clone()
        stepper.step(vector, exact_values(64, 2), round_)
        assert torch.equal(vector, before) is not moves
