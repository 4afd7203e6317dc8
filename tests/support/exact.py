"""Kernels of serving on this machine, and single operations of them."""

from collections.abc import Iterator, Sequence

import numpy as np
import torch

from p2ptrain.manifest import ModelSpec
from p2ptrain.models import build_model
from p2ptrain.models.building import deterministic_normal_
from p2ptrain.models.exact import PAGE, ExactStage, Part
from p2ptrain.models.exact.program import Geometry, Op, Program
from p2ptrain.models.exact.runners import KernelRunner, PageStore, Piece, Rotary, Rows
from p2ptrain.models.stage import Stage
from p2ptrain.native.exact import AnyKernels, Kernels, all_kernels
from p2ptrain.serving.generation import Token
from p2ptrain.serving.grammar import Matcher
from p2ptrain.serving.sampling import Sampling, draw

NO_ATTENTION = Geometry(0, 1, 1, 1, 0.0)


def kernels() -> dict[str, Kernels]:
    """All builds that this CPU can run; empty without a library."""
    try:
        return dict(all_kernels())
    except OSError:
        return {}


def run_ops(
    build: AnyKernels,
    ops: Sequence[Op],
    inputs: torch.Tensor,
    *,
    rows: Rows | None = None,
    store: PageStore | None = None,
    geometry: Geometry = NO_ATTENTION,
    before: torch.Tensor | None = None,
    threads: int = 1,
) -> torch.Tensor:
    """Result of operations from the first one's ``x`` to the last one's ``y``, which holds ``before`` at first."""
    program = Program("fp32")
    for op in ops:
        program.add(op)
    count = len(inputs)
    runner = KernelRunner(program, geometry, Rotary(geometry), count, build, threads)
    outputs = runner.buffers[ops[-1].y]
    outputs = outputs[: count * program.widths[ops[-1].y]]
    if before is not None:
        outputs.copy_(before.flatten())
    runner.buffers[ops[0].x][: inputs.numel()] = inputs.flatten()
    runner.run(rows or Rows((), np.zeros(count, dtype=np.int64), np.zeros(0, dtype=np.int64)), store)
    return outputs.view(count, -1).clone()


def one_piece(first: int, count: int, pages: Sequence[int]) -> Rows:
    """Rows of one session."""
    numbers, positions = np.asarray(pages, dtype=np.int64), np.arange(first, first + count)
    return Rows((Piece(0, count, first, numbers),), positions, numbers[positions // 64])


def lively_model(spec: ModelSpec) -> Stage:
    """A model whose norms and biases are no ones and zeros, and whose logits are far apart."""
    model = build_model(spec).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            spread = torch.empty_like(parameter)
            deterministic_normal_(spread, 0.3 if parameter.dim() == 1 else float(2 * parameter.std()), f"lively {name}")
            parameter.add_(spread)
    return model


def tokens_after(
    stage: ExactStage, prompt: Sequence[int], sampling: Sampling, most: int, matcher: Matcher | None = None
) -> Iterator[Token]:
    """Yield up to ``most`` tokens that a whole model draws after a prompt, a row at a time."""
    ids, first, pages = list(prompt), 0, range(-(-(len(prompt) + most) // PAGE))
    store = stage.new_pages(len(pages))
    for position in range(len(prompt), len(prompt) + most):
        hidden = stage.step([Part(position - first, first, pages)], torch.tensor(ids[first:]), store)
        allowed = matcher.allowed(ids[len(prompt) :]) if matcher is not None else None
        drawn = draw(stage.logits(hidden[-1:])[0], position, ids, sampling, len(prompt), allowed)
        yield Token(position, *drawn)
        ids.append(drawn.id)
        first = position
