"""The progress of a peer and of its current round."""

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
    from p2ptrain.node.reports.jobs import Job


@dataclass(frozen=True)
class PeerProgress:
    """One peer at one moment.

    Attributes:
        phase: Phase of its averaging: ``idle``, ``matchmaking``, ``scatter``, ``reduce``, ``gather``, ``commit``.
        seconds_to_round: Until it averages next, by the round leader's forecast or by its last rounds; None if unknown.
        in_round: Tokens in the current round, and tokens needed; see `tokens_in_round`.
        is_leaving: True if it was asked to stop.
    """

    record: PeerRecord
    phase: str
    seconds_to_round: float | None
    in_round: tuple[int, int]
    aborted: int
    jobs: tuple[Job, ...]
    is_leaving: bool


def progress_of(peer: Peer, is_leaving: bool) -> PeerProgress:
    """Return a peer's progress; call it on the peer's event loop."""
    sync = peer.held.synchronizer
    phase, seconds = "idle", None
    if sync is not None:
        phase = sync.averager.phase
        seconds = sync.averager.matchmaker.pacing.seconds_left
        if seconds is None:
            seconds = seconds_to_round(sync.reports, sync.rested_since, asyncio.get_running_loop().time())
    record, goal = peer.record.describe(), round_goal(peer.manifest)
    counted = [record, *peer.membership.records()]
    return PeerProgress(
        record=record,
        phase=phase,
        seconds_to_round=seconds,
        in_round=tokens_in_round(counted, record.round, goal),
        aborted=sync.rounds_aborted if sync is not None else 0,
        jobs=peer.jobs.running(),
        is_leaving=is_leaving,
    )


def seconds_to_round(reports: Sequence[RoundReport], rested_since: float | None, now: float) -> float | None:
    """Return the seconds until a peer averages next, by its median compute time; None before its first round.

    ``rested_since`` is the end of its last round, on the clock of ``now``.
    """
    computed = [report.compute_seconds for report in reports if report.compute_seconds > 0]
    if rested_since is None or not computed:
        return None
    return max(0.0, rested_since + statistics.median(computed) - now)


@dataclass(frozen=True)
class RoundGoal:
    """The tokens at which a round is due.

    Attributes:
        tokens: 0 if unknown.
        is_shared: True if ``tokens`` is the total of all peers; False if it is the average of a peer.
        sample_tokens: Tokens of a sample in a pipeline, whose hosts report samples; else 0.
    """

    tokens: int
    is_shared: bool
    sample_tokens: int = 0


def round_goal(manifest: Manifest) -> RoundGoal:
    """Return a swarm's goal: the global batch with ``every = 1``, else the average inner steps of a peer."""
    training, is_shared = manifest.training, manifest.training.every == 1
    samples = training.global_batch if is_shared else training.every * training.local_batch
    if manifest.model.family == "custom" or training.fragments > 1 or manifest.private is not None:
        samples = 0  # A script's samples have any length; fragments count their own tokens, private sites weights.
    context = manifest.model.context
    return RoundGoal(samples * context, is_shared, context if manifest.in_stages else 0)


def tokens_in_round(records: Iterable[PeerRecord], number: int, goal: RoundGoal) -> tuple[int, int]:
    """Return the peers' tokens for round ``number``, and the tokens needed; 0 if unknown.

    In a pipeline, the median round of the first stage's hosts takes the place of ``number``.
    """
    if goal.sample_tokens:
        return _tokens_in_first_stage(records, goal)
    here = [each for each in records if (each.role, each.state, each.round) == ("trainer", "training", number)]
    needed = goal.tokens * (min(1, len(here)) if goal.is_shared else len(here))
    return sum(each.round_tokens for each in here), needed


def _tokens_in_first_stage(records: Iterable[PeerRecord], goal: RoundGoal) -> tuple[int, int]:
    """Count the first stage's samples: its hosts admit the microbatches that all stages process."""
    first = [each for record in records if record.state == "training" for each in record.stages if each.unit == 0]
    if not first:
        return 0, 0
    number = statistics.median_high([each.round for each in first])
    return goal.sample_tokens * sum(each.samples for each in first if each.round == number), goal.tokens
