"""Terminal lines about a swarm, a peer and long jobs, as pure functions.

Text of other peers becomes `Text` without control characters, so that it can inject neither escape sequences nor
markup. Every line fits its width: the least important parts are dropped first.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterable, Sequence

from rich.text import Text

from p2ptrain.cli.screen.table import clipped, human_time, printable, stage_lines
from p2ptrain.network.records.record import PeerRecord, RoundReport, StageReport
from p2ptrain.node.reports.jobs import Job
from p2ptrain.status.formats import human_bytes, human_count, human_evaluation, human_latency, human_seconds
from p2ptrain.status.progress import PeerProgress
from p2ptrain.status.stages import TRAINING_ROLES
from p2ptrain.status.views import Headline, Rates, ServingView, Snapshot, StageView

LABEL_CHARS = 9
MAX_BAR_CHARS = 24
MAX_REASONS = 3
MAX_REASON_LINES = 2
MAX_STAGES = 8
MAX_CELLS = 32
HEALTH_STYLES = {"healthy": "bold green", "degraded": "bold yellow", "stopped": "bold red", "empty": "bold"}
STATES = {
    "starting": "getting ready", "serving": "serving: answers newcomers", "syncing": "taking on the swarm's state",
    "training": "training", "paused": "paused", "resting": "paused: follows the rounds", "draining": "leaving",
    "ended": "has left the swarm",
}  # fmt: skip
Part = str | Text


def line(label: str, parts: Iterable[Part], width: int) -> Text:
    """Return a label and as many of the non-empty parts as fit; the first part is truncated if necessary."""
    built = Text().append(label.ljust(LABEL_CHARS) if label else "", "dim")
    start = built.cell_len
    for part in parts:
        text = part.copy() if isinstance(part, Text) else Text(printable(part))
        if not text.cell_len:
            continue
        if built.cell_len == start:
            text.truncate(max(0, width - start), overflow="ellipsis")
        elif built.cell_len + 2 + text.cell_len > width:
            break
        else:
            built.append("  ")
        built.append_text(text)
    return built


def title_line(parts: Sequence[str], width: int) -> Text:
    """Return a title line, padded with a rule to ``width``; its first part is bold."""
    text = line("", [Text(f"── {printable(parts[0])}", "bold"), *parts[1:]], width)
    rest = width - text.cell_len - 1
    return text.append(f" {'─' * rest}", "dim") if rest > 0 else text


def bar(done: float, total: float, width: int, pulse: float = 0.0) -> Text:
    """Return a progress bar that is legible without colours; with an unknown total, one that moves.

    Args:
        total: In the unit of ``done``; 0 if unknown.
        width: Width of the line that holds the bar; the bar takes about a quarter of it.
        pulse: Seconds, which position the moving part.
    """
    length = min(MAX_BAR_CHARS, max(6, width // 4))
    if total <= 0:
        size = max(2, length // 4)
        at = int(pulse * 4) % (length - size + 1)
        return Text().append("─" * at, "dim").append("━" * size, "cyan").append("─" * (length - size - at), "dim")
    filled = int(length * min(1.0, max(0.0, done / total)))
    return Text().append("━" * filled, "green").append("─" * (length - filled), "dim")


def percent(done: float, total: float) -> str:
    """Return ``62%``, at most ``100%``; empty without a total."""
    return f"{100 * min(1.0, done / total):.0f}%" if total > 0 else ""


def counted(number: int, what: str) -> str:
    """Return ``1 peer`` or ``2 peers``."""
    return f"{number} {what}{'' if number == 1 else 's'}"


# --- a swarm ----------------------------------------------------------------------------------------------------------


def health(headline: Headline) -> Text:
    word = Text().append(headline.health.capitalize(), HEALTH_STYLES[headline.health])
    return word.append(f": {printable(headline.summary)}")


def reasons(headline: Headline, width: int, most: int = MAX_REASONS) -> list[Text]:
    """Return lines about the first ``most`` reasons for the health, worst first, and the number of the rest."""
    lines = []
    for reason in headline.reasons[:most]:
        wrapped = textwrap.wrap(printable(reason), max(10, width - 2), max_lines=MAX_REASON_LINES, placeholder=" …")
        lines += [
            Text(f"{'  ' if at else '! '}{clipped(text, width - 2)}", "yellow") for at, text in enumerate(wrapped)
        ]
    if len(headline.reasons) > most:
        lines.append(Text(f"  and {len(headline.reasons) - most} more", "yellow"))
    return lines


def swarm_lines(snapshot: Snapshot, width: int, *, with_progress: bool = True) -> list[Text]:
    """Return lines about a swarm: health, coverage, the round and its progress, speed, traffic."""
    headline = snapshot.headline
    lines = [line("", [health(headline)], width), *reasons(headline, width)]
    if len(snapshot.stages) > 1:
        lines += stage_lines(snapshot.stages, width, MAX_STAGES)
        lines += [Text(each, "dim") for each in textwrap.wrap(printable(snapshot.swarm.missing), max(10, width))]
    else:
        lines += [model_line(stage, width) for stage in snapshot.stages]
    if headline.training:
        in_round = (headline.round_tokens, headline.round_needs) if with_progress else (0, 0)
        lines.append(line("round", [str(headline.round), *_round_parts(in_round, width)], width))
        lines.append(line("speed", [
            f"{human_count(headline.tokens_per_second)} tokens/s" if headline.tokens_per_second is not None else "",
            f"loss {headline.loss:.3f}" if headline.loss is not None else "",
            f"{human_seconds(headline.round_seconds)} a round" if headline.round_seconds is not None else "",
            f"{headline.committed} committed, {headline.aborted} aborted since this began",
        ], width))  # fmt: skip
    if found := held_out_parts(snapshot):
        lines.append(line("held out", found, width))
    if found := privacy_parts(snapshot):
        lines.append(line("privacy", found, width))
    if served := serving_parts(snapshot.serving):
        lines.append(line("serves", served, width))
    peers = snapshot.peers
    lines.append(traffic_line([peer.record for peer in peers], [peer.rates for peer in peers], "", width))
    return lines


def held_out_parts(snapshot: Snapshot) -> list[str]:
    """Return the measurement over the sites of a private swarm, and their number; nothing in others."""
    found = snapshot.headline.evaluation
    if found is None:
        return []
    told = [peer.record.evaluation for peer in snapshot.peers if peer.record.evaluation is not None]
    sites = sum(each.metric == found.metric for each in told)
    return [f"{printable(human_evaluation(found))} (95 %)", f"over {counted(sites, 'site')}"]


def privacy_parts(snapshot: Snapshot) -> list[str]:
    """Return the largest loss of privacy of a site, and the number of sites that may train on; nothing without any."""
    losses = {peer.record.peer: peer.record.privacy for peer in snapshot.peers if peer.record.privacy is not None}
    if not losses:
        return []
    resting = sum(peer.record.state == "resting" for peer in snapshot.peers if peer.record.peer in losses)
    most = max(losses.values(), key=lambda each: each.epsilon)
    return [f"{most} at most at one site", *([f"{counted(resting, 'site')} at rest"] if resting else [])]


def serving_parts(served: ServingView) -> list[str]:
    if not served.peers:
        return []
    rate, totals = served.tokens_per_second, served.totals
    return [
        counted(served.peers, "peer"),
        counted(served.sessions, "session"),
        *([f"{human_count(rate)} tokens/s"] if rate is not None else []),
        f"{human_count(totals.requests)} requests, {human_count(totals.failed_requests)} failed",
        *(
            f"{what} {human_latency(each.p50)} (95 % {human_latency(each.p95)}, 99 % {human_latency(each.p99)})"
            for what, each in (("first token", served.first_token), ("further ones", served.token))
            if each.p50 is not None and each.p95 is not None and each.p99 is not None
        ),
    ]


def _round_parts(in_round: tuple[int, int], width: int) -> list[Part]:
    tokens, needed = in_round
    if not needed:
        return [f"{human_count(tokens)} tokens so far" if tokens else ""]
    shown = f"{human_count(tokens)} of {human_count(needed)} tokens"
    return [bar(tokens, needed, width), percent(tokens, needed), shown]


def model_line(stage: StageView, width: int) -> Text:
    """Return a line about the replicas of a model without stages."""
    first, end = stage.blocks
    num_hosts = len(stage.hosts)
    cell = "·" if not num_hosts else "▂" if num_hosts == 1 else "█"
    length = min(end - first, MAX_CELLS, max(4, width // 5))
    cells = Text(cell * length, "green" if num_hosts > 1 else "yellow")
    return line("model", [
        cells, counted(num_hosts, "replica"), f"{len(stage.syncing)} on the way" if stage.syncing else "",
        counted(end - first, "block"), "" if stage.risk else "losing any one breaks nothing",
    ], width)  # fmt: skip


def traffic_line(records: Sequence[PeerRecord], rates: Sequence[Rates], reached: str, width: int) -> Text:
    sent, received = sum(each.bytes_sent for each in records), sum(each.bytes_received for each in records)
    up, down = sum(each.sent_per_second for each in rates), sum(each.received_per_second for each in rates)
    return line("traffic", [
        f"{human_bytes(sent)} sent, {human_bytes(received)} received",
        f"now {human_bytes(up)}/s and {human_bytes(down)}/s" if up or down else "",
        reached,
    ], width)  # fmt: skip


# --- a peer -----------------------------------------------------------------------------------------------------------


def peer_lines(progress: PeerProgress, seconds: float, swarm: str, snapshot: Snapshot | None, width: int) -> list[Text]:
    """Return lines about a peer: state, contribution, traffic, and the health of its swarm.

    Args:
        seconds: Time since the peer's start.
        snapshot: The swarm as this peer sees it; None before the first snapshot.
    """
    record = progress.record
    lines = [title_line([f"{clipped(record.name, max(8, width // 3))} in {swarm}", human_time(seconds)], width)]
    lines.append(line("now", _doing(progress, width), width))
    if snapshot is not None and len(snapshot.stages) > 1:
        hosted = [each for each in record.stages if each.unit < len(snapshot.stages)]
        lines += [_hosted_line(record.peer, each, snapshot, width) for each in hosted]
    if record.role in TRAINING_ROLES:
        lines.append(line("learning", [
            f"loss {record.loss:.3f}" if record.loss is not None else "",
            f"{human_count(record.tokens_per_second)} tokens/s" if record.tokens_per_second else "",
            _last_round(record.last_rounds[-1]) if record.last_rounds else "no round yet",
        ], width))  # fmt: skip
        lines.append(line("given", [
            _given(record), f"here for {human_seconds(seconds)}",
            f"{progress.aborted} aborted" if progress.aborted else "",
        ], width))  # fmt: skip
    reached = {"direct": "reached directly", "relay": "reached through a relay", "unknown": "reached by nobody yet"}
    rates = [peer.rates for peer in snapshot.peers if peer.record.peer == record.peer] if snapshot is not None else []
    lines.append(traffic_line([record], rates, reached.get(record.reachability, record.reachability), width))
    if snapshot is not None:
        lines.append(line("swarm", [health(snapshot.headline), _cover(snapshot.stages)], width))
        lines += reasons(snapshot.headline, width, most=1)
    if record.note:
        lines.append(line("note", [record.note], width))
    return [*lines, *(job_line(job, width) for job in progress.jobs)]


def _hosted_line(peer: str, report: StageReport, snapshot: Snapshot, width: int) -> Text:
    stage = snapshot.stages[report.unit]
    first, end = stage.blocks
    others = len(set(stage.hosts) - {peer})
    blocks = f", blocks {first}-{end - 1}" if end - first > 1 else f", block {first}" if end > first else ""
    return line("hosting", [
        f"stage {stage.number}{blocks}",
        f"{human_count(report.tokens_per_second)} tokens/s" if report.tokens_per_second > 0 else "",
        f"{report.waiting} waiting",
        Text("bottleneck", "bold yellow") if stage.is_bottleneck else "",
        f"with {counted(others, 'other')}" if others > 0 else Text("the only host", "yellow"),
    ], width)  # fmt: skip


def _cover(stages: Sequence[StageView]) -> str:
    """Return the number of replicas, or of hosts of the stage with the fewest."""
    if len(stages) == 1:
        return counted(len(stages[0].hosts), "replica")
    weakest = min(stages, key=lambda stage: (len(stage.hosts), stage.number))
    return f"{counted(len(weakest.hosts), 'host')} at least" if weakest.hosts else ""


def _doing(progress: PeerProgress, width: int) -> list[Part]:
    record = progress.record
    if progress.is_leaving:
        return [Text("leaving", "bold yellow"), "the step in progress is finished"]
    state = Text(STATES.get(record.state, record.state), "bold")
    if record.state != "training":
        return [state]
    parts: list[Part] = [state, f"round {record.round}"]
    if progress.phase == "matchmaking":
        return [*parts, "forming a group"]
    if progress.phase != "idle":
        return [*parts, "averaging"]
    waits = progress.seconds_to_round
    soon = [] if waits is None else [f"next in {human_seconds(waits)}" if waits > 0 else "next soon"]
    counts, own = _round_parts(progress.in_round, width), record.round_tokens
    is_shared = own and own < progress.in_round[0]
    return [*parts, *counts[:2], *soon, *counts[2:], f"{human_count(own)} of them its own" if is_shared else ""]


def _given(record: PeerRecord) -> str:
    if not record.trained_rounds:
        return "nothing yet"
    return f"{human_count(record.trained_tokens)} tokens in {counted(record.trained_rounds, 'round')}"


def _last_round(report: RoundReport) -> str:
    if not report.committed:
        return f"last round not committed: {report.reason}"
    late = "" if report.contributed else ", without this peer's work"
    return f"last round {report.contributors} of {counted(report.members, 'peer')}, {report.seconds:.1f} s{late}"


# --- long jobs --------------------------------------------------------------------------------------------------------


def job_line(job: Job, width: int) -> Text:
    amount = human_bytes if job.unit == "bytes" else human_count
    of = ""
    if job.unit and job.done:
        of = f"{amount(job.done)} of {amount(job.total)}" if job.total else amount(job.done)
        of += "" if job.unit == "bytes" else f" {job.unit}"
    left = job.seconds * (job.total - job.done) / job.done if 0 < job.done < job.total and job.seconds > 1 else None
    return line("", [
        bar(job.done, job.total, width, job.seconds), percent(job.done, job.total), clipped(job.name, width // 2),
        of, f"{human_seconds(left)} left" if left is not None else human_seconds(job.seconds),
    ], width)  # fmt: skip
