"""The product's own peers on a simulated network: `p2ptrain.node.run.serve_and_close` and all that it starts."""

import asyncio
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.config import PeerConfig
from p2ptrain.manifest import (
    AdmissionSpec,
    AveragingSpec,
    DataSpec,
    Manifest,
    ModelSpec,
    PipelineSpec,
    PrivacySpec,
    PrivateSpec,
    SecureAggregationSpec,
    SignedManifest,
    TrainingSpec,
)
from p2ptrain.network.directory import Directory
from p2ptrain.network.factory import DirectoryOptions, TransportOptions
from p2ptrain.network.identity import Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.network.transport import Transport
from p2ptrain.node.options import PeerOptions, Starters, peer_options
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals
from p2ptrain.node.reports.summary import SUMMARY_FILE, Summary, read_summary
from p2ptrain.node.roles import materials
from p2ptrain.node.roles import trainer as trainer_role
from p2ptrain.node.roles.held import HeldState
from p2ptrain.node.run import serve_and_close
from p2ptrain.pipeline.checkpoints.saving import stage_folder
from p2ptrain.pipeline.stage.device import Device
from p2ptrain.training import optimizer
from p2ptrain.training.checkpoints.files import load_newest_valid
from p2ptrain.training.loop import Trainer
from p2ptrain.training.sync.synchronizer import Synchronizer
from tests.support.signers import NamedSigner
from tests.support.sim.lockstep import LockstepBridge
from tests.support.sim.pipelines import SlowDevice

STEP_SECONDS = 0.5
PASS_SECONDS = 0.05


def small_manifest(
    text: Path,
    training: dict[str, Any],
    *,
    num_stages: int = 1,
    tied: bool | None = None,
    private: PrivateSpec | None = None,
    differential_privacy: PrivacySpec | None = None,
    secure_aggregation: SecureAggregationSpec | None = None,
    admission: AdmissionSpec | None = None,
    **averaging: Any,
) -> Manifest:
    """A narrow Llama over the bytes of a text, with short deadlines; one block for each stage.

    Its embeddings are ``tied``, by default those of a whole model. With ``private`` each peer brings its own text.
    Everybody is admitted by default.
    """
    return Manifest(
        name="simulated",
        model=ModelSpec(
            layers=num_stages, hidden=8, heads=2, kv_heads=1, intermediate=8, context=8, vocabulary=256,
            tied_embeddings=num_stages == 1 if tied is None else tied,
        ),
        data=DataSpec(source=f"path:{text}" if private is None else "own"),
        private=private,
        differential_privacy=differential_privacy,
        secure_aggregation=secure_aggregation,
        training=TrainingSpec.model_validate({"local_batch": 2, **training}),
        averaging=AveragingSpec.model_validate(
            {"codec": "int8", "grace_seconds": 3.0, "matchmaking_seconds": 15.0, "round_seconds": 20.0, **averaging}
        ),
        pipeline=PipelineSpec(stages=num_stages),
        admission=admission or AdmissionSpec(mode="open", puzzle_bits=0),
    )  # fmt: skip


class SimulatedNode(Peer):
    """The product's peer on a simulated transport and directory; all nodes share the digest of each lineage."""

    def __init__(self, simulated: SimulatedPeer, options: PeerOptions, digests: dict[bytes, bytes]) -> None:
        async def start_transport(options: TransportOptions) -> Transport:
            return simulated.transport

        async def start_directory(options: DirectoryOptions) -> Directory:
            return simulated.directory

        starters = Starters(start_transport, start_directory)
        super().__init__(cast(Identity, simulated.signer), options, simulated.runtime, starters)
        self.digests = digests

    def state_changed(self) -> None:
        """Whenever a head moves, the peer holds the bits that other holders of the lineage hold."""
        hosted = [unit.synchronizer for stage in self.held.stages for unit in stage.units]
        for synchronizer in hosted or filter(None, [self.held.synchronizer]):
            head = synchronizer.head
            digest = self.digests.setdefault(head.lineage, head.digest)
            assert digest == head.digest, f"{self.options.name} holds another digest at round {head.round}"
        super().state_changed()


