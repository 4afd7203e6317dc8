"""Does a real swarm with ``every = 1`` learn as well as one process with the same global batch, from as many tokens?

For each seed, ``p2ptrain up`` runs a whole swarm (real processes, real daemons, int8 gradients) for some rounds. Then
one plain torch process trains the same model from the same parameters on the same text, with the same optimizer and
schedule and the global batch at once, until it has used as many tokens as the swarm's rounds contain. Both models are
evaluated on the same held-out windows::

    python -m benchmarks.bench_equal_tokens --seeds 1 2 3
"""

from __future__ import annotations

import argparse
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from benchmarks.bench_convergence import Worker
from benchmarks.harness import Measured, report
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.models import build_model
from p2ptrain.network.identity import Identity
from p2ptrain.training.checkpoint import load_newest_valid
from p2ptrain.training.data import Sampler, advance
from p2ptrain.training.evaluate import held_out_loss
from p2ptrain.training.layout import Layout
from p2ptrain.training.text import Corpus, load_corpus

SWARM_SECONDS = 1800.0
END_SECONDS = 60.0
WINDOWS = 512


@dataclass(frozen=True)
class Comparison:
    """Held-out losses in nats a token, after ``tokens`` tokens each."""

    seed: int
    rounds: int
    tokens: int
    loss_swarm: float
    loss_alone: float


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
            signed = SignedManifest.from_bytes((run_dir / "manifest.bin").read_bytes(), None, verifier)
        manifest = signed.manifest
        found = load_newest_valid(run_dir / "trainer-1" / "checkpoints", manifest.digest)
        if found is None:
            raise RuntimeError("the swarm left no checkpoint")
    corpus = load_corpus(manifest.data, manifest.model.context, manifest.model.vocabulary)
    model = build_model(manifest.model)
    Layout.from_module(model).write(found.tensors[0][1], model)
    swarm = evaluate(model, manifest, corpus)
    alone = evaluate(train_alone(manifest, corpus, found.head.tokens), manifest, corpus)
    return Comparison(seed, found.head.round, found.head.tokens, swarm, alone)


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


def train_alone(manifest: Manifest, corpus: Corpus, tokens: int) -> torch.nn.Module:
    """The manifest's model after ``tokens`` tokens in one process, a global batch a step."""
    batch = manifest.training.global_batch
    worker = Worker(manifest.model, manifest.training)
    sampler = Sampler(corpus.train, manifest.model.context, manifest.data.seed)
    cursor = 0
    for step in range(max(1, round(tokens / (batch * manifest.model.context)))):
        worker.step(torch.from_numpy(sampler.batch(cursor, ["alone"], "alone", step, 0, batch)), step)
        cursor = advance(cursor, [batch])
    return worker.model


def evaluate(model: torch.nn.Module, manifest: Manifest, corpus: Corpus) -> float:
    """Nats a token on the same held-out windows for everybody."""
    return held_out_loss(model, corpus.held_out, manifest.model.context, max_windows=WINDOWS).loss


def main(arguments: Sequence[str] | None = None) -> None:
    """Compare for each seed and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--peers", type=int, default=3)
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    options = parser.parse_args(arguments)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `run_swarm` ends what it started
    found = [compare(seed, options.rounds, options.peers) for seed in options.seeds]
    ratio = Measured(tuple(one.loss_swarm / one.loss_alone for one in found))
    rows = [
        (one.seed, one.rounds, f"{one.tokens:,}", f"{one.loss_swarm:.4f}", f"{one.loss_alone:.4f}", f"{value:.4f}")
        for one, value in zip(found, ratio.values, strict=True)
    ]
    results = {"loss_ratio": ratio.to_json(), "runs": [asdict(one) for one in found]}
    title = f"Held-out loss of a swarm of {options.peers} against one process, at equal tokens"
    report(title, ("seed", "rounds", "tokens", "swarm", "alone", "ratio"), rows, results, options.json)


if __name__ == "__main__":
    main()
