"""The progress of a peer and of the round in progress, at one moment."""

from __future__ import annotations

import asyncio
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from p2ptrain.manifest import Manifest
from p2ptrain.network.records.record import PeerRecord, RoundReport

if TYPE_CHECKING:
    from p2ptrain.node.peer import Peer
    from p2ptrain.node.progress import Job


@dataclass(frozen=True)
class PeerProgress:
    """One peer at one moment.

    Attributes:
        record: What it publishes; with the counters as of now.
        phase: What its averaging is doing: ``idle``, ``matchmaking``, ``scatter``, ``reduce``, ``gather``, ``commit``.
        seconds_to_round: Until it will average next, as the round's leader foresees it, or by how long it took of late;
            None when that cannot be told.
        in_round: Tokens for the round in progress, and how many it takes: see `tokens_in_round`.
        committed, aborted: Rounds.
        jobs: Long jobs that are going on.
        is_leaving: Whether it was asked to end.
    """

    record: PeerRecord
    phase: str
    seconds_to_round: float | None
    in_round: tuple[int, int]
    committed: int
    aborted: int
    jobs: tuple[Job, ...]
    is_leaving: bool


def progress_of(peer: Peer, is_leaving: bool) -> PeerProgress:
    """Return a peer's progress; call it on the peer's event loop."""
    sync = peer.synchronizer
    phase, seconds = "idle", None
    if sync is not None:
        phase = sync.averager.phase
        seconds = sync.averager.matchmaker.pacing.seconds_left
        if seconds is None:
            seconds = seconds_to_round(sync.reports, sync.rested_since, asyncio.get_running_loop().time())
    record, goal = peer.describe(), round_goal(peer.manifest)
    counted = [record, *peer.membership.records()]
    return PeerProgress(
        record=record,
        phase=phase,
        seconds_to_round=seconds,
        in_round=tokens_in_round(counted, record.round, goal),
        committed=sync.rounds_committed if sync is not None else 0,
        aborted=sync.rounds_aborted if sync is not None else 0,
        jobs=peer.jobs.running(),
        is_leaving=is_leaving,
    )


def seconds_to_round(reports: Sequence[RoundReport], rested_since: float | None, now: float) -> float | None:
    """Return the seconds until a peer averages next, going by its last rounds; None before its first round.

    Args:
        reports: Its last rounds.
        rested_since: When the last one ended.
        now: By the same clock.
    """
    computed = [report.compute_seconds for report in reports if report.compute_seconds > 0]
    if rested_since is None or not computed:
        return None
    return max(0.0, rested_since + statistics.median(computed) - now)


@dataclass(frozen=True)
class RoundGoal:
    """The tokens with which a round is due.

    Attributes:
        tokens: 0 where that cannot be told.
        is_shared: Whether it is that of all peers together, however many there are; else it is that of a peer on
            average, and all together need as many times more.
        sample_tokens: Tokens of a sample, of a model that is cut into stages, whose hosts tell samples; else 0.
    """

    tokens: int
    is_shared: bool
    sample_tokens: int = 0


def round_goal(manifest: Manifest) -> RoundGoal:
    """Return a swarm's goal: a global batch with ``every = 1``, else the inner steps of a peer on average."""
    training, is_shared = manifest.training, manifest.training.every == 1
    samples = training.global_batch if is_shared else training.every * training.local_batch
    if manifest.model.family == "custom" or training.fragments > 1:
        samples = 0  # A script's samples may be of any length; and fragments count what they have, each for itself.
    context = manifest.model.context
    return RoundGoal(samples * context, is_shared, context if manifest.in_stages else 0)


def tokens_in_round(records: Iterable[PeerRecord], number: int, goal: RoundGoal) -> tuple[int, int]:
    """Return the tokens that peers have for a round, and how many it takes; 0 where that is not known.

    Args:
        records: Of the peers to be counted.
        number: The round; of a model that is cut into stages it is the one that most hosts of the first are in.
        goal: Of the swarm.
    """
    if goal.sample_tokens:
        return _tokens_in_first_stage(records, goal)
    here = [each for each in records if (each.role, each.state, each.round) == ("trainer", "training", number)]
    needed = goal.tokens * (min(1, len(here)) if goal.is_shared else len(here))
    return sum(each.round_tokens for each in here), needed


def _tokens_in_first_stage(records: Iterable[PeerRecord], goal: RoundGoal) -> tuple[int, int]:
    """All stages process the same microbatches, and the hosts of the first one admit them to the round."""
    first = [each for record in records if record.state == "training" for each in record.stages if each.unit == 0]
    if not first:
        return 0, 0
    number = statistics.median_high([each.round for each in first])
    return goal.sample_tokens * sum(each.samples for each in first if each.round == number), goal.tokens
