"""Peers of a simulated swarm that publish their records and know each other, and do nothing else."""

from collections.abc import Callable
from operator import attrgetter

from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.node.presence import Presence
from p2ptrain.signing import Signer
from tests.support.records import record_of

SWARM = b"s" * 32


class PresentPeer:
    """One peer; ``describe`` makes its record."""

    def __init__(
        self,
        network: SimulatedNetwork,
        name: str,
        describe: Callable[[str], PeerRecord] = record_of,
        signer: Callable[[SimulatedPeer], Signer] = attrgetter("signer"),
    ) -> None:
        self.peer = network.add_peer(name)
        self.id = self.peer.peer_id
        self.signer = signer(self.peer)
        self.rpc = Rpc(self.peer.transport, self.peer.runtime, SWARM)
        self.membership = Membership(self.id, self.peer.runtime)
        self.presence = Presence(
            lambda: self.peer.directory, self.rpc, self.signer, self.membership, lambda: describe(self.id)
        )

    async def start(self) -> None:
        await self.rpc.start()
        await self.presence.start()

    def ages(self) -> dict[str, float]:
        """By other peer: how long ago it wrote the record that this one holds, in seconds."""
        now = self.peer.runtime.now()
        return {
            held.record.peer: now - held.sequence / 1000
            for held in self.presence.book.held()
            if held.record.peer != self.id
        }

    async def close(self) -> None:
        await self.presence.close(farewell=False)
        await self.rpc.close()
        await self.peer.close()
