"""``p2ptrain peer FILE``

Run one peer from a role file, a TOML file such as those in the folder 'peers'. SIGTERM or Ctrl-C drains it: the step
in progress is finished, state is saved and the others are told. A second one ends it at once.
On a terminal a live view of the peer and its swarm stands below the log; in a pipe there are log lines alone.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError

IDLE_PERCENT = 25.0
"""Of all cores, that other programs may take, if --only-when-idle names no number."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("file", type=Path, metavar="FILE", help="the role file")
    parser.add_argument("--link", help="the swarm link, if the file has none or another")
    parser.add_argument("--run-dir", type=Path, metavar="DIR", help="where to keep this peer's files")
    parser.add_argument("--link-file", type=Path, metavar="FILE", help="write its own link there, too")
    add_peer_arguments(parser)


def add_peer_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options that ``peer`` and ``join`` share."""
    parser.add_argument("--name", help="a name for people, shown in the status")
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="the pretrained model, if this machine has it already"
    )
    parser.add_argument(
        "--data", type=Path, metavar="PATH", help="this peer's own text, if the swarm trains on private data"
    )
    parser.add_argument(
        "--policy", type=Path, metavar="FILE", help="the site's policy: what may leave it in a private swarm"
    )
    machine = parser.add_argument_group("what it may use of this machine")
    add_allow_path(machine)
    machine.add_argument("--device", metavar="auto|cpu|cuda:N", help="where to train (default auto)")
    machine.add_argument("--threads", type=int, metavar="N", help="CPU threads (default one per core)")
    machine.add_argument("--max-memory", metavar="SIZE", help="resident memory, such as 4GB")
    machine.add_argument("--max-gpu-memory", metavar="SIZE", help="memory of the GPU, such as 8GB (default all)")
    machine.add_argument(
        "--serving-share",
        type=float,
        metavar="SHARE",
        help="time in which it may generate while it trains (default 0.5)",
    )
    machine.add_argument("--up", metavar="RATE", help="bandwidth to send with, such as 20Mbit")
    machine.add_argument("--down", metavar="RATE", help="bandwidth to receive with")
    machine.add_argument(
        "--nice", type=int, metavar="N",
        help="added to its niceness, 0 to 19, so that other programs go first (default 10 for join, else 0)",
    )  # fmt: skip
    guest = parser.add_argument_group("when it pauses")
    guest.add_argument(
        "--schedule", metavar="HOURS", help="work only then, by local time: '22:00-07:00', several by commas"
    )
    guest.add_argument(
        "--only-when-idle", nargs="?", type=float, const=IDLE_PERCENT, metavar="PERCENT",
        help=f"pause while other programs take more of the CPU than this (default {IDLE_PERCENT:.0f}; write"
        " --only-when-idle=PERCENT)",
    )  # fmt: skip
    guest.add_argument(
        "--on-battery", action="store_true", default=None, help="work on a battery, too (default: pause on it)"
    )
    guest.add_argument(
        "--gpu-celsius", type=float, metavar="DEGREES",
        help="pause while the GPU is hotter (default no limit; needs p2ptrain[gpu])",
    )  # fmt: skip
    parser.add_argument("--metrics-port", type=int, metavar="N", help="serve Prometheus metrics there, on loopback")
    network = parser.add_argument_group("how it is reached")
    network.add_argument("--listen", action="append", metavar="MULTIADDR", help="where to listen (default any port)")
    network.add_argument("--announce", action="append", metavar="MULTIADDR", help="what to tell others instead")
    network.add_argument("--nat-port-map", action="store_true", default=None, help="ask the gateway to forward a port")


def add_allow_path(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        "--allow-path", action="append", type=Path, metavar="DIR",
        help="a folder or file that the swarm's manifest may name to be read here (default none; trusted ones alone)",
    )  # fmt: skip


def peer_overrides(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of `add_peer_arguments` by configuration key; None for an option that is not given."""
    return {
        "name": arguments.name,
        "weights": arguments.weights,
        "data": arguments.data,
        "policy": arguments.policy,
        "allow_path": arguments.allow_path,
        "resources.device": arguments.device,
        "resources.threads": arguments.threads,
        "resources.max_memory": arguments.max_memory,
        "resources.max_gpu_memory": arguments.max_gpu_memory,
        "resources.serving_share": arguments.serving_share,
        "resources.up": arguments.up,
        "resources.down": arguments.down,
        "network.listen": arguments.listen,
        "network.announce": arguments.announce,
        "network.nat_port_map": arguments.nat_port_map,
        "resources.nice": arguments.nice,
        "guest.schedule": arguments.schedule,
        "guest.only_when_idle": arguments.only_when_idle,
        "guest.on_battery": arguments.on_battery,
        "guest.gpu_celsius": arguments.gpu_celsius,
        "metrics.port": arguments.metrics_port,
        "log.format": arguments.log_format,
        "log.level": arguments.log_level,
    }


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.cli.logs import configure_logging
    from p2ptrain.cli.running import run_configured_peer
    from p2ptrain.config import PeerConfig
    from p2ptrain.network.link import SwarmLink

    overrides = peer_overrides(arguments) | {"link": arguments.link, "run_dir": arguments.run_dir}
    config = PeerConfig.load(arguments.file, overrides)
    configure_logging(config.log.format, config.log.level)
    if config.link:
        SwarmLink.parse(config.link)
    if config.manifest is not None and not config.manifest.is_file():
        raise ConfigError(f"{config.manifest} is not there: 'p2ptrain seed' writes it")
    return run_configured_peer(config, link_file=arguments.link_file)
