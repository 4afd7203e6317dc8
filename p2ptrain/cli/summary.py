"""The summary of a swarm on one machine, combined from what each of its trainers wrote."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from p2ptrain.status.formats import human_bytes, human_count


@dataclass(frozen=True)
class SwarmSummary:
    """How a run of ``p2ptrain up`` went.

    Attributes:
        heldout_loss_before: Nats per token before training, mean over trainers; None if nobody measured it.
        tokens: In committed rounds; in those of all stages, if the model is cut.
        tokens_per_second: Those by the time of the peer that ran longest.
        rounds_committed: By the trainer that committed most; ``rounds_aborted`` by the one that aborted most.
        state_digests: Hexadecimal digest of the state at the end, by peer name; of its stage, if the model is cut.
        stages: Which stage each peer hosted, by its name; empty if the model is not cut.
        peers: How many trainers were started.
        reporting_peers: How many of them ended in good order, so that they are in these numbers.
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

    def to_json(self) -> str:
        """Indented JSON, one key for each field."""
        return json.dumps(asdict(self), indent=2) + "\n"

    def to_text(self) -> str:
        """A few lines for people."""
        states = sorted({(self.stages.get(name, 0), digest) for name, digest in self.state_digests.items()})
        stages = {stage for stage, _ in states}
        agree = len(states) == len(stages)
        equal = f"equal in each of {len(stages)} stages" if len(stages) > 1 else "all equal"
        digests = "none" if not states else equal if agree else "they differ"
        shown = " ".join(f"{stage}:{digest[:8]}" if self.stages else digest[:8] for stage, digest in states)
        return "\n".join(
            [
                f"held-out loss     {_loss(self.heldout_loss_before)} -> {_loss(self.heldout_loss_after)} nats",
                f"throughput        {human_count(self.tokens_per_second)} tokens/s,"
                f" {human_count(self.tokens)} tokens in {self.seconds:.0f} s",
                f"rounds            {self.rounds_committed} committed, {self.rounds_aborted} aborted",
                f"traffic           {human_bytes(self.bytes_sent)} sent, {human_bytes(self.bytes_received)} received",
                f"state digests     {digests} {shown}".rstrip(),
                f"peers             {self.reporting_peers} of {self.peers} ended in good order",
            ]
        )


def combine(summaries: Mapping[str, Mapping[str, Any]], peers: int) -> SwarmSummary:
    """Combine the trainers' summaries.

    Args:
        summaries: What `read_summary` returned, by the trainer's name.
        peers: How many trainers were started.
    """
    values = list(summaries.values())
    seconds = max((float(value["seconds"]) for value in values), default=0.0)
    tokens = _committed_tokens(values)
    return SwarmSummary(
        heldout_loss_before=_mean([value["heldout_loss_before"] for value in values]),
        heldout_loss_after=_mean([value["heldout_loss_after"] for value in values]),
        tokens_per_second=tokens / seconds if seconds > 0 else 0.0,
        tokens=tokens,
        bytes_sent=sum(int(value["bytes_sent"]) for value in values),
        bytes_received=sum(int(value["bytes_received"]) for value in values),
        rounds_committed=max((int(value["rounds_committed"]) for value in values), default=0),
        rounds_aborted=max((int(value["rounds_aborted"]) for value in values), default=0),
        # Who only feeds a pipeline has no state.
        state_digests={
            name: digest
            for name, value in summaries.items()
            if (digest := str(value["state_digest"])) or "stage" not in value
        },
        seconds=seconds,
        peers=peers,
        reporting_peers=len(values),
        stages={name: value["stage"] for name, value in summaries.items() if type(value.get("stage")) is int},
    )


def _committed_tokens(values: Sequence[Mapping[str, Any]]) -> int:
    """The tokens that count: what the least stage has of them, since a token goes through all."""
    by_stage: Counter[int] = Counter()
    for value in values:
        if type(stage := value.get("stage")) is int:
            by_stage[stage] += int(value.get("stage_tokens", 0))
    if by_stage:
        return min(by_stage.values())
    return sum(int(value["tokens"]) for value in values)


def read_summary(path: Path) -> dict[str, Any] | None:
    """A trainer's ``summary.json``, or None if it wrote none or died while writing."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return values if isinstance(values, dict) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _loss(value: float | None) -> str:
    return "?" if value is None else f"{value:.3f}"
