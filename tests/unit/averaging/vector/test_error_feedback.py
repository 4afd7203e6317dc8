"""Error feedback: what a round drops, the next ones bring."""

from __future__ import annotations

import pytest
import torch

from p2ptrain.averaging.vector.error_feedback import Encoded, ErrorFeedback
from p2ptrain.codecs import get_codec

SIZE = 8192
BOUNDS = (0, 4096, SIZE)


def in_pieces(exact: torch.Tensor) -> list[tuple[int, int, torch.Tensor]]:
    """A mean before it was encoded, as its owner has it."""
    return [(low, min(low + 1024, len(exact)), exact[low : low + 1024]) for low in range(0, len(exact), 1024)]


def one_round(feedbacks: list[ErrorFeedback], updates: list[torch.Tensor], weights: list[float]) -> torch.Tensor:
    """Two members average; returns the decoded mean. Member i owns share i."""
    codec = get_codec("int8")
    vectors = [update.clone() for update in updates]
    for feedback, vector in zip(feedbacks, vectors, strict=True):
        feedback.add_to(vector)
    total = sum(weights)
    mean = torch.empty(SIZE)
    exact, encoded, sent = [], [], []
    for owner in (0, 1):
        low, high = BOUNDS[owner], BOUNDS[owner + 1]
        other = 1 - owner
        part = codec.encode(vectors[other][low:high])
        share = vectors[owner][low:high] * (weights[owner] / total)
        codec.accumulate_into(part, weights[other] / total, share)
        exact.append(share)
        encoded.append(codec.encode(share))
        sent.append(part)
        codec.decode_into(encoded[owner], mean[low:high])
    for me in (0, 1):
        scale = total / weights[me]
        sent_by_me = {1 - me: sent[1 - me]}
        feedbacks[me].update(
            [Encoded(vectors[me], BOUNDS, sent_by_me, codec, 1.0, me, in_pieces(exact[me]), encoded[me], codec, scale)]
        )
    return mean


def test_over_many_rounds_nothing_is_lost_to_the_codec() -> None:
    generator = torch.Generator().manual_seed(3)
    codec = get_codec("int8")
    feedbacks = [ErrorFeedback(SIZE, codec) for _ in range(2)]
    weights = [100.0, 300.0]
    wanted, got, last_error = torch.zeros(SIZE), torch.zeros(SIZE), 0.0
    for _ in range(30):
        updates = [torch.randn(SIZE, generator=generator) for _ in range(2)]
        wanted += (updates[0] * weights[0] + updates[1] * weights[1]) / sum(weights)
        got += one_round(feedbacks, updates, weights)
        last_error = float((wanted - got).abs().max())
        # What is missing after any number of rounds is what is kept for the next, and no more.
        kept = torch.zeros(SIZE)
        for feedback, weight in zip(feedbacks, weights, strict=True):
            assert feedback.residual is not None
            kept += feedback.residual * (weight / sum(weights))
        torch.testing.assert_close(wanted - got, kept, rtol=0, atol=2e-4)
    assert last_error < 0.2


def test_a_lossless_codec_keeps_nothing() -> None:
    feedback = ErrorFeedback(8, get_codec("fp32"))
    vector = torch.ones(8)
    feedback.add_to(vector)
    codec = get_codec("fp32")
    feedback.update([Encoded(vector, (0, 8), {}, codec, 1.0, 0, None, b"", codec, 1.0)])
    feedback.reset()
    assert feedback.residual is None
    assert torch.equal(vector, torch.ones(8))


def test_reset_forgets() -> None:
    feedback = ErrorFeedback(8, get_codec("int8"))
    assert feedback.residual is not None
    feedback.residual.fill_(1.0)
    feedback.reset()
    vector = torch.zeros(8)
    feedback.add_to(vector)
    assert torch.equal(vector, torch.zeros(8))


