"""What being in a swarm costs a trainer: tokens per second and memory, against the same loop in plain torch.

A lone peer (real daemon, DHT, a certified round every ``--every`` steps with digest, codec and outer step) and a plain
loop train the manifest's default model on the same batches, in two processes that take turns.

    python -m benchmarks.bench_overhead --json results/overhead.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Protocol

import torch

from benchmarks.answers import say
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments, cpu_seconds, paired
from benchmarks.workers import Workers, memory_of_round
from p2ptrain.manifest import Manifest
from p2ptrain.models import build_model, num_parameters
from p2ptrain.training.evaluate import language_model_loss

START_SECONDS = 120.0
TURN_SECONDS = 600.0
KINDS = ("plain torch", "p2ptrain")
ALLOWED_BYTES = 250e6
ALLOWED_BYTES_PER_PARAMETER = 16
GOAL = 0.95
"""Of plain torch's tokens a second."""

Turn = tuple[float, float]
"""Tokens per second, and per CPU second of all the contender's processes."""


def manifest(every: int) -> Manifest:
    """The default, but for the steps between rounds."""
    default = Manifest()
    return default.model_copy(update={"training": default.training.model_copy(update={"every": every})})


def measure(every: int, rounds: int, turns: int, threads: int, log: str | None) -> Section:
    """Memory of each contender alone, then ``turns`` turns of ``rounds`` rounds of each, alternating.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    spec = manifest(every)
    steps = every * rounds
    tokens = steps * spec.training.local_batch * spec.model.context
    common = ["--every", str(every), "--threads", str(threads), "--worker"]
    memory: dict[str, int] = {}

    def start(stack: ExitStack, kind: str) -> Workers:
        workers = stack.enter_context(Workers("benchmarks.bench_overhead", log))
        workers.start(*common, kind).hear(START_SECONDS)
        return workers

    def turn(workers: Workers, count: int = steps) -> Turn:
        processes = workers.processes()
        before = cpu_seconds(processes)
        workers.tell_all(str(count))
        answer = workers.all[0].hear(TURN_SECONDS)
        if answer["rounds"] not in (None, count // every):
            raise RuntimeError(f"{answer['rounds']} rounds instead of {count // every}; run with --log FILE")
        return tokens * count / steps / answer["seconds"], tokens * count / steps / (cpu_seconds(processes) - before)

    for kind in KINDS:
        with ExitStack() as stack:
            alone = start(stack, kind)
            turn(alone, every)
            memory[kind] = memory_of_round(alone, lambda workers=alone: turn(workers, 2 * every)).peak  # type: ignore[misc]
    seen: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        running = {kind: start(stack, kind) for kind in KINDS}
        for number in range(-1, turns):
            # In alternating order, so that a steady drift of the machine's speed favours nobody.
            for kind in KINDS if number % 2 else reversed(KINDS):
                one = turn(running[kind])
                if number >= 0:
                    seen[kind].append(one)
    parameters = num_parameters(spec.model)
    section = Section(
        f"A lone peer against plain torch, {parameters:,} parameters, a round every {every} steps",
        ("", *KINDS, "ratio", "spread"),
        results={"parameters": parameters, "every": every, "peak_pss_bytes": memory},
    )
    for index, (what, goal) in enumerate((("tokens a second", GOAL), ("tokens a CPU second", None))):
        plain, ours = (Measured(tuple(one[index] for one in seen[kind])) for kind in KINDS)
        ratio = paired(ours, plain)
        spread = f"±{100 * ratio.spread:.0f} %"
        section.rows.append((what, f"{plain.median:.0f}", f"{ours.median:.0f}", f"{ratio.median:.3f}", spread))
        section.findings.append(Finding(what, ratio.median, "plain torch", goal, at_least=True, note=spread))
        section.results[what] = {"plain torch": plain.to_json(), "p2ptrain": ours.to_json(), "ratio": ratio.to_json()}
    extra, allowed = memory[KINDS[1]] - memory[KINDS[0]], ALLOWED_BYTES + ALLOWED_BYTES_PER_PARAMETER * parameters
    sizes = (f"{memory[kind] / 1e6:.0f}" for kind in KINDS)
    section.rows.append(("peak PSS (MB)", *sizes, f"{memory[KINDS[1]] / memory[KINDS[0]]:.2f}", ""))
    note = f"{extra / 1e6:.0f} of {allowed / 1e6:.0f} MB"
    section.findings.append(
        Finding("memory beyond plain torch", extra / allowed, "250 MB + 16 bytes a parameter", 1.0, note=note)
    )
    return section


def serve(kind: str, every: int, threads: int) -> None:
    """One trainer: takes as many steps as each line of stdin says."""
    torch.set_num_threads(threads)
    spec = manifest(every)
    model = build_model(spec.model)
    size = (64, spec.training.local_batch, spec.model.context + 1)
    batches = torch.randint(spec.model.vocabulary, size, generator=torch.Generator().manual_seed(1))
    inner = torch.optim.AdamW(
        model.parameters(), spec.training.learning_rate, betas=(0.9, 0.95), weight_decay=spec.training.weight_decay
    )
    with ExitStack() as stack:
        if kind == "p2ptrain":
            from p2ptrain.node.swarm import Swarm

            swarm = stack.enter_context(Swarm.create(spec, listen=("/ip4/127.0.0.1/tcp/0",)))
            shared = swarm.optimizer(model, inner)
            optimizer: _Optimizer = shared

            def rounds() -> int | None:
                return shared.round
        else:
            optimizer = _PlainOptimizer(model, inner, spec.training.clip_norm)

            def rounds() -> int | None:
                return None

        say(ready=True)
        for line in sys.stdin:
            _train(model, batches, int(line), optimizer, rounds)


class _Optimizer(Protocol):
    def step(self) -> object: ...

    def zero_grad(self) -> object: ...


class _PlainOptimizer:
    def __init__(self, model: torch.nn.Module, inner: torch.optim.Optimizer, clip_norm: float) -> None:
        self._model = model
        self._inner = inner
        self._clip_norm = clip_norm

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._clip_norm)
        self._inner.step()

    def zero_grad(self) -> None:
        self._inner.zero_grad()


def _train(
    model: torch.nn.Module,
    batches: torch.Tensor,
    steps: int,
    optimizer: _Optimizer,
    rounds: Callable[[], int | None],
) -> None:
    before, started = rounds(), time.monotonic()
    for number in range(steps):
        language_model_loss(model, batches[number % len(batches)]).backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        optimizer.zero_grad()
    seconds, after = time.monotonic() - started, rounds()
    say(seconds=seconds, rounds=None if after is None or before is None else after - before)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = arguments(__doc__, "one turn of one round")
    parser.add_argument("--every", type=int, default=16, help="steps between rounds")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn")
    parser.add_argument("--turns", type=int, default=6, help="turns of each contender")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each contender")
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.worker is not None:
        serve(options.worker, options.every, options.threads)
        return 0
    if options.quick:
        options.rounds = options.turns = 1
    measured = partial(measure, options.every, options.rounds, options.turns, options.threads, options.log)
    return run("overhead", {"a lone peer": measured}, options)


if __name__ == "__main__":
    sys.exit(main())
