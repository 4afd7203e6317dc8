"""The units that the hosts of a stage average with each other, put together for one of them."""

from __future__ import annotations

from dataclasses import dataclass

from p2ptrain.averaging.context import PeerContext
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.network.rpc.client import Rpc
from p2ptrain.pipeline.plan import Unit
from p2ptrain.pipeline.routing.hop import HopLimits
from p2ptrain.pipeline.stage.contribution import Part, StageWork, unit_state
from p2ptrain.pipeline.stage.gradients import StageGradients
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.progress import Jobs, untold
from p2ptrain.signing import Signer
from p2ptrain.training.sync.replica import Replica
from p2ptrain.training.sync.synchronizer import Synchronizer


@dataclass(frozen=True)
class HostingOptions:
    """Settings of a host's owner.

    Attributes:
        bandwidth: What this peer is willing to send in bytes per second; 0 for no limit.
        jobs: Told how far a catch-up is.
        hop_limits: Bounds of what it sends on.
    """

    bandwidth: int = 0
    jobs: Jobs = untold
    hop_limits: HopLimits | None = None


@dataclass(frozen=True)
class HostedUnit:
    """A unit that a host averages with others.

    Attributes:
        unit: What it is.
        swarm: In which it is averaged.
        membership: Who averages it.
        synchronizer: Of that swarm.
        work: This host's part in it.
    """

    unit: Unit
    swarm: bytes
    membership: Membership
    synchronizer: Synchronizer
    work: StageWork

    @property
    def round(self) -> int:
        """The round in progress."""
        return self.synchronizer.head.round


def host_unit(
    view: PipelineView, unit: Unit, gradients: StageGradients, rpc: Rpc, signer: Signer, options: HostingOptions
) -> HostedUnit:
    """Put together what averages a unit of a stage with its other hosts."""
    plan, worker, membership = view.plan, gradients.worker, view.membership(unit.number)
    swarm = plan.swarm_of(unit.number)
    averaging = plan.manifest.averaging.model_copy(update={"min_peers": 1})
    part = Part(worker.compute.stage, plan.local_names(worker.number, unit))
    state = unit_state(part, plan.manifest.training, swarm, plan.manifest.pipeline.moments)
    context = PeerContext(rpc.scoped(f"unit{unit.number}"), rpc.runtime, signer, swarm, averaging)
    replica = Replica(context, plan.manifest.training, state, membership)
    synchronizer = Synchronizer(replica, options.bandwidth, options.jobs)
    work = StageWork(part, state, gradients.total, worker.lock, unit.scale)
    return HostedUnit(unit, swarm, membership, synchronizer, work)
