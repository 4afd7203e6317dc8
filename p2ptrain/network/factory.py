"""Start the transport and the directory that a peer's configuration names.

A name is ``KIND`` or ``KIND:DETAILS``; the kind of a URL is its scheme. Other packages add kinds by the entry point
groups ``p2ptrain.transports`` and ``p2ptrain.directories``. Each entry point is a `StartTransport` or `StartDirectory`.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.extensions import Extensions
from p2ptrain.network.directory import Directory
from p2ptrain.network.transport import Transport
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer

if TYPE_CHECKING:
    from p2ptrain.network.identity import Identity
    from p2ptrain.network.libp2p.settings import Libp2pSettings

LIBP2P = "libp2p"


@dataclass(frozen=True)
class DirectoryOptions:
    """Arguments of a directory's start.

    Attributes:
        name: The configured name, for instance ``https://…``.
        transport: This peer's transport; it must outlive the directory.
        swarm: The manifest's digest, 32 bytes; records of other swarms are refused.
        bootstrap: Multiaddrs of peers in the directory, each ending in ``/p2p/<id>``; empty for the first peer.
        client_mode: True to store no records for other peers: for short-lived or unreachable peers.
    """

    name: str
    transport: Transport
    swarm: bytes
    verifier: Signer
    runtime: Runtime
    bootstrap: tuple[str, ...] = ()
    client_mode: bool = False


@dataclass(frozen=True)
class TransportOptions:
    """Arguments of a transport's start."""

    name: str
    identity: Identity
    settings: Libp2pSettings


StartDirectory = Callable[[DirectoryOptions], Awaitable[Directory]]
StartTransport = Callable[[TransportOptions], Awaitable[Transport]]

_CALLABLE: Any = Callable
DIRECTORIES: Extensions[StartDirectory] = Extensions(
    "p2ptrain.directories",
    "directory",
    _CALLABLE,
    {
        LIBP2P: "p2ptrain.network.libp2p.directory:Libp2pDirectory.start",
        "http": "p2ptrain.network.http_directory:HttpDirectory.start",
        "https": "p2ptrain.network.http_directory:HttpDirectory.start",
    },
)
TRANSPORTS: Extensions[StartTransport] = Extensions(
    "p2ptrain.transports", "transport", _CALLABLE, {LIBP2P: f"{__name__}:_start_libp2p"}
)


async def start_directory(options: DirectoryOptions) -> Directory:
    """Start the directory named by ``options.name``.

    Raises `IncompatibleError` if no installed package provides the kind, and the directory's own `P2PTrainError`.
    """
    return await DIRECTORIES.get(kind_of(options.name))(options)


async def start_transport(options: TransportOptions) -> Transport:
    """Start the transport named by ``options.name``; raise as `start_directory`."""
    return await TRANSPORTS.get(kind_of(options.name))(options)


def kind_of(name: str) -> str:
    """Return the kind in ``KIND:DETAILS``."""
    return name.partition(":")[0]


async def _start_libp2p(options: TransportOptions) -> Transport:
    from p2ptrain.network.libp2p.transport import Libp2pTransport

    return await Libp2pTransport.start(options.identity, options.settings)
