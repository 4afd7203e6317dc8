"""A swarm's health: pure rules that find alerts, and the headline with its reasons and main numbers."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, pairwise

from p2ptrain.network.records.evaluation import pooled
from p2ptrain.status.observation import Observation
from p2ptrain.status.progress import tokens_in_round
from p2ptrain.status.stages import ARRIVING, TRAINING_ROLES
from p2ptrain.status.views import Alert, Headline, Health, PeerView, RoundView, StageView

SEVERITIES = ("critical", "warning", "info")
MAX_NAMED_STAGES = 4
DOUBTING_PART = 3
"""A peer is reported if more than one in so many of the other trainers doubt its work, or tell of its ban."""
MAX_SKEW_SECONDS = 5.0
RISING_RATIO = 1.05
"""Ratio of the last window's median loss to the median before, above which the loss rises."""
FORK_SECONDS = 60.0
"""Grace before an alert: peers of one round on two lineages may still merge."""
MAX_PER_RULE = 20
RECENT_ROUNDS = 5
"""Last rounds of each peer that the rule considers; < the rounds in a record."""
MIN_FAILED_ROUNDS = 2
"""Failed rounds for an alert; a killed peer breaks only the current round."""
MAX_REASON_CHARACTERS = 100
FETCH_HINT = "restart it if it does not fetch theirs by itself"


@dataclass(frozen=True)
class Scene:
    """The input of each rule and of the headline, at second ``now``."""

    seen: Observation
    peers: Sequence[PeerView]
    stages: Sequence[StageView]
    now: float

    @property
    def trainers(self) -> list[PeerView]:
        return [peer for peer in self.peers if peer.record.role in TRAINING_ROLES]


def find_alerts(scene: Scene) -> list[Alert]:
    """Return all alerts, the most severe first; at most `MAX_PER_RULE` a rule, so that none hides others."""
    found = [alert for rule in RULES for alert in islice(rule(scene), MAX_PER_RULE)]
    return sorted(found, key=lambda alert: SEVERITIES.index(alert.severity))


def _directory(scene: Scene) -> Iterator[Alert]:
    if not scene.seen.directory_answers:
        text = "the swarm's directory does not answer, so this is old: see whether its bootstrap peers run"
        yield Alert("directory", "critical", "", text)


def _stages(scene: Scene) -> Iterator[Alert]:
    if all(peer.record.state in ARRIVING for peer in scene.trainers):
        return  # There is no trainer, or all are starting.
    what = "hosts it" if len(scene.stages) > 1 else "trains"
    for stage in scene.stages:
        if not stage.hosts and stage.syncing:
            if len(scene.stages) > 1:
                yield Alert("stage", "warning", str(stage.number), f"{stage.risk} for a peer that is on the way")
        elif not stage.hosts:
            yield Alert("stage", "critical", str(stage.number), f"{stage.risk}; start a peer that {what}")
        elif len(stage.hosts) == 1:
            yield Alert("replica", "warning", str(stage.number), f"{stage.risk}; let another peer join")


def _digests(scene: Scene) -> Iterator[Alert]:
    for peer in scene.peers:
        if peer.agrees is False and not peer.hosting:
            text = f"{peer.name} holds another state than the others of round {peer.record.round}: {FETCH_HINT}"
            yield Alert("digest", "critical", peer.record.peer, text)
        for hosted in [each.report for each in peer.hosting if each.agrees is False][:1]:  # One alert for each peer.
            what = f"stage {hosted.unit}" if hosted.unit < len(scene.stages) else "the shared embeddings"
            text = f"{peer.name} holds another state of {what} than the other hosts of round {hosted.round}"
            yield Alert("digest", "critical", peer.record.peer, f"{text}: {FETCH_HINT}")
    whose = "hosts of one stage" if len(scene.stages) > 1 else "peers"
    for view in scene.seen.rounds[:1]:
        if view.agrees is False:
            text = f"round {view.round + 1} left {whose} with {len(view.digests)} different states"
            yield Alert("digest", "critical", "", f"{text}: compare their digests")  # However many rounds it lasts.


def _fork(scene: Scene) -> Iterator[Alert]:
    since = scene.seen.forked_since
    if since is not None and scene.now - since >= FORK_SECONDS:
        text = (
            f"for {_duration(scene.now - since)} the swarm has been split, peers of one round follow two histories:"
            " see whether they reach each other, then restart the smaller part"
        )
        yield Alert("fork", "critical", "", text)


