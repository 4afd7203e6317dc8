"""A picture of ratios beside their goals; needs matplotlib, which the extra ``bench`` installs."""

from __future__ import annotations

import io
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.findings import Finding

COLOURS = {True: "#2a78b5", False: "#c8501e", None: "#8a8f98"}
"""By whether the goal is met."""
ROW_INCHES = 0.3
HEAD_INCHES = 0.9


class PlotError(Exception):
    """No picture can be drawn; the message says what to do."""


def require_matplotlib() -> None:
    """Fail before hours of measuring, not after.

    Raises:
        PlotError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise PlotError("--plot needs matplotlib: pip install 'p2ptrain[bench]'") from error
    matplotlib.use("Agg")


def plot(findings: Sequence[Finding], path: str) -> None:
    """Draw horizontal bars, one panel for ratios to hivemind and one for the rest, to an SVG or PNG file.

    Raises:
        PlotError: There is nothing to draw, or nothing to draw it with.
    """
    require_matplotlib()
    from matplotlib import pyplot
    from matplotlib.lines import Line2D
    from matplotlib.patches import Patch

    drawn = [finding for finding in findings if math.isfinite(finding.value) and finding.value > 0]
    panels = [
        ("of hivemind's: less is better", [one for one in drawn if one.against == "hivemind"]),
        ("of a bound", [one for one in drawn if one.against != "hivemind" and one.goal is not None]),
    ]
    panels = [(title, shown) for title, shown in panels if shown]
    if not panels:
        raise PlotError("there is no ratio to draw")
    rows = [len(shown) for _, shown in panels]
    figure, axes = pyplot.subplots(
        len(panels), 1, squeeze=False, layout="constrained",
        figsize=(9, ROW_INCHES * sum(rows) + HEAD_INCHES * (len(panels) + 1)),
        gridspec_kw={"height_ratios": rows},
    )  # fmt: skip
    for (title, shown), axis in zip(panels, axes[:, 0], strict=True):
        _draw(axis, title, shown)
    figure.legend(
        handles=[
            Patch(color=COLOURS[True], label="goal met"),
            Patch(color=COLOURS[False], label="goal missed"),
            Patch(color=COLOURS[None], label="no goal"),
            Line2D([], [], color="black", marker="|", linestyle="", markersize=12, label="goal"),
        ],
        loc="outside lower center", ncols=4, frameon=False,
    )  # fmt: skip
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw(axis: Any, title: str, shown: Sequence[Finding]) -> None:
    """One panel; in the second, values are shares of their bounds, so that all bars end at 1 when they keep it."""
    bound = shown[0].against != "hivemind"
    values = [one.value / one.goal if bound and one.goal else one.value for one in shown]
    places = range(len(shown))
    axis.barh(places, values, color=[COLOURS[one.is_met] for one in shown], height=0.7)
    for place, one, value in zip(places, shown, values, strict=True):
        mark = 0.0 if one.goal is None else 1.0 if bound else one.goal
        if mark:
            axis.plot([mark], [place], "|", color="black", markersize=14, markeredgewidth=2)
        sign = "" if not bound else " (≥ 1)" if one.at_least else " (≤ 1)"
        axis.annotate(
            f"{value:.2f}{sign}",
            (max(value, mark), place),
            xytext=(6, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
        )
    axis.set_yticks(places, [one.what for one in shown], fontsize=8)
    axis.invert_yaxis()
    axis.axvline(1.0, color="black", linewidth=0.8, linestyle=":")
    axis.set_xlim(0, 1.18 * max(1.0, *values))
    axis.set_title(title, fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)


@dataclass(frozen=True)
class Learning:
    """How one method learns, for `plot_convergence`.

    Attributes:
        name: For the legend.
        bytes_per_token: What a trainer sends.
        ratio: Its final loss, of that with large batches.
        curve: (seconds, held-out loss), in order.
    """

    name: str
    bytes_per_token: float
    ratio: float
    curve: Sequence[tuple[float, float]]


def plot_convergence(found: Sequence[Learning], target: float, path: str) -> None:
    """Draw final losses against what is sent, and losses against time, to an SVG or PNG file.

    Args:
        found: The methods; those that send nothing are in the second panel only.
        target: The loss until which time is counted.
        path: Of the file.

    Raises:
        PlotError: There is nothing to draw it with.
    """
    require_matplotlib()
    from matplotlib import pyplot

    figure, (sent, time) = pyplot.subplots(1, 2, figsize=(11, 5.5), layout="constrained")
    sent.axhspan(0.99, 1.01, color="#dfe7ee", zorder=0)
    sent.axhline(1.0, color="black", linewidth=0.8, linestyle=":")
    time.axhline(target, color="black", linewidth=0.8, linestyle=":")
    for place, each in enumerate(found):
        look: dict[str, Any] = {"marker": "os^DvPX"[place % 7], "color": f"C{place % 10}"}
        if each.bytes_per_token:
            sent.plot([each.bytes_per_token], [each.ratio], markersize=8, **look)
        seconds, losses = zip(*each.curve, strict=True)
        time.plot(seconds, losses, markersize=4, linewidth=1, label=each.name, **look)
    sent.set_xscale("log")
    sent.set_xlabel("bytes that a trainer sends for each of its tokens")
    sent.set_ylabel("final loss, of that with large batches")
    sent.set_title("Loss at equal tokens; shaded: within 1 %", fontsize=10, loc="left")
    time.set_xscale("log")
    time.set_xlabel("seconds, with 100 Mbit/s for each trainer")
    time.set_ylabel("held-out loss, nats a byte")
    time.set_title("Loss over time; dotted: the target", fontsize=10, loc="left")
    for axis in (sent, time):
        axis.minorticks_off()
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    save(figure, path)
    pyplot.close(figure)


def save(figure: Any, path: str) -> None:
    """Write a figure; an SVG in few lines, with its words as text, since glyphs drawn as paths would be most of it."""
    import matplotlib

    Path(path).parent.mkdir(parents=True, exist_ok=True)
    if not path.endswith(".svg"):
        figure.savefig(path, dpi=150)
        return
    drawn = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "p2ptrain"}):
        figure.savefig(drawn, format="svg", metadata={"Date": None})
    tags = re.sub(r"<!--.*?-->|<metadata>.*?</metadata>", "", drawn.getvalue(), flags=re.DOTALL)
    tags = re.sub(r"<[^>]+>", lambda tag: " ".join(tag.group().split()), tags)
    Path(path).write_text(re.sub(r">\s+<(?!g)", "><", tags), encoding="utf-8")
