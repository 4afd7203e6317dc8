"""`run_peer`: one peer from its role file to its exit code, signals and draining included."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.config import PeerConfig
from p2ptrain.errors import CheckpointError, ConfigError, P2PTrainError, ResourceError, TemporaryError
from p2ptrain.manifest import SIGNED_FILE, SignedManifest
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings
from p2ptrain.network.link import SwarmLink
from p2ptrain.node.draining import end_training, unless_stopped
from p2ptrain.node.peer import Peer, PeerOptions
from p2ptrain.node.service_manager import notify
from p2ptrain.node.signals import StopSignals
from p2ptrain.runtime import real_runtime
from p2ptrain.tasks import Tasks

if TYPE_CHECKING:
    from p2ptrain.training.loop import Trainer

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Summary:
    """How one peer's run went; written to ``summary.json`` in its run directory.

    Attributes:
        tokens: Of this peer's, in committed rounds.
        tokens_per_second: Those by the seconds of the run.
    """

    peer: str
    name: str
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    tokens: int
    tokens_per_second: float
    seconds: float
    bytes_sent: int
    bytes_received: int
    rounds_committed: int
    rounds_aborted: int
    state_digest: str
    round: int
    exit_reason: str


async def run_peer(
    config: PeerConfig,
    *,
    signed_manifest: SignedManifest | None = None,
    on_start: Callable[[Peer, StopSignals], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> int:
    """Run a peer until it is done or told to stop.

    Args:
        config: Its role file.
        signed_manifest: The manifest, where it is known already; otherwise from the config's file or the link's peers.
        on_start: Called with the peer once it has met its swarm, and with what tells it to stop.
        on_ready: Called with the swarm link once the peer can be reached.

    Returns:
        The exit code: 0.

    Raises:
        P2PTrainError: It cannot run or go on; ``exit_code`` says what to exit with.
    """
    run_dir = config.run_dir
    await asyncio.to_thread(run_dir.mkdir, parents=True, exist_ok=True)
    signals = StopSignals()
    signals.install()
    link = SwarmLink.parse(config.link) if config.link else None
    with contextlib.ExitStack() as stack:
        identity = stack.enter_context(contextlib.closing(Identity.create_or_load(run_dir / "identity.key")))
        signed = signed_manifest or _read_manifest(config, link, identity)
        if link is None and signed is None:
            raise ConfigError(
                "a peer needs a link to join a swarm, or a manifest to start one: set `link` or `manifest`"
            )
        runtime = real_runtime("sync", run_dir)
        stack.callback(runtime.close)
        peer = await Peer.start(identity, peer_options(config, identity.peer_id), runtime, link=link, signed=signed)
        await serve_and_close(peer, config, signals, on_start, on_ready)
    return 0


async def serve_and_close(
    peer: Peer,
    config: PeerConfig,
    signals: StopSignals,
    on_start: Callable[[Peer, StopSignals], None] | None = None,
    on_ready: Callable[[str], None] | None = None,
) -> None:
    """Do what the peer's role asks for, until it is done or told to stop; then close the peer.

    Args:
        peer: It has met its swarm.
        config: Its role file.
        signals: Tell it to stop.
        on_start: See `run_peer`.
        on_ready: See `run_peer`.

    Raises:
        P2PTrainError: It cannot go on.
    """
    try:
        peer.on_network_lost(lambda reason: signals.stop(f"the network daemon ended: {reason}"))
        _keep_manifest(peer.signed, config.run_dir / SIGNED_FILE)
        if on_start is not None:
            on_start(peer, signals)
        async with _metrics(peer, config.metrics.port):
            if on_ready is not None:
                on_ready(str(peer.link))
            notify("READY=1")
            await _take_role(peer, config, signals)
    finally:
        notify("STOPPING=1")
        await peer.close()
    if signals.reason.startswith("the network daemon ended"):
        raise TemporaryError(f"{signals.reason}; the state is saved: start this peer again")


async def _take_role(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    if peer.manifest.in_stages and config.role in ("trainer", "stage", "both"):
        from p2ptrain.node.roles.pipeline import take_part

        await take_part(peer, config, signals)
    elif config.role in ("stage", "both"):
        raise ConfigError(f'role = {config.role!r}: this swarm\'s model is not cut into stages; use role = "trainer"')
    elif config.role == "trainer":
        await _train(peer, config, signals)
    else:
        await _serve(peer, config, signals)


@contextlib.asynccontextmanager
async def _metrics(peer: Peer, port: int) -> AsyncIterator[None]:
    """Serve this peer's metrics on loopback while the body runs; nothing at port 0."""
    if not port:
        yield
        return
    from p2ptrain.network.http_server import listen, serving
    from p2ptrain.node.metrics_page import make_app

    async with serving(make_app(peer), listen("127.0.0.1", port, "--metrics-port")):
        yield


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