def _jump(scene: Scene) -> Iterator[Alert]:
    if scene.seen.jump is not None:
        rounds, tokens = scene.seen.jump
        text = (
            f"the swarm's head jumped by {rounds} rounds and {tokens} tokens, more than its peers can have done:"
            " unless you know why, stop them, and start them again from checkpoints of before"
        )
        yield Alert("jump", "critical", "", text)


def _loss(scene: Scene) -> Iterator[Alert]:
    for peer in scene.trainers:
        if peer.record.diverged:
            text = f"{peer.name}'s loss is not a finite number any more: restart it, and see whether others follow"
            yield Alert("loss", "critical", peer.record.peer, text)
    if scene.seen.losses is not None:
        before, now = scene.seen.losses
        if now > RISING_RATIO * before > 0:
            text = f"the loss rises, {now:.3f} of late, {before:.3f} before: the learning rate may be too high"
            yield Alert("rising", "warning", "", text)


def _worth(scene: Scene) -> Iterator[Alert]:
    doubts = Counter(doubted for peer in scene.trainers for doubted in set(peer.record.doubts))
    for peer in scene.trainers:
        by = doubts[peer.record.peer] - (peer.record.peer in peer.record.doubts)
        if by and by * DOUBTING_PART > len(scene.trainers) - 1:
            text = (
                f"{peer.name}'s updates show no work on the samples that it claims, by the audits of {by}"
                f" peer{'s' if by > 1 else ''}: ask who runs it, or take it out with p2ptrain ban"
            )
            yield Alert("worth", "warning", peer.record.peer, text)


def _banned(scene: Scene) -> Iterator[Alert]:
    names = {peer.record.peer: peer.name for peer in scene.peers}
    for peer, by in Counter(each for told in scene.trainers for each in set(told.record.banned)).most_common():
        if by * DOUBTING_PART > len(scene.trainers):
            text = (
                f"the members have banned {names.get(peer, peer[-8:])}: they have evidence that it signed two results"
                " of one round, or a false mean; ask who runs it, and give no pass to its other keys"
            )
            yield Alert("ban", "warning", peer, text)


def _stall(scene: Scene) -> Iterator[Alert]:
    if not any(peer.record.state == "training" for peer in scene.trainers):
        return
    waited = scene.now - max(scene.seen.since, scene.seen.last_commit or 0.0)
    if waited > scene.seen.stall_seconds:
        text = f"no round was committed for {_duration(waited)}: the peers' last reasons say why"
        yield Alert("no-round", "critical", "", text)


@dataclass(frozen=True)
class _Trouble:
    """The last rounds of one peer: number reported, number not committed, and the most frequent reason."""

    peer: PeerView
    reported: int
    failed: int
    reason: str

    @classmethod
    def of(cls, peer: PeerView) -> _Trouble:
        recent = peer.record.last_rounds[-RECENT_ROUNDS:]
        reasons = Counter(report.reason for report in recent if not report.committed)
        return cls(peer, len(recent), reasons.total(), _most_frequent(reasons))


def _most_frequent(reasons: Counter[str]) -> str:
    return min(reasons, key=lambda reason: (-reasons[reason], reason), default="")


