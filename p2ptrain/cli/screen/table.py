"""Tables on a terminal: peers, and the stages of a model with their hosts, load and risks."""

from __future__ import annotations

import textwrap
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from p2ptrain.status.formats import human_bytes, human_count, human_hash
from p2ptrain.status.stages import TRAINING_ROLES
from p2ptrain.status.views import Headline, PeerView, RoundView, StageView

COLUMNS = (
    "peer", "state", "stage", "round", "tokens/s", "loss", "given", "group", "sent", "received", "reached", "digest",
)  # fmt: skip
_MAX_NAME_CHARS = 24
_REMARKS = {"no host": "bold red", "one host": "yellow", "bottleneck": "bold yellow"}
FEEDS = "feeds"
"""The ``stage`` cell of a trainer that hosts no stage and sends microbatches through all."""


def peer_row(peer: PeerView, num_stages: int = 1, state: str | None = None) -> tuple[str, ...]:
    """Return the cells of a peer, in the order of `COLUMNS`; empty where a value does not apply.

    ``state`` is shown in place of the record's.
    """
    record = peer.record
    # A trainer without a stage of the pipeline takes part in no round.
    trains = record.role != "bootstrap" if num_stages == 1 else bool(peer.stages)
    last = record.last_rounds[-1] if record.last_rounds else None
    return (
        peer.name,
        record.state if state is None else state,
        FEEDS if num_stages > 1 and record.role == "trainer" else ",".join(map(str, peer.stages)),
        str(record.round) if trains else "",
        human_count(record.tokens_per_second) if record.tokens_per_second > 0 else "",
        f"{record.loss:.3f}" if record.loss is not None else "",
        human_count(record.trained_tokens) if record.trained_tokens else "",
        str(last.members) if last is not None else "",
        human_bytes(record.bytes_sent),
        human_bytes(record.bytes_received),
        record.reachability,
        human_hash(record.digest)[:8],
    )


@dataclass(frozen=True)
class Table:
    """The columns of a table.

    Attributes:
        right: Columns that are aligned right.
        optional: Columns that are dropped if all their cells are empty.
        leave_out_first: Columns that are dropped, in this order, until the rest fits.
    """

    names: tuple[str, ...]
    right: Collection[str]
    optional: Collection[str]
    leave_out_first: Sequence[str]

    def fit(self, rows: Sequence[Sequence[str]], width: int | None) -> list[tuple[str, ...]]:
        """Return a header and the rows, fitted to ``width`` terminal columns; None keeps what is not empty.

        Long names in the first column are truncated. In narrow terminals the result may still be too long.
        """
        lines = [self.names, *(tuple(map(printable, row)) for row in rows)]
        if width is not None:
            lines = [(clipped(line[0], _MAX_NAME_CHARS), *line[1:]) for line in lines]
        columns = list(enumerate(self.names))
        kept = [at for at, name in columns if name not in self.optional or any(row[at] for row in rows)]
        for name in self.leave_out_first:
            if width is None or sum(max(cell_len(line[at]) for line in lines) + 2 for at in kept) - 2 <= width:
                break
            kept = [at for at in kept if self.names[at] != name]
        return [tuple(line[at] for at in kept) for line in lines]

    def lines(self, rows: Sequence[Sequence[str]], width: int | None = None) -> list[str]:
        """Return the lines of `fit`, aligned, with two characters between columns."""
        fitted = self.fit(rows, width)
        widths = [max(map(cell_len, column)) for column in zip(*fitted, strict=True)]

        def padded(cell: str, width: int, name: str) -> str:
            space = " " * (width - cell_len(cell))
            return space + cell if name in self.right else cell + space

        return ["  ".join(map(padded, line, widths, fitted[0])).rstrip() for line in fitted]


PEERS = Table(
    COLUMNS,
    right={"round", "tokens/s", "loss", "given", "group", "sent", "received"},
    optional={"stage"},
    leave_out_first=("given", "reached", "received", "group", "sent", "digest", "tokens/s"),
)
_STAGE_COLUMNS = ("stage", "blocks", "hosts", "waiting", "tokens/s", "load", "")
STAGES = Table(
    _STAGE_COLUMNS,
    right={"hosts", "waiting", "tokens/s", "load"},
    optional=_STAGE_COLUMNS,
    leave_out_first=("waiting", "load", "blocks", "tokens/s"),
)


