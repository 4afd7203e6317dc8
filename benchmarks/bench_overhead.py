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
from typing import Protocol

import torch

from benchmarks.answers import say
from benchmarks.harness import Measured, cpu_seconds, exit_on_signals, report
from benchmarks.workers import Workers, memory_of_round
from p2ptrain.manifest import Manifest
from p2ptrain.models import build_model, num_parameters
from p2ptrain.training.evaluate import language_model_loss

START_SECONDS = 120.0
TURN_SECONDS = 600.0
KINDS = ("plain torch", "p2ptrain")
ALLOWED_BYTES = 250e6
ALLOWED_BYTES_PER_PARAMETER = 16

Turn = tuple[float, float]
"""Tokens per second, and per CPU second of all the contender's processes."""


def manifest(every: int) -> Manifest:
    """The default, but for the steps between rounds."""
    default = Manifest()
    return default.model_copy(update={"training": default.training.model_copy(update={"every": every})})


def measure(every: int, rounds: int, turns: int, threads: int, log: str | None) -> dict[str, object]:
    """Memory of each contender alone, then ``turns`` turns of ``rounds`` rounds of each, alternating.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    spec = manifest(every)
    steps = every * rounds
    tokens = steps * spec.training.local_batch * spec.model.context
    arguments = ["--every", str(every), "--threads", str(threads), "--worker"]
    memory: dict[str, int] = {}

    def start(stack: ExitStack, kind: str) -> Workers:
        workers = stack.enter_context(Workers("benchmarks.bench_overhead", log))
        workers.start(*arguments, kind).hear(START_SECONDS)
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
    extra = memory["p2ptrain"] - memory["plain torch"]
    return {
        "parameters": parameters,
        "every": every,
        "tokens_per_second": {kind: Measured(tuple(one[0] for one in seen[kind])).to_json() for kind in KINDS},
        "tokens_per_cpu_second": {kind: Measured(tuple(one[1] for one in seen[kind])).to_json() for kind in KINDS},
        "ratio": _ratio([one[0] for one in seen["p2ptrain"]], [one[0] for one in seen["plain torch"]]).to_json(),
        "cpu_ratio": _ratio([one[1] for one in seen["p2ptrain"]], [one[1] for one in seen["plain torch"]]).to_json(),
        "peak_pss_bytes": memory,
        "extra_bytes": extra,
        "allowed_extra_bytes": ALLOWED_BYTES + ALLOWED_BYTES_PER_PARAMETER * parameters,
    }


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> Measured:
    """Turn by turn, since neighbours in time saw the same machine."""
    return Measured(tuple(one / other for one, other in zip(ours, theirs, strict=True)))


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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=16, help="steps between rounds")
    parser.add_argument("--rounds", type=int, default=2, help="rounds in a turn")
    parser.add_argument("--turns", type=int, default=6, help="turns of each contender")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each contender")
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    parser.add_argument("--worker", choices=KINDS, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        serve(options.worker, options.every, options.threads)
        return
    exit_on_signals()  # so that `measure` ends what it started
    found = measure(options.every, options.rounds, options.turns, options.threads, options.log)
    title = f"A lone peer against plain torch, {found['parameters']:,} parameters, a round every {options.every} steps"
    report(title, ("", *KINDS, "ratio", "spread"), table(found), found, options.json)


def table(found: dict[str, object]) -> list[list[str]]:
    """The rows to print."""
    rows = []
    for title, values, ratio in (
        ("tokens a second", "tokens_per_second", "ratio"),
        ("tokens a CPU second", "tokens_per_cpu_second", "cpu_ratio"),
    ):
        speeds, relation = found[values], found[ratio]
        assert isinstance(speeds, dict)
        assert isinstance(relation, dict)
        cells = [f"{speeds[kind]['median']:.0f}" for kind in KINDS]
        rows.append([title, *cells, f"{relation['median']:.3f}", f"±{100 * relation['spread']:.0f} %"])
    memory, extra, allowed = found["peak_pss_bytes"], found["extra_bytes"], found["allowed_extra_bytes"]
    assert isinstance(memory, dict)
    assert isinstance(extra, (int, float))
    assert isinstance(allowed, (int, float))
    rows.append(
        [
            "peak PSS (MB)",
            *(f"{memory[kind] / 1e6:.0f}" for kind in KINDS),
            f"{memory[KINDS[1]] / memory[KINDS[0]]:.2f}",
            "",
        ]
    )
    rows.append(
        ["beyond plain torch (MB)", f"goal {allowed / 1e6:.0f}", f"{extra / 1e6:.0f}", f"{extra / allowed:.2f}", ""]
    )
    return rows


if __name__ == "__main__":
    main()
