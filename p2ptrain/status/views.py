"""Plain, immutable values for JSON, templates, metrics and terminals."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal, get_type_hints

import msgspec

from p2ptrain.network.records.evaluation import Evaluation
from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.network.records.serving import ServingTotals
from p2ptrain.status.progress import RoundGoal

Severity = Literal["info", "warning", "critical"]
Health = Literal["healthy", "degraded", "stopped", "empty"]
PRIVATE = frozenset({"addresses", "credential", "revocations"})
"""Fields that `plain` leaves out: a public page does not show peers' addresses, and nobody reads signed bytes."""


@dataclass(frozen=True)
class HostedView:
    """A peer's report of one stage that it hosts, or of the shared embeddings.

    Attributes:
        blocks: First block and the one after the last; equal for shared embeddings and unknown blocks.
        agrees: True if its state matches most hosts at this stage, lineage and round; None without other hosts there.
    """

    report: StageReport
    blocks: tuple[int, int]
    agrees: bool | None


@dataclass(frozen=True)
class Percentiles:
    """Latencies in seconds that 50 %, 95 % and 99 % of requests did not exceed; None if nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class Rates:
    """A peer's bytes per second, and generated tokens per second served to others; None if it does not serve."""

    sent_per_second: float = 0.0
    received_per_second: float = 0.0
    served_per_second: float | None = None


@dataclass(frozen=True)
class PeerView:
    """One peer: its record and derived values; the record's shape and signature are verified, not its truth.

    Attributes:
        name: The record's, or the end of the peer's id.
        last_seen: Wall-clock second of the record's publication.
        spans: First block and the one after the last, for each run of hosted blocks; empty if none is hosted or known.
        stages: Numbers of the hosted stages, in a pipeline.
        hosting: Reports of these stages, and of shared embeddings.
        agrees: True if its state matches most peers at its lineage and round; None without other peers there. In a
            pipeline, all hosted states have to match.
        proven: True if a certificate that this monitor has checked names it as a member of one of the last rounds; None
            if it does not train, or if no certificate tells.
        first_token: From request to first token, since the peer's start; ``token``: between tokens.
    """

    record: PeerRecord
    name: str
    last_seen: float
    rates: Rates
    spans: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    hosting: tuple[HostedView, ...]
    agrees: bool | None
    proven: bool | None
    first_token: Percentiles
    token: Percentiles


@dataclass(frozen=True)
class StageView:
    """One stage of the model and its hosts.

    Attributes:
        blocks: First block and the one after the last; equal if unknown.
        hosts: Peers that hold all of it and take part in rounds.
        syncing: Peers that are about to.
        waiting: Passes in the queues of all hosts.
        tokens_per_second: Sum over hosts.
        load: The slowest stage's speed divided by this stage's: its utilization if only stages limit the pipeline; 1
            for the slowest. None for a single stage, or if a speed is unknown.
        is_bottleneck: True if it has no host, or is the slowest of several stages.
        risk: Consequence of losing one more host; empty if there is none.
    """

    number: int
    blocks: tuple[int, int]
    hosts: tuple[str, ...]
    syncing: tuple[str, ...]
    waiting: int
    tokens_per_second: float
    load: float | None
    is_bottleneck: bool
    risk: str


@dataclass(frozen=True)
class Absence:
    """One peer whose work is not in a round.

    Attributes:
        kind: ``late`` (its work waits for the next round), ``dropped`` (its work is lost), ``aborted`` (its attempt
            failed).
    """

    peer: str
    name: str
    kind: Literal["late", "dropped", "aborted"]
    reason: str


@dataclass(frozen=True)
class RoundView:
    """One round's result and course.

    Attributes:
        round: Counted from 0.
        committed: True if most reporting peers or a certificate say so.
        verified: True if this monitor holds a majority-signed certificate.
        at: Wall-clock second at which it became known as committed; before that, of its first report.
        seconds: From the start of matchmaking to the end; ``compute_seconds`` come before. All are medians over peers.
        members: Peers in it, by certificate or median report; ``contributors``: members whose work counts.
        tokens: Tokens that count; None if unknown.
        levels: Levels of the averaging tree; 1 for one group.
        agrees: True if all peers that applied it report one digest; None for fewer than two peers.
        digests: State digests in hexadecimal, each with the number of peers that report it.
        absences: Peers that missed it, at most 20.
        broken_tries: Failed attempts of a peer, median over the ``broken_peers`` with any; ``broken_reason``: the most
            frequent reason.
    """

    round: int
    committed: bool
    verified: bool
    at: float
    seconds: float
    compute_seconds: float
    matchmaking_seconds: float
    transfer_seconds: float
    members: int
    contributors: int
    tokens: int | None
    levels: int
    lineage: str
    agrees: bool | None
    digests: tuple[tuple[str, int], ...]
    absences: tuple[Absence, ...]
    broken_tries: int
    broken_peers: int
    broken_reason: str


