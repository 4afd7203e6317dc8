"""A peer's view of a pipeline, from directory records: the hosts of each stage, and their progress."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from p2ptrain.averaging.grouping.membership import ACTIVE_STATES, Membership
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.checkpoints.saving import Saves
from p2ptrain.pipeline.placement import Host, StageNeed
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.routing.hop import Caller, HopLimits, LocalPeer
from p2ptrain.pipeline.routing.router import Router
from p2ptrain.runtime import Runtime

UNDECIDED_STATE, DECIDED_STATE = "starting", "syncing"
"""Record states of a future host, before and after it has chosen its stage."""
SILENT_SECONDS = 15.0
"""Staleness bound, relative to the newest record of any peer: three missed records. Placement and
`PipelineView.is_over` ignore stale hosts; routing and averaging detect failures themselves."""
MAX_OVER_MEDIAN = 2.0
"""Bound on a host's reported speed, relative to the median: what one host claims moves at most one other host."""
LEAST_PAUSE_SECONDS = 30.0
"""Minimum interval between two announced moves of a host."""


@dataclass(frozen=True)
class _Known:
    """A peer's newest record, and when the peer last announced a move (-inf for never); by the runtime's clock."""

    record: PeerRecord
    sequence: int
    expires_at: float
    read_at: float
    departure_at: float = -math.inf


