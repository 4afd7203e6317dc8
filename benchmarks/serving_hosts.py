"""Hosts of two stages as real processes on loopback: decoding, shared prefixes, and the pause when a host fails."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import math
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import psutil

from benchmarks.findings import Finding, Section
from benchmarks.harness import pss_bytes
from p2ptrain.manifest import ModelSpec
from p2ptrain.models import SERVED_BYTES, model_blocks
from p2ptrain.models.blocks import Span, stage_shapes
from p2ptrain.models.exact import WeightFormat
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel
from p2ptrain.node.serving.thread import ModelThread
from p2ptrain.pipeline.plan import stage_blocks
from p2ptrain.serving.sampling import Sampling

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_SECONDS = 180.0
GREEDY = Sampling(temperature=0.0)
PREFIX, REST = 512, 16
COMMON = 128
OTHER_MB = 300
HOSTS_GOALS: dict[WeightFormat, dict[int, float]] = {
    "fp32": {1: 1.4, 8: 4.5, 32: 7.0},
    "int8": {1: 2.0, 8: 8.0, 32: 8.5},
}
"""Tokens a second of some sessions on two hosts, as multiples of plain transformers with one."""
BEFORE, AFTER = 68, 40
"""Tokens of an answer before and after its host fails."""
FAILOVER_GOALS = {signal.SIGKILL: 0.5, signal.SIGSTOP: 2.0}


class Hosts:
    """A seed and hosts; a context manager that ends them. The first host of each stage is the first listed.

    Hosts have the benchmark's own priority, unlike those of 'p2ptrain join': others share the cores.
    """

    def __init__(
        self, spec: ModelSpec, stages: tuple[int, ...], weights: WeightFormat = "fp32", role: str = "stage"
    ) -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="p2ptrain-serving-"))
        self._spec = spec
        self._stages = stages
        self._weights = weights
        self._role = role
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.link = ""

    def __enter__(self) -> Hosts:
        try:
            self._start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self) -> None:
        (self._folder / "text").mkdir()
        (self._folder / "text" / "some.txt").write_text("nobody trains here. " * 50_000)
        settings = {f"model.{key}": getattr(self._spec, key) for key in self._spec.model_fields_set}
        settings |= {
            "pipeline.stages": 2,
            "training.every": 1,
            "training.local_batch": 1,
            "data.source": f"path:{self._folder / 'text'}",
        }
        self._run("init", str(self._folder / "swarm"), *(f"--set={key}={value}" for key, value in settings.items()))
        link = self._folder / "link.txt"
        folder = str(self._folder / "swarm")
        seed = self._start_one("seed", "seed", folder, "--listen", LOOPBACK, "--link-file", str(link))
        self.link = self._wait(seed, "seed", lambda log: link.read_text().strip() if link.exists() else "")
        for number, stage in enumerate(self._stages):
            name = f"host{number}"
            role = self._folder / f"{name}.toml"
            role.write_text(
                f'role = "{self._role}"\nname = "{name}"\nallow_path = ["{self._folder / "text"}"]\n'
                f'[serving]\nenabled = true\nweights = "{self._weights}"\n[pipeline]\nstage = {stage}\n'
                f'[network]\nlisten = ["{LOOPBACK}"]\n[resources]\nthreads = 1\n'
            )
            process = self._start_one(
                name, "peer", str(role), "--link", self.link, "--run-dir", str(self._folder / name)
            )
            self._wait(process, name, lambda log: log.partition("serving round")[1])

    def _run(self, *words: str) -> None:
        subprocess.run([sys.executable, "-m", "p2ptrain", *words], check=True, stdout=subprocess.DEVNULL)

    def _start_one(self, name: str, *words: str) -> subprocess.Popen[bytes]:
        with (self._folder / f"{name}.log").open("wb") as log:
            command = [sys.executable, "-m", "p2ptrain", *words]
            process = subprocess.Popen(command, stdout=log, stderr=log, start_new_session=True)
        self.processes[name] = process
        return process

    def _wait(self, process: subprocess.Popen[bytes], name: str, find: Callable[[str], str]) -> str:
        deadline = time.monotonic() + START_SECONDS
        while not (found := find((self._folder / f"{name}.log").read_text())):
            if process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"{name} did not start: {(self._folder / f'{name}.log').read_text()[-500:]}")
            time.sleep(0.1)
        return found

    def __exit__(self, *_: object) -> None:
        for number in (signal.SIGTERM, signal.SIGKILL):
            for process in self.processes.values():
                if process.poll() is None:
                    with contextlib.suppress(ProcessLookupError):
                        os.killpg(process.pid, signal.SIGCONT)
                        os.killpg(process.pid, number)
            for process in self.processes.values():
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(30)
        shutil.rmtree(self._folder, ignore_errors=True)


async def pauses(
    model: SwarmModel, prompt: int, num_tokens: int, at: int, strike: Callable[[list[str]], None]
) -> list[float]:
    """Return the seconds between tokens of one generation; call ``strike`` with the hosts' names at token ``at``."""
    times: list[float] = []
    ids = [37 * each % model.peer.manifest.model.vocabulary for each in range(prompt)]
    async with model.generator.generate(ids, GREEDY, max_tokens=num_tokens) as generation:
        async for _ in generation:
            times.append(time.perf_counter())
            if len(times) == at:
                strike([model.name_of(peer) for peer in generation.route])
    return [after - before for before, after in itertools.pairwise(times)]


