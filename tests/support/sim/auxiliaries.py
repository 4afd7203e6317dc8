"""An auxiliary among simulated trainers: it finds them through the directory, and asks them what the model is."""

from __future__ import annotations

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.lending.auxiliary import Lender
from p2ptrain.manifest import Manifest
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.network.simulated import SimulatedPeer
from p2ptrain.node.presence import Presence
from p2ptrain.training.state.layout_wire import fetch_plan


class SimulatedAuxiliary:
    """One auxiliary on a simulated peer; `run` helps until it is cancelled."""

    def __init__(self, peer: SimulatedPeer, manifest: Manifest) -> None:
        self.peer = peer
        self.rpc = Rpc(peer.transport, peer.runtime, manifest.digest)
        self.membership = Membership(peer.peer_id, peer.runtime)
        self.presence = Presence(
            peer.directory, peer.runtime, manifest.digest, peer.signer, self.membership, self.describe
        )
        self.lender = Lender(
            self.rpc, peer.runtime, peer.signer, manifest.digest, manifest.averaging, self.membership,
            lambda trainer: fetch_plan(self.rpc, trainer, manifest),
        )  # fmt: skip
        self.task = peer.spawn(self.run())

    def describe(self) -> PeerRecord:
        return PeerRecord(
            peer=self.peer.peer_id, name=self.peer.name, version="0", protocol=1, role="auxiliary", state="lending",
            device="cpu", round=self.lender.head.round if self.lender.head else 0, lineage=bytes(32), digest=bytes(32),
            lineage_tokens=0, round_tokens=0, loss=None, tokens_per_second=0.0, bytes_sent=0, bytes_received=0,
            reachability="direct", addresses=(), started_at=0.0, last_rounds=(),
        )  # fmt: skip

    async def run(self) -> None:
        """Join, then help with one round after the other."""
        await self.rpc.start()
        await self.presence.start()
        try:
            await self.lender.run()
        finally:
            await self.presence.close()
            await self.lender.close()
            await self.rpc.close()
            await self.peer.close()
