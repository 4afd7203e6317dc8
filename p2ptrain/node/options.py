"""Options of a peer at its start: role, name, network and limits."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError
from p2ptrain.manifest import INVITE_FILE, ISSUER_FILE, REVOCATIONS_FILE
from p2ptrain.network.factory import StartDirectory, StartTransport, start_directory, start_transport
from p2ptrain.network.libp2p.settings import Libp2pSettings
from p2ptrain.node.site.policy import SitePolicy

ISSUER_BYTES = 32


@dataclass(frozen=True)
class PeerOptions:
    """A peer's role, name, network and limits.

    Attributes:
        role: ``bootstrap``, ``trainer``, ``stage``, ``server``, or ``client`` (read-only).
        name, device: For people, in the record.
        run_dir: Keeps the addresses of known peers; None keeps none.
        network: Its ``directory`` may be empty, for the link's directory, or else the DHT.
        upload_bandwidth: Limit in bytes per second, which also determines share sizes; 0 for none.
        download_bandwidth: Limit in bytes per second; 0 for none.
        invite: Admits this peer, and goes into its link, if the link that it joins with has none; empty for none.
        revocations: File of the organizer's list, which this peer publishes; None for none.
        policy: The site's, in a private swarm; None for none.
        issuer: Secret of the key with which this peer, a seed, signs passes of newcomers; empty if it signs none.
    """

    role: str
    name: str
    device: str
    run_dir: Path | None
    network: Libp2pSettings
    upload_bandwidth: int = 0
    download_bandwidth: int = 0
    invite: bytes = b""
    revocations: Path | None = None
    policy: SitePolicy | None = None
    issuer: bytes = b""


@dataclass(frozen=True)
class Starters:
    """Start a peer's transport and directory; simulations give others than the configured ones."""

    transport: StartTransport = start_transport
    directory: StartDirectory = start_directory


def peer_options(config: PeerConfig, peer_id: str) -> PeerOptions:
    """Return the options that a role file gives; raise `ConfigError` if a file beside its manifest is damaged."""
    network = Libp2pSettings(**dict(config.network))

    def beside_manifest(name: str) -> bytes:
        file = config.manifest.with_name(name) if config.manifest is not None else None
        return file.read_bytes() if file is not None and file.is_file() else b""

    issuer = beside_manifest(ISSUER_FILE)
    if len(issuer) not in (0, ISSUER_BYTES):
        raise ConfigError(f"{ISSUER_FILE} is no key of {ISSUER_BYTES} bytes: copy it again from the organizer's folder")
    return PeerOptions(
        role="stage" if config.role == "both" else config.role,
        name=config.name or peer_id[-6:],
        device=config.resources.device,
        run_dir=config.run_dir,
        network=network.changed(direct="off") if config.role == "bootstrap" else network,  # no bulk transfers
        upload_bandwidth=config.resources.up,
        download_bandwidth=config.resources.down,
        invite=beside_manifest(INVITE_FILE),
        revocations=config.manifest.with_name(REVOCATIONS_FILE) if config.manifest is not None else None,
        policy=SitePolicy.load(config.policy) if config.policy is not None else None,
        issuer=issuer,
    )
