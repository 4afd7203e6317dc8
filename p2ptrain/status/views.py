"""What the page shows: plain, immutable values that JSON, templates and metrics are made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

Severity = Literal["info", "warning", "critical"]
Health = Literal["healthy", "degraded", "stopped", "empty"]


@dataclass(frozen=True)
class HostedView:
    """What one peer says of one stage that it hosts, or of what it averages beside it.

    Attributes:
        unit: The stage's number; the number of stages for embeddings that the first and the last one share.
        blocks: First block of the stage and the one after its last; equal for what is shared, and where the model's
            blocks are not known.
        round: The round that it is working towards there.
        digest, lineage: In hexadecimal; empty before it has a state.
        agrees: Whether its state is that of most hosts of the stage, lineage and round; None where nobody else has one.
        tokens_per_second: What it can do, forward and backward; 0 before it was measured.
        waiting: Passes in its queue.
        samples: Settled in this round.
    """

    unit: int
    blocks: tuple[int, int]
    round: int
    digest: str
    lineage: str
    agrees: bool | None
    tokens_per_second: float
    waiting: int
    samples: int


@dataclass(frozen=True)
class Percentiles:
    """Half, 95 % and 99 % took no more than this many seconds; None where nothing was measured."""

    p50: float | None
    p95: float | None
    p99: float | None


@dataclass(frozen=True)
class ServedView:
    """What one peer says that it served since it started.

    Attributes:
        sessions: Generations that are open now.
        requests: That were accepted, ``failed_requests`` among them.
        generated_tokens: That went out; ``prompt_tokens``: that came in.
        first_token: From a request's arrival to its first token; ``token``: from one token to the next.
    """

    sessions: int
    requests: int
    failed_requests: int
    generated_tokens: int
    prompt_tokens: int
    first_token: Percentiles
    token: Percentiles


@dataclass(frozen=True)
class PeerView:
    """One peer, as its record says; what it says is checked for shape and signature, not for truth.

    Its addresses are not here: peers need them, but who looks at a page in the web has no business with them.

    Attributes:
        peer: Its id.
        blocks: First block that it hosts and the one after its last; equal when it hosts none, or they are not known.
        spans: The same, without what lies between stages that it hosts; empty when it hosts none.
        stages: Numbers of the stages that it hosts, of a model that is cut into several.
        hosting: What it says of each of them, and of what it averages beside them.
        digest, lineage: In hexadecimal; empty for peers without state. Those of its stage, if it hosts one.
        agrees: Whether its state is that of most peers of its lineage and round; None where nobody else has one. In a
            pipeline, of most hosts of the same stage, for all that it hosts.
        sent_per_second, received_per_second: Bytes.
        hours: Since it started.
        last_seen: Wall-clock second at which it published its record.
        last_reason: Why its last round was not committed, or not with its work; empty when all went well.
        recent_rounds: Rounds among its last five that it reports; ``failed_rounds``: how many of these were not
            committed; ``failed_reason``: the most frequent cause.
        serving: What it served; None where it does not serve.
        served_per_second: Tokens that it generates for others; None where it does not serve.
    """

    peer: str
    name: str
    role: str
    state: str
    device: str
    version: str
    protocol: int
    reachability: str
    blocks: tuple[int, int]
    spans: tuple[tuple[int, int], ...]
    stages: tuple[int, ...]
    hosting: tuple[HostedView, ...]
    round: int
    digest: str
    lineage: str
    agrees: bool | None
    loss: float | None
    diverged: bool
    tokens_per_second: float
    bytes_sent: int
    bytes_received: int
    sent_per_second: float
    received_per_second: float
    trained_tokens: int
    trained_rounds: int
    hours: float
    started_at: float
    last_seen: float
    clock_skew_seconds: float
    direct_refusals: int
    last_reason: str
    note: str
    recent_rounds: int = 0
    failed_rounds: int = 0
    failed_reason: str = ""
    serving: ServedView | None = None
    served_per_second: float | None = None


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
    """One peer whose work is not in a round, and why.

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
    broken_tries: int = 0
    broken_peers: int = 0
    broken_reason: str = ""


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
    """Something that the operator should know.

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
class Headline:
    """Is the swarm healthy, in words, and why not.

    Attributes:
        reasons: One line each, the worst first.
        loss: Median over training peers; None before the first batch.
        tokens_per_second: That committed rounds contain; None before two of them were seen.
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
    round_seconds: float | None
    committed: int
    aborted: int
    bytes_per_token: float | None


@dataclass(frozen=True)
class LatencyView:
    """How long something took in the whole swarm.

    Attributes:
        recent: In the last minute.
        counts: Since the monitor began to watch: how often it took up to each of `ServingView.bounds` and more than the
            one before; the last is of what took longer than all of them.
        seconds: The sum of all these.
    """

    recent: Percentiles
    counts: tuple[int, ...]
    seconds: float


@dataclass(frozen=True)
class ServingView:
    """What the swarm serves, all peers together, as they say.

    Attributes:
        peers: That serve.
        sessions: Generations that are open now.
        tokens_per_second: Generated in the last minute; ``prompt_tokens_per_second``: that came in. None where no peer
            serves, or before it is known.
        requests: That were accepted since the monitor began to watch, ``failed_requests`` among them.
        generated_tokens: That went out since then; ``prompt_tokens``: that came in.
        first_token: From a request's arrival to its first token; ``token``: from one token to the next.
        bounds: Of the counts in both, in seconds.
    """

    peers: int
    sessions: int
    tokens_per_second: float | None
    prompt_tokens_per_second: float | None
    requests: int
    failed_requests: int
    generated_tokens: int
    prompt_tokens: int
    first_token: LatencyView
    token: LatencyView
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
