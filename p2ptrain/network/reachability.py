"""What multiaddrs tell about who can reach them, whether something listens there, and what others say about that."""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import os
import re
import socket
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Annotated

from msgspec import Meta

from p2ptrain.tasks import Tasks

ANSWER_SECONDS = 3.0
"""How long an address may take to answer; one retransmission of a lost packet fits in."""

GRACE_SECONDS = 0.5
"""How much longer than the first address of a peer its others may take."""

Port = Annotated[int, Meta(ge=1, le=65535)]
MAX_PROBED_PORTS = 4

_BANNER = b"\x13/multistream/1.0.0\n"
_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)(?:/p2p/[^/]+)?$")


class Scope(IntEnum):
    """From where an address can be dialled; the smaller, the more peers can."""

    PUBLIC = 0
    RELAYED = 1
    PRIVATE = 2
    LOOPBACK = 3


def scope(address: str) -> Scope:
    """The scope of a multiaddr; names count as public, the unspecified address and what is unknown as private."""
    if "/p2p-circuit" in address:
        return Scope.RELAYED
    _, _, rest = address.partition("/")
    protocol, _, rest = rest.partition("/")
    if protocol.startswith("dns"):
        return Scope.PUBLIC
    try:
        host = ipaddress.ip_address(rest.partition("/")[0])
    except ValueError:
        return Scope.PRIVATE
    if host.is_loopback:
        return Scope.LOOPBACK
    return Scope.PUBLIC if host.is_global else Scope.PRIVATE


def host_of(address: str) -> str:
    """The IP address that a multiaddr begins with; empty when it begins with something else, or leads over a relay."""
    found = re.match(r"/ip[46]/([^/]+)(?:/|$)", address)
    return found[1] if found is not None and "/p2p-circuit" not in address else ""


def tcp_ports(addresses: Iterable[str]) -> tuple[int, ...]:
    """The ports of the plain TCP multiaddrs among ``addresses``, without repetitions, at most `MAX_PROBED_PORTS`."""
    ports = [int(found[2]) for address in addresses if (found := _TCP.match(address)) is not None]
    return tuple(dict.fromkeys(ports))[:MAX_PROBED_PORTS]


@dataclass(frozen=True)
class ProbeReport:
    """What another peer says about reaching this one.

    Attributes:
        peer: Who says it.
        observed: The IP address that our connection comes from; empty when it came over a relay.
        reachable: The ports among those asked about at which something like us answers there.
        is_relay: Whether that peer relays for others.
    """

    peer: str
    observed: str
    reachable: tuple[int, ...]
    is_relay: bool


def judge(reports: Sequence[ProbeReport]) -> tuple[ProbeReport | None, str]:
    """Whether others can reach this peer.

    The reports from farthest away decide: that a neighbour in the same house gets through says little. Among those, one
    success is enough; a false one harms only the peer that believes it.

    Returns:
        The report that shows how (None when nobody can, or nobody knows), and a reason; it is empty when nobody knows.
    """
    told = [report for report in reports if report.observed]
    if not told:
        return None, ""
    widest = min(scope(_multiaddr(report.observed)) for report in told)
    deciding = [report for report in told if scope(_multiaddr(report.observed)) == widest]
    for report in deciding:
        if report.reachable or widest is Scope.LOOPBACK:
            return report, f"peer {report.peer[-8:]} reaches this one at {report.observed}"
    return None, f"none of {len(deciding)} peers that see this one at {deciding[0].observed} can dial it there"


def _multiaddr(host: str) -> str:
    return f"/ip{6 if ':' in host else 4}/{host}"


async def speaks_libp2p(host: str, port: int) -> bool:
    """Whether something that speaks libp2p answers at a TCP port, within `ANSWER_SECONDS`."""
    try:
        async with asyncio.timeout(ANSWER_SECONDS):
            reader, writer = await asyncio.open_connection(host, port)
            try:
                writer.write(_BANNER)
                return await reader.readexactly(len(_BANNER)) == _BANNER
            finally:
                writer.transport.abort()
    except (OSError, EOFError, TimeoutError):
        return False


async def answering(addresses: Sequence[str]) -> tuple[list[str], list[str]]:
    """Ask all multiaddrs at once whether something answers; one that is silent does not hold up those that answer.

    Returns:
        Those that answer, or cannot be asked this way, and why the others do not.
    """
    loop = asyncio.get_running_loop()
    deadline = loop.time() + ANSWER_SECONDS
    found: list[str] = []
    refusals: list[str] = []
    async with Tasks() as tasks:
        asking = {tasks.call(tcp_refusal(address), f"knock-{address}"): address for address in addresses}
        waiting = set(asking)
        while waiting:
            left = max(0.0, deadline - loop.time())
            done, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            if not done:
                refusals += [f"{asking[task]} does not answer" for task in waiting]
                break
            for task in done:
                if refusal := task.result():
                    refusals.append(refusal)
                    continue
                if not found:
                    deadline = min(deadline, loop.time() + GRACE_SECONDS)
                found.append(asking[task])
    return found, refusals


async def tcp_refusal(address: str) -> str:
    """Why nothing answers at a plain TCP multiaddr; empty when something does, or it is an address of another kind.

    The daemon punishes an address that did not answer by not dialling it for 5 seconds to 5 minutes. Asking first
    keeps a bootstrap peer that is late or restarts from being shunned. The caller sets the deadline.
    """
    found = _TCP.match(address)
    if found is None:
        return ""
    loop, port, refusal = asyncio.get_running_loop(), int(found[2]), ""
    try:
        # A name is resolved here: uvloop drops the failure of a look-up under way when its connection is cancelled, and
        # asyncio then logs an error that nobody took.
        hosts = [str(where[0]) for *_, where in await loop.getaddrinfo(found[1], port, type=socket.SOCK_STREAM)]
    except (OSError, UnicodeError) as error:
        return f"{found[1]} cannot be looked up: {error}"
    for host in dict.fromkeys(hosts):
        try:
            _, writer = await asyncio.open_connection(host, port)
        except OSError as error:
            reason = os.strerror(error.errno) if error.errno and error.errno > 0 else error
            refusal = refusal or f"{found[1]} port {port}: {reason}"
            continue
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()
        return ""
    return refusal
