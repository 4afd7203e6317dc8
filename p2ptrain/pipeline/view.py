"""A peer's view of a pipeline, from directory records: the hosts of each stage, and their progress."""

from __future__ import annotations

import asyncio
import math
import statistics
from collections import defaultdict

from p2ptrain.averaging.grouping.membership import ACTIVE_STATES, Membership
from p2ptrain.network.records.record import PeerRecord
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.pipeline.checkpoints.saving import Saves
from p2ptrain.pipeline.placement import Host
from p2ptrain.pipeline.plan import PipelinePlan
from p2ptrain.pipeline.routing.hop import Caller, Here, HopLimits
from p2ptrain.pipeline.routing.router import HostState, Router
from p2ptrain.runtime import Runtime

UNDECIDED_STATE, DECIDED_STATE = "starting", "syncing"
"""Record states of a future host, before and after it has chosen its stage."""
SILENT_SECONDS = 15.0
"""Staleness bound, relative to the newest record of any peer: three missed records. Placement and
`PipelineView.is_over` ignore stale hosts; routing and averaging detect failures themselves."""
LEAST_PAUSE_SECONDS = 30.0
"""Minimum interval between two announced moves of a host."""


class PipelineView:
    """Routes and memberships, kept current from records; `p2ptrain.node.presence` feeds it."""

    def __init__(self, plan: PipelinePlan, peer_id: str, runtime: Runtime) -> None:
        self.plan = plan
        self.here = Here()
        self.saves = Saves()
        self._updated = asyncio.Event()
        self._peer_id = peer_id
        self._runtime = runtime
        self._memberships: dict[int, Membership] = {}
        self._routers: list[Router] = []
        self._records: dict[str, tuple[PeerRecord, int, float]] = {}
        self._heard: dict[str, float] = {}
        self._departures: dict[str, float] = {}
        self._own_sequence = 0

    def membership(self, unit: int) -> Membership:
        if unit not in self._memberships:
            made = self._memberships[unit] = Membership(self._peer_id, self._runtime)
            for record, sequence, expires_at in self._records.values():
                _tell(made, unit, record, sequence, expires_at)
        return self._memberships[unit]

    def new_router(self) -> Router:
        """Return a router that follows the records."""
        router = Router(self.plan.num_stages, self._runtime.random)
        self._routers.append(router)
        self._refresh([router])
        return router

    def new_caller(self, rpc: Rpc, limits: HopLimits | None = None) -> Caller:
        """Return a caller with a router that follows the records."""
        return Caller(rpc, self.new_router(), self.here, limits)

    @property
    def failovers(self) -> int:
        """Number of hosts that failed with this peer's microbatches."""
        return sum(router.failovers for router in self._routers)

    def update(self, records: list[tuple[PeerRecord, int, float]]) -> None:
        """Apply verified records, each with its sequence and expiry time."""
        for record, sequence, expires_at in records:
            known = self._records.get(record.peer)
            if record.peer == self._peer_id or (known is not None and known[1] >= sequence):
                continue
            if _is_departing(record) and not (known and known[0].next_stage == record.next_stage):
                self._note_departure(record.peer)
            self._records[record.peer] = (record, sequence, expires_at)
            self.saves.tell(record.peer, record.stages)
            self._heard[record.peer] = self._runtime.now()
            for unit, membership in self._memberships.items():
                _tell(membership, unit, record, sequence, expires_at)
        now = self._runtime.now()
        self._records = {peer: known for peer, known in self._records.items() if known[2] > now}
        self.saves.keep_only([*self._records, self._peer_id])
        self._heard = {peer: heard for peer, heard in self._heard.items() if peer in self._records}
        self._departures = {peer: seen for peer, seen in self._departures.items() if peer in self._records}
        for membership in self._memberships.values():
            membership.forget_expired()
        self._refresh(self._routers)
        self._updated.set()
        self._updated = asyncio.Event()

    async def next_update(self) -> None:
        """Wait for the next `update`."""
        await self._updated.wait()

    def _note_departure(self, peer: str) -> None:
        """Record an announced move; ignore one host's repetitions, which could block all other moves."""
        now = self._runtime.now()
        if now >= self._departures.get(peer, -math.inf) + LEAST_PAUSE_SECONDS:
            self._departures[peer] = now

    @property
    def last_departure(self) -> float:
        """Time of another host's last announced move, on the runtime's clock; -inf before the first."""
        return max(self._departures.values(), default=-math.inf)

    def hosts(self) -> list[Host]:
        """Return the other hosts, for placement.

        A moving or arriving host counts at its destination. Of undecided newcomers only smaller ids count, so that
        simultaneous newcomers choose different stages. A host without a measurement counts with the median speed.
        """
        found: list[Host] = []
        medium, needs = self.medium_speed(), self.plan.needs
        for record in self._heard_of():
            is_first = record.state == UNDECIDED_STATE and record.peer < self._peer_id
            if not (is_first or record.state in (DECIDED_STATE, *ACTIVE_STATES)):
                continue
            stages = [stage for stage in record.stages if stage.unit < len(needs)]
            if not stages:
                continue
            speed = max(stage.tokens_per_second * needs[stage.unit].work for stage in stages)
            is_bound = record.next_stage is not None or record.state not in ACTIVE_STATES
            goes_to = stages[-1].unit if record.next_stage is None else record.next_stage
            leaves = stages[0].unit if _is_departing(record) else None
            if goes_to < len(needs):
                found.append(Host(record.peer, goes_to, speed or medium, stays=is_bound, leaves=leaves))
        return found

    def is_over(self, round: int, stage: int) -> bool:
        """True if all hosts of another stage report a later round."""
        rounds: dict[int, list[int]] = defaultdict(list)
        for record in self._heard_of():
            for report in record.stages if record.state in ACTIVE_STATES else ():
                if report.unit < self.plan.num_stages and report.unit != stage:
                    rounds[report.unit].append(report.round)
        return any(min(each) > round for each in rounds.values())

    def _heard_of(self) -> list[PeerRecord]:
        """Return the other peers' records, without stale ones."""
        heard_from = max(self._heard.values(), default=0.0) - SILENT_SECONDS
        return [record for record, _, _ in self._records.values() if self._heard[record.peer] >= heard_from]

    @property
    def is_measured(self) -> bool:
        """True if any host reports its speed."""
        return bool(self._speeds())

    def medium_speed(self) -> float:
        """Return the median reported speed, in work per second; 1 without any report."""
        speeds = self._speeds()
        return statistics.median(speeds) if speeds else 1.0

    def _speeds(self) -> list[float]:
        needs = self.plan.needs
        return [
            stage.tokens_per_second * needs[stage.unit].work
            for record, _, _ in self._records.values()
            for stage in record.stages
            if stage.unit < len(needs) and stage.tokens_per_second > 0
        ]

    def refresh_routes(self) -> None:
        """Apply this peer's own hosts to all routes."""
        self._own_sequence += 1
        self._refresh(self._routers)

    def _refresh(self, routers: list[Router]) -> None:
        states: list[dict[str, HostState]] = [{} for _ in range(self.plan.num_stages)]
        for record, sequence, _ in self._records.values():
            for stage in record.stages:
                if stage.unit < len(states) and record.state in ACTIVE_STATES:
                    states[stage.unit][record.peer] = HostState(stage.tokens_per_second, sequence)
        for number in self.here.hosts:
            self._own_sequence += 1
            states[number][self._peer_id] = HostState(0.0, self._own_sequence)
        for router in routers:
            router.update(states)


def _is_departing(record: PeerRecord) -> bool:
    """True if a host announces a move to another stage."""
    return bool(record.stages) and record.next_stage not in (None, record.stages[0].unit)


def _tell(membership: Membership, unit: int, record: PeerRecord, sequence: int, expires_at: float) -> None:
    seen = record.of_unit(unit)
    if seen is not None:
        membership.update(seen, sequence, expires_at)
    else:
        membership.forget(record.peer)
