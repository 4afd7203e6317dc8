"""Machines of different speeds in one swarm (``every = H``): what it does of what each could do alone, and the loss.

In virtual time the product's synchronisation trains at speeds of 1:1:1, 1:1:8 and 1:2:4:8. A ratio compares the tokens
of committed rounds with the sum of what the trainers would do alone in the same time. With ``--real`` peers are
processes with real daemons, whose steps sleep as long as their speed asks: no process has less of a core than it
needs, so the ratio does not depend on how well the machine keeps CPU quotas.

The loss compares a swarm at 1:1:8 with one of equal peers, in which each does H steps a round as with a barrier: the
product's trainer, in virtual time, from the same parameters on the same text, after as many tokens::

    python -m benchmarks.bench_uneven --json results/uneven.json
    python -m benchmarks.bench_uneven --real --quick
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from benchmarks.answers import say
from benchmarks.harness import Measured, exit_on_signals, report
from benchmarks.workers import Workers
from p2ptrain.manifest import Manifest
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.training.evaluate import held_out_loss

SPEEDS = ((1.0, 1.0, 1.0), (1.0, 1.0, 8.0), (1.0, 2.0, 4.0, 8.0))
LEAST = 0.95
EVERY = 32
LOSS_EVERY = 16
REAL_UNIT_SECONDS = 1.0
TOKENS_PER_STEP = 10
WAIT_SECONDS = 600.0


def in_virtual_time(speeds: Sequence[float], seeds: Sequence[int], rounds: int) -> Measured:
    """Ratios of one swarm, a seed each."""
    from tests.sim.test_uneven import committed_ratio

    return Measured(tuple(committed_ratio(list(speeds), seed, rounds, EVERY) for seed in seeds))


def real(speeds: Sequence[float], rounds: int, log: str | None) -> float:
    """The ratio of a swarm of processes.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(Workers("benchmarks.bench_uneven", log))
        link = ""
        for speed in speeds:
            link = workers.start("--worker", str(speed), "--link", link).hear(WAIT_SECONDS)["link"] or link
        workers.tell_all(str(rounds))
        answers = [worker.hear(WAIT_SECONDS) for worker in workers.all]
    tokens, seconds = answers[0]["tokens"], answers[0]["seconds"]
    return float(tokens / (sum(speeds) / REAL_UNIT_SECONDS * TOKENS_PER_STEP * seconds))


def serve(speed: float, link: str) -> None:
    """One trainer: joins, and says when so many rounds have been committed, after one that is not measured."""
    from p2ptrain.node.swarm import Swarm

    torch.set_num_threads(1)
    model = torch.nn.Linear(16, 16)
    manifest = Manifest.model_validate(
        {"name": "uneven", "model": {"family": "custom"}, "data": {"source": "custom"}, "training": {"every": EVERY}}
    )
    listen = ("/ip4/127.0.0.1/tcp/0",)
    with ExitStack() as stack:
        opened = Swarm.join(link, listen=listen) if link else Swarm.create(manifest, listen=listen)
        swarm = stack.enter_context(opened)
        optimizer = swarm.optimizer(model, torch.optim.SGD(model.parameters(), 0.01), tokens_per_step=TOKENS_PER_STEP)
        say(link="" if link else swarm.link)
        rounds = int(sys.stdin.readline())
        first = optimizer.round + 1
        began, before, is_said = 0.0, 0, False
        while not is_said or sys.stdin.readline():
            step_began = time.monotonic()
            model(torch.randn(4, 16)).square().mean().backward()
            time.sleep(max(0.0, REAL_UNIT_SECONDS / speed - (time.monotonic() - step_began)))
            optimizer.step()
            optimizer.zero_grad()
            if not began and optimizer.round >= first:
                began, before, first = time.monotonic(), optimizer._synchronizer.head.tokens, optimizer.round
            if began and not is_said and optimizer.round >= first + rounds:
                is_said = True
                say(tokens=optimizer._synchronizer.head.tokens - before, seconds=time.monotonic() - began)


def loss_after(speeds: Sequence[float], tokens: int, folder: Path, seed: int) -> float:
    """Held-out loss of the product's trainers after so many tokens of the whole swarm, in nats a token."""
    import pytest

    from tests.support.sim.product_peers import ProductSwarm, small_manifest, use_virtual_time

    text = folder / "text.txt"
    if not text.exists():
        text.write_text("".join(f"{number} bottles of beer, {number * 7 % 13} of them\n" for number in range(3000)))
    training = {"every": LOSS_EVERY, "local_batch": 4, "learning_rate": 3e-3}
    manifest = small_manifest(text, training)
    model = manifest.model.model_copy(update={"layers": 2, "hidden": 32, "intermediate": 64, "context": 32})
    manifest = manifest.model_copy(update={"model": model})
    losses: list[float] = []

    async def main(network: SimulatedNetwork) -> None:
        with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory(dir=folder) as runs:
            swarm = ProductSwarm(network, manifest, Path(runs))
            use_virtual_time(patch, swarm)

            def look(name: str, trainer: Any) -> None:
                sync = trainer._synchronizer
                if sync.head.tokens >= tokens:
                    if not losses:
                        sync.state.layout.write(sync.state.vector, trainer._module)
                        losses.append(held_out_loss(trainer._module, trainer._corpus.held_out, model.context).loss)
                    trainer.stop()

            swarm.before_step = look
            for index, speed in enumerate(speeds):
                swarm.step_seconds[f"t{index}"] = 10.0 / speed
                swarm.start(f"t{index}", 10_000)
            for task in list(swarm.tasks.values()):
                await task

    simulate(main, seed)
    return losses[0]


def main() -> int:
    """Print one ratio for each swarm; fail if one is too small, or the loss too great."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true", help="also processes with real daemons")
    parser.add_argument("--quick", action="store_true", help="fewer seeds and rounds")
    parser.add_argument("--json", metavar="FILE", help="write the results there")
    parser.add_argument("--log", metavar="FILE", help="where processes write their errors")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    parser.add_argument("--link", default="", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        serve(options.worker, options.link)
        return 0
    exit_on_signals()
    seeds, rounds = ((1, 2), 4) if options.quick else (range(1, 9), 8)
    rows, results = [], dict[str, Any]()
    for speeds in SPEEDS:
        name = ":".join(f"{speed:g}" for speed in speeds)
        ratio = in_virtual_time(speeds, seeds, rounds)
        results[f"virtual {name}"] = ratio.to_json()
        rows.append([name, "virtual time", f"{ratio.median:.3f}", f"{min(ratio.values):.3f}"])
        if options.real:
            measured = real(speeds, 2 if options.quick else 4, options.log)
            results[f"real {name}"] = measured
            rows.append([name, "processes", f"{measured:.3f}", ""])
    with tempfile.TemporaryDirectory() as folder:
        tokens = 3 * LOSS_EVERY * 4 * 32 * (8 if options.quick else 16)
        equal, uneven = (
            Measured(tuple(loss_after(speeds, tokens, Path(folder), seed) for seed in seeds)) for speeds in SPEEDS[:2]
        )
    results["loss"] = {"tokens": tokens, "1:1:1": equal.to_json(), "1:1:8": uneven.to_json()}
    rows.append(["1:1:8", "loss / that of 1:1:1", f"{uneven.median / equal.median:.3f}", ""])
    report("uneven", ["speeds", "measured", "median", "least"], rows, results, options.json)
    ratios = [float(row[2]) for row in rows[:-1]]
    return 0 if min(ratios) >= LEAST else 1


if __name__ == "__main__":
    sys.exit(main())
