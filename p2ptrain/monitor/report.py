"""The self-contained HTML page of a finished run: loss, rounds, contributions; from the files of its peers."""

from __future__ import annotations

import contextlib
import json
import math
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from p2ptrain.errors import ConfigError
from p2ptrain.manifest import SIGNED_FILE, Manifest, former_manifest
from p2ptrain.monitor.charts import Series, line_chart
from p2ptrain.monitor.pages import TEMPLATES
from p2ptrain.network.records.evaluation import Evaluation, pooled
from p2ptrain.node.reports.summary import SUMMARY_FILE, Summary, combine, read_summary
from p2ptrain.node.site.site_reports import SITE, SITES_FILE, SiteReport
from p2ptrain.signing import Signer
from p2ptrain.status import formats
from p2ptrain.status.sites import MAX_SITES

METRICS = "metrics.jsonl"
MAX_LINE_CHARS = 1 << 16
MAX_PEERS = 256
MAX_TROUBLES = 50
ENDINGS = {
    "": "did not end in good order", "signal": "stopped", "rounds": "all rounds done", "minutes": "time was up",
}  # fmt: skip


@dataclass(frozen=True)
class Line:
    """One line of metrics: wall-clock seconds, kind (``step``, ``round``, ``held_out``), and the other values."""

    time: float
    kind: str
    values: dict[str, Any]

    def number(self, name: str) -> float | None:
        value = self.values.get(name)
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            return None
        return float(value) if math.isfinite(value) else None


@dataclass(frozen=True)
class PeerRun:
    """One peer's part of a run; ``summary`` is None unless the peer ended in good order."""

    name: str
    lines: tuple[Line, ...]
    summary: Summary | None

    def of_kind(self, kind: str) -> list[Line]:
        return [line for line in self.lines if line.kind == kind]


@dataclass(frozen=True)
class Run:
    """A whole run; times are wall-clock seconds.

    Attributes:
        manifest: None if its file is missing or invalid.
        skipped: Number of unreadable lines.
        sites: What the sites of a private swarm told, oldest first.
    """

    directory: Path
    peers: tuple[PeerRun, ...]
    manifest: Manifest | None
    skipped: int
    sites: Sequence[SiteReport]

    @property
    def started(self) -> float:
        return min(peer.lines[0].time for peer in self.peers if peer.lines)

    @property
    def ended(self) -> float:
        return max(peer.lines[-1].time for peer in self.peers if peer.lines)


def read_run(directory: Path, verifier: Signer) -> Run:
    """Return the run in the run directory of ``up`` or of one peer.

    Raises:
        ConfigError: The directory does not exist, or holds no metrics.
    """
    if not directory.is_dir():
        raise ConfigError(f"{directory} is not a directory: give the run directory that 'p2ptrain up' or 'join' names")
    folders = [directory, *sorted(each for each in directory.iterdir() if each.is_dir())]
    found = [folder for folder in folders if (folder / METRICS).is_file()][:MAX_PEERS]
    peers, skipped = [], 0
    for folder in found:
        lines, unread = read_lines(folder / METRICS)
        skipped += unread
        if lines:
            summary = read_summary(folder / SUMMARY_FILE)
            peers.append(PeerRun(summary.name if summary is not None else folder.name, tuple(lines), summary))
    if not peers:
        raise ConfigError(f"{directory} holds no {METRICS}: a peer writes it when its first round is over")
    sites = read_sites([folder / SITES_FILE for folder in found])
    return Run(directory, tuple(peers), former_manifest(directory / SIGNED_FILE, verifier), skipped, sites)


