"""A peer that trains the manifest's whole model, on a training thread, until it drains."""

from __future__ import annotations

import asyncio
import gc

from p2ptrain.config import PeerConfig
from p2ptrain.errors import CheckpointError, P2PTrainError, ResourceError
from p2ptrain.node.draining import end_training, unless_stopped, until_over
from p2ptrain.node.guest.gpu import fitting_gpu
from p2ptrain.node.peer import Peer
from p2ptrain.node.process import StopSignals
from p2ptrain.node.reports.summary import write_summary
from p2ptrain.node.roles.building import build_trainer
from p2ptrain.tasks import Tasks
from p2ptrain.training.bridge import Bridge


async def train(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Train until stopped, until the last round, or for ``stop_after.minutes``; then drain."""
    loop = asyncio.get_running_loop()
    started = loop.time()
    bridge = Bridge(loop)
    trainer = await unless_stopped(build_trainer(peer, config, bridge), signals)
    if trainer is None:
        return  # Its initial state is on disk.
    gc.collect()
    gc.freeze()  # Loaded objects stay; their garbage collection would block the event loop.

    def work() -> None:
        if config.serving.enabled:
            peer.runtime.yield_to_serving()
        with fitting_gpu():
            trainer.run()

    signals.wishes.join(trainer.pause, trainer.finish)
    done, reason = bridge.run_thread(work), ""
    serving = Tasks()
    if config.serving.enabled:
        from p2ptrain.node.serving.hosting import Serving

        served = Serving(peer, config)
        signals.wishes.join(served.pause)
        serving.keep(served.run, "serving")
    try:
        reason = await until_over(done, signals, config.stop_after.minutes)
    finally:
        await serving.close()
        unsaved: P2PTrainError | None = None
        try:
            await end_training(trainer, bridge, done, peer.runtime, config.drain_seconds)
        except (ResourceError, CheckpointError) as caught:
            unsaved = caught
    error = done.exception() or unsaved if done.done() else unsaved
    ended = reason if error is None else str(error)
    write_summary(peer, config, trainer.progress, loop.time() - started, ended)
    if error is not None:
        raise error
