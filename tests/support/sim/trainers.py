"""Simulated trainers: the real synchronisation code around a tiny model, and the invariants that always hold."""

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from p2ptrain.averaging.context import PeerContext, ballots_in, founding_of
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.ballots import Ballots
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.errors import P2PTrainError
from p2ptrain.manifest import AveragingSpec, Manifest, TrainingSpec
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.node.presence import Presence
from p2ptrain.node.roles.training import find_the_others, step_in
from p2ptrain.training.learning_rate import WrappedOptimizer
from p2ptrain.training.local_update import LocalContribution
from p2ptrain.training.state.initial_state import initial_state
from p2ptrain.training.sync.replica import Replica
from p2ptrain.training.sync.synchronizer import RoundResult, Synchronizer
from tests.support.coroutines import at_end
from tests.support.records import record_of
from tests.support.settings import training_over
from tests.support.sim.seed import SimulatedSeed

TOKENS_PER_STEP = 10
BASE_RATE = 0.01


def rate_factor(round_: int) -> float:
    return 1.0 / (1 + round_ % 5)


def make_manifest(training: dict[str, Any] | None = None, /, **averaging: object) -> Manifest:
    """A manifest with short deadlines; ``training`` and ``averaging`` override these sections."""
    values: dict[str, object] = {
        "codec": "int8",
        "grace_seconds": 3.0,
        "matchmaking_seconds": 15.0,
        "round_seconds": 20.0,
        **averaging,
    }
    usual = {"every": 4, "outer": "nesterov", "outer_learning_rate": 0.7, "outer_momentum": 0.9}
    training = training or {}
    steps = training if training.get("every") == 1 else training_over(usual, training)
    return Manifest(
        name="simulated", training=TrainingSpec.model_validate(steps), averaging=AveragingSpec.model_validate(values)
    )


WIDTH = 40
"""Its 1,640 values are 7 blocks of a codec: each member of a group owns a share, also a slow, dying or hostile one."""


def make_module(manifest: Manifest, width: int = WIDTH) -> torch.nn.Module:
    """A tiny model, of one layer or, where the manifest asks for fragments, of enough narrow ones."""
    if manifest.training.fragments == 1:
        return torch.nn.Linear(width, width)
    return torch.nn.Sequential(*(torch.nn.Linear(5, 5) for _ in range(2 * manifest.training.fragments)))


def longest_wait_seconds(manifest: Manifest) -> float:
    """A bound on one synchronisation, from the manifest's deadlines: three attempts, each matched, run and settled."""
    spec = manifest.averaging
    return 4 * (spec.matchmaking_seconds + spec.grace_seconds + spec.round_seconds + 30)


class InvariantError(AssertionError):
    """A promise was broken."""


@dataclass
class Ledger:
    """Record what all trainers of one simulation did, and check what must hold among them at any time.

    ``ballots`` are the votes of trainers without a folder, by peer: as a file would, they outlive a crash.
    """

    digests: dict[bytes, bytes] = field(default_factory=dict)
    tokens: dict[bytes, int] = field(default_factory=dict)
    rounds: dict[bytes, int] = field(default_factory=dict)
    contributed: dict[str, int] = field(default_factory=dict)
    produced: dict[str, int] = field(default_factory=dict)
    commits: list[tuple[float, str, int]] = field(default_factory=list)
    ballots: dict[str, Ballots] = field(default_factory=dict)

    def check_head(self, trainer: "SimulatedTrainer") -> None:
        """Holders of one lineage hold the same bits."""
        head = trainer.sync.head
        digest = self.digests.setdefault(head.lineage, head.digest)
        if digest != head.digest:
            raise InvariantError(f"{trainer.peer.name} has another digest than others at round {head.round}")
        self.rounds[head.lineage] = head.round
        if self.tokens.setdefault(head.lineage, head.tokens) != head.tokens:
            raise InvariantError(f"{trainer.peer.name} counts other tokens than others at round {head.round}")

    def check_convictions(self, trainers: Iterable["SimulatedTrainer"]) -> None:
        """Nobody has evidence against an honest trainer, and no lineage bans one."""
        trainers = list(trainers)
        honest = {each.peer.peer_id for each in trainers} - {each.peer.peer_id for each in trainers if each.is_hostile}
        for each in trainers:
            if convicted := honest & each.sync.averager.evidence.convicted.keys():
                raise InvariantError(f"{each.peer.name} has evidence against honest trainers: {sorted(convicted)}")
            if banned := honest & each.sync.head.table.banned:
                raise InvariantError(f"{each.peer.name}'s lineage bans honest trainers: {sorted(banned)}")

    @property
    def forked_rounds(self) -> list[int]:
        return sorted(number for number, count in Counter(self.rounds.values()).items() if count > 1)


