"""Reachability: scopes of multiaddrs, TCP probes, and the verdict over other peers' probe reports."""

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
"""Timeout of a TCP probe; allows for one TCP retransmission."""

GRACE_SECONDS = 0.5
"""Timeout of a peer's other addresses after the first one has answered."""

Port = Annotated[int, Meta(ge=1, le=65535)]
MAX_PROBED_PORTS = 4

_BANNER = b"\x13/multistream/1.0.0\n"
_TCP = re.compile(r"/(?:ip4|ip6|dns|dns4|dns6)/([^/]+)/tcp/(\d+)(?:/p2p/[^/]+)?$")


class Scope(IntEnum):
    """The range from which an address can be dialled, widest first."""

    PUBLIC = 0
    RELAYED = 1
    PRIVATE = 2
    LOOPBACK = 3


def scope(address: str) -> Scope:
    """Return the scope of a multiaddr; names count as public, unspecified and unknown addresses as private."""
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
    """Return the IP address of a multiaddr; empty if it begins with none, or leads over a relay."""
    found = re.match(r"/ip[46]/([^/]+)(?:/|$)", address)
    return found[1] if found is not None and "/p2p-circuit" not in address else ""


def tcp_ports(addresses: Iterable[str]) -> tuple[int, ...]:
    """Return the distinct ports of the plain TCP multiaddrs, at most `MAX_PROBED_PORTS`."""
    ports = [int(found[2]) for address in addresses if (found := _TCP.match(address)) is not None]
    return tuple(dict.fromkeys(ports))[:MAX_PROBED_PORTS]


@dataclass(frozen=True)
class ProbeReport:
    """Another peer's report of dialling this peer back.

    Attributes:
        observed: The IP address from which this peer's connection comes; empty over a relay.
        reachable: The probed ports at which a libp2p peer answered.
        is_relay: True if the reporting peer relays for others.
    """

    peer: str
    observed: str
    reachable: tuple[int, ...]
    is_relay: bool


def judge(reports: Sequence[ProbeReport]) -> tuple[ProbeReport | None, str]:
    """Judge from probe reports whether other peers can reach this one.

    Only reports of the widest scope count, and one success suffices: a false report harms only this peer. Return the
    report of a success, or None, and the reason. The reason is empty if all reports came over relays.
    """
    told = [report for report in reports if report.observed]
    if not told:
        return None, ""
    widest = min(scope(as_multiaddr(report.observed)) for report in told)
    deciding = [report for report in told if scope(as_multiaddr(report.observed)) == widest]
    for report in deciding:
        if report.reachable or widest is Scope.LOOPBACK:
            return report, f"peer {report.peer[-8:]} reaches this one at {report.observed}"
    return None, f"none of {len(deciding)} peers that see this one at {deciding[0].observed} can dial it there"


def as_multiaddr(host: str) -> str:
    """Return the multiaddr of an IP address."""
    return f"/ip{6 if ':' in host else 4}/{host}"


async def speaks_libp2p(host: str, port: int) -> bool:
    """True if a libp2p peer answers at a TCP port within `ANSWER_SECONDS`."""
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
    """Probe multiaddrs in parallel; return those that answer or are not plain TCP, and the others' refusals."""
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
    """Return why a plain TCP multiaddr does not answer; empty if it answers, or is of another kind.

    After a failed dial the daemon backs off for 5 seconds to 5 minutes. This probe avoids the backoff for a bootstrap
    peer that starts late or restarts. The caller sets the timeout.
    """
    found = _TCP.match(address)
    if found is None:
        return ""
    loop, port, refusal = asyncio.get_running_loop(), int(found[2]), ""
    try:
        # Resolve first: a cancelled uvloop connect leaves a look-up whose failure asyncio logs as never retrieved.
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
