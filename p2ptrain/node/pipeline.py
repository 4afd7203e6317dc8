"""A peer of a swarm whose model is cut into stages: it hosts one, or sends microbatches through all, or both."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.config import PeerConfig
from p2ptrain.errors import ConfigError, ResourceError
from p2ptrain.network.records import StageReport
from p2ptrain.node.draining import RESCUE, Drain, unless_stopped
from p2ptrain.node.peer import EMPTY_HASH, Pace, Peer
from p2ptrain.node.signals import StopSignals
from p2ptrain.node.stage_saving import save_and_tell
from p2ptrain.node.stages import WRITING_SECONDS, Stages, last_round
from p2ptrain.pipeline.placement import Choice, choose
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.tasks import Tasks, together
from p2ptrain.training.pipeline_view import DECIDED_STATE, PipelineView

if TYPE_CHECKING:
    from p2ptrain.pipeline.feeder import Feeder
    from p2ptrain.training.hosted_stage import HostedStage
    from p2ptrain.training.moving import Mover
    from p2ptrain.training.pipeline_trainer import PipelineTrainer

logger = logging.getLogger(__name__)

LINGER_SECONDS = 20.0
"""After the last round hosts go on answering trainers that measure the result."""
MAX_CHOICES = 6
SPREADING_SECONDS = 1.5
"""How long a record may take to be seen by everybody."""
QUIET_SECONDS = 4.0
"""If nobody asked for so long, they have."""


@dataclass(frozen=True)
class PipelineSummary:
    """How one peer's part in a pipeline went; written to ``summary.json`` in its run directory.

    Attributes:
        tokens: Of the microbatches that it sent and all stages accepted.
        stage_tokens: Of the work that it did for its stage, in committed rounds of the stage.
    """

    peer: str
    name: str
    stage: int | None
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    tokens: int
    stage_tokens: int
    tokens_per_second: float
    seconds: float
    bytes_sent: int
    bytes_received: int
    rounds_committed: int
    rounds_aborted: int
    state_digest: str
    round: int
    exit_reason: str


async def take_part(peer: Peer, config: PeerConfig, signals: StopSignals) -> None:
    """Host, feed, or both, until told to stop, the rounds are done, or as long as the config says; then drain.

    Raises:
        ManifestError: The model cannot be cut as the manifest says.
        ResourceError: No stage fits into this machine.
        ConfigError: There is no such stage, or the text cannot be read.
        TemporaryError: Microbatches do not come through.
    """
    loop = asyncio.get_running_loop()
    started = loop.time()
    if config.resources.threads:
        import torch

        torch.set_num_threads(config.resources.threads)
    plan = PipelinePlan(peer.manifest)
    await asyncio.to_thread(lambda: plan.needs)  # Adapters are looked up in the model, which takes a while.
    view = PipelineView(plan, peer.identity.peer_id, peer.runtime)
    peer.presence.on_records, peer.status.failovers = view.update, lambda: view.failovers
    await peer.presence.refresh()
    parties = await unless_stopped(_start(peer, config, view), signals)
    if parties is None:
        return  # What it began with is on disk.
    mover, feeding = parties
    peer.set_state("training")
    if mover is not None:
        await Stages(peer, config, view).step_in(mover.hosted)
    parts: list[Coroutine[Any, Any, None]] = []
    if mover is not None:
        parts.append(_host(mover, lambda hosted: save_and_tell(peer, config, hosted, is_last=True)))
    if feeding is not None:
        parts.append(feeding.run())
    async with Tasks() as tasks:
        working = tasks.call(together("part", parts), "pipeline")
        wanted = tasks.call(signals.requested.wait(), "stop")
        timeout = config.stop_after.minutes * 60 if config.stop_after.minutes else None
        await asyncio.wait({working, wanted}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        drain = Drain(config.drain_seconds)
        reason = signals.reason or ("rounds" if working.done() else "minutes")
        if feeding is not None:
            feeding.stop()
        if mover is not None:
            mover.stop()
        await asyncio.wait({working}, timeout=drain.left(RESCUE))
    error = None if working.cancelled() else working.exception()
    hosted = mover.hosted if mover is not None else None
    if hosted is not None:
        unsaved = await save_and_tell(peer, config, hosted, is_last=True)
        error = error or unsaved
    await asyncio.to_thread(_write_summary, peer, config, hosted, feeding, loop.time() - started, reason)
    if error is not None:
        raise error


async def _start(peer: Peer, config: PeerConfig, view: PipelineView) -> tuple[Mover | None, PipelineTrainer | None]:
    mover = await _start_hosting(peer, config, view) if config.role != "trainer" else None
    feeding = await _start_feeding(peer, config, view) if config.role != "stage" else None
    return mover, feeding


# Hosting


async def _start_hosting(peer: Peer, config: PeerConfig, view: PipelineView) -> Mover:
    from p2ptrain.pipeline.measuring import available_memory
    from p2ptrain.training.moving import Mover

    memory = config.resources.max_memory or available_memory()
    choice = await _choose_stage(peer, config, view, memory)
    logger.info("hosting %s as stage %d: %s", view.plan.spans[choice.stage], choice.stage, choice.reason)
    stages = Stages(peer, config, view)
    hosted = await stages.take_on(choice.stage)
    completing = Tasks()

    def look() -> None:
        if not completing:
            completing.start(mover.hosted.saves.complete(), "complete")
        mover.look()

    peer.on_close(lambda: completing.close(WRITING_SECONDS))
    may_move = config.pipeline.stage < 0
    mover = Mover(view, peer.presence, peer.rpc, peer.runtime, hosted, stages, memory, may_move=may_move)

    def moved(after: HostedStage) -> None:
        peer.hosted = [after]
        peer.synchronizer = after.units[0].synchronizer
        peer.presence.changed()

    mover.on_moved, view.on_update = moved, look
    peer.next_stage = lambda: mover.next_stage
    return mover


async def _choose_stage(peer: Peer, config: PeerConfig, view: PipelineView, memory: int) -> Choice:
    """The stage that the config names, or the one that needs this peer most.

    Raises:
        ConfigError: There is no such stage.
        ResourceError: No stage fits.
    """
    plan = view.plan
    if config.pipeline.stage >= plan.num_stages:
        raise ConfigError(
            f"pipeline.stage = {config.pipeline.stage}: this swarm has the stages 0 to {plan.num_stages - 1}"
        )
    if config.pipeline.stage >= 0:
        need = plan.needs[config.pipeline.stage].memory
        if config.resources.max_memory and need > memory:  # Else its owner knows what it has to spare.
            raise ResourceError(
                f"stage {config.pipeline.stage} takes about {need / 1e9:.1f} GB, and the limit is {memory / 1e9:.1f}"
                " GB: raise --max-memory, or let the peer choose a stage"
            )
        peer.set_state(DECIDED_STATE)
        return Choice(config.pipeline.stage, "asked for")
    speed, choice = await _speed(peer, config, view), Choice(-1, "")
    for _ in range(MAX_CHOICES):
        before = choice
        choice = choose(plan.needs, view.hosts(), speed, memory)
        if choice.stage == before.stage:
            break
        # Others that come now should see it, and this peer what they want.
        peer.intended = (StageReport(choice.stage, 0, EMPTY_HASH, EMPTY_HASH, 0),)
        await peer.presence.publish()
        await asyncio.sleep(SPREADING_SECONDS * peer.runtime.random.uniform(1.0, 1.5))
        await peer.presence.refresh()
    peer.status.state = DECIDED_STATE
    await peer.presence.publish()
    return choice


async def _speed(peer: Peer, config: PeerConfig, view: PipelineView) -> float:
    """This machine's, beside the speeds of hosts that are there; as a medium one's where none was measured yet."""
    from p2ptrain.node.trainer import choose_device
    from p2ptrain.pipeline.measuring import measure_speed

    others = view.medium_speed()
    if not view.is_measured:
        return others
    with peer.jobs("measuring this machine", ""):
        device, bandwidth = choose_device(config), config.resources.up
        speed = await peer.runtime.on_device(measure_speed, view.plan, device, bandwidth)
    if speed:
        logger.info("this machine is about %.2g times as fast as a host of medium speed", speed / others)
    return speed or others


async def _host(mover: Mover, save: Callable[[HostedStage], Awaitable[object]]) -> None:
    await mover.run()
    hosted = mover.hosted
    await save(hosted)
    if hosted.rounds.is_done:  # Trainers may measure what came of it.
        loop = asyncio.get_running_loop()
        deadline = loop.time() + LINGER_SECONDS
        left = QUIET_SECONDS
        while left > 0:
            await asyncio.sleep(left)
            quiet = QUIET_SECONDS - hosted.host.seconds_idle
            # Other hosts are to tell of their last checkpoint, and to hear of this one's.
            left = min(deadline - loop.time(), max(quiet, 1.0 if hosted.saves.missing() else 0.0))
        if missing := hosted.saves.missing():
            logger.warning("the last checkpoint is not complete: %s", missing)


# Feeding


async def start_feeder(peer: Peer, view: PipelineView) -> Feeder:
    """What sends microbatches; it is closed with the peer."""
    from p2ptrain.pipeline.feeder import Feeder
    from p2ptrain.pipeline.hops import Caller
    from p2ptrain.pipeline.outputs import Outputs

    router, view.outputs = view.new_router(), Outputs(peer.rpc)
    caller = Caller(peer.rpc, router, peer.runtime.random, view.local)
    # Numbers of a former life of this peer may still be known to hosts.
    first = int(peer.runtime.now() * 1000)
    feeder = Feeder(peer.rpc, router, caller, peer.runtime.random, first, view.outputs)
    await feeder.start()
    peer.on_close(feeder.close)
    return feeder


async def _start_feeding(peer: Peer, config: PeerConfig, view: PipelineView) -> PipelineTrainer:
    from p2ptrain.models import check_reads_text
    from p2ptrain.models.pretrained import local_data
    from p2ptrain.training.metrics import MetricsWriter
    from p2ptrain.training.pipeline_trainer import PipelineTrainer
    from p2ptrain.training.text import load_corpus

    manifest, model = peer.manifest, peer.manifest.model
    check_reads_text(model)
    data, cache = local_data(manifest, config.weights), config.run_dir.parent / "data"
    corpus = await asyncio.to_thread(load_corpus, data, model.context, model.vocabulary, cache, peer.jobs)
    feeder = await start_feeder(peer, view)
    trainer = PipelineTrainer(
        feeder, manifest, corpus, peer.identity.peer_id, config.pipeline.credits,
        MetricsWriter(config.run_dir / "metrics.jsonl"), config.run_dir, lambda now: last_round(peer, config, now),
    )  # fmt: skip
    progress = trainer.progress
    peer.status.pace = lambda: Pace(progress.loss, progress.tokens_per_second, 0)

    def publish() -> None:
        peer.status.note = progress.note
        peer.presence.changed()

    trainer.on_progress = publish
    return trainer


def _write_summary(
    peer: Peer,
    config: PeerConfig,
    hosted: HostedStage | None,
    feeding: PipelineTrainer | None,
    seconds: float,
    reason: str,
) -> None:
    sync = hosted.units[0].synchronizer if hosted is not None else None
    progress = feeding.progress if feeding is not None else None
    tokens = progress.tokens if progress is not None else 0
    summary = PipelineSummary(
        peer=peer.identity.peer_id,
        name=peer.options.name,
        stage=hosted.number if hosted is not None else None,
        heldout_loss_before=progress.held_out_loss_before if progress is not None else None,
        heldout_loss_after=progress.held_out_loss_after if progress is not None else None,
        tokens=tokens,
        stage_tokens=sync.trained_tokens if sync is not None else 0,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        bytes_sent=peer.rpc.bytes_sent,
        bytes_received=peer.rpc.bytes_received,
        rounds_committed=sync.rounds_committed if sync is not None else feeding.rounds if feeding is not None else 0,
        rounds_aborted=sync.rounds_aborted if sync is not None else 0,
        state_digest=sync.head.digest.hex() if sync is not None else "",
        round=sync.head.round if sync is not None else 0,
        exit_reason=reason,
    )
    text = json.dumps(asdict(summary), indent=2) + "\n"
    for path in (config.run_dir / "summary.json", *([config.summary] if config.summary else [])):
        try:
            path.write_text(text)
        except OSError as error:
            logger.error("cannot write the summary to %s: %s", path, error.strerror)
