"""The text form of a swarm's summary."""

from __future__ import annotations

from p2ptrain.node.reports.summary import SwarmSummary
from p2ptrain.status.formats import human_bytes, human_count, human_loss


def to_text(summary: SwarmSummary) -> str:
    states = summary.states
    num_stages = len({stage for stage, _ in states})
    equal = f"equal in each of {num_stages} stages" if num_stages > 1 else "all equal"
    digests = "none" if not states else equal if len(states) == num_stages else "they differ"
    shown = " ".join(f"{stage}:{digest[:8]}" if summary.stages else digest[:8] for stage, digest in states)
    before, after = human_loss(summary.heldout_loss_before), human_loss(summary.heldout_loss_after)
    tokens, rate = human_count(summary.tokens), human_count(summary.tokens_per_second)
    sent, received = human_bytes(summary.bytes_sent), human_bytes(summary.bytes_received)
    return "\n".join(
        [
            f"held-out loss     {before} -> {after} nats",
            f"throughput        {rate} tokens/s, {tokens} tokens in {summary.seconds:.0f} s",
            f"rounds            {summary.rounds_committed} committed, {summary.rounds_aborted} aborted",
            f"traffic           {sent} sent, {received} received",
            f"state digests     {digests} {shown}".rstrip(),
            f"peers             {summary.reporting_peers} of {summary.peers} ended in good order",
        ]
    )