def read_lines(path: Path) -> tuple[list[Line], int]:
    """Return the lines of a metrics file and its rotated predecessor (``.1``), and the number of unreadable lines."""
    lines, skipped = [], 0
    for part in (path.with_name(path.name + ".1"), path):
        for text in _texts(part):
            try:
                values = json.loads(text)
                time, kind = values.pop("time"), values.pop("kind")
                if not (type(time) in (int, float) and math.isfinite(time) and isinstance(kind, str)):
                    raise ValueError("no time or kind")
            except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
                skipped += 1
                continue
            lines.append(Line(float(time), kind, values))
    return sorted(lines, key=lambda line: line.time), skipped


def read_sites(files: Sequence[Path]) -> list[SiteReport]:
    """Return the readable reports of a private swarm's sites, oldest first."""
    lines = [line for file in files for line in read_lines(file)[0] if line.kind == SITE]
    found = []
    for line in sorted(lines, key=lambda line: line.time):
        with contextlib.suppress(msgspec.ValidationError):
            found.append(msgspec.convert(line.values, SiteReport))
    return found


def _texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while text := file.readline(MAX_LINE_CHARS):
                yield text
    except FileNotFoundError:
        return


# --- the page ---------------------------------------------------------------------------------------------------------


def render(run: Run) -> str:
    values = {
        "run": run,
        "name": run.manifest.name if run.manifest else run.directory.name,
        "manifest": run.manifest.model_dump(mode="json") if run.manifest else None,
        "facts": facts(run),
        "charts": charts(run),
        "peers": [peer_row(peer) for peer in run.peers],
        "troubles": troubles(run),
    }
    return TEMPLATES.get_template("report.html").render(values)


def facts(run: Run) -> list[tuple[str, str]]:
    found = {str(index): peer.summary for index, peer in enumerate(run.peers) if peer.summary is not None}
    whole = combine(found, len(run.peers))
    before, after = formats.human_loss(whole.heldout_loss_before), formats.human_loss(whole.heldout_loss_after)
    sent, received = formats.human_bytes(whole.bytes_sent), formats.human_bytes(whole.bytes_received)
    rounds = [line for peer in run.peers for line in peer.of_kind("round")]
    done = [line for line in rounds if line.values.get("committed") is True]
    seconds = [taken for line in done if (taken := line.number("seconds")) is not None]
    states = {(_stage(peer), state) for peer in run.peers if (state := _state(peer))}
    stages = {stage for stage, _ in states}
    return [
        ("held-out loss", f"{before} → {after} nats"),
        ("duration", formats.human_seconds(run.ended - run.started)),
        ("peers", f"{whole.peers}, of which {whole.reporting_peers} ended in good order"),
        ("rounds", f"{len({line.values.get('round') for line in done})} committed"),
        ("averaging", f"{statistics.median(seconds):.2f} s a round (median)" if seconds else "no round was committed"),
        ("tokens", formats.human_count(whole.tokens)),
        ("traffic", f"{sent} sent, {received} received"),
        ("bytes a token", f"{whole.bytes_sent / whole.tokens:.0f}" if whole.tokens else "unknown"),
        ("state at the end", _agreement(len(states), len(stages))),
    ]  # fmt: skip


def clock(seconds: float) -> str:
    """Return an axis label that differs for all marks: ``1:40``, from 90 minutes on ``1.5 h``."""
    return formats.human_seconds(seconds) if seconds >= 5400 else f"{int(seconds) // 60}:{int(seconds) % 60:02}"


def charts(run: Run) -> list[tuple[str, str]]:
    """Return pairs of heading and SVG markup."""
    start = run.started

    def of(kind: str, name: str, committed_only: bool = False) -> list[Series]:
        return [
            Series(peer.name, [
                (line.time - start, value)
                for line in peer.of_kind(kind)
                if (value := line.number(name)) is not None
                and (not committed_only or line.values.get("committed") is True)
            ])
            for peer in run.peers
        ]  # fmt: skip

    def chart(title: str, series: Sequence[Series], unit: str, from_zero: bool) -> tuple[str, str]:
        return title, line_chart(title, series, x_text=clock, y_text=lambda y: f"{y:.4g}{unit}", from_zero=from_zero)

    return [
        chart("Training loss, nats", of("step", "loss"), "", False),
        chart("Held-out loss, nats", of("held_out", "loss"), "", False),
        chart("Tokens a second, each peer", of("step", "tokens_per_second"), "", True),
        chart("Finding a group", of("round", "matchmaking_seconds", committed_only=True), " s", True),
        chart("Averaging", of("round", "transfer_seconds", committed_only=True), " s", True),
        *(
            (title, line_chart(title, lines, x_text=lambda x: f"round {x:.0f}", y_text=lambda y: f"{y:.4g}"))
            for title, lines in site_curves(run.sites)
        ),
    ]