def clipped(text: str, width: int) -> str:
    """Return printable text of at most ``width`` terminal columns, with an ellipsis if truncated."""
    text = printable(text)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"[: max(0, width)]


def plain_table(rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Return the rows of `peer_row` as aligned text without colours or rules; a ``width`` of None keeps all columns."""
    return "\n".join(PEERS.lines(list(rows), width))


def table_lines(rows: Sequence[Sequence[str]], width: int, most: int) -> list[Text]:
    """Return the table for a terminal: a header, a rule, at most ``most`` lines, and the number of omitted rows."""
    shown = rows if len(rows) <= most else rows[: max(0, most - 1)]
    header, *body = PEERS.lines(shown, width)
    lines = [Text(header, "bold"), Text("─" * min(width, max(map(len, (header, *body)))), "dim"), *map(Text, body)]
    if len(shown) < len(rows):
        lines.append(Text(f"and {len(rows) - len(shown)} more", "dim"))
    return lines


def printable(text: str) -> str:
    """Return text with unprintable characters replaced, so that it holds no escape sequences."""
    return "".join(character if character.isprintable() else "?" for character in text)


def rounds_line(rounds: Sequence[RoundView], peers: Sequence[PeerView], state: str) -> str:
    """Return one line about newly committed rounds, with the peer count of the worst one.

    Args:
        rounds: Ascending, at least one.
        peers: All peers, for their digests.
        state: The result of `present_state`.
    """
    # Rounds are numbered from 0; the line shows the number of completed rounds.
    first, last = rounds[0].round + 1, rounds[-1].round + 1
    fewest = min(rounds, key=lambda view: view.contributors / max(view.members, 1))
    seconds = sum(view.seconds for view in rounds) / len(rounds)
    shown_peers = [
        peer for peer in peers
        if peer.record.role in TRAINING_ROLES and peer.record.round == last and any(peer.record.digest)
    ]  # fmt: skip
    digests = sorted({(peer.stages[:1], human_hash(peer.record.digest)[:8]) for peer in shown_peers})
    is_cut = any(peer.stages for peer in peers)
    shown = " ".join("".join([*(f"{stage}:" for stage in stages), digest]) for stages, digest in digests)
    parts = [
        f"round {last}" if first == last else f"rounds {first}-{last}",
        f"{fewest.contributors}/{fewest.members} peers",
        f"averaged in {seconds:.1f} s",
        state,
        f"{'stage digests' if is_cut else 'digest'} {shown}" if digests else "",
    ]
    return "  ".join(filter(None, parts))


def present_state(headline: Headline, held_out: float | None) -> str:
    rate = headline.tokens_per_second
    parts = [
        f"loss {headline.loss:.3f}" if headline.loss is not None else "",
        f"held-out {held_out:.2f}" if held_out is not None else "",
        f"{human_count(rate)} tokens/s" if rate is not None else "",
    ]
    return "  ".join(filter(None, parts))


def human_time(seconds: float) -> str:
    """Return ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _stage_row(stage: StageView) -> tuple[str, ...]:
    """Return the cells of a stage, in the order of `STAGES`; the last one holds remarks."""
    first, end = stage.blocks
    on_the_way = f"+{len(stage.syncing)}" if stage.syncing else ""
    few = {0: "no host", 1: "one host"}.get(len(stage.hosts), "")
    remarks = [few, "bottleneck" if stage.is_bottleneck and stage.hosts else ""]
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
    shown = stages if most is None else sorted(sorted(stages, key=_urgency)[:most], key=lambda each: each.number)
    header, *body = STAGES.lines([_stage_row(stage) for stage in shown], width)
    lines = [Text(header, "bold"), *map(Text, body)]
    for line in lines:
        for remark, style in _REMARKS.items():
            line.highlight_words([remark], style)
        if width is not None:
            line.truncate(width, overflow="ellipsis")
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