@dataclass
class ProductSwarm:
    """Peers that run the product from their role file to their exit, each with a run directory of its own.

    Attributes:
        digests: The digest of each lineage, checked to be one whenever a head moves.
        nodes, signals, tasks, trainers: By name, of each peer's present life.
        step_seconds: How long a trainer's step takes, where not `STEP_SECONDS`.
        before_step: Called on the training thread.
    """

    network: SimulatedNetwork
    manifest: Manifest
    folder: Path
    digests: dict[bytes, bytes] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    signals: dict[str, StopSignals] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    before_step: Callable[[str, Trainer], None] = lambda name, trainer: None

    def __post_init__(self) -> None:
        self._signed = SignedManifest.create(self.manifest, NamedSigner("organizer"))
        self.manifest = self._signed.manifest

    def start(self, name: str, max_rounds: int = 0, role: str = "trainer", **config: Any) -> None:
        """Start a peer, or start it again after it ended; it leaves at ``max_rounds`` if not 0.

        ``config`` is more of its role file.
        """
        before = self.network.peers.get(name)
        if before is not None and before.alive:
            self.network.crash(before)
        peer = self.network.restart(before) if before is not None else self.network.add_peer(name)
        run_dir = self.folder / name
        run_dir.mkdir(exist_ok=True)
        values = {
            "role": role, "name": name, "run_dir": run_dir, "manifest": run_dir / "manifest.bin",
            "network": {"listen": ["/ip4/127.0.0.1/tcp/0"]}, "resources": {"device": "cpu"},
            "stop_after": {"at_round": max_rounds}, "checkpoints": {"every_rounds": 1}, "allow_path": [self.folder],
            **config,
        }  # fmt: skip
        self.tasks[name] = peer.spawn(self._run(peer, PeerConfig.model_validate(values)))

    async def _run(self, peer: SimulatedPeer, config: PeerConfig) -> None:
        name = peer.name
        signals = self.signals[name] = StopSignals()
        others = tuple(other.address for other in self.network.alive if other is not peer)
        link = SwarmLink(self.manifest.digest, others) if others else None
        options = peer_options(config, peer.peer_id)
        node = self.nodes[name] = SimulatedNode(peer, options, self.digests)
        try:
            await node._start(link, self._signed)
            await serve_and_close(node, config, signals)
        finally:
            await node.close(farewell=False)
            await peer.close()

    def start_all(self, names: Iterable[str], *arguments: Any, **config: Any) -> None:
        for name in names:
            self.start(name, *arguments, **config)

    def stop(self, name: str) -> None:
        """SIGTERM."""
        self.signals[name].stop("signal")

    async def drain(self, name: str) -> float:
        """SIGTERM; return the seconds until the peer had ended."""
        began = self.network.loop.time()
        self.stop(name)
        await self.tasks[name]
        return self.network.loop.time() - began

    async def lose_network(self, name: str) -> None:
        node = self.nodes[name]
        await node.network.transport.close()
        node.network.lose("killed")

    async def kill(self, name: str) -> None:
        """SIGKILL."""
        self.network.crash(self.network.peers[name])
        await asyncio.gather(self.tasks[name], return_exceptions=True)

    async def until(self, condition: Callable[[], bool], seconds: float = 600.0) -> None:
        """Wait in virtual time; the error of a peer that ended surfaces here."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + seconds
        while not condition():
            for task in self.tasks.values():
                if task.done() and not task.cancelled():
                    task.result()
            assert loop.time() < deadline, f"not within {seconds:g} s"
            await asyncio.sleep(0.25)

    async def end(self) -> None:
        await asyncio.gather(*self.tasks.values())

    def saved_head(self, name: str) -> tuple[int, bytes]:
        """Round and digest of a peer's newest checkpoint, of its stage if it hosts one."""
        folder, swarm = self.folder / name / "checkpoints", self.manifest.digest
        for hosted in self.nodes[name].held.stages:
            folder, swarm = folder / stage_folder(hosted.number), hosted.units[0].swarm
        checkpoint = load_newest_valid(folder, swarm)
        assert checkpoint is not None
        return checkpoint.head.round, checkpoint.head.digest

    def summary(self, name: str) -> Summary:
        summary = read_summary(self.folder / name / SUMMARY_FILE)
        assert summary is not None
        return summary

    def sync(self, name: str) -> Synchronizer:
        synchronizer = self.nodes[name].held.synchronizer
        assert synchronizer is not None
        return synchronizer

    def round(self, name: str) -> int:
        """The round of a peer's state; -1 before it has one."""
        node = self.nodes.get(name)
        return node.held.synchronizer.head.round if node is not None and node.held.synchronizer is not None else -1

    def heads(self) -> set[tuple[int, bytes]]:
        syncs = [node.held.synchronizer for node in self.nodes.values()]
        return {(sync.head.round, sync.head.digest) for sync in syncs if sync is not None}


Begin = Callable[..., ProductSwarm]
"""The fixture ``begin`` of tests/sim."""


def use_virtual_time(monkeypatch: pytest.MonkeyPatch, swarm: ProductSwarm) -> None:
    """Make training threads take turns with the loop, and steps and passes take virtual time; nobody measures."""
    loop = swarm.network.loop
    # Threads run only while the loop stands still, so what they schedule needs no wake-up.
    loop.call_soon_threadsafe = loop.call_soon  # type: ignore[method-assign]
    monkeypatch.setattr(optimizer, "time", SimpleNamespace(monotonic=loop.time))
    monkeypatch.setattr(trainer_role, "Bridge", LockstepBridge)
    monkeypatch.setattr(materials, "Device", _slow_device)
    monkeypatch.setattr(HeldState, "_warm_up", lambda held: None)  # It starts a thread; torch gives the same bits.
    step = Trainer._train_step

    def slow_step(trainer: Trainer) -> Any:
        name = next(name for name, peer in swarm.network.peers.items() if peer.peer_id == trainer.peer_id)
        swarm.trainers[name] = trainer
        trainer.optimizer._bridge.sleep(swarm.step_seconds.get(name, STEP_SECONDS))
        swarm.before_step(name, trainer)
        return step(trainer)

    monkeypatch.setattr(Trainer, "_measure", lambda trainer, seconds=0.0: None)
    monkeypatch.setattr(Trainer, "_glance", lambda trainer: None)
    monkeypatch.setattr(Trainer, "_train_step", slow_step)
    monkeypatch.setattr(Trainer, "_wait_for_a_wish", lambda trainer: trainer.optimizer._bridge.sleep(STEP_SECONDS))


def _slow_device(runtime: Any) -> Device:
    return SlowDevice(runtime, PASS_SECONDS)
