"""What a pipeline costs beside one process on the same cores: real hosts over loopback, against plain torch.

Two hosts (``p2ptrain join --role stage``, each with its daemon) and a trainer train a model of random text in two
stages with int8 activations, a step for each global batch. Plain torch trains the same model in one process, with one
optimizer step for as many microbatches, and computes the first stage again for its backward as its host does. All
processes of a contender share the same cores, one or more; plain torch has a thread for each, and the hosts share them
out. The contenders take turns. CPU seconds are those of all processes of a contender. On a busy machine trust them more
than seconds: who has more processes then gets more of the cores. On more than one core trust seconds, on a quiet
machine: threads of plain torch that wait for each other take CPU seconds, too. Part of `benchmarks.bench_pipeline`.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.nn import functional

from benchmarks.answers import say
from benchmarks.bench_profile import cpu_of_threads
from benchmarks.findings import Finding, Section
from benchmarks.harness import Measured, cpu_seconds, process_trees, progress
from benchmarks.workers import Workers
from p2ptrain.manifest import AveragingSpec, Manifest, ModelSpec, PipelineSpec, TrainingSpec
from p2ptrain.models import build_stage, num_parameters
from p2ptrain.node.peer import Peer
from p2ptrain.node.swarm import Swarm
from p2ptrain.pipeline.client.sender import MicrobatchSender
from p2ptrain.pipeline.messages import pack
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.view import PipelineView

KINDS = ("plain torch", "pipeline")
LOOPBACK = "/ip4/127.0.0.1/tcp/0"
STAGES = 2
MICROBATCHES, SAMPLES, CREDITS = 8, 4, 8
"""In a round, in a microbatch, and under way at a time."""
START_SECONDS, IDLE_SECONDS, TURN_SECONDS = 180.0, 20.0, 900.0
GOAL = 0.85
MODELS = {
    "large": ModelSpec(layers=4, hidden=512, heads=8, kv_heads=8, intermediate=1376, context=256),
    "medium": ModelSpec(layers=4, hidden=256, heads=4, kv_heads=4, intermediate=688, context=128),
    "small": ModelSpec(layers=4, hidden=64, heads=2, kv_heads=2, intermediate=168, context=64),
}
ROUNDS = {"large": 2, "medium": 6, "small": 10}
"""In a turn."""


def manifest(size: str) -> Manifest:
    """Of the swarm."""
    return Manifest(
        name=f"overhead {size}",
        model=MODELS[size],
        training=TrainingSpec(every=1, global_batch=MICROBATCHES * SAMPLES, local_batch=SAMPLES, warmup_steps=0),
        averaging=AveragingSpec(),
        pipeline=PipelineSpec(stages=STAGES),
    )


def batch(spec: Manifest, number: int) -> torch.Tensor:
    """A microbatch: ``[SAMPLES, context + 1]``."""
    generator = torch.Generator().manual_seed(number)
    return torch.randint(spec.model.vocabulary, (SAMPLES, spec.model.context + 1), generator=generator)


# One process


def serve_plain(size: str) -> None:
    """Plain torch: takes as many steps as each line of stdin says."""
    spec = manifest(size)
    first, last = (build_stage(spec.model, span) for span in PipelinePlan(spec).spans)
    parameters = [*first.parameters(), *last.parameters()]
    optimizer = torch.optim.AdamW(
        parameters, spec.training.learning_rate, betas=(0.9, 0.95), weight_decay=spec.training.weight_decay, fused=True
    )
    say(ready=True)
    for line in sys.stdin:
        started = time.monotonic()
        for _ in range(int(line)):
            for number in range(MICROBATCHES):
                tokens = batch(spec, number)
                with torch.no_grad():
                    hidden = first(tokens[:, :-1])
                hidden.requires_grad_()
                loss = functional.cross_entropy(last(hidden).flatten(0, 1), tokens[:, 1:].flatten())
                (loss / MICROBATCHES).backward()  # type: ignore[no-untyped-call]
                torch.autograd.backward(first(tokens[:, :-1]), hidden.grad)
            torch.nn.utils.clip_grad_norm_(parameters, spec.training.clip_norm)
            optimizer.step()
            optimizer.zero_grad()
        say(seconds=time.monotonic() - started)


# The pipeline


def serve_pipeline(size: str, threads: int) -> None:
    """The trainer, which starts the hosts: feeds as many rounds as each line of stdin says.

    Args:
        size: Of the model.
        threads: Of each host.
    """
    spec = manifest(size)
    with ExitStack() as stack:
        swarm = stack.enter_context(Swarm.create(spec, listen=(LOOPBACK,)))
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for stage in range(STAGES):
            options = ["--yes", "--role", "stage", "--stage", str(stage), "--listen", LOOPBACK]
            options += ["--threads", str(threads)]
            command = [sys.executable, "-m", "p2ptrain", "join", swarm.link, "--run-dir", str(folder / f"host{stage}")]
            host = stack.enter_context(subprocess.Popen([*command, *options], stdout=subprocess.DEVNULL))
            stack.callback(host.terminate)
        # What a script of one's own cannot do yet: send microbatches whose loss the last stage makes.
        thread, peer = swarm._running.thread, swarm._peer
        feeder = thread.call(start_feeder(peer, PipelinePlan(spec)))
        thread.call(feed(feeder, spec, 1))
        say(ready=True)
        for line in sys.stdin:
            started = time.monotonic()
            thread.call(feed(feeder, spec, int(line)))
            say(seconds=time.monotonic() - started)


async def start_feeder(peer: Peer, plan: PipelinePlan) -> MicrobatchSender:
    """What sends microbatches."""
    view = PipelineView(plan, peer.identity.peer_id, peer.runtime)
    peer.presence.listeners.append(view.update)
    await peer.presence.refresh()
    feeder = MicrobatchSender(view.new_caller(peer.rpc), peer.identity)
    peer.on_close(feeder.tasks.close)
    peer.set_state("training")
    return feeder


async def feed(feeder: MicrobatchSender, spec: Manifest, rounds: int) -> None:
    """Send rounds of microbatches, and wait until the last round is over."""
    numbers, context = iter(range(rounds * MICROBATCHES)), spec.model.context
    last = max(feeder.round, 0) + rounds

    async def send() -> None:
        for number in numbers:
            tokens = batch(spec, number % MICROBATCHES)
            codec = spec.pipeline.codec
            await feeder.send(pack(tokens[:, :-1], codec), pack(tokens[:, 1:], codec), SAMPLES, SAMPLES * context)

    async with asyncio.TaskGroup() as group:
        for _ in range(CREDITS):
            group.create_task(send())
    async with asyncio.timeout(TURN_SECONDS):
        while feeder.round < last:  # noqa: ASYNC110 - what tells of rounds tells one listener
            await asyncio.sleep(0.01)


# The comparison


@dataclass(frozen=True)
class Turn:
    """One turn of a contender.

    Attributes:
        per_second: Tokens.
        per_cpu_second: Tokens, of all its processes.
        parts: CPU seconds by what they were for.
    """

    per_second: float
    per_cpu_second: float
    parts: dict[str, float]


def parts(workers: Workers) -> dict[str, float]:
    """CPU seconds so far, by what they were for."""
    found: dict[str, float] = {}
    root = workers.pids[0]
    for process in process_trees([root]):
        is_python = "python" in process.name()
        for thread, (user, system) in cpu_of_threads(process.pid).items():
            if not is_python:
                part = "daemons"
            elif process.pid == root:
                part = "trainer"
            else:
                part = "hosts: event loop" if thread == process.pid else "hosts: compute threads"
            found[part] = found.get(part, 0.0) + user + system
    return found


def spent(before: dict[str, float], after: dict[str, float]) -> dict[str, float]:
    """Between two of these."""
    return {part: seconds - before.get(part, 0.0) for part, seconds in after.items()}


def take_turn(workers: Workers, size: str, rounds: int) -> Turn:
    """Have a contender train for some rounds."""
    spec = MODELS[size]
    tokens = rounds * MICROBATCHES * SAMPLES * spec.context
    processes, before = workers.processes(), parts(workers)
    used = cpu_seconds(processes)
    workers.tell_all(str(rounds))
    seconds = workers.all[0].hear(TURN_SECONDS)["seconds"]
    used = cpu_seconds(processes) - used
    return Turn(tokens / seconds, tokens / used, spent(before, parts(workers)))


def compare(sizes: Sequence[str], turns: int, log: str | None, num_cores: int = 1) -> Section:
    """Turns of both contenders, in alternating order."""
    section = Section(
        f"A pipeline of {STAGES} stages against one process, all on the same {num_cores} of the machine's cores",
        ("model", *KINDS, "ratio", "spread"),
        results={"cores": num_cores},
    )
    cores = os.sched_getaffinity(0)
    os.sched_setaffinity(0, sorted(cores)[-num_cores:])  # What is started from now on inherits it.
    try:
        for size in sizes:
            measure(section, size, turns, log, num_cores)
    finally:
        os.sched_setaffinity(0, cores)
    return section


def measure(section: Section, size: str, turns: int, log: str | None, num_cores: int) -> None:
    """One model."""
    progress(f"overhead of a {size} model")
    seen: dict[str, list[Turn]] = {kind: [] for kind in KINDS}
    with ExitStack() as stack:
        running: dict[str, Workers] = {}
        for kind in KINDS:
            running[kind] = stack.enter_context(Workers("benchmarks.pipeline_overhead", log))
            running[kind].start(kind, size, str(num_cores)).hear(START_SECONDS)
        idle = parts(running["pipeline"])
        time.sleep(IDLE_SECONDS)
        idle = spent(idle, parts(running["pipeline"]))
        for number in range(-1, turns):
            for kind in KINDS if number % 2 else reversed(KINDS):
                one = take_turn(running[kind], size, ROUNDS[size])
                if number >= 0:
                    seen[kind].append(one)
    parameters = num_parameters(MODELS[size])
    for what, value in (
        ("tokens a second", lambda turn: turn.per_second),
        ("tokens a CPU second", lambda turn: turn.per_cpu_second),
    ):
        _add(section, f"{size}, {parameters / 1e6:.1f}M, {what}", seen, value)
    plain = [1 / one.per_cpu_second for one in seen[KINDS[0]]]
    tokens = ROUNDS[size] * MICROBATCHES * SAMPLES * MODELS[size].context
    usual = Measured(tuple(plain)).median * tokens
    section.results[f"{size}, CPU seconds of plain torch"] = usual
    cores = sum(idle.values()) / IDLE_SECONDS
    section.notes.append(f"The {size} model's pipeline takes {cores:.3f} cores while nothing is fed.")
    section.results[f"{size}, cores at rest"] = cores
    for part in sorted({part for turn in seen["pipeline"] for part in turn.parts}):
        share = Measured(tuple(turn.parts[part] for turn in seen["pipeline"])).median / usual
        section.rows.append((f"  {part}, of plain torch's CPU", "", "", f"{share:.3f}", ""))
        section.results[f"{size}, {part}"] = share


def _add(section: Section, what: str, seen: dict[str, list[Turn]], value: Callable[[Turn], float]) -> None:
    each = {kind: [value(turn) for turn in seen[kind]] for kind in KINDS}
    ratio = Measured(tuple(ours / theirs for theirs, ours in zip(*(each[kind] for kind in KINDS), strict=True)))
    middle = (f"{Measured(tuple(each[kind])).median:.0f}" for kind in KINDS)
    section.rows.append((what, *middle, f"{ratio.median:.3f}", f"±{100 * ratio.spread:.0f} %"))
    section.results[what] = {**each, "ratio": ratio.to_json()}
    section.findings.append(Finding(what, ratio.median, "one process", GOAL, at_least=True))


def main(arguments: Sequence[str] | None = None) -> None:
    """One contender."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=KINDS)
    parser.add_argument("size", choices=list(MODELS))
    parser.add_argument("cores", type=int)
    options = parser.parse_args(arguments)
    if options.kind == KINDS[0]:
        torch.set_num_threads(options.cores)
        serve_plain(options.size)
    else:
        torch.set_num_threads(1)
        serve_pipeline(options.size, max(1, options.cores // STAGES))


if __name__ == "__main__":
    main()
