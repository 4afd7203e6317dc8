"""A peer that only looks on: a monitor, for as long as it runs."""

import asyncio
from typing import cast

import pytest

from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.directory import Directory
from p2ptrain.network.factory import DirectoryOptions, TransportOptions
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.directory import SimulatedDirectory
from p2ptrain.network.transport import Transport
from p2ptrain.node.options import PeerOptions, Starters
from p2ptrain.node.peer import Peer
from tests.support.coroutines import simulated
from tests.support.signers import NamedSigner


@simulated()
async def test_an_observer_follows_the_swarms_clock_when_its_machines_is_set(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    watcher, skew = network.add_peer("watcher"), 3600.0

    async def start_transport(options: TransportOptions) -> Transport:
        return watcher.transport

    async def start_directory(options: DirectoryOptions) -> Directory:
        return watcher.directory

    monkeypatch.setattr(SimulatedDirectory, "clock_skew_seconds", property(lambda directory: skew))
    peer = await Peer.start(
        cast(Identity, watcher.signer), PeerOptions("client", "watcher", "cpu", None, Libp2pSettings()),
        watcher.runtime, signed=SignedManifest.create(Manifest(), NamedSigner("organizer")),
        starters=Starters(start_transport, start_directory),
    )  # fmt: skip
    assert watcher.runtime.clock_offset_seconds == -3600.0
    skew = 0.0
    await asyncio.sleep(10.0)
    assert watcher.runtime.clock_offset_seconds == 0.0
    await peer.close()
