"""Plain, immutable values for JSON, templates, metrics and terminals."""

from __future__ import annotations

from dataclasses import dataclass, is_dataclass
from functools import cache
from typing import Any, Literal, get_type_hints

import msgspec

from p2ptrain.network.records.record import PeerRecord, StageReport
from p2ptrain.network.records.serving import ServingTotals
from p2ptrain.status.progress import RoundGoal

Severity = Literal["info", "warning", "critical"]
Health = Literal["healthy", "degraded", "stopped", "empty"]
PRIVATE = frozenset({"addresses"})
"""Fields that `plain` leaves out: peers need addresses, visitors of a page in the web have no business with them."""


@dataclass(frozen=True)
class HostedView:
    """A peer's report of one stage that it hosts, or of embeddings that it averages beside it.

    Attributes:
        report: As in its record.
        blocks: First block of the stage and the one after its last; equal for what is shared, and where the model's
            blocks are not known.
        agrees: Whether its state is that of most hosts of the stage, lineage and round; None where nobody else has one.
    """

    report: StageReport
    blocks: tuple[int, int]
    agrees: bool | None


@dataclass(frozen=True)
class Percentiles:
    """Seconds that 50 %, 95 % and 99 % of requests did not exceed; None where nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class Rates:
    """What a peer sends and receives, in bytes per second, and the tokens per second that it generates for others.

    The last one is None where it does not serve.
    """

    sent_per_second: float = 0.0
    received_per_second: float = 0.0
    served_per_second: float | None = None


@dataclass(frozen=True)
class PeerView:
    """One peer: its record, which is checked for shape and signature, not for truth, and what follows from it.

    Attributes:
        name: Of the record, or the end of its id.
        last_seen: Wall-clock second at which it published the record.
        spans: First block that it hosts and the one after its last, for each run of blocks; empty when it hosts none,
            or they are not known.
        stages: Numbers of the stages that it hosts, of a model that is cut into several.
        hosting: What it says of each of them, and of what it averages beside them.
        agrees: Whether its state is that of most peers of its lineage and round; None where nobody else has one. In a
            pipeline, of most hosts of the same stage, for all that it hosts.
        first_token: From a request's arrival to its first token, since the peer started; ``token``: from one token to
            the next.
    """

    record: PeerRecord
    name: str
    last_seen: float
    rates: Rates
    spans: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    hosting: tuple[HostedView, ...]
    agrees: bool | None
    first_token: Percentiles
    token: Percentiles


@dataclass(frozen=True)
class StageView:
    """One stage of the model and who hosts it.

    Attributes:
        blocks: First block and the one after the last; equal where they are not known.
        hosts: Peers that hold all of it and take part in rounds.
        syncing: Peers that are about to.
        waiting: Passes in the queues of all hosts together.
        tokens_per_second: Of all hosts together.
        load: The slowest stage's speed by this one's, which is how much of it is used when nothing but stages limits
            the pipeline: 1 for the slowest; None where there is no other stage, or not all speeds are known.
        is_bottleneck: Whether it is the slowest of several stages.
        risk: What happens when one more host is lost; empty when nothing does.
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
        kind: ``late`` (it waits for the next round), ``dropped`` (it is lost), ``aborted`` (its attempt broke).
    """

    peer: str
    name: str
    kind: Literal["late", "dropped", "aborted"]
    reason: str


@dataclass(frozen=True)
class RoundView:
    """How one round went.

    Attributes:
        round: Counted from 0.
        committed: Whether a peer reports it committed, or a certificate says so.
        verified: Whether this monitor holds a certificate with signatures of a majority.
        at: Wall-clock second at which it was first reported.
        seconds: From the start of matchmaking to its end, median over peers; and what that and the time before it were
            spent on.
        members: Peers in it, by the certificate or the median report; ``contributors``: whose work counts.
        tokens: That count in it; None where it is not known.
        levels: Of the tree in which it was averaged; 1 for one group.
        agrees: Whether all who applied it report one state digest; None when fewer than two do.
        digests: State digests in hexadecimal, each with the number of peers that report it.
        absences: Peers that missed it, at most 20.
        broken_tries: Attempts of a peer that broke, the median over those with any; ``broken_peers``: how many these
            are; ``broken_reason``: what most of them say.
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
    """A problem for the operator.

    Attributes:
        rule: Which rule found it.
        subject: What it is about (a peer id, a stage); empty when it is the swarm.
        text: One line for people.
    """

    rule: str
    severity: Severity
    subject: str
    text: str


@dataclass(frozen=True)
class Event:
    """Something that happened, with one line for people.

    Attributes:
        kind: ``joined``, ``left``, ``failover``, ``alert`` or ``cleared``.
    """

    at: float
    kind: str
    peer: str
    text: str


@dataclass(frozen=True)
class Headline:
    """The swarm's health in words, and its main numbers.

    Attributes:
        reasons: One line each, the worst first.
        loss: Median over training peers; None before the first batch.
        tokens_per_second: That committed rounds contain; None before two of them were seen.
        round_tokens: That peers have for the round in progress; ``round_needs``: with how many it is due, 0 where that
            is not known.
        round_seconds: Median from one committed round to the next.
        committed, aborted: Rounds since this monitor began to watch.
        bytes_per_token: Sent for each token that counts, the median over training peers; None before there is any.
    """

    health: Health
    summary: str
    reasons: tuple[str, ...]
    loss: float | None
    tokens_per_second: float | None
    peers: int
    training: int
    round: int
    round_tokens: int
    round_needs: int
    round_seconds: float | None
    committed: int
    aborted: int
    bytes_per_token: float | None


@dataclass(frozen=True)
class ServingView:
    """The serving of all peers together, as they report it.

    Attributes:
        peers: That serve.
        sessions: Generations that are open now.
        tokens_per_second: Generated in the last minute; ``prompt_tokens_per_second``: that came in. None where no peer
            serves, or before it is known.
        first_token: In the last minute, from a request's arrival to its first token; ``token``: from one token to the
            next.
        totals: Since the monitor began to watch. Latencies have a count for each of ``bounds``, in seconds, and above.
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
class SwarmView:
    """What the swarm agreed on, and how to join it.

    Attributes:
        digest: Of the manifest, in hexadecimal.
        command: That joins it.
        signer: The organizer's id.
        manifest: By section: names and values.
        num_blocks: Of the model; 0 where it is not known.
        group_size: Peers that average together at most.
        spans: Of each stage: its first block and the one after its last; one for a model that is not cut.
        goal: When a round is due.
        missing: Why the model's blocks are not known, and what to do; empty where they are.
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
    spans: tuple[tuple[int, int], ...]
    goal: RoundGoal
    missing: str = ""


@dataclass(frozen=True)
class Snapshot:
    """The swarm at one moment.

    Attributes:
        at: Wall-clock second.
        rejected: Records dropped for what they say, since the start.
        directory_answers: Whether the last look-up was answered; the rest is as of the last one that was.
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
    rejected: int
    directory_answers: bool


@cache
def fields_of(kind: type) -> dict[str, Any]:
    """Return the types of the fields that `plain` shows, by name; empty for other types than views."""
    if not (is_dataclass(kind) or issubclass(kind, msgspec.Struct)):
        return {}
    return {name: hint for name, hint in get_type_hints(kind).items() if name not in PRIVATE}


def plain(value: Any) -> Any:
    """For ``json.dumps(…, default=plain)``: a view as a dict without what is `PRIVATE`, bytes in hexadecimal."""
    if isinstance(value, bytes):
        return value.hex()
    return {name: getattr(value, name) for name in fields_of(value.__class__)}
