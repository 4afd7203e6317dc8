"""The stages of a model on a terminal: hosts, queues, load, bottleneck and risks."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from typing import TYPE_CHECKING

from p2ptrain.cli.screen.table import printable
from p2ptrain.status.formats import human_count

if TYPE_CHECKING:
    from rich.text import Text

    from p2ptrain.status.views import StageView

COLUMNS = ("stage", "blocks", "hosts", "waiting", "tokens/s", "load", "")
_RIGHT = ("hosts", "waiting", "tokens/s", "load")
_LEAVE_OUT_FIRST = ("waiting", "load", "blocks", "tokens/s")
_REMARKS = {"no host": "bold red", "one host": "yellow", "bottleneck": "bold yellow"}


def stage_row(stage: StageView) -> tuple[str, ...]:
    """Return the cells of a stage, in the order of `COLUMNS`; the last one holds remarks."""
    first, end = stage.blocks
    on_the_way = f"+{len(stage.syncing)}" if stage.syncing else ""
    remarks = [
        "no host" if not stage.hosts else "one host" if len(stage.hosts) == 1 else "",
        "bottleneck" if stage.is_bottleneck and stage.hosts else "",
    ]
    return (
        str(stage.number),
        f"{first}-{end - 1}" if end - first > 1 else str(first) if end > first else "",
        f"{len(stage.hosts)}{on_the_way}",
        str(stage.waiting),
        human_count(stage.tokens_per_second) if stage.tokens_per_second > 0 else "",
        f"{100 * stage.load:.0f}%" if stage.load is not None else "",
        ", ".join(filter(None, remarks)),
    )


def stage_lines(stages: Sequence[StageView], width: int | None, most: int | None = None) -> list[Text]:
    """Return a header and a line for each stage.

    Args:
        width: Line width in characters; the least important columns are dropped to fit. None keeps all columns.
        most: Limit of stages; those that need hosts most are kept. None keeps all stages.
    """
    from rich.text import Text

    shown = stages if most is None else sorted(sorted(stages, key=_urgency)[:most], key=lambda each: each.number)
    rows = [COLUMNS, *(stage_row(stage) for stage in shown)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    kept = [index for index in range(len(COLUMNS)) if any(row[index] for row in rows[1:])]
    for name in _LEAVE_OUT_FIRST:
        if width is None or sum(widths[index] + 2 for index in kept) - 2 <= width:
            break
        kept = [index for index in kept if COLUMNS[index] != name]
    lines = []
    for row in rows:
        cells = [
            row[index].rjust(widths[index]) if COLUMNS[index] in _RIGHT else row[index].ljust(widths[index])
            for index in kept
        ]
        line = Text("  ".join(cells).rstrip(), "bold" if row is COLUMNS else "")
        for remark, style in _REMARKS.items():
            line.highlight_words([remark], style)
        if width is not None:
            line.truncate(width, overflow="ellipsis")
        lines.append(line)
    if len(shown) < len(stages):
        lines.append(Text(f"and {len(stages) - len(shown)} more stages", "dim"))
    return lines


def _urgency(stage: StageView) -> tuple[int, bool, float, int]:
    return (min(2, len(stage.hosts)), not stage.is_bottleneck, stage.tokens_per_second, stage.number)


def risk_lines(stages: Sequence[StageView], width: int | None) -> list[str]:
    """Return lines about the stages that the loss of one host would break; one line if there are none."""
    risks = [f"! {printable(stage.risk)}" for stage in stages if stage.risk]
    if not risks:
        return ["losing any one host breaks nothing"]
    if width is None:
        return risks
    return [line for risk in risks for line in textwrap.wrap(risk, max(10, width), subsequent_indent="  ")]