def _keep_manifest(signed: SignedManifest, path: Path) -> None:
    """Keep what the swarm agreed on beside the checkpoints, which can be exported with it after the swarm is gone."""
    data = signed.to_bytes()
    try:
        if path.is_file() and path.read_bytes() == data:
            return
        partial = path.with_name(f".{path.name}.partial")
        partial.write_bytes(data)
        partial.replace(path)
    except OSError as error:
        logger.warning("cannot keep the manifest in %s, going on without: %s", path, error.strerror)


def peer_options(config: PeerConfig, peer_id: str) -> PeerOptions:
    """How a peer with this role file appears and listens."""
    network = config.network
    return PeerOptions(
        role="stage" if config.role == "both" else config.role,
        name=config.name or peer_id[-6:],
        device=config.resources.device,
        run_dir=config.run_dir,
        network=Libp2pSettings(
            listen=tuple(network.listen),
            announce=tuple(network.announce),
            nat_port_map=network.nat_port_map,
            auto_nat=network.auto_nat,
            relay=network.relay,
            trusted_relays=tuple(network.trusted_relays),
            force_reachability=network.force_reachability,
            direct=network.direct if config.role != "bootstrap" else "off",  # a seed moves nothing in bulk
            direct_port=network.direct_port,
        ),
        upload_bandwidth=config.resources.up,
        download_bandwidth=config.resources.down,
    )


async def _serve(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """A bootstrap peer: it answers until it is told to stop."""
    peer.set_state("serving")
    timeout = config.stop_after.minutes * 60 if config.stop_after.minutes else None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(timeout):
            await signals.requested.wait()


async def _train(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    from p2ptrain.node.roles.trainer import build_trainer
    from p2ptrain.training.optimizer import Bridge

    loop, run_dir = asyncio.get_running_loop(), config.run_dir
    started = loop.time()
    bridge = Bridge(loop)
    trainer = await unless_stopped(build_trainer(peer, config, run_dir, bridge), signals)
    if trainer is None:
        return  # What it began with is on disk.
    gc.collect()
    gc.freeze()  # What is loaded now stays. Searching it for garbage stops the event loop for a tenth of a second.
    done, reason = bridge.begin(trainer.run), ""
    try:
        timeout = config.stop_after.minutes * 60 if config.stop_after.minutes else None
        async with Tasks() as tasks:
            waiting: set[asyncio.Future[Any]] = {done, tasks.call(signals.requested.wait(), "stop")}
            await asyncio.wait(waiting, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        reason = signals.reason or ("rounds" if done.done() else "minutes")
    finally:
        unsaved: P2PTrainError | None = None
        try:
            await end_training(trainer, bridge, done, peer.runtime, config.drain_seconds)
        except (ResourceError, CheckpointError) as caught:
            unsaved = caught
    error = done.exception() or unsaved if done.done() else unsaved
    paths = [run_dir / "summary.json", *([config.summary] if config.summary else [])]
    _write_summary(peer, trainer, paths, loop.time() - started, reason if error is None else str(error))
    if error is not None:
        raise error


def _write_summary(peer: Peer, trainer: Trainer, paths: list[Path], seconds: float, reason: str) -> None:
    sync, progress = peer.synchronizer, trainer.progress
    assert sync is not None
    summary = Summary(
        peer=peer.identity.peer_id,
        name=peer.options.name,
        heldout_loss_before=progress.held_out_loss_before,
        heldout_loss_after=progress.held_out_loss_after,
        tokens=sync.replica.trained_tokens,
        tokens_per_second=sync.replica.trained_tokens / seconds,
        seconds=seconds,
        bytes_sent=peer.rpc.bytes_sent,
        bytes_received=peer.rpc.bytes_received,
        rounds_committed=sync.rounds_committed,
        rounds_aborted=sync.rounds_aborted,
        state_digest=sync.head.digest.hex(),
        round=sync.head.round,
        exit_reason=reason,
    )
    text = json.dumps(asdict(summary), indent=2) + "\n"
    for path in paths:
        try:
            path.write_text(text)
        except OSError as error:
            logger.error("cannot write the summary to %s: %s", path, error.strerror)
