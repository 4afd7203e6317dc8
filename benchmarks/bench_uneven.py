"""Machines of different speeds in one swarm (``every = H``): what it does of what each could do alone, and the loss.

In virtual time the product's synchronisation trains at speeds of 1:1:1, 1:1:8 and 1:2:4:8. A ratio compares the tokens
of committed rounds with the sum of what the trainers would do alone in the same time. With ``--real`` peers are
processes with real daemons, whose steps sleep as long as their speed asks: no process has less of a core than it
needs, so the ratio does not depend on how well the machine keeps CPU quotas.

With ``--quotas`` peers are processes with real daemons that compute, under CPU quotas of 0.1, 0.1 and 0.8 of a core. A
quota holds for all that a peer does: training, event loop and daemon. Each peer first trains without any swarm, under
the same quota, and the ratio is to the sum of these speeds. Needs root.

Pipelines of two stages are measured in virtual time too: three hosts of each stage, even and uneven ones that together
do as much, against what the hosts of a stage could do without pause.

The loss compares a swarm at 1:1:8 with one of equal peers, in which each does H steps a round as with a barrier: the
product's trainer, in virtual time, from the same parameters on the same text, after as many tokens::

    python -m benchmarks.bench_uneven --json results/uneven.json
    python -m benchmarks.bench_uneven --real --quick
    python -m benchmarks.bench_uneven --quotas
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.answers import say
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments
from benchmarks.quotas import CpuQuotas
from benchmarks.workers import Worker, Workers
from p2ptrain.manifest import Manifest
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.training.evaluate import held_out_loss

SPEEDS = ((1.0, 1.0, 1.0), (1.0, 1.0, 8.0), (1.0, 2.0, 4.0, 8.0))
LEAST = 0.95
EVERY = 32
LOSS_EVERY = 16
REAL_UNIT_SECONDS = 1.0
TOKENS_PER_STEP = 10
STAGE_SPEEDS = ((10 / 3, 10 / 3, 10 / 3), (1.0, 1.0, 8.0))
STAGE_MICROBATCHES, STAGE_AT_ONCE = 384, 24
QUOTAS = (0.1, 0.1, 0.8)
"""Of a core: together one, so that two cores are enough."""
QUOTA_WIDTH, QUOTA_LAYERS, QUOTA_BATCH = 512, 4, 4096
"""A step of about 0.3 CPU seconds; 1M parameters."""
ALONE_SECONDS, ALONE_STEPS = 20.0, 8
WAIT_SECONDS = 600.0


def in_virtual_time(speeds: Sequence[float], seeds: Sequence[int], rounds: int) -> Measured:
    """Ratios of one swarm, a seed each."""
    from tests.sim.test_uneven import committed_ratio

    return Measured(
        tuple(simulate(lambda network: committed_ratio(network, speeds, seed, rounds, EVERY), seed) for seed in seeds)  # noqa: B023
    )


def of_stages(speeds: Sequence[float], microbatches: int) -> float:
    """The ratio of a pipeline, in virtual time."""
    from tests.sim.test_uneven_stages import done_ratio

    return simulate(lambda network: done_ratio(network, speeds, microbatches, STAGE_AT_ONCE), 1)


def real(speeds: Sequence[float], rounds: int, log: str | None) -> float:
    """The ratio of a swarm of processes.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    with ExitStack() as stack:
        workers = stack.enter_context(Workers("benchmarks.bench_uneven", log))
        link = ""
        for speed in speeds:
            worker = workers.start("--worker", str(speed))
            link = _open(worker, link)
        workers.tell_all(str(rounds))
        answers = [worker.hear(WAIT_SECONDS) for worker in workers.all]
    tokens, seconds = answers[0]["tokens"], answers[0]["seconds"]
    return float(tokens / (sum(speeds) / REAL_UNIT_SECONDS * TOKENS_PER_STEP * seconds))


def _open(worker: Worker, link: str) -> str:
    """Have a worker open its swarm; return the link for the others."""
    worker.tell(link)
    return worker.hear(WAIT_SECONDS)["link"] or link