class SimulatedTrainer:
    """One trainer on a simulated peer; `run` trains until it is cancelled or ``stop`` is set."""

    def __init__(
        self,
        peer: SimulatedPeer,
        manifest: Manifest,
        ledger: Ledger,
        step_seconds: float = 0.5,
        seed: int = 0,
        width: int = WIDTH,
    ) -> None:
        self.peer = peer
        self.manifest = manifest
        self.ledger = ledger
        self.step_seconds = step_seconds
        self.random = random.Random(f"{seed}/{peer.name}/{peer.incarnation}")
        self.noise = torch.Generator().manual_seed(self.random.randrange(1 << 63))
        self.swarm = manifest.digest
        generator = torch.Generator().manual_seed(1)
        self.module = make_module(manifest, width)
        with torch.no_grad():
            for parameter in self.module.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        # With a global batch it steps on the mean gradient, at a rate of which no two rounds in a row have the same.
        inner = torch.optim.AdamW(self.module.parameters(), lr=BASE_RATE)
        self.state = initial_state(self.module, WrappedOptimizer(inner, rate_factor), manifest, self.swarm)
        self.rpc = Rpc(peer.transport, peer.runtime, self.swarm)
        self.membership = Membership(peer.peer_id, peer.runtime)
        self.status = "starting"
        self.presence = Presence(lambda: peer.directory, self.rpc, peer.signer, self.membership, self.describe)
        self.is_reachable = True
        ballots = ledger.ballots.setdefault(peer.peer_id, Ballots())
        if peer.runtime.scratch is not None:
            ballots = ballots_in(peer.runtime.scratch, self.swarm)
        context = PeerContext(
            self.rpc, peer.runtime, peer.signer, self.swarm, manifest.averaging, self.membership, self,
            founding_of(manifest), ballots, secure_aggregation=manifest.secure_aggregation,
        )  # fmt: skip
        self.sync = Synchronizer(Replica(context, manifest, self.state))
        spec = manifest.training
        self.work = LocalContribution(
            self.module, self.state, accumulate=spec.every == 1, mixing=spec.mixing if spec.overlap_steps else None
        )
        self.first_step = 0
        self.results: list[RoundResult] = []
        self.stop = False
        self.is_hostile = False

    def state_changed(self) -> None:
        self.ledger.check_head(self)
        self.presence.changed()

    def describe(self) -> PeerRecord:
        head = self.sync.head
        return record_of(
            self.peer.peer_id, name=self.peer.name, state=self.status, round=head.round, lineage=head.lineage,
            digest=head.digest, lineage_tokens=head.tokens, lineage_full=head.full,
            lineage_returned=head.returned, round_tokens=self.work.tokens,
            last_rounds=tuple(self.sync.reports),
        )  # fmt: skip

    async def run(self) -> None:
        """Join, then train: local steps, and a synchronisation when H are done or the swarm closes the round."""
        await self.rpc.start()
        await self.presence.start()
        try:
            await self._join()
            spec = self.manifest.training
            while not self.stop:
                began = asyncio.get_running_loop().time()
                await self._compute()
                if await self._is_due(asyncio.get_running_loop().time() - began):
                    result = await (self.synchronize_under_compute() if spec.overlap_steps else self.synchronize())
                    self.first_step = 0 if spec.overlap_steps else self.work.steps
                    if not result.committed:
                        self.first_step = self.work.steps + 1 - spec.steps_per_round
                    self.sync.pacing.note(self.steps_in_round)
        finally:
            await self.close()

    @property
    def steps_in_round(self) -> int:
        return max(0, self.work.steps - self.first_step)

    async def _is_due(self, batch_seconds: float) -> bool:
        """True if the product's optimizer would synchronise now."""
        if self.manifest.training.every > 1:
            self.sync.pacing.note(self.steps_in_round, batch_seconds)
            return self.sync.is_due(self.steps_in_round)
        if self.sync.position.is_closing:
            return True
        return await self.sync.pacing.report_batch(self.work.samples, 1, batch_seconds)

    async def synchronize_under_compute(self) -> RoundResult:
        """One synchronisation that goes on while the next steps are computed, up to the manifest's overlap."""
        self.work.steps = 0
        async with asyncio.TaskGroup() as tasks:
            flight = tasks.create_task(self.synchronize())
            while not flight.done() and self.work.steps < self.manifest.training.overlap_steps:
                await self._compute()
        return flight.result()

    async def _join(self) -> None:
        self.status = "syncing"
        await find_the_others(self.presence, self.sync, self.work)
        self.status = "training"
        self.sync.participate(True)
        await step_in(self.presence, self.sync)

    async def _compute(self) -> None:
        await asyncio.sleep(self.step_seconds * self.random.uniform(0.9, 1.1))
        self._step()

    def _step(self) -> None:
        for parameter in self.module.parameters():
            noise = 0.01 * torch.randn(parameter.shape, generator=self.noise)
            if self.manifest.training.every == 1:
                parameter.grad = noise
            else:
                parameter.data.add_(noise)
        if self.manifest.training.every == 1:
            self.work.add_gradients(self.module.parameters(), TOKENS_PER_STEP)
        self.work.add_step(1, TOKENS_PER_STEP)
        name = self.peer.name
        self.ledger.produced[name] = self.ledger.produced.get(name, 0) + TOKENS_PER_STEP

    async def synchronize(self) -> RoundResult:
        """One synchronisation, with the promises around it checked."""
        loop = asyncio.get_running_loop()
        head, vector = self.sync.head, self.state.vector.clone()
        started, pending = loop.time(), list(self.work.pending)
        result = await self.sync.synchronize(self.work)
        seconds = loop.time() - started
        if seconds > longest_wait_seconds(self.manifest):
            raise InvariantError(f"{self.peer.name} waited {seconds:.0f} s in a synchronisation")
        if self.sync.head == head and not torch.equal(vector, self.state.vector):
            raise InvariantError(f"{self.peer.name}: a round that was not applied changed parameters")
        if not self.manifest.training.overlap_steps and any(
            now not in (0, before) for now, before in zip(self.work.pending, pending, strict=True)
        ):
            raise InvariantError(f"{self.peer.name}: work was split")
        if result.committed:
            self.ledger.commits.append((loop.time(), self.peer.name, result.round))
            if result.contributed:
                body = Certificate.from_bytes(self.sync.head.certificate, self.swarm, self.peer.signer).body
                tokens, _ = self.sync.averager.contributions.counts_in(body) or (0, 0)
                name = self.peer.name
                self.ledger.contributed[name] = self.ledger.contributed.get(name, 0) + tokens
        self.results.append(result)
        return result

    async def close(self) -> None:
        self.status = "draining"
        await self.presence.close()
        await self.sync.close()
        await self.rpc.close()
        await self.peer.close()


