"""The emulated swarm and what is computed from its runs."""

import numpy as np
import pytest
import torch

from benchmarks.bench_convergence import (
    ALONE,
    LARGE_BATCH,
    METHODS,
    TARGET_MARGIN,
    seconds_per_step,
    seconds_to,
    summarize,
)
from benchmarks.emulation import Method, Run, Setting, Swarm
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import ModelSpec
from p2ptrain.training.data.corpus import Corpus

MODEL = ModelSpec(layers=2, hidden=8, heads=2, kv_heads=2, intermediate=16, vocabulary=16, context=8)
SETTING = Setting(MODEL, steps=8, local_batch=2, workers=3)


@pytest.fixture(autouse=True)
def _short_looks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.emulation.CURVE_POINTS", 2)
    monkeypatch.setattr("benchmarks.emulation.CURVE_WINDOWS", 2)
    monkeypatch.setattr("benchmarks.emulation.FINAL_WINDOWS", 2)


def _corpus() -> Corpus:
    tokens = (np.arange(4000, dtype=np.uint64) * 2654435761 % 2**32 >> 28).astype(np.uint8)
    return Corpus(tokens[:3000], tokens[3000:], bytes(32), 16)


def _train(training: dict[str, object], **method: object) -> Swarm:
    swarm = Swarm(Method("m", training, workers=3, **method), SETTING, _corpus(), 1)  # type: ignore[arg-type]
    swarm.train()
    return swarm


def test_exact_averages_of_one_step_are_one_large_batch() -> None:
    plain = {"clip_norm": 1e9, "weight_decay": 0.0}
    every_step = _train({"every": 1, **plain})
    alone = Swarm(Method("alone", {"every": 1, **plain}, workers=1), Setting(MODEL, 8, 6, 1), _corpus(), 1)
    batches = Swarm(Method("m", {"every": 1}, workers=3), SETTING, _corpus(), 1)._batches
    alone._batches = lambda step: iter([torch.cat(list(batches(step)))])  # type: ignore[method-assign]
    alone.train()
    torch.testing.assert_close(every_step.state.vector, alone.state.vector, rtol=1e-3, atol=1e-4)


def test_fragments_without_overlap_end_where_whole_rounds_end_if_nobody_steps_in_between() -> None:
    training = {"every": 4, "learning_rate": 1e-9, "outer": "average", "outer_learning_rate": 1.0}
    whole, parts = _train(training), _train({**training, "fragments": 2})
    assert (whole.rounds, parts.rounds) == (2, 5)  # The last turn of a fragment that had work left.
    torch.testing.assert_close(whole.state.vector, parts.state.vector)


@pytest.mark.parametrize("gathered", [True, False])
def test_bytes_are_those_of_the_encoded_parts(gathered: bool) -> None:
    swarm = _train({"every": 4}, codec="int8", gathered=gathered)
    size = swarm.state.layout.num_values
    whole = get_codec("int8").encoded_bytes(size)
    # In each of two rounds: parts to two owners, and a third of the mean, or of the list of three parts, to two others.
    assert swarm.sent_bytes == pytest.approx(2 * (2 / 3 + 2 * (1 if gathered else 1 / 3)) * whole, rel=0.02)


def test_what_is_dropped_comes_later_with_feedback_and_never_without() -> None:
    training = {"every": 4, "outer": "average"}
    kept = [_train(training, codec="topk", gathered=True, feedback_decay=decay) for decay in (0.95, 0.0)]
    residuals = [[f.residual for row in swarm.feedbacks for f in row if f.residual is not None] for swarm in kept]
    assert all(bool(residual.any()) for residual in residuals[0])
    assert not any(bool(residual.any()) for residual in residuals[1])


def test_the_time_to_a_target_is_read_between_the_points_of_the_curve() -> None:
    curve = [(10, 4.0), (20, 3.0), (30, 2.5)]
    assert seconds_to(3.5, curve, 2.0) == pytest.approx(30.0)
    assert seconds_to(4.0, curve, 2.0) == pytest.approx(20.0)
    assert seconds_to(2.0, curve, 2.0) is None


def test_what_is_sent_under_compute_takes_no_time_of_its_own() -> None:
    run = Run("m", 1, [], 1.0, 1, bytes_per_round=12.5e6, rounds=10, step_seconds=1.0)
    names = {method.name: method for method in METHODS}
    plain = seconds_per_step(names["DiLoCo, int8"], run, 100, 1.0)
    overlapped = seconds_per_step(names["streaming, overlap of 1 step, int4"], run, 100, 1.0)
    assert plain == pytest.approx(1.1)
    assert overlapped == pytest.approx(1.0)
    assert seconds_per_step(names[LARGE_BATCH], run, 100, 1.0) == pytest.approx(1.1)
    assert seconds_per_step(names[ALONE], run, 100, 1.0) == 1.0
    assert seconds_per_step(names["one machine alone, large batches"], run, 100, 1.0) == 4.0


def test_speeds_are_compared_at_the_target_and_only_where_both_get_there() -> None:
    def run(method: str, last: float) -> Run:
        return Run(method, 1, [(50, 4.0), (100, last)], last, 1000, 0.0, 10, 1.0)

    methods = [method for method in METHODS if method.name in (LARGE_BATCH, "DiLoCo, int8", "SparseLoCo, H = 6")]
    runs = [run(LARGE_BATCH, 2.0), run("DiLoCo, int8", 1.0), run("SparseLoCo, H = 6", 3.0)]
    summary = summarize(methods, runs, 100)
    large, diloco, sparse = summary.rows
    assert summary.targets == {1: pytest.approx(2.0 * TARGET_MARGIN)}
    assert [row.ratio.median for row in summary.rows] == [1.0, 0.5, 1.5]
    # Each falls from 4 at step 50 on a straight line.
    share = (4 - summary.targets[1]) / np.array([4 - 2.0, 4 - 1.0])
    steps = 50 + 50 * share
    assert diloco.times_as_fast_as(large) == pytest.approx(steps[0] / steps[1])
    assert sparse.seconds_to_target is None
    assert sparse.times_as_fast_as(large) is None
    assert large.times_as_fast_as(sparse) is None
    assert large.times_as_fast_as(summary.row("unknown")) is None