def under_quotas(cores: Sequence[float], rounds: int, log: str | None) -> dict[str, Any]:
    """What a swarm of processes with CPU quotas does of the sum of what each did alone.

    Raises:
        RuntimeError: A process failed or took too long, or there are no quotas here.
    """
    with ExitStack() as stack:
        quotas = stack.enter_context(CpuQuotas())
        workers = stack.enter_context(Workers("benchmarks.bench_uneven", log))
        limits = []
        for _ in cores:
            worker = workers.start("--worker", "0")
            limits.append(quotas.make())
            limits[-1].add(worker.process.pid)
        for worker in workers.all:
            worker.hear(WAIT_SECONDS)
        for limit, each in zip(limits, cores, strict=True):
            limit.limit(each)
        workers.tell_all("alone")
        alone = [worker.hear(WAIT_SECONDS)["tokens_per_second"] for worker in workers.all]
        for limit in limits:  # Imports and the daemons' start would take minutes.
            limit.limit(None)
        link = ""
        for worker in workers.all:
            link = _open(worker, link)
        for limit, each in zip(limits, cores, strict=True):
            limit.limit(each)
        workers.tell_all(str(rounds))
        idle, began = psutil.cpu_times().idle, time.monotonic()
        answers = [worker.hear(WAIT_SECONDS) for worker in workers.all]
        idle = (psutil.cpu_times().idle - idle) / (time.monotonic() - began)
    tokens, seconds = answers[0]["tokens"], answers[0]["seconds"]
    return {"idle": idle, "ratio": tokens / seconds / sum(alone), "alone": alone, "tokens": tokens, "seconds": seconds}


def make_step(model: torch.nn.Module, step_seconds: float) -> Callable[[], None]:
    """Return a function that computes a gradient: in ``step_seconds``, or with real work if that is 0."""
    is_asleep = step_seconds > 0
    batch = torch.randn(4, 16) if is_asleep else torch.randn(QUOTA_BATCH, QUOTA_WIDTH)

    def step() -> None:
        began = time.monotonic()
        model(batch).square().mean().backward()
        if is_asleep:
            time.sleep(max(0.0, step_seconds - (time.monotonic() - began)))

    return step


def speed_alone(step: Callable[[], None], inner: torch.optim.Optimizer) -> float:
    """Tokens a second of an ordinary training loop."""
    step()
    inner.zero_grad()
    began, steps = time.monotonic(), 0
    while (seconds := time.monotonic() - began) < ALONE_SECONDS or steps < ALONE_STEPS:
        step()
        inner.step()
        inner.zero_grad()
        steps += 1
    return steps * TOKENS_PER_STEP / seconds


def serve(speed: float) -> None:
    """One trainer: joins, and says when so many rounds have been committed, after one that is not measured.

    Args:
        speed: In steps of `REAL_UNIT_SECONDS`; 0 for steps that compute. Such a trainer is measured alone first.
    """
    from p2ptrain.node.swarm import Swarm

    torch.set_num_threads(1)
    torch.manual_seed(0)
    width, layers = (16, 1) if speed else (QUOTA_WIDTH, QUOTA_LAYERS)
    model = torch.nn.Sequential(*(torch.nn.Linear(width, width) for _ in range(layers)))
    inner = torch.optim.SGD(model.parameters(), 0.01)
    step = make_step(model, REAL_UNIT_SECONDS / speed if speed else 0.0)
    if not speed:
        say(ready=True)
        sys.stdin.readline()
        say(tokens_per_second=speed_alone(step, inner))
    manifest = Manifest.model_validate(
        {"name": "uneven", "model": {"family": "custom"}, "data": {"source": "custom"}, "training": {"every": EVERY}}
    )
    listen = ("/ip4/127.0.0.1/tcp/0",)
    link = sys.stdin.readline().strip()
    with ExitStack() as stack:
        opened = Swarm.join(link, listen=listen) if link else Swarm.create(manifest, listen=listen)
        swarm = stack.enter_context(opened)
        optimizer = swarm.optimizer(model, inner, tokens_per_step=TOKENS_PER_STEP)
        say(link="" if link else swarm.link)
        rounds = int(sys.stdin.readline())
        first = optimizer.round + 1
        began, before, is_said = 0.0, 0, False
        while not is_said or sys.stdin.readline():
            step()
            optimizer.step()
            optimizer.zero_grad()
            if not began and optimizer.round >= first:
                began, before, first = time.monotonic(), optimizer.synchronizer.head.tokens, optimizer.round
            if began and not is_said and optimizer.round >= first + rounds:
                is_said = True
                say(tokens=optimizer.synchronizer.head.tokens - before, seconds=time.monotonic() - began)


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
                sync = trainer.optimizer.synchronizer
                if sync.head.tokens >= tokens:
                    if not losses:
                        sync.state.layout.write(sync.state.vector, trainer.optimizer.module)
                        losses.append(
                            held_out_loss(trainer.optimizer.module, trainer._corpus.held_out, model.context).loss
                        )
                    trainer.stop()

            swarm.before_step = look
            for index, speed in enumerate(speeds):
                swarm.step_seconds[f"t{index}"] = 10.0 / speed
                swarm.start(f"t{index}", 10_000)
            for task in list(swarm.tasks.values()):
                await task

    simulate(main, seed)
    return losses[0]


