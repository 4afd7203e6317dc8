"""A stage on this peer, put together: its host, what it averages with whom, and its rounds."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Protocol

from p2ptrain.network.records.record import StageReport
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.pipeline.checkpoints.saving import StageSaves
from p2ptrain.pipeline.plan import Unit
from p2ptrain.pipeline.routing.hop import Caller, HopLimits
from p2ptrain.pipeline.stage.contribution import Part, StageWork, unit_state
from p2ptrain.pipeline.stage.gradients import StageGradients
from p2ptrain.pipeline.stage.host import StageHost
from p2ptrain.pipeline.stage.rounds import AdmissionQueue, HostedUnit, StageRounds
from p2ptrain.pipeline.stage.service import HostService
from p2ptrain.pipeline.stage.worker import StageWorker
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.progress import Jobs, untold
from p2ptrain.signing import Signer
from p2ptrain.tasks import Tasks
from p2ptrain.training.state.vector_codec import vector_codec
from p2ptrain.training.sync.synchronizer import RoundResult, Synchronizer

NOT_YET = -1
"""The round of a host that has not taken on its stage's state: microbatches wait."""
WRITING_SECONDS = 10.0
"""How long the list of a complete checkpoint that is being written when the stage is closed may take."""


class StageObserver(Protocol):
    """Is told of a hosted stage's rounds."""

    def round_ended(self, hosted: HostedStage, result: RoundResult) -> None:
        """The stage's own unit was synchronised."""

    def round_began(self, hosted: HostedStage, round: int) -> None:
        """A round began, and all units are at it."""


@dataclass(frozen=True)
class HostingOptions:
    """What a host's owner wants.

    Attributes:
        bandwidth: What this peer is willing to send in bytes per second; 0 for no limit.
        jobs: Told how far a catch-up is.
        hop_limits: Bounds of what it sends on.
    """

    bandwidth: int = 0
    jobs: Jobs = untold
    hop_limits: HopLimits | None = None


class HostedStage:
    """One stage that this peer hosts. Averaging begins with `run`, after `synchronizers` have taken on their state.

    Args:
        view: Who else is there.
        worker: Computes; its modules are as they are in the beginning.
        rpc: To reach other peers.
        signer: This peer's key.
        observer: Told of its rounds.
        options: Its owner's.

    Attributes:
        number: Which stage.
        module: The worker's; changed by rounds alone.
        host: Takes on microbatches.
        units: What is averaged; what is the stage's own first.
        rounds: Goes from round to round.
        saves: What of it is on this peer's disk.
    """

    def __init__(
        self,
        view: PipelineView,
        worker: StageWorker,
        rpc: Rpc,
        signer: Signer,
        observer: StageObserver,
        options: HostingOptions | None = None,
    ) -> None:
        options = options or HostingOptions()
        self.number = worker.number
        self.module = worker.compute.stage
        self.worker = worker
        self.saves = StageSaves(view, rpc.peer_id)
        self._rpc = rpc
        self._view = view
        self._is_closed = self._participates = False
        self._following, self._completing = Tasks(), Tasks()
        self._queue, gradients = AdmissionQueue(), StageGradients(worker)
        caller = Caller(rpc, view.new_router(), view.here, options.hop_limits)
        self.host = StageHost(worker, gradients, caller, NOT_YET, self._queue)
        self._service = HostService(self.host, rpc)
        self.units = [self._make(unit, gradients, signer, options) for unit in view.plan.units(self.number)]
        self.rounds = StageRounds(
            self.host, self._queue, self.units, view.plan.manifest.averaging.grace_seconds,
            partial(observer.round_ended, self), partial(observer.round_began, self),
        )  # fmt: skip

    def _make(self, unit: Unit, gradients: StageGradients, signer: Signer, options: HostingOptions) -> HostedUnit:
        plan, membership, swarm = (
            self._view.plan,
            self._view.membership(unit.number),
            self._view.plan.swarm_of(unit.number),
        )
        averaging = plan.manifest.averaging.model_copy(update={"min_peers": 1})
        manifest = plan.manifest.model_copy(update={"averaging": averaging})
        part = Part(self.module, plan.local_names(self.number, unit))
        state = unit_state(part, manifest.training, swarm, manifest.pipeline.moments)
        synchronizer = Synchronizer(
            self._rpc.scoped(f"unit{unit.number}"), self._rpc.runtime, signer, swarm, manifest, state,
            vector_codec(averaging, state.layout), membership, options.bandwidth, options.jobs,
        )  # fmt: skip
        work = StageWork(part, state, gradients.total, self.worker.lock, unit.scale)
        return HostedUnit(unit, swarm, membership, synchronizer, work)

    def participate(self) -> None:
        """Have leaders wait for this peer, and routes lead here."""
        self._participates = True
        for unit in self.units:
            unit.synchronizer.averager.matchmaker.participates = True
        self._view.here.hosts[self.number] = self.host.take
        self._view.refresh_routes()
        if not self._following:
            self._following.keep(self._follow_records, "follow-records")

    async def run(self) -> None:
        """Take part until `rounds` is stopped or done."""
        self.participate()
        await self.rounds.run()

    async def _follow_records(self) -> None:
        """See whether the other stages are through with the round in progress, and which checkpoints are complete.

        A microbatch of the next round would tell so, too, but none comes after the last round.
        """
        while True:
            await self._view.next_update()
            if self._view.is_over(self.host.ledger.round, self.number):
                self._queue.is_over()
            if not self._completing:
                self._completing.start(self.saves.complete(), "complete")

    def reports(self) -> list[StageReport]:
        """What this peer's record says of it; nothing before it takes part."""
        found = []
        for each in self.units if self._participates else ():
            number, head = each.unit.number, each.synchronizer.head
            is_own, saved = number == self.number, self.saves.newest(number)
            found.append(
                StageReport(
                    number, head.round, head.lineage, head.digest, head.tokens,
                    self.host.tokens_per_second if is_own else 0.0,
                    self.worker.device.num_waiting if is_own else 0,
                    self.host.ledger.settled_samples if is_own else 0,
                    saved.round if saved is not None else 0,
                    saved.digest if saved is not None else bytes(32),
                )
            )  # fmt: skip
        return found

    async def close(self) -> None:
        """End everything that was started here; idempotent."""
        if self._is_closed:
            return
        self._is_closed = True
        await self._following.close()
        await self._completing.close(WRITING_SECONDS)
        self._view.here.hosts.pop(self.number, None)
        self.saves.forget()
        self._view.refresh_routes()
        self._service.close()
        await self.host.close()
        for each in self.units:
            await each.synchronizer.close()
            self._rpc.withdraw(f"unit{each.unit.number}")
