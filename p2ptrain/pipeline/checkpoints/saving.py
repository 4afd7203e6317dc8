"""A host's own checkpoints of what it hosts: its record names the last one, and complete ones get their list."""

from __future__ import annotations

import asyncio
import logging
import threading
from dataclasses import dataclass
from pathlib import Path

from p2ptrain.errors import ResourceError
from p2ptrain.pipeline.checkpoints.agreement import MAX_ROUNDS, Agreement
from p2ptrain.pipeline.checkpoints.folders import unit_folder
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.training.checkpoints.stage_list import StageList, write_stage_list

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Save:
    """One checkpoint of a unit.

    Attributes:
        unit: Of what; see `p2ptrain.pipeline.plan.Unit`.
        round: At the start of which round.
        digest: Of its state, 32 bytes.
        path: Its folder.
    """

    unit: int
    round: int
    digest: bytes
    path: Path


class StageSaves:
    """The saves of one hosted stage, and of what it averages besides.

    Args:
        view: What the other hosts say of theirs.
        peer_id: This peer's.
    """

    def __init__(self, view: PipelineView, peer_id: str) -> None:
        self._view = view
        self._peer_id = peer_id
        self._newest: dict[int, Save] = {}
        self._waiting: dict[tuple[int, int], Save] = {}
        self._writing = asyncio.Lock()
        self.disk = threading.Lock()
        """Held by the thread that writes a checkpoint: a periodic save may be under way when the last one begins."""

    def note(self, save: Save) -> None:
        """It is on disk."""
        self._newest[save.unit] = save
        self._waiting.pop((save.unit, save.round), None)
        self._waiting[save.unit, save.round] = save
        while len(self._waiting) > 2 * MAX_ROUNDS:  # Others remember no more either; a host has two units at most.
            del self._waiting[next(iter(self._waiting))]
        self._view.saves.note(self._peer_id, save.unit, save.round, save.digest)

    def failed(self, unit: int) -> None:
        """A round could not be saved: others are not to wait for it."""
        self._newest.pop(unit, None)
        self._view.saves.forget(self._peer_id, unit)

    def newest(self, unit: int) -> Save | None:
        """The last one of a unit."""
        return self._newest.get(unit)

    def missing(self) -> str:
        """What keeps the last round from being complete, for people; empty where nothing does."""
        for save in self._newest.values():
            if self._waiting.get((save.unit, save.round)) is save:
                found = self._view.saves.agreement(self._view.plan.unit_numbers, save.round)
                num_stages = self._view.plan.num_stages
                reasons = [f"{unit_folder(unit, num_stages)}: {why}" for unit, why in found.missing.items()]
                return f"round {save.round}: {'; '.join(reasons) or 'other hosts have another state'}"
        return ""

    async def complete(self) -> None:
        """Write the lists of those checkpoints of which all stages are known by now."""
        async with self._writing:
            for key, save in list(self._waiting.items()):
                found = self._view.saves.agreement(self._view.plan.unit_numbers, save.round)
                if found.is_complete and found.digests[save.unit] == save.digest:
                    await self._write(save, found)
                    if self._waiting.get(key) is save:
                        del self._waiting[key]

    async def _write(self, save: Save, found: Agreement) -> None:
        plan = self._view.plan
        digests = {unit_folder(unit, plan.num_stages): digest for unit, digest in found.digests.items()}
        listed = StageList(plan.manifest.digest, save.round, digests)
        try:
            await asyncio.to_thread(write_stage_list, save.path, listed)
        except ResourceError as error:
            if save.path.is_dir():  # Else newer ones have taken its place.
                logger.warning("%s", error)
        else:
            logger.info("%s/%s is complete: all stages saved it", save.path.parent.name, save.path.name)

    def forget(self) -> None:
        """This peer hosts the stage no more."""
        for unit in self._newest:
            self._view.saves.forget(self._peer_id, unit)
        self._newest.clear()
        self._waiting.clear()
