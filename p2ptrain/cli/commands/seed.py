"""``p2ptrain seed DIR``

Sign DIR/run.toml, serve it as the swarm's first bootstrap peer, and print the link that others join with. With
admission.mode = "invite", that link lets in everybody who has it: pass it on like a password. The plain link under it
shows the swarm, and lets in nobody; 'p2ptrain invite DIR' makes other invites.
It keeps running; Ctrl-C stops it. Started again, it has the same identity, and the link stays valid as long as
run.toml and the address are the same: choose a fixed port with --listen, and --announce what others can dial.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from p2ptrain.errors import ConfigError

LOG_LEVEL = "info"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("folder", type=Path, metavar="DIR", help="what 'p2ptrain init' wrote")
    parser.add_argument(
        "--listen", action="append", metavar="MULTIADDR", help="where to listen (default /ip4/0.0.0.0/tcp/31337)"
    )
    parser.add_argument(
        "--announce", action="append", metavar="MULTIADDR", help="what to tell others instead, for a forwarded port"
    )
    parser.add_argument("--relay", action="store_true", help="relay for volunteers behind NAT")
    parser.add_argument("--nat-port-map", action="store_true", help="ask the gateway to forward the port")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where to keep this peer's files (default DIR/bootstrap)"
    )
    parser.add_argument("--link-file", type=Path, metavar="FILE", help="write the link there, too, for others to read")
    parser.add_argument("--directory", metavar="URL", help="where peers find each other (default: their own DHT)")
    parser.add_argument("--metrics-port", type=int, metavar="N", help="serve Prometheus metrics there, on loopback")


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.manifests import KEY_FILE, RUN_FILE, load_manifest, public_paths, sign_manifest
    from p2ptrain.cli.running import run_configured_peer
    from p2ptrain.config import PeerConfig
    from p2ptrain.manifest import SIGNED_FILE
    from p2ptrain.network.identity import Identity

    folder: Path = arguments.folder
    for name in (RUN_FILE, KEY_FILE):
        if not (folder / name).is_file():
            raise ConfigError(f"{folder / name} is not there: write it with 'p2ptrain init {folder}'")
    manifest = load_manifest(folder / RUN_FILE)
    for warning in public_paths(manifest):
        print(warning, file=sys.stderr)
    run_dir = arguments.run_dir or folder / "bootstrap"
    config = PeerConfig.load(
        None,
        {
            "role": "bootstrap",
            "name": "bootstrap",
            "run_dir": run_dir,
            "manifest": folder / SIGNED_FILE,
            "network.listen": arguments.listen or ["/ip4/0.0.0.0/tcp/31337"],
            "network.announce": arguments.announce,
            "network.relay": arguments.relay,
            # A relay must detect its reachability: with an assumed one, it cuts its streams.
            "network.auto_nat": arguments.relay,
            "network.nat_port_map": arguments.nat_port_map,
            "network.directory": arguments.directory,
            "metrics.port": arguments.metrics_port,
            "log.format": arguments.log_format,
            "log.level": arguments.log_level,
        },
    )
    with Identity.create_or_load(folder / KEY_FILE) as organizer:
        signed = sign_manifest(manifest, organizer, folder / SIGNED_FILE, run_dir)
    return run_configured_peer(
        config, signed, f"swarm {manifest.name!r} is up; others take part with:\n\np2ptrain join ", arguments.link_file
    )
