"""The product's own trainers on a simulated network: `p2ptrain.node.trainer.build_trainer` and all that it builds."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

from p2ptrain.averaging.membership import Membership
from p2ptrain.config import PeerConfig
from p2ptrain.manifest import AveragingSpec, DataSpec, Manifest, ModelSpec, TrainingSpec
from p2ptrain.network.records import PeerRecord
from p2ptrain.network.rpc import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.node.peer import Peer, Status
from p2ptrain.node.presence import Presence
from p2ptrain.node.progress import JobBook
from p2ptrain.node.trainer import build_trainer
from p2ptrain.training import optimizer as optimizer_module
from p2ptrain.training.encoding import vector_codec
from p2ptrain.training.state import SharedState
from p2ptrain.training.sync import Synchronizer
from p2ptrain.training.trainer import Trainer
from tests.support.sim.lockstep import LockstepBridge

STEP_SECONDS = 0.5


def small_manifest(text: Path, training: dict[str, Any], **averaging: Any) -> Manifest:
    """A Llama of one narrow block over the bytes of a text, with short deadlines."""
    return Manifest(
        name="simulated",
        model=ModelSpec(layers=1, hidden=8, heads=2, kv_heads=1, intermediate=8, context=8, vocabulary=256),
        data=DataSpec(source=f"path:{text}"),
        training=TrainingSpec.model_validate({"local_batch": 2, **training}),
        averaging=AveragingSpec.model_validate(
            {"codec": "int8", "grace_seconds": 3.0, "matchmaking_seconds": 15.0, "round_seconds": 20.0, **averaging}
        ),
    )


class SimulatedNode:
    """What `build_trainer` and its parts use of a `Peer`, over a simulated transport and directory."""

    def __init__(self, peer: SimulatedPeer, manifest: Manifest) -> None:
        self.identity, self.options = SimpleNamespace(peer_id=peer.peer_id), SimpleNamespace(name=peer.name)
        self.manifest, self.swarm, self.runtime = manifest, manifest.digest, peer.runtime
        self.jobs = JobBook(asyncio.get_running_loop())
        self.status = Status(started_at=peer.runtime.now())
        self.rpc = Rpc(peer.transport, peer.runtime, self.swarm)
        self.membership = Membership(peer.peer_id, peer.runtime)
        self.synchronizer: Synchronizer | None = None
        self.presence = Presence(peer.directory, peer.runtime, self.swarm, peer.signer, self.membership, self.describe)
        self._peer = peer

    def describe(self) -> PeerRecord:
        sync = self.synchronizer
        head = sync.head if sync is not None else None
        return PeerRecord(
            peer=self._peer.peer_id, name=self._peer.name, version="0", protocol=1, role="trainer",
            state=self.status.state, device="cpu", round=head.round if head else 0,
            lineage=head.lineage if head else bytes(32), digest=head.digest if head else bytes(32),
            lineage_tokens=head.tokens if head else 0, round_tokens=0, loss=None, tokens_per_second=0.0, bytes_sent=0,
            bytes_received=0, reachability="direct", addresses=(), started_at=0.0,
            last_rounds=tuple(sync.reports) if sync is not None else (),
        )  # fmt: skip

    def train(self, state: SharedState) -> Synchronizer:
        self.synchronizer = Synchronizer(
            self.rpc, self.runtime, self._peer.signer, self.swarm, self.manifest, state,
            vector_codec(self.manifest.averaging, state.layout), self.membership, 0, self.jobs,
        )  # fmt: skip
        self.synchronizer.on_change = self.presence.changed
        return self.synchronizer

    def set_state(self, state: str) -> None:
        self.status.state = state
        self.presence.changed()

    def remember_peers(self) -> None:
        """Nothing outlives a simulation."""


@dataclass
class ProductSwarm:
    """Peers that run the product's trainer, each with a run directory of its own.

    Attributes:
        digests: The digest of each lineage, checked to be one whenever a head moves.
    """

    network: SimulatedNetwork
    manifest: Manifest
    folder: Path
    digests: dict[bytes, bytes] = field(default_factory=dict)
    trainers: dict[str, Trainer] = field(default_factory=dict)
    nodes: dict[str, SimulatedNode] = field(default_factory=dict)
    tasks: dict[str, asyncio.Task[None]] = field(default_factory=dict)
    step_seconds: dict[str, float] = field(default_factory=dict)
    before_step: Callable[[str, Trainer], None] = lambda name, trainer: None

    def start(self, name: str, max_rounds: int, step_seconds: float = STEP_SECONDS) -> None:
        """Start a peer, or start it again after a crash; it leaves at ``max_rounds``."""
        before = self.network.peers.get(name)
        peer = self.network.restart(before) if before is not None else self.network.add_peer(name)
        self.step_seconds[name] = step_seconds
        self.tasks[name] = peer.spawn(self._run(peer, max_rounds))

    async def _run(self, peer: SimulatedPeer, max_rounds: int) -> None:
        name, loop = peer.name, asyncio.get_running_loop()
        node = self.nodes[name] = SimulatedNode(peer, self.manifest)
        run_dir = self.folder / name
        run_dir.mkdir(exist_ok=True)
        config = PeerConfig.model_validate(
            {"role": "trainer", "run_dir": run_dir, "manifest": run_dir / "manifest.bin",
             "stop_after": {"at_round": max_rounds}, "resources": {"device": "cpu"}, "checkpoints": {"every_rounds": 1}}
        )  # fmt: skip
        await node.rpc.start()
        await node.presence.start()
        bridge = LockstepBridge(loop)
        try:
            trainer = await build_trainer(cast(Peer, node), config, run_dir, bridge)
            trainer._evaluate = False
            self.trainers[name] = trainer
            train_step = trainer._train_step

            def slow_step() -> Any:
                bridge.rest(self.step_seconds[name])
                self.before_step(name, trainer)
                return train_step()

            trainer._train_step = slow_step  # type: ignore[method-assign]
            assert node.synchronizer is not None
            node.synchronizer.on_change = lambda: self._moved(name)
            await bridge.run(trainer.run)
        finally:
            await node.presence.close()
            if node.synchronizer is not None:
                await node.synchronizer.close()
            await node.rpc.close()
            await peer.close()

    def _moved(self, name: str) -> None:
        sync = self.nodes[name].synchronizer
        assert sync is not None
        digest = self.digests.setdefault(sync.head.lineage, sync.head.digest)
        assert digest == sync.head.digest, f"{name} holds another digest at round {sync.head.round}"
        self.nodes[name].presence.changed()

    def heads(self) -> set[tuple[int, bytes]]:
        """Round and digest of every peer's state."""
        syncs = [node.synchronizer for node in self.nodes.values()]
        return {(sync.head.round, sync.head.digest) for sync in syncs if sync is not None}


def use_virtual_time(monkeypatch: Any, network: SimulatedNetwork) -> None:
    """Let the optimizer measure its local batches in virtual seconds."""
    monkeypatch.setattr(optimizer_module, "time", SimpleNamespace(monotonic=network.loop.time))
