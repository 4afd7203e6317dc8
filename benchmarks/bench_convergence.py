"""Does a swarm learn as well as one process from the same number of tokens?

Emulates ``--workers`` trainers that synchronise every H inner steps (an exact mean: no codec, no network) and compares
their held-out loss with one process that takes the same number of steps with the same global batch, at the best of
several learning rates. Everything but the named options is the manifest's default, so this also shows what
``p2ptrain up`` may expect at best. Run it with::

    python -m benchmarks.bench_convergence --tokens 2000000
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median

import torch
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from benchmarks.harness import machine
from p2ptrain.manifest import Manifest, ModelSpec, TrainingSpec
from p2ptrain.models import build_model, num_parameters
from p2ptrain.training.data import Sampler, advance
from p2ptrain.training.evaluate import held_out_loss, language_model_loss
from p2ptrain.training.learning_rate import learning_rate_factor
from p2ptrain.training.text import Corpus, load_corpus


@dataclass(frozen=True)
class Result:
    """One run: held-out losses in nats per token, tokens of all workers together, and tokens per CPU second."""

    name: str
    seed: int
    learning_rate: float
    loss_before: float
    loss_after: float
    tokens: int
    tokens_per_second: float


class Worker:
    """One trainer: a model and its own AdamW."""

    def __init__(self, model: ModelSpec, training: TrainingSpec) -> None:
        self.model = build_model(model)
        self.training = training
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(),
            training.learning_rate,
            betas=(0.9, 0.95),  # as every trainer has
            weight_decay=training.weight_decay,
            fused=True,
        )

    def step(self, samples: torch.Tensor, step: int) -> None:
        """One inner step on ``samples``, ``[batch, context + 1]``."""
        factor = learning_rate_factor(step, warmup_steps=self.training.warmup_steps)
        self.optimizer.param_groups[0]["lr"] = self.training.learning_rate * factor
        self.optimizer.zero_grad()
        language_model_loss(self.model, samples).backward()  # type: ignore[no-untyped-call]
        if self.training.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_norm)
        self.optimizer.step()


def train(
    name: str, model: ModelSpec, training: TrainingSpec, corpus: Corpus, seed: int, workers: int, tokens: int
) -> Result:
    """Train with ``workers`` emulated trainers (1: no outer steps at all) on ``tokens`` tokens in all."""
    peers = [f"peer{index}" for index in range(workers)]
    swarm = [Worker(model, training) for _ in peers]
    sampler = Sampler(corpus.train, model.context, seed)
    before = held_out_loss(swarm[0].model, corpus.held_out, model.context, max_windows=256).loss
    shared = parameters_to_vector(swarm[0].model.parameters()).detach()
    momentum = torch.zeros_like(shared)
    per_step = workers * training.local_batch * model.context
    num_rounds = max(1, round(tokens / (per_step * training.every)))
    started = time.process_time()
    cursor = 0
    for number in range(num_rounds):
        for rank, (peer, worker) in enumerate(zip(peers, swarm, strict=True)):
            for step in range(training.every):
                first = step * training.local_batch
                samples = sampler.batch(cursor, (rank, workers), peer, number, first, training.local_batch)
                worker.step(torch.from_numpy(samples), number * training.every + step)
        cursor = advance(cursor, [training.every * training.local_batch] * workers)
        if workers > 1:
            outer_step(shared, momentum, swarm, training)
    seconds = time.process_time() - started
    after = held_out_loss(swarm[0].model, corpus.held_out, model.context, max_windows=256).loss
    used = num_rounds * training.every * per_step
    return Result(name, seed, training.learning_rate, before, after, used, used / seconds)


@torch.no_grad()
def outer_step(shared: torch.Tensor, momentum: torch.Tensor, swarm: list[Worker], training: TrainingSpec) -> None:
    """Average the workers' parameters and take the outer step of `TrainingSpec` on ``shared``, in place."""
    mean = torch.stack([parameters_to_vector(worker.model.parameters()) for worker in swarm]).mean(dim=0)
    if training.outer == "average":
        shared.copy_(mean)
    else:
        gradient = shared - mean
        momentum.mul_(training.outer_momentum).add_(gradient)
        shared.sub_(training.outer_learning_rate * (gradient + training.outer_momentum * momentum))
    for worker in swarm:
        vector_to_parameters(shared.clone(), worker.model.parameters())


def main(arguments: list[str] | None = None) -> int:
    """Run the comparison for each seed and print a table and, as the last line, JSON."""
    defaults = Manifest().training
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--tokens", type=int, default=2_000_000, help="of all workers together")
    parser.add_argument("--every", type=int, default=defaults.every)
    parser.add_argument("--outer", choices=("nesterov", "average"), default=defaults.outer)
    parser.add_argument("--learning-rate", type=float, default=defaults.learning_rate)
    parser.add_argument("--reference-factors", type=float, nargs="+", default=[0.5, 1.0, 2.0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    torch.set_num_threads(1)
    results, ratios = [], []
    for seed in options.seeds:
        model = Manifest().model.model_copy(update={"initial_seed": seed})
        corpus = load_corpus(Manifest().data, model.context, model.vocabulary)
        changes = {"every": options.every, "outer": options.outer, "learning_rate": options.learning_rate}
        training = defaults.model_copy(update=changes)
        swarm = train("swarm", model, training, corpus, seed, options.workers, options.tokens)
        report(swarm)
        references = []
        for factor in options.reference_factors:
            changes = {
                "local_batch": options.workers * training.local_batch,
                "learning_rate": options.learning_rate * factor,
            }
            alone = training.model_copy(update=changes)
            references.append(train("one process", model, alone, corpus, seed, 1, options.tokens))
            report(references[-1])
        best = min(result.loss_after for result in references)
        ratios.append(swarm.loss_after / best)
        results += [swarm, *references]
    summary = {
        "benchmark": "convergence",
        "parameters": num_parameters(Manifest().model),
        "workers": options.workers,
        "every": options.every,
        "loss_ratio_median": median(ratios),
        "loss_ratio_spread": [min(ratios), max(ratios)],
        "runs": [asdict(result) for result in results],
    }
    sys.stdout.write(f"held-out loss, swarm / best single process: {median(ratios):.4f}\n{json.dumps(summary)}\n")
    if options.json:
        payload = {"benchmark": "convergence", "machine": machine(), "results": summary}
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        Path(options.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
    return 0


def report(result: Result) -> None:
    """Print one line of the table."""
    sys.stdout.write(
        f"{result.name:12} seed {result.seed}  lr {result.learning_rate:.4f}  {result.tokens / 1e6:5.2f}M tokens  "
        f"loss {result.loss_before:.3f} -> {result.loss_after:.3f}  {result.tokens_per_second:7.0f} tokens/CPU s\n"
    )
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