@dataclass(frozen=True)
class GroupView:
    """One cell of the last committed round's grid.

    Attributes:
        members: (peer id, ``counted``, ``late``, ``absent`` or ``delegate``), ordered by peer id.
    """

    cell: int
    members: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Alert:
    """A problem for the operator, found by ``rule``; ``subject`` is a peer id, a stage, or empty for the swarm."""

    rule: str
    severity: Severity
    subject: str
    text: str


@dataclass(frozen=True)
class Event:
    """An event with one line for people; ``kind`` is ``joined``, ``left``, ``failover``, ``alert`` or ``cleared``."""

    at: float
    kind: str
    peer: str
    text: str


@dataclass(frozen=True)
class Headline:
    """The swarm's health in words, and its main numbers.

    Attributes:
        reasons: One line each, the most severe first.
        loss: Median over training peers; None before the first batch.
        tokens_per_second: In committed rounds; None before two of them were seen.
        unproven: Peers among ``peers`` that train by their own word alone: `PeerView.proven` is False.
        round_tokens: Peers' tokens for the current round; ``round_needs``: tokens at which it is due, 0 if unknown.
        round_seconds: Median time between committed rounds.
        committed, aborted: Rounds since the monitor's start.
        bytes_per_token: Bytes sent for each token that counts, median over training peers; None before the first.
        evaluation: Over the held-out samples of all sites that report; None unless one does.
    """

    health: Health
    summary: str
    reasons: tuple[str, ...]
    loss: float | None
    tokens_per_second: float | None
    peers: int
    training: int
    unproven: int
    round: int
    round_tokens: int
    round_needs: int
    round_seconds: float | None
    committed: int
    aborted: int
    bytes_per_token: float | None
    evaluation: Evaluation | None = None


@dataclass(frozen=True)
class ServingView:
    """The serving of all peers together, as they report it.

    Attributes:
        peers: Number of peers that serve.
        sessions: Open generations.
        tokens_per_second: Generated in the last minute; ``prompt_tokens_per_second``: received. None if no peer serves,
            or if unknown.
        first_token: In the last minute, from request to first token; ``token``: between tokens.
        totals: Since the monitor's start. Latencies have a count for each of ``bounds``, in seconds, and above.
    """

    peers: int
    sessions: int
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    first_token: Percentiles
    token: Percentiles
    totals: ServingTotals
    bounds: tuple[float, ...]


@dataclass(frozen=True)
class CurvePoint:
    """A mean over held-out samples in a round; ``error`` is its standard error, None if unknown."""

    round: int
    mean: float
    error: float | None


@dataclass(frozen=True)
class SiteCurve:
    """The measurements of a site of a private swarm, oldest first; of all sites together if ``peer`` is empty."""

    peer: str
    name: str
    metric: str
    points: tuple[CurvePoint, ...]


@dataclass(frozen=True)
class SwarmView:
    """The manifest's view of a swarm, and how to join it.

    Attributes:
        digest: The manifest's, in hexadecimal.
        command: The command that joins it.
        signer: The organizer's id.
        manifest: By section: names and values.
        num_blocks: 0 if unknown.
        group_size: Limit of peers that average together.
        max_weight: Most tokens that one peer may contribute to a round.
        spans: By stage: its first block and the one after its last; one span for a model that is not cut.
        goal: When a round is due.
        missing: Why the model's blocks are unknown, and what to do; empty if they are known.
    """

    name: str
    digest: str
    link: str
    command: str
    signer: str
    manifest: dict[str, Any]
    protocol: int
    num_blocks: int
    group_size: int
    max_weight: float
    spans: tuple[tuple[int, int], ...]
    goal: RoundGoal
    missing: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The swarm at one moment.

    Attributes:
        at: Wall-clock second.
        sites: The curves of a private swarm, the pooled one first; empty without measurements.
        rejected: Invalid records and reports since the start.
        directory_answers: True if the last lookup was answered; else the rest is as of the last answered one.
    """

    at: float
    swarm: SwarmView
    headline: Headline
    alerts: tuple[Alert, ...]
    stages: tuple[StageView, ...]
    peers: tuple[PeerView, ...]
    rounds: tuple[RoundView, ...]
    groups: tuple[GroupView, ...]
    serving: ServingView
    sites: tuple[SiteCurve, ...]
    rejected: int
    directory_answers: bool


@cache
def fields_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields that `plain` shows, by name; empty if the type is not a view."""
    if not (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return {}
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in PRIVATE}


def plain(value: Any) -> Any:
    """Return a view without `PRIVATE` fields as a dict, or bytes in hexadecimal; a ``default`` for ``json.dumps``."""
    if isinstance(value, bytes):
        return value.hex()
    return {name: getattr(value, name) for name in fields_of(value.__class__)}