async def together(model: SwarmModel, number: int, num_tokens: int) -> float:
    """Return the seconds a token of some sessions of one client, while all of them decode.

    They have a prompt in common, whose pages the hosts have, and a token of their own after it.
    """
    times: list[list[float]] = []

    async def ask(last: int) -> None:
        ids = [37 * each % model.peer.manifest.model.vocabulary for each in range(COMMON)] + [last]
        times.append(mine := [])
        async with model.generator.generate(ids, GREEDY, max_tokens=num_tokens) as generation:
            async for _ in generation:
                mine.append(time.perf_counter())

    await ask(0)  # Computes the common pages.
    times.clear()
    await asyncio.gather(*map(ask, range(1, number + 1)))
    begin, end = max(each[0] for each in times), min(each[-1] for each in times)
    if begin >= end:
        raise RuntimeError(f"{number} sessions did not decode at the same time: give them more tokens")
    return (end - begin) / sum(begin < at <= end for each in times for at in each)


def decoding_on_hosts(spec: ModelSpec, plain_seconds: Callable[[], float], num_tokens: int) -> Section:
    """Greedy tokens of sessions on two hosts against plain transformers with one, in turn."""
    section = Section("A token of sessions on hosts of two stages", ("weights, sessions", "ms", "plain, ms"))
    for weights, goals in HOSTS_GOALS.items():
        with Hosts(spec, (0, 1), weights) as hosts, ModelThread(SwarmLink.parse(hosts.link)) as thread:
            for number, goal in goals.items():
                ours, theirs = [], []
                for _ in range(3):
                    ours.append(1000 * thread.call(together(thread.model, number, num_tokens)))
                    theirs.append(statistics.median(plain_seconds() for _ in range(num_tokens)))
                name = f"{weights}, {number}"
                section.rows.append((name, *(f"{statistics.median(each):.1f}" for each in (ours, theirs))))
                ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
                what = f"tokens of {number} sessions on 2 hosts, {weights}"
                section.findings.append(Finding(what, ratio, "plain transformers with 1", goal, at_least=True))
                section.results[name] = {"ours": ours, "theirs": theirs}
    return section


async def in_use(
    model: SwarmModel, number: int, prompt: int, num_tokens: int, measure: Callable[[], list[int]]
) -> list[int]:
    """Return what ``measure`` returns while some sessions, which have all their tokens, are open."""
    found: list[int] = []
    is_measured = asyncio.Event()

    async def ask(first: int) -> None:
        ids = [(first + 37 * each) % model.peer.manifest.model.vocabulary for each in range(prompt)]
        async with model.generator.generate(ids, GREEDY, max_tokens=num_tokens) as generation:
            async for _ in generation:
                pass
            found.append(first)
            if len(found) == number:
                found[:] = measure()
                is_measured.set()
            await is_measured.wait()

    await asyncio.gather(*map(ask, range(number)))
    return found


