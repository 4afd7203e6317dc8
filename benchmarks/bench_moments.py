"""AdamW's moments in 8 bits beside fp32: the loss that training comes to, the CPU time of a step, and the state's size.

A small Llama learns the Python standard library's sources, byte by byte, with the same batches and the step that stages
take (`p2ptrain.training.state.adamw`); torch's AdamW steps beside them for the time.

    python -m benchmarks.bench_moments --steps 500 --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import math
import sys
from functools import partial
from typing import Literal

import torch
from torch import nn
from torch.nn import functional

from benchmarks.harness import alternate, format_table, progress, report, thread_seconds
from p2ptrain.manifest import DataSpec, ModelSpec, TrainingSpec
from p2ptrain.models import build_model
from p2ptrain.training.data.corpus import load_corpus
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.state.adamw import AdamWStep
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import GradientStep, Stepper

SPEC = ModelSpec(layers=3, hidden=96, intermediate=256, context=96)
TRAINING = TrainingSpec(every=1, learning_rate=3e-3, warmup_steps=20)
BATCH, HELD_OUT = 16, 384
Moments = Literal["fp32", "8bit"]
MOMENTS: tuple[Moments, ...] = ("fp32", "8bit")


def windows(tokens: torch.Tensor, num: int, generator: torch.Generator) -> torch.Tensor:
    """Samples ``[num, context + 1]`` from anywhere in a text."""
    starts = torch.randint(len(tokens) - SPEC.context - 1, (num,), generator=generator)
    return torch.stack([tokens[start : start + SPEC.context + 1] for start in starts]).long()


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Mean over a batch, in nats."""
    return functional.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def train(moments: Moments, seed: int, steps: int, train_on: torch.Tensor, held_out: torch.Tensor) -> float:
    """The held-out loss after so many steps."""
    model = build_model(SPEC.model_copy(update={"initial_seed": seed}))
    layout = Layout.from_module(model)
    stepper, vector, mean = AdamWStep(layout, TRAINING, moments), layout.new_vector(), layout.new_vector()
    layout.read(model, vector)
    generator = torch.Generator().manual_seed(seed)
    for step in range(steps):
        model.zero_grad()
        torch.autograd.backward(loss_of(model, windows(train_on, BATCH, generator)))
        for entry, parameter in layout.parameters_of(model):
            assert parameter.grad is not None
            mean[entry.offset : entry.end] = parameter.grad.reshape(-1)
        stepper.step(vector, mean, step)
        layout.write(vector, model)
    with torch.no_grad():
        parts = windows(held_out, HELD_OUT, torch.Generator().manual_seed(0)).split(32)  # type: ignore[no-untyped-call]
        return sum(float(loss_of(model, part)) for part in parts) / len(parts)


def state_bytes(moments: Moments) -> float:
    """Of one parameter: what hosts hold, save and hand to newcomers."""
    layout = Layout.from_module(build_model(SPEC))
    stepper = AdamWStep(layout, TRAINING, moments)
    held = layout.new_vector().nbytes + sum(tensor.nbytes for _, tensor in stepper.state_tensors())
    return held / layout.num_parameters


def step_seconds(num_values: int, repeats: int) -> dict[str, float]:
    """CPU time of one step, by what holds the moments."""
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(num_values))
    layout, vector, mean = Layout.from_module(module), torch.randn(num_values), torch.randn(num_values)
    steppers = {moments: AdamWStep(layout, TRAINING, moments) for moments in MOMENTS}
    wrapped = WrappedOptimizer(torch.optim.AdamW(module.parameters(), lr=1e-3), clip_norm=TRAINING.clip_norm)
    of_torch = GradientStep(wrapped, module, layout)
    steps: dict[str, Stepper] = {"torch": of_torch} | {str(name): each for name, each in steppers.items()}
    cases = {name: thread_seconds(partial(stepper.step, vector, mean, 0)) for name, stepper in steps.items()}
    return {name: measured.median for name, measured in alternate(cases, repeats).items()}


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=500)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--values", type=int, default=10_000_000, help="parameters of the step that is timed")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of the step")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    corpus = load_corpus(DataSpec(), SPEC.context, SPEC.vocabulary)
    texts = [torch.from_numpy(part[:20_000_000].copy()) for part in (corpus.train, corpus.held_out)]
    rows, runs, ratios = [], [], []
    for seed in arguments.seeds:
        progress(f"seed {seed}")
        fp32, of_8_bits = (train(moments, seed, arguments.steps, *texts) for moments in MOMENTS)
        ratios.append(of_8_bits / fp32)
        rows.append((f"seed {seed}", f"{fp32:.4f}", f"{of_8_bits:.4f}", f"{ratios[-1]:.4f}"))
        runs.append({"seed": seed, "fp32": fp32, "8bit": of_8_bits, "ratio": ratios[-1]})
    mean = math.prod(ratios) ** (1 / len(ratios))
    seconds = step_seconds(arguments.values, arguments.repeats)
    results = {"steps": arguments.steps, "runs": runs, "ratio": mean, "step_seconds": seconds}
    title = f"held-out loss after {arguments.steps} steps, nats"
    report(title, ("", "fp32", "8 bits", "ratio"), [*rows, ("mean", "", "", f"{mean:.4f}")], results, arguments.json)
    sizes = {moments: state_bytes(moments) for moments in MOMENTS}
    timed = [(name, f"{each:.3f}", f"{each / seconds['torch']:.2f}") for name, each in seconds.items()]
    title = f"CPU seconds of a step of {arguments.values / 1e6:g}M parameters"
    sys.stdout.write(f"\n{format_table((title, '', 'of torch'), timed)}\n")
    sys.stdout.write(f"\nstate: {sizes['fp32']:.2f} bytes a parameter, with 8 bits {sizes['8bit']:.2f}\n")


if __name__ == "__main__":
    main()
