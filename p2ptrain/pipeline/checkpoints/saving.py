"""Saved checkpoints of stages, and the hosts' agreement on complete ones.

Round numbers agree across stages. So checkpoints of one round form one model, unless the swarm was split. Hosts publish
the digests of their saved states in their records. A checkpoint is *complete* once, for every stage, more than half of
the saving hosts report its round with the same digest. A complete checkpoint gets a list of all digests beside it.
"""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from p2ptrain.buffers import Bounded
from p2ptrain.errors import ResourceError
from p2ptrain.network.records.record import StageReport
from p2ptrain.training.checkpoints.stage_list import StageList, write_stage_list

if TYPE_CHECKING:
    from p2ptrain.pipeline.plan import PipelinePlan

logger = logging.getLogger(__name__)

MAX_ROUNDS = 8
"""Remembered saves per host and unit."""
TIED_FOLDER = "tied"
"""Folder of tied parameters, beside those of stages, in a run's checkpoint folder."""


def stage_folder(stage: int) -> str:
    return f"stage-{stage}"


def unit_folder(unit: int, num_stages: int) -> str:
    """Return the folder of a unit; see `p2ptrain.pipeline.plan.Unit`."""
    return stage_folder(unit) if unit < num_stages else TIED_FOLDER


@dataclass(frozen=True)
class Agreement:
    """The hosts' agreement on one round: majority digests by unit, and for each other unit the reason in words."""

    round: int
    digests: Mapping[int, bytes]
    missing: Mapping[int, str]

    @property
    def is_complete(self) -> bool:
        return not self.missing


class Saves:
    """All hosts' saves. A host's newest record determines its units; its older records add earlier rounds."""

    def __init__(self) -> None:
        self._told: dict[tuple[int, str], Bounded[int, bytes]] = {}
        """By unit and host: the digests of saved rounds, newest last."""

    def tell(self, peer: str, reports: Iterable[StageReport]) -> None:
        """Apply the saves in a host's record."""
        saved = {report.unit: report for report in reports if report.saved_round > 0}
        for unit, other in list(self._told):
            if other == peer and unit not in saved:
                self.forget(peer, unit)
        for unit, report in saved.items():
            self.note(peer, unit, report.saved_round, report.saved_digest)

    def note(self, peer: str, unit: int, round: int, digest: bytes) -> None:
        """Record a host's save."""
        self._told.setdefault((unit, peer), Bounded(MAX_ROUNDS))[round] = digest

    def forget(self, peer: str, unit: int) -> None:
        """Remove a host's saves of a unit."""
        self._told.pop((unit, peer), None)

    def keep_only(self, peers: Iterable[str]) -> None:
        """Remove the saves of all other peers, so that departed hosts have no vote."""
        kept = set(peers)
        self._told = {(unit, peer): rounds for (unit, peer), rounds in self._told.items() if peer in kept}

    def agreement(self, units: Iterable[int], round: int) -> Agreement:
        """Return the hosts' agreement on a round."""
        digests: dict[int, bytes] = {}
        missing: dict[int, str] = {}
        for unit in units:
            hosts = [rounds for (saved, _), rounds in self._told.items() if saved == unit]
            votes = Counter(rounds[round] for rounds in hosts if round in rounds)
            digest, count = votes.most_common(1)[0] if votes else (b"", 0)
            if 2 * count > len(hosts):
                digests[unit] = digest
            else:
                missing[unit] = f"{count} of {len(hosts)} hosts that save agree" if hosts else "no host has saved any"
        return Agreement(round, digests, missing)


@dataclass(frozen=True)
class Save:
    """One checkpoint of a unit, saved at the start of ``round``; ``digest`` has 32 bytes."""

    unit: int
    round: int
    digest: bytes
    path: Path


class StageSaves:
    """This peer's saves of one hosted stage, and of its tied unit: the ``newest`` of each. ``told`` are all hosts'."""

    def __init__(self, plan: PipelinePlan, told: Saves, peer_id: str) -> None:
        self._plan = plan
        self._told = told
        self._peer_id = peer_id
        self.newest: dict[int, Save] = {}
        self._waiting = Bounded[tuple[int, int], Save](2 * MAX_ROUNDS)
        """Other hosts remember no more; a host has at most two units."""
        self._writing = asyncio.Lock()
        self.disk = threading.Lock()
        """Held by the thread that writes a checkpoint: a periodic save may overlap the final one."""

    def note(self, save: Save) -> None:
        """Record a save that is on disk."""
        self.newest[save.unit] = save
        self._waiting[save.unit, save.round] = save
        self._told.note(self._peer_id, save.unit, save.round, save.digest)

    def failed(self, unit: int) -> None:
        """Withdraw a unit's saves after a failed one, so that other hosts do not wait for it."""
        self.newest.pop(unit, None)
        self._told.forget(self._peer_id, unit)

    def missing(self) -> str:
        """Describe why the newest save is incomplete, for people; empty if it is complete."""
        for save in self.newest.values():
            if self._waiting.get((save.unit, save.round)) is save:
                found = self._told.agreement(self._plan.unit_numbers, save.round)
                reasons = [f"{unit_folder(unit, self._plan.num_stages)}: {why}" for unit, why in found.missing.items()]
                return f"round {save.round}: {'; '.join(reasons) or 'other hosts have another state'}"
        return ""

    async def complete(self) -> None:
        """Write the list beside each checkpoint that is complete by now."""
        async with self._writing:
            for key, save in list(self._waiting.items()):
                found = self._told.agreement(self._plan.unit_numbers, save.round)
                if found.is_complete and found.digests[save.unit] == save.digest:
                    await self._write(save, found)
                    if self._waiting.get(key) is save:
                        del self._waiting[key]

    async def _write(self, save: Save, found: Agreement) -> None:
        digests = {unit_folder(unit, self._plan.num_stages): digest for unit, digest in found.digests.items()}
        listed = StageList(self._plan.manifest.digest, save.round, digests)
        try:
            await asyncio.to_thread(write_stage_list, save.path, listed)
        except ResourceError as error:
            if save.path.is_dir():  # Otherwise, newer saves have replaced it.
                logger.warning("%s", error)
        else:
            logger.info("%s/%s is complete: all stages saved it", save.path.parent.name, save.path.name)

    def forget(self) -> None:
        """Withdraw all saves: this peer no longer hosts the stage."""
        for unit in self.newest:
            self._told.forget(self._peer_id, unit)
        self.newest.clear()
        self._waiting.clear()
