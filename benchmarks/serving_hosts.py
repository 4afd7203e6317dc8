"""Hosts of two stages as real processes on loopback: decoding, shared prefixes, and the pause when a host fails."""

from __future__ import annotations

import contextlib
import itertools
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

from benchmarks.findings import Finding, Section
from p2ptrain.manifest import ModelSpec
from p2ptrain.models.exact import WeightFormat
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.serving.client import SwarmModel
from p2ptrain.node.serving.thread import ModelThread
from p2ptrain.serving.sampling import Sampling

LOOPBACK = "/ip4/127.0.0.1/tcp/0"
START_SECONDS = 180.0
GREEDY = Sampling(temperature=0.0)
PREFIX, REST = 512, 16
FAILOVER_GOALS = {signal.SIGKILL: 0.5, signal.SIGSTOP: 2.0}


class Hosts:
    """A seed and hosts; a context manager that ends them. The first host of each stage is the first listed.

    Hosts have the benchmark's own priority, unlike those of 'p2ptrain join': others share the cores.
    """

    def __init__(self, spec: ModelSpec, stages: tuple[int, ...], weights: WeightFormat = "fp32") -> None:
        self._folder = Path(tempfile.mkdtemp(prefix="p2ptrain-serving-"))
        self._spec = spec
        self._stages = stages
        self._weights = weights
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
                f'role = "stage"\nname = "{name}"\nallow_path = ["{self._folder / "text"}"]\n'
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


async def pauses(model: SwarmModel, num_tokens: int, at: int, strike: Callable[[list[str]], None]) -> list[float]:
    """Return the seconds between tokens of one generation; call ``strike`` with the hosts' names at token ``at``."""
    times: list[float] = []
    ids = [37 * each % model.peer.manifest.model.vocabulary for each in range(32)]
    async with model.generator.generate(ids, GREEDY, max_tokens=num_tokens) as generation:
        async for _ in generation:
            times.append(time.perf_counter())
            if len(times) == at:
                strike([model.name_of(peer) for peer in generation.route])
    return [after - before for before, after in itertools.pairwise(times)]


def decoding_on_hosts(spec: ModelSpec, plain_seconds: Callable[[], float], num_tokens: int) -> Section:
    """Greedy tokens of one session on two hosts against plain transformers, in turn."""
    section = Section("A token on hosts of two stages, milliseconds", ("contender", "milliseconds"))
    ours, theirs = [], []
    with Hosts(spec, (0, 1)) as hosts, ModelThread(SwarmLink.parse(hosts.link)) as thread:
        for _ in range(3):
            found = thread.call(pauses(thread.model, num_tokens, 0, lambda route: None))
            ours.append(1000 * statistics.median(found))
            theirs.append(statistics.median(plain_seconds() for _ in range(num_tokens)))
    section.rows += [("two hosts", f"{statistics.median(ours):.1f}"), ("plain", f"{statistics.median(theirs):.1f}")]
    ratio = statistics.median(their / our for our, their in zip(ours, theirs, strict=True))
    section.findings.append(Finding("tokens of 1 session on 2 hosts, fp32", ratio, "plain transformers", 1.4, True))
    section.results = {"ours": ours, "theirs": theirs}
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

        found = thread.call(pauses(thread.model, at + 100, at, strike))
    return max(found[at - 1 :]), statistics.median(found)