@pytest.mark.parametrize("is_reduced", [False, True])
def test_a_share_that_another_member_reduced_leaves_no_residual(is_reduced: bool) -> None:
    codec = get_codec("int8")
    feedback = ErrorFeedback(16, codec)
    assert feedback.residual is not None
    feedback.residual.fill_(5.0)
    mean, own_mean_exact = codec.encode(torch.ones(8)), in_pieces(torch.ones(8)) if is_reduced else None
    feedback.update([Encoded(torch.ones(16), (0, 8, 16), {}, codec, 1.0, 0, own_mean_exact, mean, codec, 2.0)])
    assert float(feedback.residual.abs().max()) < 0.05


def test_a_rule_that_drops_what_one_member_brings_keeps_no_loss_of_the_mean() -> None:
    codec = get_codec("int8")
    feedback, exact = ErrorFeedback(16, codec), torch.linspace(-1, 1, 8)
    sent, mean = {1: codec.encode(torch.ones(8))}, codec.encode(exact)
    feedback.update([Encoded(torch.ones(16), (0, 8, 16), sent, codec, 1.0, 0, in_pieces(exact), mean, codec, 0.0)])
    assert feedback.residual is not None
    assert torch.equal(feedback.residual[:8], torch.zeros(8))


def test_an_owner_of_a_sparse_share_keeps_what_its_part_lost_and_what_the_dense_mean_lost() -> None:
    codec, dense = get_codec("topk"), get_codec("int8")
    vector = torch.randn(SIZE, generator=torch.Generator().manual_seed(4))
    exact, feedback = 3 * vector[:4096] + 1, ErrorFeedback(SIZE, codec)
    parts = {index: codec.encode(vector[BOUNDS[index] : BOUNDS[index + 1]]) for index in (0, 1)}
    feedback.update([Encoded(vector, BOUNDS, parts, codec, 1.0, 0, in_pieces(exact), dense.encode(exact), dense, 2.5)])
    out, expected = torch.empty(4096), vector.clone()
    for index in (0, 1):
        codec.decode_into(parts[index], out)
        expected[BOUNDS[index] : BOUNDS[index + 1]] -= out
    dense.decode_into(dense.encode(exact), out)
    expected[:4096] += 2.5 * (exact - out)
    assert feedback.residual is not None
    torch.testing.assert_close(feedback.residual, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.95])
def test_what_is_kept_decays_once_for_each_round_that_took_it_along(decay: float) -> None:
    codec, generator = get_codec("topk"), torch.Generator().manual_seed(5)
    feedback, decoded = ErrorFeedback(SIZE, codec, decay), torch.empty(SIZE)
    expected = torch.zeros(SIZE)
    for _ in range(5):
        update = torch.randn(SIZE, generator=generator)
        vector = update.clone()
        for _ in range(2):  # The first attempt is not committed.
            vector = update.clone()
            feedback.add_to(vector)
        torch.testing.assert_close(vector, update + decay * expected, rtol=0, atol=1e-5)
        part = codec.encode(vector)
        feedback.update([Encoded(vector, (0, SIZE), {0: part}, codec, 1.0, 0, None, b"", codec, 0.0)])
        codec.decode_into(part, decoded)
        expected = vector - decoded


def test_the_loss_of_a_mean_decays_as_well() -> None:
    codec, exact = get_codec("int8"), torch.linspace(-1, 1, 8)
    kept = []
    for decay in (1.0, 0.5):
        feedback = ErrorFeedback(16, codec, decay)
        feedback.update(
            [Encoded(exact.repeat(2), (0, 8, 16), {}, codec, 1.0, 0, [(0, 8, exact)], codec.encode(exact), codec, 3.0)]
        )
        assert feedback.residual is not None
        kept.append(feedback.residual)
    assert bool(kept[0].any())
    assert torch.equal(kept[1], 0.5 * kept[0])


def test_parts_of_a_residual_decay_as_the_whole() -> None:
    codec = get_codec("topk")
    whole, vector = ErrorFeedback(2 * SIZE, codec, 0.5), torch.arange(1.0, SIZE + 1)
    _, part = whole.split([codec, codec], [SIZE, SIZE])
    part.update(
        [Encoded(vector, (0, SIZE), {0: codec.encode(torch.zeros(SIZE))}, codec, 1.0, 0, None, b"", codec, 0.0)]
    )
    assert whole.residual is not None
    assert torch.equal(whole.residual, torch.cat([torch.zeros(SIZE), 0.5 * vector]))
