"""The summaries of one peer's run and of a whole swarm."""

from __future__ import annotations

import logging
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from p2ptrain.config import PeerConfig
    from p2ptrain.node.peer import Peer
    from p2ptrain.training.loop import TrainingProgress

logger = logging.getLogger(__name__)

SUMMARY_FILE = "summary.json"


@dataclass(frozen=True)
class Summary:
    """One peer's run; written to ``summary.json`` in its run directory.

    Attributes:
        stage: The hosted stage; None if it hosted none.
        tokens: The peer's tokens in committed rounds; in a pipeline, of its microbatches that all stages accepted.
        stage_tokens: Tokens of its work as a host, in committed rounds of its stage.
        tokens_per_second: ``tokens`` divided by ``seconds``.
        state_digest: Hexadecimal; empty if the peer has no state.
    """

    peer: str
    name: str
    stage: int | None
    heldout_loss_before: float | None
    heldout_loss_after: float | None
    tokens: int
    stage_tokens: int
    tokens_per_second: float
    seconds: float
    bytes_sent: int
    bytes_received: int
    rounds_committed: int
    rounds_aborted: int
    state_digest: str
    round: int
    exit_reason: str


def write_summary(
    peer: Peer, config: PeerConfig, progress: TrainingProgress, seconds: float, reason: str, rounds: int = 0
) -> None:
    """Write a peer's summary to its run directory, and to the config's ``summary`` file.

    Args:
        seconds: Duration of the run.
        reason: Why it ends.
        rounds: Committed rounds that it saw, if it averages nothing itself.
    """
    sync, in_stages = peer.held.synchronizer, peer.manifest.in_stages
    trained = sync.replica.trained_tokens if sync is not None else 0
    tokens = progress.tokens if in_stages else trained
    summary = Summary(
        peer=peer.identity.peer_id,
        name=peer.options.name,
        stage=peer.held.stages[-1].number if peer.held.stages else None,
        heldout_loss_before=progress.held_out_loss_before,
        heldout_loss_after=progress.held_out_loss_after,
        tokens=tokens,
        stage_tokens=trained if in_stages else 0,
        tokens_per_second=tokens / seconds,
        seconds=seconds,
        bytes_sent=peer.rpc.traffic.sent,
        bytes_received=peer.rpc.traffic.received,
        rounds_committed=sync.rounds_committed if sync is not None else rounds,
        rounds_aborted=sync.rounds_aborted if sync is not None else 0,
        state_digest=sync.head.digest.hex() if sync is not None else "",
        round=sync.head.round if sync is not None else 0,
        exit_reason=reason,
    )
    for path in (config.run_dir / SUMMARY_FILE, *([config.summary] if config.summary else [])):
        try:
            path.write_bytes(to_json(summary))
        except OSError as error:
            logger.error("cannot write the summary to %s: %s", path, error.strerror)


def read_summary(path: Path) -> Summary | None:
    """Return a peer's summary; None if it is missing or cannot be decoded."""
    try:
        return msgspec.json.decode(path.read_bytes(), type=Summary)
    except (OSError, msgspec.DecodeError):
        return None


def to_json(summary: Summary | SwarmSummary) -> bytes:
    """Return indented JSON; non-finite numbers become null."""
    return msgspec.json.format(msgspec.json.encode(summary), indent=2) + b"\n"


@dataclass(frozen=True)
class SwarmSummary:
    """The combined runs of a swarm's trainers.

    Attributes:
        heldout_loss_before: Nats per token before training, mean over trainers; None if no trainer measured it.
        tokens: In committed rounds; in a pipeline, the minimum over stages.
        tokens_per_second: ``tokens`` divided by the duration of the longest run, ``seconds``.
        rounds_committed: The maximum over trainers, as is ``rounds_aborted``.
        state_digests: Hexadecimal digest of the final state, by peer name; in a pipeline, of its stage's.
        stages: The hosted stage by peer name; empty if the model is not cut.
        peers: Number of trainers started.
        reporting_peers: Number of trainers that ended in good order; only these count here.
    """

    heldout_loss_before: float | None
    heldout_loss_after: float | None
    tokens_per_second: float
    tokens: int
    bytes_sent: int
    bytes_received: int
    rounds_committed: int
    rounds_aborted: int
    state_digests: dict[str, str]
    seconds: float
    peers: int
    reporting_peers: int
    stages: dict[str, int] = field(default_factory=dict)

    @property
    def states(self) -> list[tuple[int, str]]:
        """The distinct final states as (stage, digest), sorted; one for each stage if its hosts agree."""
        return sorted({(self.stages.get(name, 0), digest) for name, digest in self.state_digests.items()})


def combine(summaries: Mapping[str, Summary], peers: int) -> SwarmSummary:
    """Return the summary of ``peers`` started trainers, from the summaries by name of cleanly ended ones."""
    values = list(summaries.values())
    seconds = max((each.seconds for each in values), default=0.0)
    tokens = _committed_tokens(values)
    return SwarmSummary(
        heldout_loss_before=_mean([each.heldout_loss_before for each in values]),
        heldout_loss_after=_mean([each.heldout_loss_after for each in values]),
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        tokens=tokens,
        bytes_sent=sum(each.bytes_sent for each in values),
        bytes_received=sum(each.bytes_received for each in values),
        rounds_committed=max((each.rounds_committed for each in values), default=0),
        rounds_aborted=max((each.rounds_aborted for each in values), default=0),
        state_digests={name: each.state_digest for name, each in summaries.items() if each.state_digest},
        seconds=seconds,
        peers=peers,
        reporting_peers=len(values),
        stages={name: each.stage for name, each in summaries.items() if each.stage is not None},
    )


def _committed_tokens(values: Sequence[Summary]) -> int:
    """Return the tokens of the stage with the fewest, since a token passes through all stages."""
    by_stage: Counter[int] = Counter()
    for each in values:
        if each.stage is not None:
            by_stage[each.stage] += each.stage_tokens
    return min(by_stage.values()) if by_stage else sum(each.tokens for each in values)


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None