class PipelineView:
    """Routes and memberships, kept current from records; `p2ptrain.node.presence` feeds it."""

    def __init__(self, plan: PipelinePlan, peer_id: str, runtime: Runtime) -> None:
        self.plan = plan
        self.local = LocalPeer()
        self.saves = Saves()
        self.updated = asyncio.Event()
        """Set by the next `update`, which replaces it."""
        self._peer_id = peer_id
        self._runtime = runtime
        self._memberships: dict[int, Membership] = {}
        self._routers: list[Router] = []
        self._known: dict[str, _Known] = {}
        self._own_sequence = 0

    def membership(self, unit: int) -> Membership:
        if unit not in self._memberships:
            made = self._memberships[unit] = Membership(self._peer_id, self._runtime)
            for known in self._known.values():
                _tell(made, unit, known)
        return self._memberships[unit]

    def new_router(self) -> Router:
        """Return a router that follows the records."""
        router = Router(self.plan.num_stages, self._runtime.random)
        self._routers.append(router)
        self._refresh([router])
        return router

    def new_caller(self, rpc: Rpc, limits: HopLimits | None = None) -> Caller:
        """Return a caller with a router that follows the records."""
        return Caller(rpc, self.new_router(), self.local, limits)

    @property
    def failovers(self) -> int:
        """Number of hosts that failed with this peer's microbatches."""
        return sum(router.failovers for router in self._routers)

    def update(self, records: list[tuple[PeerRecord, int, float]]) -> None:
        """Apply verified records, each with its sequence and expiry time."""
        now = self._runtime.now()
        for record, sequence, expires_at in records:
            before = self._known.get(record.peer)
            if record.peer == self._peer_id or (before is not None and before.sequence >= sequence):
                continue
            known = _Known(record, sequence, expires_at, now, _departure(record, before, now))
            self._known[record.peer] = known
            self.saves.tell(record.peer, record.stages)
            for unit, membership in self._memberships.items():
                _tell(membership, unit, known)
        self._known = {peer: known for peer, known in self._known.items() if known.expires_at > now}
        self.saves.keep_only([*self._known, self._peer_id])
        for membership in self._memberships.values():
            membership.forget_expired()
        self._refresh(self._routers)
        self.updated.set()
        self.updated = asyncio.Event()

    @property
    def last_departure(self) -> float:
        """Time of another host's last announced move, on the runtime's clock; -inf before the first."""
        return max((known.departure_at for known in self._known.values()), default=-math.inf)

    def hosts(self) -> list[Host]:
        """Return the other hosts, for placement.

        A moving or arriving host counts at its destination. Of undecided newcomers only smaller ids count, so that
        simultaneous newcomers choose different stages. A host without a measurement counts with the median speed, and
        none with more than `bounded`.
        """
        found: list[Host] = []
        needs = self.plan.needs
        for record in self._fresh_records():
            is_first = record.state == UNDECIDED_STATE and record.peer < self._peer_id
            if not (is_first or record.state in (DECIDED_STATE, *ACTIVE_STATES)):
                continue
            stages = [stage for stage in record.stages if stage.unit < len(needs)]
            if not stages:
                continue
            speed = self.bounded(_speed_of(record, needs))
            is_bound = record.next_stage is not None or record.state not in ACTIVE_STATES
            goes_to = stages[-1].unit if record.next_stage is None else record.next_stage
            leaves = stages[0].unit if _is_departing(record) else None
            if goes_to < len(needs):
                found.append(Host(record.peer, goes_to, speed, stays=is_bound, leaves=leaves))
        return found

    def is_over(self, round: int, stage: int) -> bool:
        """True if all hosts of another stage report a later round."""
        rounds: dict[int, list[int]] = defaultdict(list)
        for record in self._fresh_records():
            for report in record.stages if record.state in ACTIVE_STATES else ():
                if report.unit < self.plan.num_stages and report.unit != stage:
                    rounds[report.unit].append(report.round)
        return any(min(each) > round for each in rounds.values())

    def _fresh_records(self) -> list[PeerRecord]:
        """Return the other peers' records, without stale ones."""
        fresh_at = max((known.read_at for known in self._known.values()), default=0.0) - SILENT_SECONDS
        return [known.record for known in self._known.values() if known.read_at >= fresh_at]

    @property
    def is_measured(self) -> bool:
        """True if any host reports its speed."""
        return bool(self._speeds())

    def medium_speed(self) -> float:
        """Return the median reported speed, in work per second, of two the smaller; 1 without any report."""
        speeds = self._speeds()
        return statistics.median_low(speeds) if speeds else 1.0

    def bounded(self, speed: float) -> float:
        """Return a host's speed as it counts in placement: reported, at most `MAX_OVER_MEDIAN` times the median."""
        medium = self.medium_speed()
        return min(speed or medium, MAX_OVER_MEDIAN * medium)

    def _speeds(self) -> list[float]:
        speeds = (_speed_of(known.record, self.plan.needs) for known in self._known.values())
        return [speed for speed in speeds if speed > 0]

    def refresh_routes(self) -> None:
        """Apply this peer's own hosts to all routes."""
        self._own_sequence += 1
        self._refresh(self._routers)

    def _refresh(self, routers: list[Router]) -> None:
        sequences: list[dict[str, int]] = [{} for _ in range(self.plan.num_stages)]
        for peer, known in self._known.items():
            for stage in known.record.stages if known.record.state in ACTIVE_STATES else ():
                if stage.unit < len(sequences):
                    sequences[stage.unit][peer] = known.sequence
        for number in self.local.hosts:
            self._own_sequence += 1
            sequences[number][self._peer_id] = self._own_sequence
        for router in routers:
            router.update(sequences)


def _speed_of(record: PeerRecord, needs: Sequence[StageNeed]) -> float:
    """Return a host's reported speed, in work per second; 0 for none."""
    speeds = (stage.tokens_per_second * needs[stage.unit].work for stage in record.stages if stage.unit < len(needs))
    return max(speeds, default=0.0)


def _is_departing(record: PeerRecord) -> bool:
    """True if a host announces a move to another stage."""
    return bool(record.stages) and record.next_stage not in (None, record.stages[0].unit)


def _departure(record: PeerRecord, before: _Known | None, now: float) -> float:
    """Return when a host last announced a move; one host's repetitions do not count, as they could block all others."""
    last = before.departure_at if before is not None else -math.inf
    is_told = before is not None and before.record.next_stage == record.next_stage
    is_new = _is_departing(record) and not is_told and now >= last + LEAST_PAUSE_SECONDS
    return now if is_new else last


def _tell(membership: Membership, unit: int, known: _Known) -> None:
    seen = known.record.of_unit(unit)
    if seen is not None:
        membership.update(seen, known.sequence, known.expires_at)
    else:
        membership.forget(known.record.peer)
