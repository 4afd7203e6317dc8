"""Reachability probes: caller and server of the RPC ``reach.probe``.

The caller names ports. The server dials them at the source address of the caller's connection, never at an address
that the caller names. So no caller can direct this peer's dials at a third party.
`p2ptrain.network.reachability.judge` evaluates the reports.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Annotated

from msgspec import Meta

from p2ptrain.errors import DeadlineError, PeerError, TemporaryError
from p2ptrain.network.libp2p.transport import Libp2pTransport
from p2ptrain.network.link import check_peer_address
from p2ptrain.network.reachability import (
    ANSWER_SECONDS,
    MAX_PROBED_PORTS,
    Port,
    ProbeReport,
    Scope,
    as_multiaddr,
    host_of,
    scope,
    speaks_libp2p,
    tcp_ports,
)
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Message
from p2ptrain.tasks import Tasks, together

logger = logging.getLogger(__name__)

PROBE = "reach.probe"
PROBE_SECONDS = 2 * ANSWER_SECONDS
CONTACT_SECONDS = 5.0
"""Timeout of a dial to another peer."""
NUM_ASKED = 3
MAX_PROBES_PER_PEER = 10
MAX_PROBES = 200
PROBE_WINDOW_SECONDS = 60.0


class ProbeRequest(Message, frozen=True):
    """Request to be dialled at these ports."""

    ports: Annotated[tuple[Port, ...], Meta(max_length=MAX_PROBED_PORTS)]


class ProbeReply(Message, frozen=True):
    """See `ProbeReport`."""

    observed: Annotated[str, Meta(max_length=64)]
    reachable: Annotated[tuple[Port, ...], Meta(max_length=MAX_PROBED_PORTS)]
    is_relay: bool

    def __post_init__(self) -> None:
        if self.observed and host_of(as_multiaddr(self.observed)) != self.observed:
            raise ValueError("observed: not an IP address")


class ProbeServer:
    """Tells callers whether this peer can dial them, and whether it relays (``is_relay``)."""

    def __init__(self, rpc: Rpc, transport: Callable[[], Libp2pTransport]) -> None:
        self.is_relay = False
        self._transport = transport
        self._asked: Counter[str] = Counter()
        self._window_ends = 0.0
        rpc.serve(PROBE, ProbeRequest, self._probe, max_request_bytes=1024)

    async def _probe(self, peer: str, request: ProbeRequest) -> ProbeReply:
        self._count(peer)
        transport = self._transport()
        hosts = [host_of(address) for remote, address in await transport.connections() if remote == peer]
        observed = next(filter(None, hosts), "")
        reachable: tuple[int, ...] = ()
        # A dial to loopback would show a stranger which ports of this machine are open.
        if observed and scope(as_multiaddr(observed)) is not Scope.LOOPBACK:
            answers = await together("probe", (speaks_libp2p(observed, port) for port in request.ports))
            reachable = tuple(port for port, answer in zip(request.ports, answers, strict=True) if answer)
        return ProbeReply(observed, reachable, self.is_relay)

    def _count(self, peer: str) -> None:
        now = asyncio.get_running_loop().time()
        if now >= self._window_ends:
            self._window_ends = now + PROBE_WINDOW_SECONDS
            self._asked.clear()
        if self._asked[peer] >= MAX_PROBES_PER_PEER or self._asked.total() >= MAX_PROBES:
            raise TemporaryError("asked too often whether it can be reached: try again in a minute")
        self._asked[peer] += 1


async def ask_back(rpc: Rpc, transport: Libp2pTransport, addresses: Sequence[str]) -> list[ProbeReport]:
    """Ask up to `NUM_ASKED` peers to dial back; return the reports of the peers that answered.

    A success at a public address ends the search. The peers dial the TCP ports of ``transport``.

    Args:
        addresses: Multiaddrs that end in ``/p2p/<id>``; this peer's own are skipped.
    """
    by_peer: dict[str, list[str]] = {}
    for address in addresses:
        if (peer := check_peer_address(address)) != rpc.peer_id:
            by_peer.setdefault(peer, []).append(address)
    ports = tcp_ports(await transport.addresses())
    reports: list[ProbeReport] = []
    async with Tasks() as tasks:
        asked = list(by_peer.items())[:NUM_ASKED]
        asking = [tasks.call(_ask_one(rpc, transport, at, ports), f"probe-{peer[-8:]}") for peer, at in asked]
        for attempt in asyncio.as_completed(asking):
            try:
                reports.append(await attempt)
            except (PeerError, DeadlineError, ValueError) as error:
                logger.debug("a peer cannot say how it sees this one: %s", error)
                continue
            if reports[-1].reachable and scope(as_multiaddr(reports[-1].observed)) is Scope.PUBLIC:
                break
    return reports


async def _ask_one(
    rpc: Rpc, transport: Libp2pTransport, addresses: Sequence[str], ports: tuple[int, ...]
) -> ProbeReport:
    peer = await transport.connect(addresses, CONTACT_SECONDS)
    reply = await rpc.call(peer, PROBE, ProbeRequest(ports), ProbeReply, PROBE_SECONDS, max_reply_bytes=1024)
    found = tuple(port for port in ports if port in reply.reachable)
    return ProbeReport(peer, reply.observed, found, reply.is_relay)
