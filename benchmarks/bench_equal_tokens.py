"""Does a real swarm with ``every = 1`` learn as well as one process with the same global batch, from as many tokens?

For each seed, ``p2ptrain up`` runs a whole swarm (real processes, real daemons, int8 gradients) for some rounds. Then
one plain torch process trains the same model from the same parameters on the same text, with the same optimizer and
schedule and the global batch at once. Both are evaluated on the same held-out windows after as many tokens, at each of
the swarm's last checkpoints: at this learning rate the loss of either goes up and down by some percent from step to
step, and with the order of the data, so trust the median of several seeds::

    python -m benchmarks.bench_equal_tokens --seeds 1 2 3
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments
from p2ptrain.manifest import Manifest, ModelSpec, SignedManifest, TrainingSpec
from p2ptrain.models import build_model
from p2ptrain.network.identity import Identity
from p2ptrain.training.checkpoints.files import load_checkpoint
from p2ptrain.training.data.corpus import Corpus, load_corpus
from p2ptrain.training.data.windows import Sampler, advance
from p2ptrain.training.evaluate import held_out_loss, language_model_loss
from p2ptrain.training.learning_rate import manifest_schedule
from p2ptrain.training.state.layout import Layout

SWARM_SECONDS = 1800.0
END_SECONDS = 60.0
WINDOWS = 512
GOAL = 1.02


@dataclass(frozen=True)
class Comparison:
    """Held-out losses in nats a token, one for each checkpoint, after ``tokens`` tokens of either."""

    seed: int
    rounds: int
    tokens: tuple[int, ...]
    losses_swarm: tuple[float, ...]
    losses_alone: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Mean loss of the swarm over that of one process."""
        return sum(self.losses_swarm) / sum(self.losses_alone)


class Worker:
    """One trainer in plain torch: a model and its AdamW."""

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
        self.optimizer.param_groups[0]["lr"] = self.training.learning_rate * manifest_schedule(self.training)(step)
        self.optimizer.zero_grad()
        language_model_loss(self.model, samples).backward()  # type: ignore[no-untyped-call]
        if self.training.clip_norm:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.training.clip_norm)
        self.optimizer.step()


def compare(seed: int, rounds: int, peers: int) -> Comparison:
    """Train a swarm and a single process, and evaluate both.

    Raises:
        RuntimeError: The swarm failed or took too long.
    """
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        options = ["--rounds", str(rounds), "--peers", str(peers), "--run-dir", str(run_dir), "--no-monitor"]
        settings = ["--set", f"model.initial_seed={seed}", "--set", f"data.seed={seed}"]
        run_swarm([sys.executable, "-m", "p2ptrain", "up", *options, *settings])
        with Identity.create_or_load(run_dir / "verifier.key") as verifier:
            manifest = SignedManifest.from_bytes((run_dir / "manifest.bin").read_bytes(), None, verifier).manifest
        checkpoints = [load_checkpoint(path) for path in sorted((run_dir / "trainer-1" / "checkpoints").glob("0*"))]
    corpus = load_corpus(manifest.data, manifest.model.context, manifest.model.vocabulary)
    model = build_model(manifest.model)
    layout = Layout.from_module(model)
    swarm = []
    for checkpoint in checkpoints:
        layout.write(checkpoint.tensors[0][1], model)
        swarm.append(evaluate(model, manifest, corpus))
    tokens = tuple(checkpoint.head.tokens for checkpoint in checkpoints)
    return Comparison(
        seed, checkpoints[-1].head.round, tokens, tuple(swarm), tuple(train_alone(manifest, corpus, tokens))
    )


def run_swarm(command: Sequence[str]) -> None:
    """Run ``p2ptrain up``; it is told to end in good order when this process is interrupted."""
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        try:
            _, errors = process.communicate(timeout=SWARM_SECONDS)
        except BaseException:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
            raise
    if process.returncode != 0:
        raise RuntimeError(f"p2ptrain up ended with {process.returncode}: {errors[-500:]}")


def train_alone(manifest: Manifest, corpus: Corpus, tokens: Sequence[int]) -> Iterator[float]:
    """Losses of one process that takes a global batch a step, after each of these numbers of tokens."""
    batch = manifest.training.global_batch
    due = [max(1, round(count / (batch * manifest.model.context))) for count in tokens]
    worker = Worker(manifest.model, manifest.training)
    sampler = Sampler(corpus.train, manifest.model.context, manifest.data.seed)
    cursor = 0
    for step in range(due[-1]):
        worker.step(torch.from_numpy(sampler.batch(cursor, (0, 1), "alone", step, 0, batch)), step)
        cursor = advance(cursor, [batch])
        for _ in range(due.count(step + 1)):
            yield evaluate(worker.model, manifest, corpus)


def evaluate(model: torch.nn.Module, manifest: Manifest, corpus: Corpus) -> float:
    """Nats a token on the same held-out windows for everybody."""
    return held_out_loss(model, corpus.held_out, manifest.model.context, max_windows=WINDOWS).loss


def show(losses: Sequence[float]) -> str:
    """Losses for people."""
    return " ".join(f"{loss:.3f}" for loss in losses)


def compare_all(seeds: Sequence[int], rounds: int, peers: int) -> Section:
    """All seeds."""
    found = [compare(seed, rounds, peers) for seed in seeds]
    ratio = Measured(tuple(one.ratio for one in found))
    return Section(
        f"Held-out loss of a swarm of {peers} against one process, at equal tokens",
        ("seed", "rounds", "tokens", "swarm", "alone", "ratio"),
        [
            (one.seed, one.rounds, one.tokens[-1], show(one.losses_swarm), show(one.losses_alone), f"{one.ratio:.4f}")
            for one in found
        ],
        [Finding("held-out loss", ratio.median, "one process", GOAL, note=f"±{100 * ratio.spread:.0f} %")],
        {"loss_ratio": ratio.to_json(), "runs": [asdict(one) for one in found]},
    )


def main(given: Sequence[str] | None = None) -> int:
    """Compare for each seed and report."""
    parser = arguments(__doc__, "one seed, 10 rounds")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--peers", type=int, default=3)
    options = parser.parse_args(given)
    if options.quick:
        options.seeds, options.rounds = [1], 10
    return run("equal_tokens", {"seeds": partial(compare_all, options.seeds, options.rounds, options.peers)}, options)


if __name__ == "__main__":
    sys.exit(main())
