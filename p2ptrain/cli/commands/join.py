"""``p2ptrain join LINK``

Take part in a swarm. Fetches its manifest and checks that it is the one that the link names, shows what will be
downloaded, run and exposed, asks once, checks that this machine can do it, takes on the swarm's state and trains.
Most swarms admit peers with an invite: a link with 'invite=' lets this peer in, and is remembered in --run-dir.
If the manifest names text or a tokenizer on this machine, --allow-path must name it, or a folder above it.
Ctrl-C leaves in good order, and 'p2ptrain pause', 'resume' and 'leave' work from another terminal.
Started again with the same --run-dir, this peer has the same identity.
On a terminal a live view of the peer and its swarm stands below the log; in a pipe there are log lines alone.

Where the swarm's model is cut into stages, it hosts the stage that needs it most, says why, and sends text through all
of them; --role and --stage say otherwise.

With --serve it also answers those who generate with the model. A machine without the memory to train then only serves:
it fetches the weights of the newest rounds from the others. --serve-only never trains.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.cli.commands.peer import add_peer_arguments, peer_overrides
from p2ptrain.errors import IncompatibleError, UsageError

if TYPE_CHECKING:
    from p2ptrain.manifest import Manifest

LOG_LEVEL = "info"
NICENESS = 10
"""Of a volunteer's peer, so that the owner's programs go first."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    parser.add_argument(
        "--role",
        choices=("trainer", "stage", "both"),
        help="of a model in stages: send text, host one, or both (default)",
    )
    parser.add_argument("--stage", type=int, metavar="N", help="host this stage (default: the one that needs it most)")
    parser.add_argument(
        "--serve", action="store_true", default=None, help="also serve the model to those who generate with it"
    )
    parser.add_argument(
        "--serve-only", action="store_true", help="serve the model and do not train; takes a fraction of the memory"
    )
    parser.add_argument("--yes", action="store_true", help="do not ask")
    parser.add_argument(
        "--run-dir", type=Path, metavar="DIR", help="where to keep this peer's files (default runs/join-DIGEST)"
    )
    parser.add_argument("--minutes", type=float, metavar="N", help="leave after this time (default never)")
    parser.add_argument(
        "--rounds", type=int, metavar="N", help="leave after so many more rounds of the swarm (default never)"
    )
    add_peer_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.running import confirm, default_run_dir, run_async, run_configured_peer
    from p2ptrain.cli.terms import check_admission, check_machine, describe
    from p2ptrain.config import PeerConfig
    from p2ptrain.network.link import SwarmLink
    from p2ptrain.node.observe import fetch_manifest
    from p2ptrain.node.site.policy import SitePolicy

    link = SwarmLink.parse(arguments.link)
    overrides = peer_overrides(arguments) | {
        "resources.nice": NICENESS if arguments.nice is None else arguments.nice,
        "role": "trainer",
        "link": str(link),
        "run_dir": arguments.run_dir or default_run_dir(f"join-{link.digest.hex()[:8]}"),
        "network.auto_nat": True,
        "network.directory": link.directory or None,
        "stop_after.minutes": arguments.minutes,
        "stop_after.rounds": arguments.rounds,
        "serving.enabled": arguments.serve or arguments.serve_only or None,
    }
    signed = run_async(fetch_manifest(link))
    check_compatible(signed.manifest)
    overrides |= in_pipeline(arguments, signed.manifest)
    config = PeerConfig.load(None, overrides)
    if config.policy is not None:
        SitePolicy.load(config.policy).check(signed.manifest)
    print(describe(signed.manifest, config))
    if not confirm("Take part?", assume_yes=arguments.yes):
        print("nothing was started")
        return 0
    check_admission(signed.manifest, link.invite, config.run_dir)  # It makes this peer's key.
    check_machine(signed.manifest, config)
    return run_configured_peer(config, signed, "joined; others can take part with:\n\np2ptrain join ")


def in_pipeline(arguments: argparse.Namespace, manifest: Manifest) -> dict[str, object]:
    """Return the configuration of --role and --stage; raise `UsageError` if they do not apply to this swarm."""
    from p2ptrain.cli.terms import can_train, has_room

    if arguments.serve_only and arguments.role is not None:
        raise UsageError(f"--role {arguments.role}: this peer would train; leave out --serve-only")
    if arguments.serve_only or (
        arguments.serve and arguments.role is None and not can_train(manifest, arguments.max_memory, arguments.stage)
    ):
        if arguments.stage is not None and not manifest.in_stages:
            raise UsageError("--stage: this swarm's model is not cut into stages")
        return {"role": "server", "pipeline.stage": arguments.stage}
    if not manifest.in_stages:
        given = (
            "--role" if arguments.role not in (None, "trainer") else "--stage" if arguments.stage is not None else ""
        )
        if given:
            raise UsageError(f"{given}: this swarm's model is not cut into stages; every trainer holds all of it")
        return {}
    if arguments.role == "trainer" and arguments.stage is not None:
        raise UsageError("--stage: a trainer hosts none; use --role stage or both")
    role = arguments.role or (
        "both" if arguments.stage is not None or has_room(manifest, arguments.max_memory) else "trainer"
    )
    return {"role": role, "pipeline.stage": arguments.stage}


def check_compatible(manifest: Manifest) -> None:
    """Check that this version can join the swarm.

    Raises:
        IncompatibleError: The protocol, model family, codec or rule is unknown; the message names the remedy.
        UsageError: The swarm trains a custom model, which only its own script can build.
    """
    from p2ptrain.manifest import PROTOCOL_VERSION
    from p2ptrain.models import check_reads_text
    from p2ptrain.node.extensions import check_extensions

    if manifest.protocol != PROTOCOL_VERSION:
        raise IncompatibleError(
            f"the swarm speaks protocol {manifest.protocol}, this version {PROTOCOL_VERSION}:"
            " install the swarm's version"
        )
    check_extensions(manifest)
    check_reads_text(manifest.model)
