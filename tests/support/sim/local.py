"""Peers of one process whose streams stay in memory, with no daemon behind them, in virtual time or real."""

from __future__ import annotations

from typing import Any, cast

from p2ptrain.network.libp2p.control import DaemonControl, DaemonRefusal
from p2ptrain.network.libp2p.daemon import Daemon
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer


class NoDaemon:
    """Stands for a daemon and its control: reaches nobody."""

    def close(self) -> None:
        """Nothing to close."""

    def expect_end(self) -> None:
        """It never began."""

    async def stop(self) -> None:
        """Nothing to stop."""

    async def serve_stream(self, protocol: str, callback: object) -> None:
        """Nobody comes that way."""

    async def open_stream(self, peer: str, protocol: str) -> object:
        """Nobody is there."""
        raise DaemonRefusal("there is no daemon")


class LocalTransport(Libp2pTransport):
    """The transport of real peers, with memory as its only way."""

    def __init__(self, peer_id: str, **settings: Any) -> None:
        nothing = NoDaemon()
        settings = {"direct": "off", **settings}
        super().__init__(cast(Daemon, nothing), cast(DaemonControl, nothing), Libp2pSettings(**settings), peer_id)

    @property
    def num_streams(self) -> int:
        """Streams of which this end is open."""
        return len(self._streams)


def in_memory(network: SimulatedNetwork) -> SimulatedNetwork:
    """``network``, but what its peers send each other stays in memory; its faults befall them no more."""
    add_peer = network.add_peer

    def add_local_peer(name: str, **options: Any) -> SimulatedPeer:
        peer = add_peer(name, **options)
        peer.transport = LocalTransport(peer.peer_id)  # type: ignore[assignment]
        return peer

    network.add_peer = add_local_peer  # type: ignore[method-assign]
    return network
