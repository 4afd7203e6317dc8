"""Error feedback: what a round drops, the next ones bring. Worker momentum: the mean of recent updates."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch

from p2ptrain.averaging.vector.error_feedback import Encoded, ErrorFeedback, Momentum
from p2ptrain.buffers import Buffer
from p2ptrain.codecs import get_codec
from tests.support.codecs import decode, gaussian

SIZE = 8192
BOUNDS = (0, 4096, SIZE)
INT8, TOPK = get_codec("int8"), get_codec("topk")


def encoded(
    vector: torch.Tensor, bounds: tuple[int, ...], parts: Mapping[int, Buffer], exact: torch.Tensor | None = None,
    **others: Any,
) -> Encoded:  # fmt: skip
    """One group of a round, in which this peer owns the first share and reduced it to ``exact`` if that is given."""
    usual: dict[str, Any] = {
        "part_codec": INT8,
        "part_scale": 1.0,
        "own_index": 0,
        "mean_codec": INT8,
        "mean_scale": 1.0,
    }
    mean, pieces = b"" if exact is None else INT8.encode(exact), None
    if exact is not None:
        starts = range(0, len(exact), 1024)
        pieces = [(low, min(low + 1024, len(exact)), exact[low : low + 1024]) for low in starts]
    return Encoded(vector, bounds, parts, own_mean_exact=pieces, **{**usual, "own_mean": mean, **others})


def kept(feedback: ErrorFeedback) -> torch.Tensor:
    assert feedback.residual is not None
    return feedback.residual


def one_round(feedbacks: list[ErrorFeedback], updates: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Two members average; returns the decoded mean. Member i owns share i."""
    vectors = [update.clone() for update in updates]
    for feedback, vector in zip(feedbacks, vectors, strict=True):
        feedback.add_to(vector)
    total, mean = sum(weights), torch.empty(SIZE)
    exact, sent = [], []
    for owner, other in ((0, 1), (1, 0)):
        own = slice(BOUNDS[owner], BOUNDS[owner + 1])
        part, share = INT8.encode(vectors[other][own]), vectors[owner][own] * (weights[owner] / total)
        INT8.accumulate_into(part, weights[other] / total, share)
        exact.append(share)
        sent.append(part)
        INT8.decode_into(INT8.encode(share), mean[own])
    for me, other in ((0, 1), (1, 0)):
        group = encoded(
            vectors[me], BOUNDS, {other: sent[other]}, exact[me], own_index=me, mean_scale=total / weights[me]
        )
        feedbacks[me].update([group])
    return mean


def test_over_many_rounds_nothing_is_lost_to_the_codec() -> None:
    generator = torch.Generator().manual_seed(3)
    feedbacks = [ErrorFeedback(SIZE, INT8) for _ in range(2)]
    weights = [100.0, 300.0]
    wanted, got = torch.zeros(SIZE), torch.zeros(SIZE)
    for _ in range(30):
        updates = [torch.randn(SIZE, generator=generator) for _ in range(2)]
        wanted += (updates[0] * weights[0] + updates[1] * weights[1]) / sum(weights)
        got += one_round(feedbacks, updates, weights)
        # What is missing after any number of rounds is what is kept for the next, and no more.
        waiting = sum(
            (kept(f) * (w / sum(weights)) for f, w in zip(feedbacks, weights, strict=True)), torch.zeros(SIZE)
        )
        torch.testing.assert_close(wanted - got, waiting, rtol=0, atol=2e-4)
    assert float((wanted - got).abs().max()) < 0.2


def test_a_lossless_codec_keeps_nothing() -> None:
    feedback, vector, fp32 = ErrorFeedback(8, get_codec("fp32")), torch.ones(8), get_codec("fp32")
    feedback.add_to(vector)
    feedback.update([encoded(vector, (0, 8), {}, part_codec=fp32, mean_codec=fp32)])
    feedback.reset()
    assert feedback.residual is None
    assert torch.equal(vector, torch.ones(8))


@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_share_that_another_member_reduced_leaves_no_residual(is_reduced: bool) -> None:
    feedback = ErrorFeedback(16, INT8)
    kept(feedback).fill_(5.0)
    exact, mean = torch.ones(8) if is_reduced else None, INT8.encode(torch.ones(8))
    feedback.update([encoded(torch.ones(16), (0, 8, 16), {}, exact, own_mean=mean, mean_scale=2.0)])
    assert float(kept(feedback).abs().max()) < 0.05


