"""Runs of a scenario in virtual time, on the simulated network: the same seed gives the same run."""

from __future__ import annotations

import asyncio
import gc
import math
import resource
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.protocol.table import ESTABLISHED
from p2ptrain.manifest import AdmissionSpec
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer, SimulationError, simulate
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.node.presence import Presence
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.state.shared_state import SharedState
from tests.lab.scenario import HOSTILE, Attackers, Measured, Peers, Scenario
from tests.lab.stranger import Member, Stranger
from tests.support.records import record_of
from tests.support.sim.heads import watch_head
from tests.support.sim.trainers import (
    BASE_RATE,
    InvariantError,
    SimulatedSwarm,
    SimulatedTrainer,
    make_manifest,
    make_module,
)

START_SECONDS = 180.0
"""Timeout for all trainers' first common round."""
RECOVERY_SECONDS = 120.0
"""Timeout for all honest trainers to be on one lineage after the watched time."""
PAUSE_SECONDS = 0.5


class Run:
    """One run of a scenario, with or without its faults and attackers."""

    def __init__(self, scenario: Scenario, network: SimulatedNetwork, *, disturbed: bool) -> None:
        self.scenario = scenario
        self.network = network
        self.disturbed = disturbed
        network.trace = deque(maxlen=0)  # type: ignore[assignment]  # Otherwise it is most of the memory.
        sections = scenario.manifest
        manifest = make_manifest(sections.get("training"), **sections.get("averaging", {}))
        admission = AdmissionSpec.model_validate(sections.get("admission", {}))
        self._groups: dict[str, Peers] = {
            **dict(scenario.named()), **{name: Peers(1) for name, _ in scenario.hostile(members=True)},
        }  # fmt: skip
        # Among strangers, a member votes after hours: here the trainers found the swarm.
        founders = [name for name, group in self._groups.items() if group.role == "trainer"]
        manifest = manifest.model_copy(update={"admission": admission})
        self.swarm = SimulatedSwarm(network, manifest, network.seed, founders if admission.mode == "open" else ())
        self.measured = Measured(scenario.seconds)
        self._parents: dict[bytes, bytes] = {}
        self._honest_tokens: dict[bytes, int] = {}
        self._judged: set[bytes] = set()
        self._honest: set[str] = set()
        self._commits: list[str] = []
        self._began = math.inf
        self._front = 0
        self._strangers: list[asyncio.Task[None]] = []
        self._phantoms: set[str] = set()
        dial = network.dial

        def dial_or_wait(caller: SimulatedPeer, peer_id: str, *rest: Any) -> None:
            if peer_id not in self._phantoms:  # Nothing answers at the address of a peer that does not exist.
                dial(caller, peer_id, *rest)

        network.dial = dial_or_wait  # type: ignore[method-assign, assignment]
        launch = self.swarm._launch

        def launch_and_watch(*args: Any) -> SimulatedTrainer:
            trainer: SimulatedTrainer = launch(*args)
            trainer.is_reachable = self._groups[trainer.peer.name].nat == "none"
            trainer.is_hostile = trainer.peer.name.startswith(HOSTILE)
            if not trainer.is_hostile:
                self._honest.add(trainer.peer.peer_id)
                watch_head(trainer.sync.replica, lambda: self._moved(trainer))
            return trainer

        self.swarm._launch = launch_and_watch  # type: ignore[method-assign, assignment]

    async def play(self) -> Measured:
        scenario, swarm, loop, measured = self.scenario, self.swarm, self.network.loop, self.measured
        presences = [await self._bootstrap(name) for name, group in scenario.named() if group.role == "bootstrap"]
        for name, group in self._groups.items():
            if group.role == "trainer":
                swarm.start(name, group.step_seconds)
        try:
            await swarm.until(lambda: all(map(_is_established, swarm.alive)), START_SECONDS, "all vote")
            self._began = began = loop.time()
            self._front = self._slowest()
            tokens = self._tokens()
            for at, act in self._plan():
                await self._watch(began + at)
                act()
            await self._watch(began + scenario.seconds)
            self._began = math.inf
            await self._recover()
            measured.tokens = self._tokens() - tokens
        except InvariantError as error:
            measured.problems.append(str(error))
        for task in self._strangers:
            task.cancel()
        for ended in await asyncio.gather(*self._strangers, return_exceptions=True):
            if isinstance(ended, Exception):
                raise ended  # A defect of the attack, whose run says nothing.
        with suppress(InvariantError):  # It was reported above.
            await swarm.end()
        for presence, peer in presences:
            await presence.close()
            await peer.close()
        for peer in self.network.alive:
            await peer.close()
        return measured

    async def _bootstrap(self, name: str) -> tuple[Presence, SimulatedPeer]:
        """Start a peer that only shows that it is there."""
        peer = self.network.add_peer(name)
        record = record_of(peer.peer_id, name=name, role="bootstrap", state="serving")
        membership = Membership(peer.peer_id, peer.runtime)
        rpc = Rpc(peer.transport, peer.runtime, self.swarm.manifest.digest)
        presence = Presence(lambda: peer.directory, rpc, peer.signer, membership, lambda: record)
        await rpc.start()
        await presence.start()
        return presence, peer

    # --- what disturbs it

    def _plan(self) -> list[tuple[float, Callable[[], None]]]:
        """Return the times and acts of faults and attackers, in order; nothing for an undisturbed run."""
        if not self.disturbed:
            return []
        plan: list[tuple[float, Callable[[], None]]] = [
            (at, lambda kind=kind, names=names: self._befall(kind, names))  # type: ignore[misc]
            for at, kind, names in self.scenario.timeline()
        ]
        plan += [(group.at, lambda group=group: self._attack(group)) for group in self.scenario.attackers]  # type: ignore[misc]
        return sorted(plan, key=lambda each: each[0])

    def _befall(self, kind: str, names: tuple[str, ...]) -> None:
        network, swarm = self.network, self.swarm
        peers = [swarm.trainers[name].peer for name in names]
        match kind:
            case "partition":
                network.partition(peers)
            case "heal":
                network.heal()
            case "restart":
                for name in names:
                    swarm.restart(name, self._groups[name].step_seconds)
            case _:
                act = {
                    "kill": network.crash, "stop": network.stall, "resume": network.resume, "cut": network.cut,
                    "mend": network.mend,
                }[kind]  # fmt: skip
                for peer in peers:
                    act(peer)

    def _attack(self, group: Attackers) -> None:
        for name in (name for name, each in self.scenario.hostile() if each is group):
            trainer = self.swarm.trainers[name] if group.member else None
            peer = trainer.peer if trainer is not None else self.network.add_peer(name)
            made = iter(range(1 << 30))

            def new_signer(name: str = name, made: Any = made) -> SimulatedSigner:
                signer = SimulatedSigner(f"{self.network.seed}/{name}", str(next(made)), self.network.keyring)
                self._phantoms.add(signer.peer_id)
                return signer

            manifest = self.swarm.manifest
            rpc = trainer.rpc if trainer is not None else Rpc(peer.transport, peer.runtime, manifest.digest)
            who = (name, rpc, peer.transport, peer.directory, peer.signer, manifest, new_signer, self._new_state)
            if trainer is not None:
                self._strangers.append(peer.spawn(Member(*who, trainer.sync).run(group.attack, group.options)))
            else:
                self._strangers.append(peer.spawn(_live(Stranger(*who), group)))

    def _new_state(self) -> SharedState:
        manifest = self.swarm.manifest
        module = make_module(manifest)
        inner = torch.optim.AdamW(module.parameters(), lr=BASE_RATE)
        return initial_state(module, WrappedOptimizer(inner, lambda round_: 1.0), manifest, manifest.digest)

    # --- what comes of it

    def _moved(self, trainer: SimulatedTrainer) -> None:
        """Note each round that an honest trainer applied: who signed it, and whose tokens it counts."""
        head, at = trainer.sync.head, self.network.loop.time() - self._began
        self._commits.append(trainer.peer.name)
        if at >= 0 and (slowest := self._slowest()) > self._front:
            self.measured.ends += [at] * (slowest - self._front)
            self._front = slowest
        if not head.certificate or head.lineage in self._judged:
            return
        self._judged.add(head.lineage)
        certificate = Certificate.from_bytes(head.certificate, trainer.swarm, trainer.peer.signer)
        body, measured = certificate.body, self.measured
        self._parents[head.lineage] = body.lineage
        counts = {body.members[index]: tokens for index, tokens, _ in body.contributors}
        self._honest_tokens[head.lineage] = sum(counts[peer] for peer in counts.keys() & self._honest)
        if not self._honest.intersection(peer for peer, _ in certificate.proofs):
            measured.foreign_rounds += 1
        elif counts.keys() - self._honest:
            measured.stranger_rounds += 1

    def _slowest(self) -> int:
        """Return the round of the slowest trainer that no fault hits."""
        return min(self.swarm.trainers[name].sync.head.round for name in self.scenario.unharmed)

    def _tokens(self) -> int:
        """Return the honest tokens of the lineage with most of them among the honest trainers'."""
        return max((self._tokens_of(trainer.sync.head.lineage) for trainer in self.swarm.honest), default=0)

    def _tokens_of(self, lineage: bytes) -> int:
        total = 0
        while lineage in self._parents:
            total += self._honest_tokens[lineage]
            lineage = self._parents[lineage]
        return total

    async def _watch(self, until: float) -> None:
        while (left := until - self.network.loop.time()) > 0:
            await asyncio.sleep(min(left, PAUSE_SECONDS))
            self.swarm._raise_errors()

    async def _recover(self) -> None:
        """Heal what is left of the faults, and count the lineages once all have committed, or after a timeout."""
        network, swarm, began = self.network, self.swarm, self.network.loop.time()
        network.heal()
        for trainer in swarm.alive:
            network.mend(trainer.peer)
            network.resume(trainer.peer)
        since = len(self._commits)

        def recovered() -> bool:
            return self._num_lineages() == 1 and {*self._commits[since:]} >= {each.peer.name for each in swarm.honest}

        with suppress(InvariantError):
            await swarm.until(recovered, RECOVERY_SECONDS, "all are on one lineage")
        swarm._raise_errors()
        self.measured.recovery = network.loop.time() - began
        self.measured.lineages = self._num_lineages()

    def _num_lineages(self) -> int:
        """Return how many of the honest trainers' heads no other one's head follows from."""
        heads = {trainer.sync.head.lineage for trainer in self.swarm.honest}
        followed = set()
        for lineage in heads:
            while (lineage := self._parents.get(lineage, b"")) != b"":
                followed.add(lineage)
        return len(heads - followed)