class SimulatedSwarm:
    """Trainers, and the seed that founded their swarm, maybe with some of them."""

    def __init__(self, network: SimulatedNetwork, manifest: Manifest, seed: int, founders: Iterable[str] = ()) -> None:
        self.network = network
        self._founders = {name: network.add_peer(name) for name in founders}
        others = [peer.peer_id for peer in self._founders.values()]
        self.founder = SimulatedSeed(network, others, is_open=manifest.admission.mode == "open")
        self.manifest = manifest.model_copy(update={"founders": (self.founder.peer.peer_id, *others)})
        self.founder.peer.spawn(self.founder.serve(self.manifest.digest, manifest.averaging))
        self.seed = seed
        self.ledger = Ledger()
        self.trainers: dict[str, SimulatedTrainer] = {}
        self.launched: list[SimulatedTrainer] = []
        self.tasks: dict[str, asyncio.Task[None]] = {}
        at_end(self.end)

    def start(self, name: str, step_seconds: float = 0.5, **options: float) -> SimulatedTrainer:
        return self._launch(self._founders.get(name) or self.network.add_peer(name, **options), step_seconds)

    def restart(self, name: str, step_seconds: float = 0.5) -> SimulatedTrainer:
        """Start a crashed trainer again: same identity, no memory."""
        return self._launch(self.network.restart(self.trainers[name].peer), step_seconds)

    def _launch(self, peer: SimulatedPeer, step_seconds: float) -> SimulatedTrainer:
        trainer = SimulatedTrainer(peer, self.manifest, self.ledger, step_seconds, self.seed)
        self.trainers[peer.name] = trainer
        self.launched.append(trainer)
        self.tasks[peer.name] = peer.spawn(trainer.run())
        return trainer

    @property
    def alive(self) -> list[SimulatedTrainer]:
        return [trainer for trainer in self.trainers.values() if trainer.peer.alive]

    @property
    def honest(self) -> list[SimulatedTrainer]:
        return [trainer for trainer in self.alive if not trainer.is_hostile]

    def crash(self, name: str) -> None:
        """SIGKILL."""
        self.network.crash(self.trainers[name].peer)

    async def until(self, condition: Callable[[], bool], seconds: float, what: str) -> None:
        """Wait in virtual time for a condition, with a deadline; errors of trainers surface here."""
        deadline = self.network.loop.time() + seconds
        while not condition():
            self._raise_errors()
            if self.network.loop.time() >= deadline:
                raise InvariantError(f"not within {seconds:.0f} s: {what}; {self.describe()}")
            await asyncio.sleep(0.25)
        self._raise_errors()

    def _raise_errors(self) -> None:
        for name, task in self.tasks.items():
            if task.done() and not task.cancelled() and (error := task.exception()) is not None:
                if self.trainers[name].is_hostile and isinstance(error, (P2PTrainError, InvariantError)):
                    continue  # The others refuse it again and again, or ban it.
                raise InvariantError(f"trainer {name} ended with {error!r}") from error

    def in_agreement(self, rounds: int) -> bool:
        """Whether all living trainers are at least at this round, and within one round of each other."""
        reached = [t.sync.head.round for t in self.alive]
        return bool(reached) and min(reached) >= rounds and max(reached) - min(reached) <= 1

    def describe(self) -> str:
        return "; ".join(
            f"{t.peer.name} r{t.sync.head.round} {t.sync.head.lineage.hex()[:6]} {t.sync.averager.phase} {t.status}"
            f" {t.results[-1].reason if t.results else '-'}"
            for t in self.alive
        )

    async def end(self) -> None:
        for trainer in self.alive:
            trainer.stop = True
        pending = [task for name, task in self.tasks.items() if self.trainers[name].peer.alive and not task.done()]
        for task in pending:
            task.cancel()
        await asyncio.gather(*pending, return_exceptions=True)
        await self.founder.close()
        self._raise_errors()
        self.ledger.check_convictions(self.launched)
