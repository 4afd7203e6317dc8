"""Start the transport and the directory that a peer's configuration names.

A name is ``KIND`` or ``KIND:DETAILS``; a URL names its scheme. Other packages add kinds by the entry point groups
``p2ptrain.transports`` and ``p2ptrain.directories``; each leads to an asynchronous function like those in the tables.
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
        name: What the configuration says: ``https://…``, for instance.
        transport: Of this peer; it must outlive the directory.
        swarm: The manifest's digest, 32 bytes: records of other swarms are refused.
        verifier: Checks signatures.
        runtime: Its clock decides about expiry.
        bootstrap: Multiaddrs of peers that take part already, each ending in ``/p2p/<id>``; empty for the first peer.
        client_mode: Ask others, but store nothing for them: for peers that come for a moment, or cannot be reached.
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
    """Arguments of a transport's start.

    Attributes:
        name: What the configuration says.
        identity: This peer's key; the transport authenticates peers by such keys.
        settings: Where to listen, and whom to dial first.
    """

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
    """Start the directory of the kind that ``options.name`` names.

    Raises:
        IncompatibleError: There is no such kind on this machine.
        P2PTrainError: It cannot be used; says why.
    """
    return await DIRECTORIES.get(kind_of(options.name))(options)


async def start_transport(options: TransportOptions) -> Transport:
    """Start the transport of the kind that ``options.name`` names; raises as `start_directory`."""
    return await TRANSPORTS.get(kind_of(options.name))(options)


def kind_of(name: str) -> str:
    """Return the kind in ``KIND:DETAILS``."""
    return name.partition(":")[0]


async def _start_libp2p(options: TransportOptions) -> Transport:
    from p2ptrain.network.libp2p.transport import Libp2pTransport

    return await Libp2pTransport.start(options.identity, options.settings)
