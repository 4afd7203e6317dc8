"""Metrics and checkpoints of a hosted stage, restored at the host's start."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path

from p2ptrain.config import PeerConfig
from p2ptrain.errors import CheckpointError, ResourceError
from p2ptrain.node.peer import Peer
from p2ptrain.pipeline.checkpoints.saving import TIED_FOLDER, Save, stage_folder
from p2ptrain.pipeline.stage.hosted_stage import HostedStage
from p2ptrain.tasks import Tasks
from p2ptrain.training.checkpoints.files import load_newest_valid, save_checkpoint
from p2ptrain.training.checkpoints.saving import restore_shared
from p2ptrain.training.metrics import MetricsWriter
from p2ptrain.training.sync.synchronizer import RoundResult

logger = logging.getLogger(__name__)


def _folder(config: PeerConfig, hosted: HostedStage, unit: int) -> Path:
    return config.run_dir / "checkpoints" / (stage_folder(unit) if unit == hosted.number else TIED_FOLDER)


async def save_and_tell(
    peer: Peer, config: PeerConfig, hosted: HostedStage, *, is_last: bool = False
) -> ResourceError | CheckpointError | None:
    """Save a hosted stage's units and publish the saves; return the first error, if any.

    The last save runs on a pool thread, since a stuck device may block the thread that applies rounds. No round
    changes the state then.
    """
    run = peer.runtime.offload if is_last else peer.runtime.compute
    saves, failed = await run(_save, config, hosted)
    for save in saves:
        hosted.saves.note(save)
    for unit in failed:
        hosted.saves.failed(unit)
    peer.presence.changed()
    return next(iter(failed.values()), None)


def _save(config: PeerConfig, hosted: HostedStage) -> tuple[list[Save], dict[int, ResourceError | CheckpointError]]:
    """Return the new saves, without unchanged units, and by unit the errors; errors do not stop training."""
    saves: list[Save] = []
    failed: dict[int, ResourceError | CheckpointError] = {}
    for unit in hosted.units:
        number, state = unit.unit.number, unit.synchronizer.state
        last = hosted.saves.newest.get(number)
        if last is not None and (last.round, last.digest) == (state.head.round, state.head.digest):
            continue
        try:
            with hosted.saves.disk:
                path = save_checkpoint(
                    _folder(config, hosted, number), head=state.head, tensors=state.tensors(), local={},
                    extra={"stage": hosted.number}, swarm=unit.swarm, keep_last=config.checkpoints.keep_last,
                )  # fmt: skip
        except (ResourceError, CheckpointError) as error:
            logger.error("%s", error)
            failed[number] = error
        else:
            saves.append(Save(number, state.head.round, state.head.digest, path))
    return saves, failed


def restore_stage(config: PeerConfig, hosted: HostedStage) -> list[Save]:
    """Restore each unit's newest checkpoint, if there is one; return the restored saves."""
    saves = []
    for unit in hosted.units:
        number = unit.unit.number
        checkpoint = load_newest_valid(_folder(config, hosted, number), unit.swarm)
        if checkpoint is not None:
            restore_shared(unit.synchronizer.state, checkpoint)
            unit.synchronizer.averager.begin_at(checkpoint.head)
            unit.work.adopt(False, None)
            logger.info("restored round %d from %s", checkpoint.head.round, checkpoint.path)
            saves.append(Save(number, checkpoint.head.round, checkpoint.head.digest, checkpoint.path))
    return saves


class RoundKeeper:
    """A host's work after each round: log, save, publish; a `StageObserver`.

    The caller owns the saves in progress (``saves``), since they may outlive a stage.
    """

    def __init__(self, peer: Peer, config: PeerConfig, saves: Tasks) -> None:
        self._peer = peer
        self._config = config
        self._metrics = MetricsWriter(config.run_dir / "metrics.jsonl")
        self._saves = saves
        self._saving: asyncio.Task[None] | None = None

    def round_ended(self, hosted: HostedStage, result: RoundResult) -> None:
        head = hosted.units[0].synchronizer.head
        if result.committed:
            logger.info(
                "round %d of stage %d: %d of %d hosts contributed, %.1f s%s", result.round, hosted.number,
                result.contributors, result.members, result.seconds, f" ({result.reason})" if result.reason else "",
            )  # fmt: skip
        else:
            logger.warning("round %d of stage %d was not committed: %s", result.round, hosted.number, result.reason)
        self._metrics.write(
            "round", round=result.round, committed=result.committed, reason=result.reason, seconds=result.seconds,
            matchmaking_seconds=result.matchmaking_seconds, transfer_seconds=result.transfer_seconds,
            members=result.members, contributors=result.contributors, loss=None, digest=head.digest.hex(),
            tokens=hosted.units[0].synchronizer.replica.trained_tokens, stage=hosted.number,
        )  # fmt: skip
        self._peer.presence.changed()

    def round_began(self, hosted: HostedStage, round: int) -> None:
        """Save if a checkpoint is due. All hosts save at the same rounds, so that their checkpoints match.

        `p2ptrain.node.roles.pipeline` saves after the last round.
        """
        every = self._config.checkpoints.every_rounds
        is_idle = self._saving is None or self._saving.done()
        if is_idle and every > 0 and round % every == 0 and not hosted.rounds.is_done:
            saving = save_and_tell(self._peer, self._config, hosted)
            self._saving = self._saves.start(saving, "save")
