"""Finding out how a peer is reached, with real daemons on loopback; tests/nat has gateways, too."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from p2ptrain.errors import PeerRefusedError
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.reachability import host_of, speaks_libp2p, tcp_ports
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Nothing
from p2ptrain.node.nat import probing, reach
from p2ptrain.node.nat.probing import PROBE, ProbeReply, ProbeRequest, ask_back
from p2ptrain.node.nat.reach import Reach
from p2ptrain.node.nat.relaying import CARRY, carrier, why_no_relay
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.peer import Peer
from p2ptrain.runtime import real_runtime
from tests.support.coroutines import on_loop
from tests.support.processes.daemons import LOOPBACK, eventually, free_port, loopback_transport
from tests.support.processes.files import OPEN_TO_ALL
from tests.support.processes.swarmlet import MANIFEST


@asynccontextmanager
async def started(directory: Path, name: str, link: SwarmLink | None = None, **network: Any) -> AsyncIterator[Peer]:
    """A peer of one swarm; the first one, without a link, starts it."""
    runtime = real_runtime(name)
    settings = Libp2pSettings(**{"listen": LOOPBACK, "auto_nat": True, **network})
    with Identity.ephemeral() as identity:
        signed = (
            None
            if link
            else SignedManifest.create(Manifest.model_validate({**MANIFEST, "admission": OPEN_TO_ALL}), identity)
        )
        options = PeerOptions("bootstrap" if link is None else "trainer", name, "cpu", directory, settings)
        peer = await Peer.start(identity, options, runtime, link=link, signed=signed)
        try:
            yield peer
        finally:
            await peer.close()
            runtime.close()


@on_loop
async def test_a_swarm_on_loopback_is_direct_without_asking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def ask(*_: object) -> list[object]:
        raise AssertionError("asked")

    monkeypatch.setattr(reach, "ask_back", ask)
    async with started(tmp_path, "seed") as seed, started(tmp_path, "joiner", seed.network.link) as joiner:
        assert (seed.network.reach.standing.reachability, joiner.record.describe().reachability) == ("direct", "direct")
        assert joiner.record.describe().addresses


@on_loop
async def test_a_probe_dials_nothing_on_loopback_and_refuses_floods(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def speaks(host: str, port: int) -> bool:
        raise AssertionError("dialled")

    monkeypatch.setattr(probing, "speaks_libp2p", speaks)
    monkeypatch.setattr(probing, "MAX_PROBES_PER_PEER", 3)
    async with started(tmp_path, "seed") as seed, started(tmp_path, "joiner", seed.network.link) as joiner:
        for _ in range(3):
            reply = await joiner.rpc.call(seed.identity.peer_id, PROBE, ProbeRequest((22,)), ProbeReply, 5)
            assert reply == ProbeReply("127.0.0.1", (), is_relay=False)
        with pytest.raises(PeerRefusedError, match="too often"):
            await joiner.rpc.call(seed.identity.peer_id, PROBE, ProbeRequest((22,)), ProbeReply, 5)


@on_loop
async def test_a_daemon_is_recognised_where_it_listens() -> None:
    async with loopback_transport() as (_, transport):
        address = (await transport.addresses())[0]
        assert await speaks_libp2p(host_of(address), tcp_ports([address])[0])


@on_loop
async def test_a_relay_carries_once_it_has_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    proof, verdicts = why_no_relay, []

    async def noted(*arguments: Any) -> str:
        verdicts.append(await proof(*arguments))
        return verdicts[-1]

    monkeypatch.setattr(reach, "why_no_relay", noted)
    for number in range(3):
        async with started(tmp_path, f"seed{number}", relay=True):
            assert verdicts[-1] == ""
    # On busy cores a daemon may start its services in the wrong order once in a while, and is started again.
    assert len(verdicts) <= 4


@pytest.mark.fault(39)
@on_loop
async def test_a_relay_that_does_not_carry_starts_again_and_keeps_its_address(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    proof, verdicts = why_no_relay, ["it cuts streams"]

    async def seldom(*arguments: Any) -> str:
        return verdicts.pop() if verdicts else await proof(*arguments)

    monkeypatch.setattr(reach, "why_no_relay", seldom)
    listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)
    async with started(tmp_path, "seed", relay=True, listen=listen) as seed:
        assert not verdicts
        assert [address.partition("/p2p/")[0] for address in seed.network.link.addresses] == list(listen)
        async with started(tmp_path, "joiner", seed.network.link) as joiner:
            reply = await joiner.rpc.call(seed.identity.peer_id, PROBE, ProbeRequest(()), ProbeReply, 5)
            assert reply.is_relay


@on_loop
async def test_a_peer_that_takes_a_relay_while_it_runs_keeps_its_rpc_and_directory(tmp_path: Path) -> None:
    async with started(tmp_path, "seed", relay=True) as seed, started(tmp_path, "joiner", seed.network.link) as joiner:
        before = joiner.network.transport
        assert isinstance(before, Libp2pTransport)
        assert isinstance(joiner.network.reach, Reach)
        reports = await ask_back(joiner.rpc, before, seed.network.link.addresses)
        assert [report.is_relay for report in reports] == [True]
        await joiner.network.reach._be_private(reports, "for a test")
        await joiner.network.reach.refresh()
        joiner.presence.changed()
        assert joiner.network.transport is not before
        assert joiner.network.reach.standing.reachability == "relay"

        async def is_seen() -> bool:
            await seed.presence.refresh()
            return any(record.reachability == "relay" for record in seed.membership.records())

        await eventually(is_seen)
        reply = await joiner.rpc.call(seed.identity.peer_id, PROBE, ProbeRequest(()), ProbeReply, 5)
        assert reply.observed == "127.0.0.1"


@on_loop
async def test_nobody_but_its_own_carrier_can_have_a_peer_carry(tmp_path: Path) -> None:
    async with started(tmp_path, "seed") as seed:
        runtime = real_runtime("stranger")
        async with carrier(runtime, seed.swarm), loopback_transport() as (_, transport):
            rpc = Rpc(transport, runtime, seed.swarm)
            await transport.connect(seed.network.link.addresses, 5)
            async with rpc.open(seed.identity.peer_id, CARRY, Nothing(), 5) as channel:
                with pytest.raises(PeerRefusedError, match="not asked"):
                    await channel.receive(Nothing, 5)
        runtime.close()