def _is_established(trainer: SimulatedTrainer) -> bool:
    row = trainer.sync.head.table.row_of(trainer.peer.peer_id)
    return row is not None and row.votes and row.counted >= ESTABLISHED


async def _live(stranger: Stranger, group: Attackers) -> None:
    await stranger.rpc.start()
    try:
        await stranger.run(group.attack, group.options)
    finally:
        await stranger.rpc.close()


def run_simulated(scenario: Scenario, seed: int, *, disturbed: bool) -> Measured:
    """Run a scenario to its end; what breaks the simulation is one of its problems."""
    link = scenario.link
    rate = link.megabits * 125_000
    model = LinkModel(
        latency_seconds=(0.5e-3 * link.delay_ms, 1.5e-3 * link.delay_ms), loss=link.loss_percent / 100,
        up_bytes_per_second=rate, down_bytes_per_second=rate,
    )  # fmt: skip
    gc.collect()  # Of the run before: a simulation does not collect while it runs.
    _reset_peak()
    runs: list[Run] = []

    async def main(network: SimulatedNetwork) -> Measured:
        runs.append(Run(scenario, network, disturbed=disturbed))
        return await runs[0].play()

    try:
        measured = simulate(main, seed, model=model)
    except SimulationError as error:
        measured = runs[0].measured if runs else Measured(scenario.seconds)
        measured.problems.append(f"{type(error).__name__}: {str(error)[:400]}")
    measured.peak_mb = _peak_mb()
    return measured


def _reset_peak() -> None:
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def _peak_mb() -> float:
    """Return the peak of this process's memory since `_reset_peak`; since its start where the kernel cannot do that."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