def _failure_words(troubles: Sequence[_Trouble]) -> str:
    """Describe the failed rounds of the median peer in ``troubles``, with the most frequent reason."""
    middle = sorted(troubles, key=lambda each: each.failed / each.reported)[(len(troubles) - 1) // 2]
    reason = _most_frequent(Counter(each.reason for each in troubles))[:MAX_REASON_CHARACTERS]
    words = f"{middle.failed} of the last {middle.reported} were not committed"
    return f"{words} ({reason})" if reason else words


def _rounds(scene: Scene) -> Iterator[Alert]:
    reporting = [peer for peer in scene.trainers if peer.record.state == "training" and peer.record.last_rounds]
    troubles = map(_Trouble.of, reporting)
    found = [each for each in troubles if each.failed >= MIN_FAILED_ROUNDS and 2 * each.failed >= each.reported]
    hint = "see the last reasons, and whether peers reach each other"
    if 2 * len(found) > len(reporting):
        yield Alert("rounds", "warning", "", f"rounds fail: {_failure_words(found)}; {hint}")
        return
    for each in found:
        text = f"{each.peer.name}'s rounds fail: {_failure_words([each])}; {hint}"
        yield Alert("rounds", "warning", each.peer.record.peer, text)


def _bootstraps(scene: Scene) -> Iterator[Alert]:
    present = {peer.record.peer for peer in scene.peers}
    missing = [peer for peer in scene.seen.bootstraps if peer not in present]
    for peer in missing:
        others = len(scene.seen.bootstraps) - len(missing)
        rest = f"newcomers have {others} other{'s' if others > 1 else ''}" if others else "newcomers cannot join"
        text = f"bootstrap peer {peer[-8:]} of the swarm link is down, {rest}: start it again"
        yield Alert("bootstrap", "warning", peer, text)


def _clocks(scene: Scene) -> Iterator[Alert]:
    for peer in scene.peers:
        skew = peer.record.clock_skew_seconds
        if abs(skew) > MAX_SKEW_SECONDS:
            way = "ahead of" if skew > 0 else "behind"
            text = f"{peer.name}'s clock is {abs(skew):.0f} s {way} the swarm's: set it by NTP"
            yield Alert("clock", "warning", peer.record.peer, text)


def _versions(scene: Scene) -> Iterator[Alert]:
    protocols = Counter(peer.record.protocol for peer in scene.peers)
    if len(protocols) > 1:
        counts = ", ".join(f"{count} of protocol {protocol}" for protocol, count in sorted(protocols.items()))
        yield Alert("protocol", "warning", "", f"peers speak different versions, {counts}: update the older ones")


RULES: tuple[Callable[[Scene], Iterator[Alert]], ...] = (
    _directory, _stages, _fork, _jump, _stall, _rounds, _digests, _loss, _worth, _banned, _bootstraps, _clocks,
    _versions,
)  # fmt: skip


def _duration(seconds: float) -> str:
    if seconds < 120:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


# --- the headline -----------------------------------------------------------------------------------------------------


def headline(scene: Scene, alerts: Sequence[Alert]) -> Headline:
    """Return the page's first lines; ``alerts`` are the current ones, as `find_alerts` returns them."""
    seen, trainers = scene.seen, scene.trainers
    training = [peer.record for peer in trainers if peer.record.state == "training"]
    # Medians, since a single peer cannot forge them.
    losses = [record.loss for record in training if record.loss is not None]
    costs = [record.bytes_sent / record.trained_tokens for record in training if record.trained_tokens]
    hosts = [peer for peer in trainers if peer.hosting]
    health = _health(len(trainers), len(training), alerts)
    # A peer that only sends microbatches is in no round.
    round_ = statistics.median_high([peer.record.round for peer in hosts or trainers]) if trainers else 0
    tokens, needs = tokens_in_round((peer.record for peer in scene.peers), round_, seen.swarm.goal)
    return Headline(
        health=health,
        summary=_summary(scene, health, len(training), alerts),
        reasons=tuple(alert.text for alert in alerts),
        loss=statistics.median(losses) if losses else None,
        tokens_per_second=seen.tokens_per_second,
        peers=len(scene.peers),
        training=len(training),
        unproven=sum(peer.proven is False for peer in scene.peers),
        round=round_,
        round_tokens=tokens,
        round_needs=needs,
        round_seconds=seconds_between(seen.rounds),
        committed=seen.committed,
        aborted=seen.aborted,
        bytes_per_token=statistics.median(costs) if costs else None,
        evaluation=pooled([each.evaluation for peer in trainers if (each := peer.record).evaluation is not None]),
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


def _summary(scene: Scene, health: Health, training: int, alerts: Sequence[Alert]) -> str:
    stages = scene.stages
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
    if not any(view.committed for view in scene.seen.rounds):
        return f"{count}; no round is committed yet"
    others = sum(peer.record.state in ARRIVING for peer in scene.trainers)
    return f"{count}{f', {others} more on the way' if others else ''}"


def _listed(numbers: Sequence[str]) -> str:
    """Return ``stage 2 has`` or ``stages 0, 2 and 3 have``; only their number if there are many."""
    if len(numbers) == 1:
        return f"stage {numbers[0]} has"
    if len(numbers) > MAX_NAMED_STAGES:
        return f"{len(numbers)} stages have"
    return f"stages {', '.join(numbers[:-1])} and {numbers[-1]} have"
