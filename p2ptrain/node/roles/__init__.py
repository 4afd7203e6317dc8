"""The training roles of a peer: trainer, stage host, sender of microbatches."""

from __future__ import annotations

import asyncio
import contextlib
from importlib import import_module
from typing import TYPE_CHECKING

from p2ptrain.errors import ConfigError

if TYPE_CHECKING:
    from p2ptrain.config import PeerConfig
    from p2ptrain.node.peer import Peer
    from p2ptrain.node.process import StopSignals


async def take_role(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Do what the configured role does, until it ends; raise `ConfigError` if the swarm has no such role.

    Its module imports torch, which takes a minute on a busy machine: in a thread, so that the peer answers meanwhile.
    """
    offload = peer.runtime.offload
    private, serves = peer.manifest.private, config.serving.enabled or config.role == "server"
    if serves and private is not None and private.personal:
        raise ConfigError(
            "each site of this swarm has layers of its own, so none can serve for the others: leave out --serve"
        )
    if peer.manifest.in_stages and config.role in ("trainer", "stage", "both"):
        await offload(import_module, "p2ptrain.node.roles.pipeline")
        from p2ptrain.node.roles.pipeline import take_part

        await take_part(peer, config, signals)
    elif config.role in ("stage", "both"):
        raise ConfigError(f'role = {config.role!r}: this swarm\'s model is not cut into stages; use role = "trainer"')
    elif config.role == "trainer":
        await offload(import_module, "p2ptrain.node.roles.trainer")
        from p2ptrain.node.roles.trainer import train

        await train(peer, config, signals)
    elif config.role == "server":
        await offload(import_module, "p2ptrain.node.serving.server")
        from p2ptrain.node.serving.server import serve_only

        await serve_only(peer, config, signals)
    else:
        await _serve(peer, config, signals)


async def _serve(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    from p2ptrain.node.roles.founder import vote_as_founder

    vote_as_founder(peer)
    peer.set_state("serving")
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(60 * config.stop_after.minutes or None):
            await signals.requested.wait()
