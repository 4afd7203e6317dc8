"""An observation of a swarm: the input of a snapshot, of the alerts and of the headline."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from p2ptrain.network.records.record import Sighting
from p2ptrain.status.serving import NOTHING, Served
from p2ptrain.status.views import GroupView, Rates, RoundView, SiteCurve, SwarmView


@dataclass(frozen=True)
class Observation:
    """The input of a snapshot.

    Attributes:
        sightings: The newest record of each peer.
        rates: By peer id; 0 for a missing peer.
        rounds: Newest first.
        tokens_per_second: The swarm's, in committed rounds.
        committed, aborted: Rounds since the monitor's start.
        since: Wall-clock second of the monitor's start.
        stall_seconds: Timeout without a committed round.
        last_commit: Wall-clock second at which the last commit was seen; None before the first.
        losses: Median losses of the window before the last and of the last; None without enough of them.
        bootstraps: Ids of the peers that the swarm link names.
        forked_since: Wall-clock second since which peers of one round follow different lineages; None if none do.
        proven: Ids of the members of the last certified rounds; None if no certificates tell.
        jump: Rounds and tokens by which the head lately advanced at once, if that is impossible; else None.
        directory_answers: True if the last lookup was answered.
        sites: The curves of a private swarm.
    """

    swarm: SwarmView
    sightings: Sequence[Sighting]
    rates: Mapping[str, Rates]
    rounds: Sequence[RoundView]
    groups: Sequence[GroupView]
    tokens_per_second: float | None
    committed: int
    aborted: int
    rejected: int
    since: float
    stall_seconds: float
    last_commit: float | None = None
    losses: tuple[float, float] | None = None
    bootstraps: Sequence[str] = ()
    forked_since: float | None = None
    jump: tuple[int, int] | None = None
    proven: Collection[str] | None = None
    directory_answers: bool = True
    served: Served = NOTHING
    sites: tuple[SiteCurve, ...] = ()