def quotas(rounds: int, log: str | None) -> Section:
    """Processes with CPU quotas."""
    found = under_quotas(QUOTAS, rounds, log)
    speeds = " + ".join(f"{tokens / TOKENS_PER_STEP:.3f}" for tokens in found["alone"])
    cores = " ".join(f"{each:g}" for each in QUOTAS)
    return Section(
        "Processes under CPU quotas", ("cores", "steps/s alone", "seconds", "idle cores"),
        [(cores, speeds, f"{found['seconds']:.0f}", f"{found['idle']:.2f}")],
        [Finding(f"processes of {cores} cores", found["ratio"], "the sum of each alone", LEAST, at_least=True)], found,
    )  # fmt: skip


def speeds(seeds: Sequence[int], rounds: int, real_rounds: int, log: str | None) -> Section:
    """Swarms of all speeds in virtual time; with ``real_rounds``, of processes too."""
    section = Section("Tokens of committed rounds, of the sum of what each does alone", ("speeds", "median", "least"))
    for each in SPEEDS:
        name = _name(each)
        ratio = in_virtual_time(each, seeds, rounds)
        section.rows.append((f"{name}, virtual time", f"{ratio.median:.3f}", f"{min(ratio.values):.3f}"))
        section.results[f"virtual {name}"] = ratio.to_json()
        section.findings.append(Finding(f"{name}, virtual time", ratio.median, "the sum", LEAST, at_least=True))
        if real_rounds:
            measured = real(each, real_rounds, log)
            section.results[f"real {name}"] = measured
            section.findings.append(Finding(f"{name}, processes", measured, "the sum", LEAST, at_least=True))
    return section


def losses(seeds: Sequence[int], rounds: int) -> Section:
    """The loss of uneven machines beside that of equal ones, after the tokens that equal ones take in these rounds."""
    tokens = 3 * LOSS_EVERY * 4 * 32 * rounds
    with tempfile.TemporaryDirectory() as folder:
        equal, uneven = (
            Measured(tuple(loss_after(each, tokens, Path(folder), seed) for seed in seeds)) for each in SPEEDS[:2]
        )
    return Section(
        f"Held-out loss after {tokens} tokens", ("1:1:1", "1:1:8"), [(equal, uneven)],
        [Finding("loss at 1:1:8", uneven.median / equal.median, "that at 1:1:1", 1.0)],
        {"tokens": tokens, "1:1:1": equal.to_json(), "1:1:8": uneven.to_json()},
    )  # fmt: skip


def stages(microbatches: int) -> Section:
    """Pipelines of even and uneven hosts."""
    section = Section(f"Two stages, {microbatches} microbatches a round")
    for each in STAGE_SPEEDS:
        name, done = _name(each), of_stages(each, microbatches)
        section.results[name] = done
        section.findings.append(Finding(f"hosts of {name}", done, "what they can without pause", at_least=True))
    return section


def _name(speeds: Sequence[float]) -> str:
    return ":".join(f"{speed:.3g}" for speed in speeds)


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "fewer seeds and rounds")
    parser.add_argument("--real", action="store_true", help="also processes with real daemons")
    parser.add_argument("--quotas", action="store_true", help="only processes with CPU quotas")
    parser.add_argument("--log", metavar="FILE", help="where processes write their errors")
    parser.add_argument("--worker", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.worker is not None:
        serve(options.worker)
        return 0
    real_rounds = 2 if options.quick else 4
    seeds, rounds = ((1,), 2) if options.quick else (range(1, 9), 8)
    parts: dict[str, Callable[[], Section]] = {
        "speeds": partial(speeds, seeds, rounds, real_rounds if options.real else 0, options.log),
        "loss": partial(losses, seeds, 4 if options.quick else 16),
        "stages": partial(stages, STAGE_MICROBATCHES // 4 if options.quick else STAGE_MICROBATCHES),
    }
    if options.quotas:
        parts = {"quotas": partial(quotas, real_rounds, options.log)}
    return run("uneven", parts, options)


if __name__ == "__main__":
    sys.exit(main())
