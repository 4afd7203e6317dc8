"""Wiring of the units that a host averages with the other hosts of its stage."""

from __future__ import annotations

from dataclasses import dataclass, field

from p2ptrain.averaging.context import Owner, PeerContext, Unconcerned, ballots_in, founding_of
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.plan import Unit
from p2ptrain.pipeline.routing.hop import HopLimits
from p2ptrain.pipeline.stage.contribution import Part, StageWork, unit_state
from p2ptrain.pipeline.stage.gradients import StageGradients
from p2ptrain.pipeline.view import PipelineView
from p2ptrain.progress import Progress, no_progress
from p2ptrain.signing import Signer
from p2ptrain.training.state.shared_state import SharedState
from p2ptrain.training.sync.replica import Replica
from p2ptrain.training.sync.synchronizer import Synchronizer


@dataclass(frozen=True)
class HostingOptions:
    """Settings of a host's owner; ``bandwidth`` is the upload limit in bytes per second, 0 for none."""

    bandwidth: int = 0
    jobs: Progress = no_progress
    hop_limits: HopLimits | None = None
    owner: Owner = field(default_factory=Unconcerned)


@dataclass(frozen=True)
class HostedUnit:
    """A unit that a host averages with others; ``work`` is its contribution."""

    unit: Unit
    swarm: bytes
    state: SharedState
    synchronizer: Synchronizer
    work: StageWork


def host_unit(
    view: PipelineView, unit: Unit, gradients: StageGradients, rpc: Rpc, signer: Signer, options: HostingOptions
) -> HostedUnit:
    """Return a stage's unit with all that averages it."""
    plan, worker = view.plan, gradients.worker
    swarm = plan.swarm_of(unit.number)
    averaging = plan.manifest.averaging.model_copy(update={"min_peers": 1})
    part = Part(worker.compute.stage, plan.local_names(worker.number, unit))
    state = unit_state(part, plan.manifest.training, swarm, plan.manifest.pipeline.moments)
    context = PeerContext(
        rpc.scoped(f"unit{unit.number}"), rpc.runtime, signer, swarm, averaging, view.membership(unit.number),
        options.owner, founding_of(plan.manifest), ballots_in(rpc.runtime.scratch, swarm),
    )  # fmt: skip
    replica = Replica(context, plan.manifest, state)
    synchronizer = Synchronizer(replica, options.bandwidth, options.jobs)
    work = StageWork(part, state, gradients.total, worker.lock, unit.scale)
    return HostedUnit(unit, swarm, state, synchronizer, work)