def site_curves(reports: Sequence[SiteReport]) -> list[tuple[str, list[Series]]]:
    """Return, for each metric of the sites, a heading and the lines over rounds: of all sites, then of each one.

    A site whose newest report tells no measurement has no line: its policy keeps them now.
    """
    found: dict[str, dict[str, dict[int, Evaluation]]] = {}
    for report in reports:
        if (told := report.evaluation) is not None:
            found.setdefault(told.metric, {}).setdefault(report.peer, {})[told.round] = told
            continue
        for by_site in found.values():
            by_site.pop(report.peer, None)
    charts = []
    for metric, by_site in found.items():
        newest, points = dict[str, Evaluation](), list[tuple[float, float]]()
        for at in sorted({at for each in by_site.values() for at in each}):
            newest.update({peer: each[at] for peer, each in by_site.items() if at in each})
            if (whole := pooled(newest.values())) is not None:
                points.append((at, whole.mean))
        lines = [Series(peer[-8:], [(at, each[at].mean) for at in sorted(each)]) for peer, each in by_site.items()]
        charts.append((f"Held-out {metric} of the sites", [Series("all sites", points), *lines[:MAX_SITES]]))
    return charts


def peer_row(peer: PeerRun) -> dict[str, Any]:
    rounds = peer.of_kind("round")
    committed = [line for line in rounds if line.values.get("committed") is True]
    reason = peer.summary.exit_reason if peer.summary is not None else ""
    return {
        "name": peer.name,
        "summary": peer.summary,
        "committed": len(committed),
        "aborted": len(rounds) - len(committed),
        "digest": _state(peer)[:8],
        "ended": ENDINGS.get(reason, reason),
    }


def troubles(run: Run) -> list[tuple[float, str, str, str]]:
    """Return rounds without a peer's contribution: seconds since the start, peer, round and reason."""
    found: list[tuple[Line, PeerRun]] = [
        (line, peer) for peer in run.peers for line in peer.of_kind("round") if line.values.get("reason")
    ]
    found.sort(key=lambda each: each[0].time)
    return [
        (line.time - run.started, peer.name, str(line.values.get("round", "")), str(line.values["reason"])[:300])
        for line, peer in found[:MAX_TROUBLES]
    ]


def _state(peer: PeerRun) -> str:
    """Return a peer's last digest in hexadecimal; empty if unknown."""
    digest = peer.summary.state_digest if peer.summary is not None else _of_last_round(peer, "digest")
    return digest if isinstance(digest, str) else ""


def _stage(peer: PeerRun) -> int | None:
    """Return the stage that a peer hosted; None if it hosted none."""
    stage = peer.summary.stage if peer.summary is not None else _of_last_round(peer, "stage")
    return stage if type(stage) is int else None


def _of_last_round(peer: PeerRun, name: str) -> Any:
    rounds = peer.of_kind("round")
    return rounds[-1].values.get(name) if rounds else None


def _agreement(num_states: int, num_stages: int) -> str:
    """Return whether digests agree, as text; only hosts of the same stage are compared."""
    if num_stages < 2:
        return "equal everywhere" if num_states == 1 else f"{num_states} different ones"
    return "equal in each stage" if num_states == num_stages else f"{num_states} different ones in {num_stages} stages"
