"""A stage on this peer, put together: its host, what it averages with whom, and its rounds."""

from __future__ import annotations

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.models.stage import Stage
from p2ptrain.network.records.record import StageReport
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.pipeline.checkpoints.saving import StageSaves
from p2ptrain.pipeline.plan import Unit
from p2ptrain.pipeline.routing.hop import Caller, HopLimits, service
from p2ptrain.pipeline.stage.compute import StageCompute
from p2ptrain.pipeline.stage.device import Device
from p2ptrain.pipeline.stage.gradients import Part, StageWork, unit_state
from p2ptrain.pipeline.stage.host import StageHost
from p2ptrain.pipeline.stage.ledger import Limits
from p2ptrain.pipeline.stage.rounds import HostedUnit, StageRounds
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.progress import Jobs, untold
from p2ptrain.runtime import Runtime
from p2ptrain.signing import Signer
from p2ptrain.training.sync.replica import Replica
from p2ptrain.training.sync.synchronizer import Synchronizer

NOT_YET = -1
"""The round of a host that has not taken on its stage's state: microbatches wait."""


class HostedStage:
    """One stage that this peer hosts. Averaging begins with `run`, after `synchronizers` have taken on their state.

    Attributes:
        number: Which stage.
        module: As given; changed by rounds alone.
        host: Takes on microbatches.
        units: What is averaged; what is the stage's own first.
        rounds: Goes from round to round.
        saves: What of it is on this peer's disk.
    """

    def __init__(
        self,
        view: PipelineView,
        number: int,
        stage: Stage,
        device: Device,
        rpc: Rpc,
        runtime: Runtime,
        signer: Signer,
        *,
        compute: StageCompute | None = None,
        limits: Limits | None = None,
        hop_limits: HopLimits | None = None,
        bandwidth: int = 0,
        jobs: Jobs = untold,
    ) -> None:
        """
        Args:
            view: Who else is there.
            number: Which stage.
            stage: Its modules, on their device, as they are in the beginning.
            device: Where passes run.
            rpc: To reach other peers.
            runtime: Time, chance, arithmetic.
            signer: This peer's key.
            compute: Its arithmetic, if it is another than `StageCompute`.
            limits: What it takes on at a time.
            hop_limits: Bounds of what it sends on.
            bandwidth: What this peer is willing to send in bytes per second; 0 for no limit.
            jobs: Told how far a catch-up is.
        """
        plan = view.plan
        self.number = number
        self.module = stage
        self.saves = StageSaves(view, rpc.peer_id)
        self._rpc = rpc
        self._is_closed = False
        self._participates = False
        self._view = view
        self._compute = compute or StageCompute(stage)
        caller = Caller(rpc, view.new_router(), runtime.random, view.local, hop_limits, view.come_home)
        self.host = StageHost(
            rpc.peer_id, number, plan.num_stages, self._compute, device, caller, plan.manifest.pipeline.codec,
            limits or Limits(), NOT_YET,
            lambda inputs, targets, samples, tokens: plan.check(number, inputs, targets, samples, tokens),
            plan.num_ids, plan.num_classes,
        )  # fmt: skip
        self.host.listen(rpc)
        self._made = [
            self._make_unit(unit, stage, rpc, runtime, signer, bandwidth, jobs) for unit in plan.units(number)
        ]
        self.units = [made for _, made, _ in self._made]
        self.rounds = StageRounds(self.host, self.units, plan.manifest.averaging.grace_seconds)

    def _make_unit(
        self, unit: Unit, stage: Stage, rpc: Rpc, runtime: Runtime, signer: Signer, bandwidth: int, jobs: Jobs
    ) -> tuple[Unit, HostedUnit, Membership]:
        plan, membership = self._view.plan, self._view.membership(unit.number)
        averaging = plan.manifest.averaging.model_copy(update={"min_peers": 1})
        swarm = plan.swarm_of(unit.number)
        part = Part(stage, plan.local_names(self.number, unit))
        state = unit_state(part, plan.manifest.training, swarm, plan.manifest.pipeline.moments)
        context = PeerContext(rpc.scoped(f"unit{unit.number}"), runtime, signer, swarm, averaging)
        replica = Replica(context, plan.manifest.training, state, membership)
        synchronizer = Synchronizer(replica, bandwidth, jobs)
        work = StageWork(part, state, self._compute, unit.scale)
        return unit, HostedUnit(synchronizer, work), membership

    @property
    def unit_numbers(self) -> list[int]:
        """By which each of `units` is known."""
        return [unit.number for unit, _, _ in self._made]

    @property
    def unit_swarms(self) -> list[bytes]:
        """In which each of `units` is averaged."""
        return [self._view.plan.swarm_of(unit.number) for unit, _, _ in self._made]

    @property
    def memberships(self) -> list[Membership]:
        """Who averages each of `units`."""
        return [membership for _, _, membership in self._made]

    def participate(self) -> None:
        """Have leaders wait for this peer, and routes lead here."""
        self._participates = True
        for unit in self.units:
            unit.synchronizer.averager.matchmaker.participates = True
        self._view.local[self.number] = self.host.take_here
        self._view.refresh_routes()

    async def run(self) -> None:
        """Take part until `rounds` is stopped or done."""
        self.participate()
        await self.rounds.run()

    def look(self) -> None:
        """The view was brought up to date: see whether the other stages are through with the round in progress.

        A microbatch of the next round would tell so, too, but none comes after the last round.
        """
        if self._view.is_over(self.host.round, self.number):
            self.host.on_over()

    def reports(self) -> list[StageReport]:
        """What this peer's record says of it; nothing before it takes part."""
        found = []
        for unit, made, _ in self._made if self._participates else ():
            head, is_own = made.synchronizer.head, unit.number == self.number
            saved = self.saves.newest(unit.number)
            found.append(
                StageReport(
                    unit.number, head.round, head.lineage, head.digest, head.tokens,
                    self.host.tokens_per_second if is_own else 0.0,
                    self.host.num_waiting if is_own else 0,
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
        self._view.local.pop(self.number, None)
        self.saves.forget()
        self._view.refresh_routes()
        for name in ("", ".settle", ".round"):  # What became of microbatches may still be asked.
            self._rpc.withdraw(f"{service(self.number)}{name}")
        await self.host.close()
        for unit, made, _ in self._made:
            await made.synchronizer.close()
            self._rpc.withdraw(f"unit{unit.number}")
