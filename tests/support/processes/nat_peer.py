"""A peer without a model for tests of reachability: it joins, says how it is reached, and obeys.

Run by `tests.support.processes.nat.NatPeer` as ``python -m tests.support.processes.nat_peer OPTIONS``. It says one
JSON object a line: ``joined`` once, and ``standing`` whenever that changes. Orders are JSON lists, one a line; each is
answered by a line:

``["send", PEER, NUM_BYTES]``
    Send so much to a peer and get it back.
``["peers"]``
    The reachability of all peers by name, from the directory.
``["reachability", NAME]``
    That of one peer.
``["connections"]``
    The remote addresses of all connections by peer.
``["disconnect", PEER]``
    Close all connections with a peer.
"""

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from p2ptrain.errors import P2PTrainError
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.node.nat.reach import Reach
from p2ptrain.node.options import PeerOptions
from p2ptrain.node.peer import Peer
from p2ptrain.runtime import real_runtime
from tests.support.processes.files import OPEN_TO_ALL
from tests.support.processes.swarmlet import MANIFEST

OPEN = {**MANIFEST, "admission": OPEN_TO_ALL}


def say(event: str, **values: Any) -> None:
    print(json.dumps({"event": event, **values}), flush=True)  # noqa: T201


async def echo(channel: Channel, request: dict[str, Any]) -> None:
    await channel.send_bytes(await channel.receive_bytes(request["size"], 30))


async def obey(peer: Peer, order: list[Any]) -> Any:
    match order:
        case ["send", str(other), int(size)]:
            async with peer.rpc.open(other, "echo", {"size": size}, 10) as channel:
                sending = asyncio.create_task(channel.send_bytes(bytes(size)))
                await channel.receive_bytes(size, 30)
                await sending
            return "ok"
        case ["peers"]:
            return {record.name: record.reachability for record in peer.membership.records()}
        case ["reachability", str(name)]:
            return next((record.reachability for record in peer.membership.records() if record.name == name), None)
        case ["connections"]:
            found: dict[str, list[str]] = {}
            for remote, address in await _daemon(peer).connections():
                found.setdefault(remote, []).append(address)
            return found
        case ["disconnect", str(other)]:
            await _daemon(peer).disconnect(other)
            return "ok"
    raise ValueError(order)


def _daemon(peer: Peer) -> Libp2pTransport:
    assert isinstance(peer.network.transport, Libp2pTransport)
    return peer.network.transport


async def tell_standing(peer: Peer) -> None:
    told = None
    while True:
        if peer.network.reach.standing != told:
            told = peer.network.reach.standing
            say("standing", reached=told.reachability, addresses=told.addresses, note=told.note)
        await asyncio.sleep(0.1)


async def main(
    name: str, run_dir: str, link: str = "", relay: bool = False, manifest: dict[str, Any] | None = None, **network: Any
) -> None:
    settle_seconds = 0.0
    settle = Reach.settle

    async def timed(reach: Reach) -> None:
        nonlocal settle_seconds
        started = time.monotonic()
        await settle(reach)
        settle_seconds = time.monotonic() - started

    Reach.settle = timed  # type: ignore[method-assign,assignment]
    listen = tuple(network.get("listen", ["/ip4/0.0.0.0/tcp/0"]))
    with Identity.create_or_load(Path(run_dir) / "identity.key") as identity:
        options = PeerOptions(
            "bootstrap" if relay else "trainer", name, "cpu", Path(run_dir),
            Libp2pSettings(listen=listen, relay=relay, auto_nat=True),
        )  # fmt: skip
        where: dict[str, Any] = {"link": SwarmLink.parse(link)} if link else {}
        if not link:
            where["signed"] = SignedManifest.create(Manifest.model_validate(manifest or OPEN), identity)
        peer = await Peer.start(identity, options, real_runtime("nat"), **where)
        peer.rpc.serve_channel("echo", dict, echo)
        peer.set_state("starting" if relay else "training")
        say("joined", peer=identity.peer_id, link=str(peer.network.link), settle_seconds=settle_seconds)
        teller = asyncio.create_task(tell_standing(peer))
        reader = asyncio.StreamReader()
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        while line := await reader.readline():
            try:
                result = await obey(peer, json.loads(line))
            except P2PTrainError as error:
                result = f"{type(error).__name__}: {error}"
            say("answer", result=result)
        teller.cancel()
        await peer.close()


if __name__ == "__main__":
    asyncio.run(main(**json.loads(sys.argv[1])))
