"""Runs of a scenario with real processes in network namespaces, with no route out; needs root, ``ip`` and ``nft``."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

from p2ptrain.averaging.protocol.table import ESTABLISHED
from p2ptrain.network.identity import IDENTITY_FILE, Identity
from tests.lab.scenario import HOSTILE, Attackers, Measured, Peers, Scenario
from tests.support.processes.files import OPEN_TO_ALL
from tests.support.processes.nat import Host, Internet, NatPeer, why_unavailable
from tests.support.processes.swarmlet import Swarmlet, Worker, nothing_left_behind
from tests.support.processes.tellers import Event, Teller

START_SECONDS = 400.0
RECOVERY_SECONDS = 120.0
PAUSE_SECONDS = 0.5
HIDDEN = 8
"""Of the workers' model."""


class RealRun:
    """One run of a scenario; `play` ends everything that it started."""

    def __init__(self, scenario: Scenario, folder: Path, net: Internet, stack: contextlib.ExitStack) -> None:
        self.scenario = scenario
        self.folder = folder
        self.net = net
        self.stack = stack
        self.swarm = stack.enter_context(Swarmlet(folder, **self._sections()))
        self.hosts: dict[str, Host] = {}
        self.workers: dict[str, Worker] = {}
        self.strangers: list[Teller] = []
        self.link = ""
        self.measured = Measured(scenario.seconds)
        self._before: dict[str, float] = {}

    def play(self, disturbed: bool) -> Measured:
        self._start(disturbed)
        measured, unharmed = self.measured, self.scenario.unharmed
        self._wait(lambda: all(map(self._votes, self.workers)), START_SECONDS)
        began, plan = time.monotonic(), self._plan() if disturbed else []
        self._before = {name: self._memory_mb(name) for name in unharmed}
        first, front = max(map(self._front, self.workers)), min(map(self._front, unharmed))
        while (now := time.monotonic()) < began + self.scenario.seconds:
            while plan and plan[0][0] <= now - began:
                plan.pop(0)[1]()
            self._look(unharmed)
            measured.ends += [now - began] * ((slowest := min(map(self._front, unharmed))) - front)
            front = slowest
            time.sleep(PAUSE_SECONDS)
        self._recover()
        self._count(first)
        return measured

    @property
    def honest(self) -> dict[str, Worker]:
        return {name: worker for name, worker in self.workers.items() if not name.startswith(HOSTILE)}

    # --- starting

    def _sections(self) -> dict[str, dict[str, Any]]:
        """Return the manifest's sections; a swarm that a bootstrap peer begins is open, as a link alone leads to it."""
        is_begun = any(group.role == "bootstrap" for _, group in self.scenario.named())
        return {**({"admission": OPEN_TO_ALL} if is_begun else {}), **self.scenario.manifest}

    def _founders(self) -> list[str]:
        """Make the trainers' identities, and return their peer ids: among strangers, others would vote after hours."""
        names = [name for name, group in self.scenario.named() if group.role == "trainer"]
        found = []
        for name in (*names, *(name for name, _ in self.scenario.hostile(members=True))):
            with Identity.create_or_load(self.folder / name / IDENTITY_FILE) as identity:
                found.append(identity.peer_id)
        return found

    def _start(self, disturbed: bool) -> None:
        scenario = self.scenario
        for name, group in scenario.named():
            symmetric = group.nat == "symmetric"
            made = self.net.public(name) if group.nat == "none" else self.net.private(name, symmetric=symmetric)
            self.hosts[name] = made
        for name, _ in scenario.hostile(members=True):
            self.hosts[name] = self.net.public(name)
        if disturbed:
            for name, _ in scenario.hostile(members=False):
                self.hosts[name] = self.net.public(name)
        link = scenario.link
        # Each way between two peers leads through two cables.
        self.net.lengthen(link.megabits, link.delay_ms / 2000, link.loss_percent / 200)
        for name, group in scenario.named():
            if group.role == "bootstrap":
                listen = ["/ip4/0.0.0.0/tcp/31337"]
                manifest = {**self.swarm.manifest, "founders": self._founders()}
                peer = NatPeer(self.hosts[name], self.folder, name, relay=True, listen=listen, manifest=manifest)
                self.link = self.link or str(self.stack.enter_context(peer).joined["link"])
        trainers = [(name, group.step_seconds) for name, group in scenario.named() if group.role == "trainer"]
        members = [(name, Peers(1).step_seconds) for name, _ in scenario.hostile(members=True)]
        for name, step_seconds in (*trainers, *members):
            self._start_worker(name, step_seconds)
            self.link = self.link or self.workers[name].link

    def _start_worker(self, name: str, step_seconds: float) -> None:
        self.workers[name] = self.swarm.start(
            name, self.link or None, prefix=self.hosts[name].command(), listen="/ip4/0.0.0.0/tcp/0", hidden=HIDDEN,
            step_seconds=step_seconds,
        )  # fmt: skip

    def _plan(self) -> list[tuple[float, Callable[[], None]]]:
        plan: list[tuple[float, Callable[[], None]]] = [
            (at, lambda kind=kind, names=names: self._befall(kind, names))  # type: ignore[misc]
            for at, kind, names in self.scenario.timeline()
        ]
        for name, group in self.scenario.hostile():
            plan.append((group.at, lambda name=name, group=group: self._attack(name, group)))  # type: ignore[misc]
        return sorted(plan, key=lambda each: each[0])

    def _befall(self, kind: str, names: tuple[str, ...]) -> None:
        hosts = [self.hosts[name] for name in names]
        match kind:
            case "partition":
                self.net.part(*hosts)
            case "heal":
                self.net.heal(*hosts)
            case "restart":
                groups = dict(self.scenario.named())
                for name in names:
                    self._start_worker(name, groups[name].step_seconds)
            case "kill":
                for name in names:
                    self.workers[name].kill()
            case "stop" | "resume":
                for name in names:
                    self.workers[name].signal_all(signal.SIGSTOP if kind == "stop" else signal.SIGCONT)
            case "cut" | "mend":
                for host in hosts:
                    (self.net.unplug if kind == "cut" else self.net.plug_in)(host)

    def _attack(self, name: str, group: Attackers) -> None:
        what = {"attack": group.attack, "options": group.options}
        if group.member:
            self.workers[name].order(f"attack {json.dumps(what)}")
            return
        options = {"name": name, "link": self.link, "hidden": HIDDEN, **what}
        command = [sys.executable, "-m", "tests.lab.attacker", json.dumps(options)]
        stranger = Teller(name, self.hosts[name].command(*command), self.folder / f"{name}.log")
        self.stack.callback(stranger.kill)
        self.strangers.append(stranger)

    # --- watching

    def _wait(self, condition: Callable[[], bool], seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, [self.workers[name].last_words() for name in self.workers]
            time.sleep(PAUSE_SECONDS)

    def _commits(self, name: str, since: int = 0) -> list[Event]:
        return [event for event in self.workers[name].rounds(since) if event["committed"]]

    def _votes(self, name: str) -> bool:
        """True once a trainer has been counted in so many rounds that, among friends, it votes; founders vote before.

        A swarm of fewer voters may stand still for `matchmaking_seconds` when one is killed.
        """
        own = next((event["peer"] for event in self.workers[name].events if event["event"] == "joined"), "")
        return sum(own in event.get("counted", ()) for event in self._commits(name)) >= ESTABLISHED

    def _front(self, name: str) -> int:
        return max((event["round"] for event in self.workers[name].rounds()), default=0)

    def _memory_mb(self, name: str) -> float:
        worker, total = self.workers[name], 0
        for process_id in (worker.process.pid, worker.daemon):
            with contextlib.suppress(psutil.NoSuchProcess):
                total += psutil.Process(process_id).memory_info().rss
        return total / (1 << 20)

    def _look(self, unharmed: list[str]) -> None:
        for name in unharmed:
            if self.workers[name].process.poll() is not None:
                self._problem(f"{name} ended: {self.workers[name].last_words()[-300:]}")
            self.measured.peak_mb = max(self.measured.peak_mb, self._memory_mb(name) - self._before[name])
        for stranger in self.strangers:
            if stranger.process.poll() is not None:
                raise RuntimeError(f"the attack {stranger.name} ended: {stranger.last_words()}")
        for worker in self.workers.values():
            if ended := [event for event in worker.events if event["event"] == "attack ended"]:
                raise RuntimeError(f"the attack of {worker.name} ended: {ended[0]}")

    def _problem(self, what: str) -> None:
        if what not in self.measured.problems:
            self.measured.problems.append(what)

    def _recover(self) -> None:
        """Wait until one round is in the lineages of all trainers that are there, and began after this call."""
        marks = {name: len(worker.events) for name, worker in self.honest.items() if worker.process.poll() is None}
        began = time.monotonic()

        def heads() -> list[set[str]]:
            return [{event["lineage"] for event in self._commits(name, mark)} for name, mark in marks.items()]

        with contextlib.suppress(AssertionError):
            self._wait(lambda: bool(set.intersection(*heads())), RECOVERY_SECONDS)
        self.measured.recovery = time.monotonic() - began
        self.measured.lineages = 1 if set.intersection(*heads()) else len(marks)

    def _count(self, first: int) -> None:
        """Count tokens and whose they are, in the rounds after the first one that honest trainers tell of."""
        workers = [worker for worker in self.swarm.workers if worker.name in self.honest]
        honest = {e["peer"] for worker in workers for e in worker.events if e["event"] == "joined"}
        seen: dict[str, dict[str, int]] = {}
        for worker in workers:
            for event in worker.rounds():
                if not event["intact"]:
                    self._problem(f"{worker.name}: its state has another digest than its head at {event['round']}")
                if event["round"] > first and event.get("counted"):
                    seen[event["lineage"]] = event["counted"]
        for counts in seen.values():
            self.measured.foreign_rounds += not honest.intersection(counts)
            self.measured.stranger_rounds += bool(honest.intersection(counts)) and bool(counts.keys() - honest)
            self.measured.tokens += sum(tokens for peer, tokens in counts.items() if peer in honest)


def run_real(scenario: Scenario, *, disturbed: bool) -> Measured:
    """Run a scenario with real processes.

    Raises:
        ValueError: The scenario does not say ``real = true``, or this machine cannot make the namespaces.
    """
    if not scenario.real or (reason := why_unavailable()):
        raise ValueError(reason if scenario.real else "the scenario does not say real = true")
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="p2ptrain-lab-")))
        stack.enter_context(nothing_left_behind())
        net = stack.enter_context(Internet())
        return RealRun(scenario, folder, net, stack).play(disturbed)
