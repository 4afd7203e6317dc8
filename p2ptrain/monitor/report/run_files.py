"""Readers of a finished run's files: metrics and summaries of its peers, and the manifest."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from p2ptrain.errors import ConfigError, ManifestError
from p2ptrain.manifest import Manifest, SignedManifest
from p2ptrain.node.reports.summary import SUMMARY_FILE, Summary, read_summary
from p2ptrain.signing import Signer

METRICS, MANIFEST = "metrics.jsonl", "manifest.bin"
MAX_LINE_CHARS = 1 << 16
MAX_PEERS = 256


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
    """

    directory: Path
    peers: tuple[PeerRun, ...]
    manifest: Manifest | None
    skipped: int

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
    return Run(directory, tuple(peers), _read_manifest(directory / MANIFEST, verifier), skipped)


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


def _texts(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", errors="replace") as file:
            while text := file.readline(MAX_LINE_CHARS):
                yield text
    except FileNotFoundError:
        return


def _read_manifest(path: Path, verifier: Signer) -> Manifest | None:
    try:
        return SignedManifest.from_bytes(path.read_bytes(), None, verifier).manifest
    except (OSError, ManifestError):
        return None
