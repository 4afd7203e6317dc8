"""A stage on this peer: its host, averaging units, checkpoints and rounds, wired together."""

from __future__ import annotations

from functools import partial
from typing import Protocol

from p2ptrain.network.records.record import StageReport
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.checkpoints.saving import StageSaves
from p2ptrain.pipeline.stage.host import NOT_YET, AdmissionQueue, StageHost
from p2ptrain.pipeline.stage.rounds import StageRounds
from p2ptrain.pipeline.stage.service import HostService
from p2ptrain.pipeline.stage.units import HostingOptions, host_unit
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks
from p2ptrain.training.sync.synchronizer import RoundResult

WRITING_SECONDS = 10.0
"""Timeout of a checkpoint list that is being written when the stage is closed."""


class StageObserver(Protocol):
    """Observer of a hosted stage's rounds."""

    def round_ended(self, hosted: HostedStage, result: RoundResult) -> None:
        """Called after a synchronization of the stage's own unit."""

    def round_began(self, hosted: HostedStage, round: int) -> None:
        """Called when a round began, with all units in it."""


class HostedStage:
    """One stage that this peer hosts. Call `run` once the units' synchronizers have their state.

    The worker's modules begin with initial values; only rounds change them. ``units`` has the stage's own first.
    """

    def __init__(
        self,
        view: PipelineView,
        worker: StageWorker,
        rpc: Rpc,
        signer: Signer,
        observer: StageObserver,
        options: HostingOptions,
    ) -> None:
        self.number = worker.number
        self.worker = worker
        self.saves = StageSaves(view.plan, view.saves, rpc.peer_id)
        self._rpc = rpc
        self._view = view
        self._is_closed = self._participates = False
        self._following, self._completing = Tasks(), Tasks()
        self._queue = AdmissionQueue()
        self.host = StageHost(worker, view.new_caller(rpc, options.hop_limits), NOT_YET, self._queue)
        self._service = HostService(self.host, rpc, signer)
        units = view.plan.units(self.number)
        self.units = [host_unit(view, unit, self.host.gradients, rpc, signer, options) for unit in units]
        self.rounds = StageRounds(
            self.host, self._queue, self.units, view.plan.manifest.averaging.grace_seconds,
            partial(observer.round_ended, self), partial(observer.round_began, self),
        )  # fmt: skip

    def participate(self) -> None:
        """Become visible to leaders and in routes."""
        self._participates = True
        for unit in self.units:
            unit.synchronizer.participate(True)
        self._view.local.hosts[self.number] = self.host.take
        self._view.refresh_routes()
        if not self._following:
            self._following.keep(self._follow_records, "follow-records")

    async def run(self) -> None:
        """Participate until `rounds` is stopped or done."""
        self.participate()
        await self.rounds.run()

    async def _follow_records(self) -> None:
        """Check each update for rounds that other stages have ended, and for complete checkpoints.

        A microbatch of the next round also shows the end of a round, but none follows the last round.
        """
        while True:
            await self._view.updated.wait()
            if self._view.is_over(self.host.ledger.round, self.number):
                self._queue.note_over()
            if not self._completing:
                self._completing.start(self.saves.complete(), "complete")

    def reports(self) -> list[StageReport]:
        """Return this stage's part of the peer's record; empty before it participates."""
        found = []
        for each in self.units if self._participates else ():
            number, head = each.unit.number, each.synchronizer.head
            is_own, saved = number == self.number, self.saves.newest.get(number)
            found.append(
                StageReport(
                    number, head.round, head.lineage, head.digest, head.tokens,
                    self.host.tokens_per_second if is_own else 0.0,
                    self.worker.device.num_waiting if is_own else 0,
                    self.host.ledger.settled_samples if is_own else 0,
                    saved.round if saved is not None else 0,
                    saved.digest if saved is not None else bytes(32),
                    head.full,
                    head.returned,
                )
            )  # fmt: skip
        return found

    async def close(self) -> None:
        """Stop all services and tasks; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._following.close()
        await self._completing.close(WRITING_SECONDS)
        self._view.local.hosts.pop(self.number, None)
        self.saves.forget()
        self._view.refresh_routes()
        self._service.close()
        await self.host.close()
        for each in self.units:
            await each.synchronizer.close()
            self._rpc.withdraw(f"unit{each.unit.number}")
