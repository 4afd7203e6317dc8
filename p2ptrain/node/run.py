"""`run_peer`: run one peer from its role file to its exit code, with signals and draining."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, TemporaryError
from p2ptrain.manifest import SIGNED_FILE, SignedManifest
from p2ptrain.network.identity import IDENTITY_FILE, Identity
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.guest.visit import visiting
from p2ptrain.node.options import peer_options
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals, notify
from p2ptrain.node.reports import summary
from p2ptrain.node.roles import take_role
from p2ptrain.runtime import be_nice, real_runtime


async def run_peer(
    config: PeerConfig,
    *,
    signed_manifest: SignedManifest | None = None,
    signals: StopSignals | None = None,
    on_start: Callable[[Peer], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run a peer until it is done or stopped; return the exit code, 0.

    Args:
        config: Its role file.
        signed_manifest: The manifest, if known; None reads the config's file or asks the link's peers.
        signals: Stop the peer; None creates new ones.
        on_start: Called with the peer once it has joined its swarm.
        on_ready: Called with the swarm link once the peer can be reached.

    Raises:
        P2PTrainError: The peer cannot run or continue; ``exit_code`` is the process's exit code.
    """
    run_dir = config.run_dir
    be_nice(config.resources.nice)  # Before any thread or daemon starts.
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    signals = signals or StopSignals()
    signals.install()
    link = SwarmLink.parse(config.link) if config.link else None
    with contextlib.ExitStack() as stack:
        identity = stack.enter_context(contextlib.closing(Identity.create_or_load(run_dir / IDENTITY_FILE)))
        (run_dir / summary.SUMMARY_FILE).unlink(missing_ok=True)  # Of an earlier run; a killed peer leaves none.
        signed = signed_manifest or _read_manifest(config, link, identity)
        if link is None and signed is None:
            raise ConfigError(
                "a peer needs a link to join a swarm, or a manifest to start one: set `link` or `manifest`"
            )
        runtime = real_runtime("sync", run_dir)
        stack.callback(runtime.close)
        peer = await Peer.start(identity, peer_options(config, identity.peer_id), runtime, link=link, signed=signed)
        async with visiting(peer, config, signals):
            await serve_and_close(peer, config, signals, on_start, on_ready)
    return 0


async def serve_and_close(
    peer: Peer,
    config: PeerConfig,
    signals: StopSignals,
    on_start: Callable[[Peer], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Run the role of a peer that has joined its swarm until it is done or stopped; then close the peer.

    See `run_peer` for the arguments.

    Raises:
        P2PTrainError: The peer cannot continue.
    """
    try:
        peer.network.lost.add_done_callback(lambda lost: signals.stop(f"the network daemon ended: {lost.result()}"))
        peer.entry.dismissed.add_done_callback(lambda dismissed: signals.stop(dismissed.result()))
        peer.signed.keep(config.run_dir / SIGNED_FILE)
        if on_start is not None:
            on_start(peer)
        async with contextlib.AsyncExitStack() as stack:
            if config.metrics.port:
                from p2ptrain.node.reports import metrics_page

                await stack.enter_async_context(metrics_page.serve_metrics(peer, config.metrics.port))
            if on_ready is not None:
                on_ready(str(peer.network.link))
            notify("READY=1")
            await take_role(peer, config, signals)
    finally:
        notify("STOPPING=1")
        await peer.close()
    peer.entry.check()
    if signals.reason.startswith("the network daemon ended"):
        raise TemporaryError(f"{signals.reason}; the state is saved: start this peer again")


def _read_manifest(config: PeerConfig, link: SwarmLink | None, identity: Identity) -> SignedManifest | None:
    if not config.manifest:
        return None
    path = config.manifest
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ConfigError(
            f"cannot read the manifest {path}: {error.strerror}; write it with `p2ptrain seed`"
        ) from error
    return SignedManifest.from_bytes(data, link.digest if link else None, identity)
