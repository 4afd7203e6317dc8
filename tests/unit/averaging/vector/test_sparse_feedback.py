"""Training through `topk` ends where exact averaging ends if error feedback is on, and stalls far from it if it is off.

Four workers each hold another convex quadratic, and take outer steps on the mean of their gradients, in the rounds of
`p2ptrain.averaging.allreduce.session`: every part is encoded, and an owner's mean is the list of them.
"""

from __future__ import annotations

import functools

import pytest
import torch

from p2ptrain.averaging.vector.error_feedback import Encoded, ErrorFeedback
from p2ptrain.codecs import Codec, PartList, get_codec

WORKERS = 4
STEP, ROUNDS = 0.02, 400


class Problem:
    """``f_i(x) = sum(curvature_i (x - target_i)**2) / 2``; most of what pulls at a worker, others pull against.

    So the largest values of each gradient do not vanish at the optimum, but cancel in the mean; only what is smaller
    tells where the optimum is. That is what data of different kinds at each worker does.
    """

    def __init__(self, num_values: int) -> None:
        generator = torch.Generator().manual_seed(7)
        common = 0.2 * torch.randn(num_values, generator=generator)
        pulls = torch.randn(WORKERS, num_values, generator=generator)
        pulls *= torch.rand(num_values, generator=generator) < 0.05
        self.targets = common + 4 * (pulls - pulls.mean(0))
        self.curvatures = torch.ones(WORKERS, num_values)
        self.curvatures += 0.5 * (torch.rand(WORKERS, num_values, generator=generator) - 0.5) * (pulls == 0)
        self.optimum = (self.curvatures * self.targets).sum(0) / self.curvatures.sum(0)

    def excess(self, x: torch.Tensor) -> float:
        """How far the mean of all f_i at ``x`` lies above its least value."""
        return float((self.curvatures.mean(0) * (x - self.optimum) ** 2).sum() / 2)

    def gradient(self, worker: int, x: torch.Tensor) -> torch.Tensor:
        """Of f_i."""
        return self.curvatures[worker] * (x - self.targets[worker])


def average(codec: Codec, vectors: list[torch.Tensor], feedbacks: list[ErrorFeedback] | None) -> torch.Tensor:
    """The decoded mean of one round in which worker i owns share i, equal weights; updates the feedbacks."""
    size = len(vectors[0]) // WORKERS
    bounds = tuple(size * i for i in range(WORKERS + 1))
    mean = torch.empty(len(vectors[0]))
    sent = [{o: codec.encode(vector[bounds[o] : bounds[o + 1]]) for o in range(WORKERS)} for vector in vectors]
    means, parts = [], PartList(codec, WORKERS)
    for owner in range(WORKERS):
        means.append(bytearray(parts.encoded_bytes(size)))
        parts.write([1 / WORKERS] * WORKERS, [sent[worker][owner] for worker in range(WORKERS)], means[owner])
        parts.decode_into(means[owner], mean[bounds[owner] : bounds[owner + 1]])
    for worker, feedback in enumerate(feedbacks or []):
        feedback.update(
            [Encoded(vectors[worker], bounds, sent[worker], codec, 1.0, worker, None, means[worker], codec, WORKERS)]
        )
    return mean


@functools.cache
def train(problem: Problem, codec: Codec, with_feedback: bool, decay: float = 1.0) -> tuple[float, ...]:
    """The excess before each round and after the last."""
    x = torch.zeros(len(problem.optimum))
    feedbacks = [ErrorFeedback(len(x), codec, decay) for _ in range(WORKERS)] if with_feedback else None
    found = [problem.excess(x)]
    for _ in range(ROUNDS):
        vectors = [STEP * problem.gradient(worker, x) for worker in range(WORKERS)]
        for vector, feedback in zip(vectors, feedbacks or [], strict=False):
            feedback.add_to(vector)
        x -= average(codec, vectors, feedbacks)
        found.append(problem.excess(x))
    return tuple(found)


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(WORKERS * 4096)


def test_exact_averaging_solves_the_problem(problem: Problem) -> None:
    excess = train(problem, get_codec("fp32"), with_feedback=False)
    assert excess[-1] < 1e-3 * excess[0]


# At a constant step, what is left is proportional to the square of the step.
def test_with_feedback_topk_ends_near_the_optimum(problem: Problem) -> None:
    excess = train(problem, get_codec("topk"), with_feedback=True)
    assert excess[-1] < 0.03 * excess[0]


def test_without_feedback_topk_stalls_far_from_it(problem: Problem) -> None:
    excess = train(problem, get_codec("topk"), with_feedback=False)
    assert min(excess) > 0.9 * excess[0]
    assert max(excess[300:]) < 1.1 * min(excess[300:])


def test_a_residual_that_decays_forgets_what_is_always_smaller_than_what_cancels(problem: Problem) -> None:
    kept = train(problem, get_codec("topk"), with_feedback=True)
    decaying = train(problem, get_codec("topk"), with_feedback=True, decay=0.95)
    without = train(problem, get_codec("topk"), with_feedback=False)
    assert 10 * kept[-1] < decaying[-1] < 0.7 * without[-1]
