"""Worker momentum: the mean of recent updates."""

import pytest
import torch

from p2ptrain.averaging.vector.momentum import Momentum


def updates(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(count)
    return [torch.randn(33, generator=generator) for _ in range(count)]


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.9])
def test_a_contribution_is_the_weighted_mean_of_those_that_counted(decay: float) -> None:
    momentum, counted = Momentum(decay), updates(7)
    for number in range(len(counted)):
        sent = counted[number].clone()
        momentum.blend(sent)
        momentum.keep(sent, None)
        weights = torch.tensor([decay**age for age in range(number, -1, -1)], dtype=torch.float64)
        mean = torch.stack(counted[: number + 1]).double().T @ weights / weights.sum()
        torch.testing.assert_close(sent.double(), mean, rtol=1e-5, atol=1e-6)


def test_an_update_that_does_not_count_leaves_nothing_behind() -> None:
    first, lost, last = updates(3)
    expected, sent = Momentum(0.5), Momentum(0.5)
    for momentum in (expected, sent):
        momentum.keep(first, None)
    sent.blend(lost)
    a, b = last.clone(), last.clone()
    expected.blend(a)
    sent.blend(b)
    assert torch.equal(a, b)


def test_the_residual_that_was_sent_along_is_not_repeated() -> None:
    update, residual, after = updates(3)
    with_it, without = Momentum(0.5), Momentum(0.5)
    with_it.keep(update + residual, residual)
    without.keep(update, None)
    a, b = after.clone(), after.clone()
    with_it.blend(a)
    without.blend(b)
    torch.testing.assert_close(a, b)


def test_a_reset_begins_with_the_next_update() -> None:
    first, second = updates(2)
    momentum = Momentum(0.9)
    momentum.keep(first, None)
    momentum.reset()
    sent = second.clone()
    momentum.blend(sent)
    assert torch.equal(sent, second)


def test_the_mean_does_not_change_with_the_buffer_that_was_sent() -> None:
    first, second = updates(2)
    momentum = Momentum(0.5)
    momentum.keep(first, None)
    expected = torch.lerp(second, first, 1 / 3)
    first.zero_()
    momentum.blend(second)
    torch.testing.assert_close(second, expected)