def test_a_rule_that_drops_what_one_member_brings_keeps_no_loss_of_the_mean() -> None:
    feedback, sent = ErrorFeedback(16, INT8), {1: INT8.encode(torch.ones(8))}
    feedback.update([encoded(torch.ones(16), (0, 8, 16), sent, torch.linspace(-1, 1, 8), mean_scale=0.0)])
    assert torch.equal(kept(feedback)[:8], torch.zeros(8))


def test_an_owner_of_a_sparse_share_keeps_what_its_part_lost_and_what_the_dense_mean_lost() -> None:
    vector, feedback = gaussian(SIZE, seed=4), ErrorFeedback(SIZE, TOPK)
    exact = 3 * vector[:4096] + 1
    parts = {index: TOPK.encode(vector[BOUNDS[index] : BOUNDS[index + 1]]) for index in (0, 1)}
    feedback.update([encoded(vector, BOUNDS, parts, exact, part_codec=TOPK, mean_scale=2.5)])
    expected = vector - torch.cat([decode(TOPK, part, 4096) for part in parts.values()])
    expected[:4096] += 2.5 * (exact - decode(INT8, INT8.encode(exact), 4096))
    torch.testing.assert_close(kept(feedback), expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_what_is_kept_decays_once_for_each_round_that_took_it_along(decay: float) -> None:
    feedback, expected = ErrorFeedback(SIZE, TOPK, decay), torch.zeros(SIZE)
    for seed in range(5):
        update = gaussian(SIZE, seed=seed)
        for _ in range(2):  # The first attempt is not committed.
            vector = update.clone()
            feedback.add_to(vector)
        torch.testing.assert_close(vector, update + decay * expected, rtol=0, atol=1e-5)
        part = TOPK.encode(vector)
        feedback.update([encoded(vector, (0, SIZE), {0: part}, part_codec=TOPK, mean_codec=TOPK, mean_scale=0.0)])
        expected = vector - decode(TOPK, part, SIZE)


def test_the_loss_of_a_mean_decays_as_well() -> None:
    exact, feedbacks = torch.linspace(-1, 1, 8), [ErrorFeedback(16, INT8, decay) for decay in (1.0, 0.5)]
    for feedback in feedbacks:
        feedback.update([encoded(exact.repeat(2), (0, 8, 16), {}, exact, mean_scale=3.0)])
    whole, half = map(kept, feedbacks)
    assert bool(whole.any())
    assert torch.equal(half, 0.5 * whole)


def test_parts_of_a_residual_are_parts_of_its_memory_and_decay_as_the_whole() -> None:
    whole, vector = ErrorFeedback(2 * SIZE, TOPK, 0.5), torch.arange(1.0, SIZE + 1)
    exact, part = whole.split([get_codec("fp32"), TOPK], [SIZE, SIZE])
    assert exact.residual is None
    sent = {0: TOPK.encode(torch.zeros(SIZE))}
    part.update([encoded(vector, (0, SIZE), sent, part_codec=TOPK, mean_codec=TOPK, mean_scale=0.0)])
    assert torch.equal(kept(whole), torch.cat([torch.zeros(SIZE), 0.5 * vector]))


# --- worker momentum --------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("num_fragments", [1, 2])
def test_buffers_have_no_momentum(num_fragments: int) -> None:
    """A running variance that fell from 1 to 0.1 and stays there would fall to -0.2."""
    fp32 = get_codec("fp32")
    whole = ErrorFeedback(num_fragments * 4, fp32, momentum=0.5, num_parameters=num_fragments * 4 - 1)
    feedback = whole.split([fp32] * num_fragments, [4] * num_fragments, [4] * (num_fragments - 1) + [3])[-1]
    first, second = torch.tensor([0.9, 0.9, 0.9, 0.9]), torch.zeros(4)
    feedback.add_to(first)
    feedback.update([encoded(first, (0, 4), {}, part_codec=fp32, mean_codec=fp32, mean_scale=0.0)])
    feedback.add_to(second)
    torch.testing.assert_close(second, torch.tensor([0.3, 0.3, 0.3, 0.0]))


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