def memory(spec: ModelSpec, number: int, prompt: int) -> Section:
    """Memory of hosts that only serve, with their daemons, while sessions are open, against what it is for."""
    num_tokens, blocks = 32, model_blocks(spec)
    section = Section(
        f"Memory of hosts of two stages that only serve, {number} sessions of {prompt + num_tokens} tokens, MB",
        ("weights, stage", "measured", "weights", "keys and values", "journals", f"and {OTHER_MB}"),
    )
    for weights in HOSTS_GOALS:
        with Hosts(spec, (0, 1), weights, "server") as hosts, ModelThread(SwarmLink.parse(hosts.link)) as thread:
            processes = [psutil.Process(hosts.processes[f"host{each}"].pid) for each in (0, 1)]

            def measure(processes: list[psutil.Process] = processes) -> list[int]:
                return [pss_bytes([each, *each.children(recursive=True)]) for each in processes]

            found = thread.call(in_use(thread.model, number, prompt, num_tokens, measure))
            spans = [Span(*each) for each in stage_blocks(thread.model.peer.manifest)]
        tokens, row = number * (prompt + num_tokens), spec.hidden // spec.heads * spec.kv_heads
        for stage, (measured, span) in enumerate(zip(found, spans, strict=True)):
            values = sum(math.prod(shape) for shape in stage_shapes(blocks, span).values())
            layers = min(span.stop, len(blocks) - 1) - max(span.start, 1)
            parts = [SERVED_BYTES[weights] * values, 2 * 4 * layers * row * tokens, 4 * spec.hidden * tokens]
            whole = [*(each / 1e6 for each in parts), sum(parts) / 1e6 + OTHER_MB]
            name = f"{weights}, {stage}"
            section.rows.append((name, f"{measured / 1e6:.0f}", *(f"{each:.0f}" for each in whole)))
            what = f"memory of a host of stage {stage}, {weights}"
            section.findings.append(Finding(what, measured / 1e6 / whole[-1], "what it holds and 300 MB", 1.0))
            section.results[name] = {"measured": measured, "parts": parts}
    return section


async def first_token(model: SwarmModel, ids: list[int]) -> tuple[float, int]:
    """Return the seconds to a generation's first token, and how many tokens of its prompt were cached."""
    start = time.perf_counter()
    async with model.generator.generate(ids, GREEDY, max_tokens=1) as generation:
        async for _ in generation:
            seconds = time.perf_counter() - start
        return seconds, generation.cached


def prefixes(spec: ModelSpec, repeats: int) -> Section:
    """The first token of prompts with a prefix that the hosts have, and with another one, in turn."""
    section = Section(f"A prompt's first token after {PREFIX} tokens and {REST} more, s", ("prefix", "seconds"))
    new: list[float] = []
    shared: list[float] = []
    with Hosts(spec, (0, 1)) as hosts, ModelThread(SwarmLink.parse(hosts.link)) as thread:

        def ask(first: int, last: int) -> tuple[float, int]:
            rest = [(last + 41 * each) % spec.vocabulary for each in range(REST)]
            return thread.call(
                first_token(thread.model, [(first + 37 * each) % spec.vocabulary for each in range(PREFIX)] + rest)
            )

        ask(0, 0)
        for each in range(1, repeats + 1):
            for times, first, cached in ((new, each, 0), (shared, 0, PREFIX)):
                seconds, found = ask(first, each)
                if found != cached:
                    raise RuntimeError(f"{found} tokens were cached, not {cached}")
                times.append(seconds)
    section.rows += [("new", f"{statistics.median(new):.3f}"), ("shared", f"{statistics.median(shared):.3f}")]
    ratio = statistics.median(one / other for one, other in zip(new, shared, strict=True))
    section.findings.append(Finding("a new prefix", ratio, "the time of a shared one", 5, at_least=True))
    section.results = {"new": new, "shared": shared}
    return section


def failover(spec: ModelSpec, positions: tuple[int, ...]) -> Section:
    """The pause when the first stage's host is killed or stopped, beside the usual pause."""
    section = Section("A host of the first stage fails", ("what, after tokens", "pause, s", "usual, s"))
    for number, goal in FAILOVER_GOALS.items():
        for at in positions:
            pause, usual = _one_failover(spec, number, at)
            word = "killed" if number == signal.SIGKILL else "stopped"
            section.rows.append((f"{word}, {at}", f"{pause:.2f}", f"{usual:.3f}"))
            section.findings.append(
                Finding(f"pause when a host is {word} at {at} tokens", pause / goal, f"{goal:g} s", 1)
            )
            section.results[f"{word} {at}"] = {"pause": pause, "usual": usual}
    return section


def _one_failover(spec: ModelSpec, number: signal.Signals, at: int) -> tuple[float, float]:
    with Hosts(spec, (0, 0, 1)) as hosts, ModelThread(SwarmLink.parse(hosts.link)) as thread:

        def strike(route: list[str]) -> None:
            os.kill(hosts.processes[route[0]].pid, number)

        found = thread.call(pauses(thread.model, at - BEFORE, BEFORE + AFTER, BEFORE, strike))
    return max(found[BEFORE - 1 :]), statistics.median(found)
