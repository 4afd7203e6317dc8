"""The headline: the swarm's health as text, its reasons, and main numbers."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING

from p2ptrain.status.progress import tokens_in_round
from p2ptrain.status.stages import TRAINING_ROLES
from p2ptrain.status.views import Alert, Headline, Health, PeerView, RoundView, StageView

if TYPE_CHECKING:
    from p2ptrain.status.snapshot import Observation

SEVERITIES = ("critical", "warning", "info")
MAX_NAMED_STAGES = 4


def headline(
    seen: Observation, peers: Sequence[PeerView], stages: Sequence[StageView], alerts: Sequence[Alert]
) -> Headline:
    """Return the page's first lines; ``alerts`` are the current ones."""
    trainers = [peer for peer in peers if peer.record.role in TRAINING_ROLES]
    training = [peer.record for peer in trainers if peer.record.state == "training"]
    # Medians, since a single peer cannot forge them.
    losses = [record.loss for record in training if record.loss is not None]
    costs = [record.bytes_sent / record.trained_tokens for record in training if record.trained_tokens]
    hosts = [peer for peer in trainers if peer.hosting]
    health = _health(len(trainers), len(training), alerts)
    # A peer that only sends microbatches is in no round.
    round_ = statistics.median_high([peer.record.round for peer in hosts or trainers]) if trainers else 0
    tokens, needs = tokens_in_round((peer.record for peer in peers), round_, seen.swarm.goal)
    return Headline(
        health=health,
        summary=_summary(health, len(training), len(trainers), stages, seen.rounds, alerts),
        reasons=tuple(alert.text for alert in sorted(alerts, key=lambda each: SEVERITIES.index(each.severity))),
        loss=statistics.median(losses) if losses else None,
        tokens_per_second=seen.tokens_per_second,
        peers=len(peers),
        training=len(training),
        round=round_,
        round_tokens=tokens,
        round_needs=needs,
        round_seconds=seconds_between(seen.rounds),
        committed=seen.committed,
        aborted=seen.aborted,
        bytes_per_token=statistics.median(costs) if costs else None,
    )


def seconds_between(rounds: Sequence[RoundView]) -> float | None:
    """Return the median time between committed rounds; None before two rounds."""
    times = sorted(view.at for view in rounds if view.committed)
    gaps = [later - earlier for earlier, later in pairwise(times)]
    return statistics.median(gaps) if gaps else None


def _health(trainers: int, training: int, alerts: Sequence[Alert]) -> Health:
    severities = {alert.severity for alert in alerts}
    if not trainers:
        return "empty"
    if "critical" in severities or not training:
        return "stopped" if not training or any(alert.rule in ("no-round", "stage") for alert in alerts) else "degraded"
    return "degraded" if "warning" in severities else "healthy"


def _summary(
    health: Health,
    training: int,
    trainers: int,
    stages: Sequence[StageView],
    rounds: Sequence[RoundView],
    alerts: Sequence[Alert],
) -> str:
    if health == "empty":
        return "Nobody trains in this swarm yet"
    count = f"{training} {'peer trains' if training == 1 else 'peers train'}"
    if len(stages) > 1:
        count += f" {len(stages)} stages"
    bare = [str(stage.number) for stage in stages if not stage.hosts] if len(stages) > 1 and training else []
    if bare:
        return f"Training waits: {_listed(bare)} no host"
    if health == "stopped":
        return "Training stands still" if training else "No peer trains at the moment"
    failures = [alert.text for alert in alerts if alert.rule == "rounds" and not alert.subject]
    if failures:
        return f"{count}, and {failures[0].rpartition(';')[0]}"
    if not any(view.committed for view in rounds):
        return f"{count}; no round is committed yet"
    others = trainers - training
    return f"{count}{f', {others} more on the way' if others else ''}"


def _listed(numbers: Sequence[str]) -> str:
    """Return ``stage 2 has`` or ``stages 0, 2 and 3 have``; only their number if there are many."""
    if len(numbers) == 1:
        return f"stage {numbers[0]} has"
    if len(numbers) > MAX_NAMED_STAGES:
        return f"{len(numbers)} stages have"
    return f"stages {', '.join(numbers[:-1])} and {numbers[-1]} have"
