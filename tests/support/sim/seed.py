"""The peer that founded a simulated swarm: it votes, and trains nothing."""

from collections.abc import Iterable, Mapping

from p2ptrain.averaging.commit.votes import LightVotes
from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.protocol.ballots import Ballots
from p2ptrain.averaging.protocol.table import founding_table
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import at_end


class SimulatedSeed:
    """A founder on a peer of its own, maybe beside others.

    ``membership`` has whom it knows in the swarm, ``memberships`` in the units of a pipeline by the names of scopes;
    ``ballots`` are its votes by swarm or unit.
    """

    def __init__(self, network: SimulatedNetwork, others: Iterable[str] = (), *, is_open: bool = False) -> None:
        self.peer = network.add_peer("seed")
        self.founding = founding_table([self.peer.peer_id, *others], is_open=is_open)
        self.membership = Membership(self.peer.peer_id, self.peer.runtime)
        self.memberships: dict[str, Membership] = {}
        self.ballots: dict[bytes, Ballots] = {}
        self._rpc: Rpc | None = None
        at_end(self.close)

    async def serve(self, swarm: bytes, spec: AveragingSpec, units: Mapping[str, bytes] | None = None) -> None:
        """Vote in a swarm from now on, or in the units of a pipeline, whose swarms are given by the names of scopes."""
        peer = self.peer
        rpc = self._rpc = Rpc(peer.transport, peer.runtime, swarm)
        for scope, unit in (units or {"": swarm}).items():
            scoped = rpc.scoped(scope) if scope else rpc
            membership = Membership(peer.peer_id, peer.runtime) if scope else self.membership
            self.memberships[scope] = membership
            context = PeerContext(
                scoped, peer.runtime, peer.signer, unit, spec, membership, founding=self.founding,
                ballots=self.ballots.setdefault(unit, Ballots()),
            )  # fmt: skip
            LightVotes(context)
        await rpc.start()

    async def close(self) -> None:
        if self._rpc is not None and self.peer.alive:
            await self._rpc.close()
            await self.peer.close()
        self._rpc = None
