"""How peers look on a terminal: the rows of ``status`` and ``up``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from p2ptrain.status.formats import human_bytes, human_count
from p2ptrain.status.stages import TRAINING_ROLES

if TYPE_CHECKING:
    from rich.text import Text

    from p2ptrain.network.records.record import PeerRecord, RoundReport

COLUMNS = (
    "peer", "state", "stage", "round", "tokens/s", "loss", "given", "group", "sent", "received", "reached", "digest",
)  # fmt: skip
_RIGHT = {"round", "tokens/s", "loss", "given", "group", "sent", "received"}
_LEAVE_OUT_FIRST = ("given", "reached", "received", "group", "sent", "digest", "tokens/s")
_MAX_NAME_CHARS = 24
FEEDS = "feeds"
"""In place of a stage: it hosts none, and sends microbatches through all."""


def peer_row(record: PeerRecord, num_stages: int = 1) -> tuple[str, ...]:
    """One peer as text, in the order of `COLUMNS`; what a bootstrap peer has not is left out.

    Args:
        record: What it publishes.
        num_stages: Into which the swarm's model is cut.
    """
    stages = hosted_stages(record, num_stages)
    # Who only sends microbatches through a pipeline is in no round.
    trains = record.role != "bootstrap" if num_stages == 1 else bool(stages)
    last = record.last_rounds[-1] if record.last_rounds else None
    return (
        record.name or record.peer[-8:],
        record.state,
        FEEDS if num_stages > 1 and record.role == "trainer" else ",".join(map(str, stages)),
        str(record.round) if trains else "",
        human_count(record.tokens_per_second) if record.tokens_per_second > 0 else "",
        f"{record.loss:.3f}" if record.loss is not None else "",
        human_count(record.trained_tokens) if record.trained_tokens else "",
        str(last.members) if last is not None else "",
        human_bytes(record.bytes_sent),
        human_bytes(record.bytes_received),
        record.reachability,
        record.digest.hex()[:8] if any(record.digest) else "",
    )


def hosted_stages(record: PeerRecord, num_stages: int) -> list[int]:
    """Numbers of the stages that a peer hosts, of so many; empty where the model is not cut."""
    return [stage.unit for stage in record.stages if stage.unit < num_stages] if num_stages > 1 else []


def _shown_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Those of `COLUMNS` that are there at all: stages only where a model is cut."""
    stage = COLUMNS.index("stage")
    return [index for index in range(len(COLUMNS)) if index != stage or any(row[stage] for row in rows)]


def fit_columns(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """The header and rows made by `peer_row`, made to fit in lines of ``width`` characters.

    Long names are cut, and columns are left out, those first that say least, until the rest fits with two characters
    between columns. What is left of a line of fewer than 40 characters may still be too long.
    """
    from rich.cells import cell_len

    lines = [COLUMNS, *(tuple(printable(cell) for cell in row) for row in rows)]
    lines = [(clipped(line[0], _MAX_NAME_CHARS), *line[1:]) for line in lines]
    kept = _shown_columns(rows)
    for name in _LEAVE_OUT_FIRST:
        if sum(max(cell_len(line[index]) for line in lines) + 2 for index in kept) - 2 <= width:
            break
        kept.remove(COLUMNS.index(name))
    return [tuple(line[index] for index in kept) for line in lines]


def clipped(text: str, width: int) -> str:
    """Text from a stranger in at most ``width`` columns of a terminal, with an ellipsis where some is left out."""
    from rich.cells import cell_len, set_cell_size

    text = printable(text)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"[: max(0, width)]


def plain_table(rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Rows made by `peer_row` as aligned text without colours or lines; ``width`` None keeps all columns."""
    from rich.cells import cell_len

    rows = list(rows)
    if width is not None:
        lines = fit_columns(rows, width)
    else:
        kept = _shown_columns(rows)
        lines = [tuple(printable(row[index]) for index in kept) for row in (COLUMNS, *rows)]
    widths = [max(map(cell_len, column)) for column in zip(*lines, strict=True)]

    def padded(cell: str, width: int, name: str) -> str:
        space = " " * (width - cell_len(cell))
        return space + cell if name in _RIGHT else cell + space

    return "\n".join("  ".join(map(padded, line, widths, lines[0])).rstrip() for line in lines)


def table_lines(rows: Sequence[Sequence[str]], width: int, most: int) -> list[Text]:
    """The same for a terminal: a header, a rule, at most ``most`` lines of rows, and how many there are more."""
    from rich.text import Text

    shown = rows if len(rows) <= most else rows[: max(0, most - 1)]
    header, *body = plain_table(shown, width).split("\n")
    lines = [Text(header, "bold"), Text("─" * min(width, max(map(len, (header, *body)))), "dim"), *map(Text, body)]
    if len(shown) < len(rows):
        lines.append(Text(f"and {len(rows) - len(shown)} more", "dim"))
    return lines


def printable(text: str) -> str:
    """Text from a stranger without control characters, which could command the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def record_values(record: PeerRecord) -> dict[str, Any]:
    """A record as plain values for JSON, hashes in hexadecimal."""
    return asdict(record, dict_factory=_with_hex)


def _with_hex(items: list[tuple[str, Any]]) -> dict[str, Any]:
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in items}


def most_tokens(records: Iterable[PeerRecord]) -> int | None:
    """Tokens of the lineage that is furthest, for `TokenRate`; None while nobody trains.

    In a pipeline, of the stage that is least far: a token counts when all stages have counted it.
    """
    furthest: dict[int | None, int] = {}
    for record in records:
        if record.role in TRAINING_ROLES and record.state != "starting":
            stage = _own_stage(record)
            furthest[stage] = max(furthest.get(stage, 0), record.lineage_tokens)
    if len(furthest) > 1:
        furthest.pop(None, None)  # Those who feed a pipeline have no lineage.
    return min(furthest.values(), default=None)


def committed_rounds(records: Iterable[PeerRecord], after: int) -> list[RoundReport]:
    """The committed rounds that the trainers report, in order, each as the peer saw it that saw most contributors.

    In a pipeline each stage has rounds of its own: one is told when no stage is behind it, with the members of all.

    Args:
        records: Of all peers.
        after: Leave out this many of the swarm's first rounds.
    """
    by_stage: dict[int | None, dict[int, RoundReport]] = {}
    for record in records:
        if record.role not in TRAINING_ROLES or not (record.last_rounds or record.stages):
            continue
        done = by_stage.setdefault(_own_stage(record), {})
        for report in record.last_rounds:
            # A report names the round that was worked on, counted from 0; people count the rounds that are done.
            if report.committed and report.round + 1 > after:
                done[report.round] = max(done.get(report.round, report), report, key=lambda other: other.contributors)
    everywhere = min((max(done, default=-1) for done in by_stage.values()), default=-1)
    numbers = {number for done in by_stage.values() for number in done if number <= everywhere}
    return [
        _of_all_stages([done[number] for done in by_stage.values() if number in done]) for number in sorted(numbers)
    ]


def _of_all_stages(reports: Sequence[RoundReport]) -> RoundReport:
    slowest = max(reports, key=lambda report: report.seconds)
    return replace(
        slowest,
        members=sum(report.members for report in reports),
        contributors=sum(report.contributors for report in reports),
    )


def _own_stage(record: PeerRecord) -> int | None:
    """The stage that a peer tells of in the rest of its record; None where it holds the whole model, or nothing."""
    return record.stages[0].unit if record.stages else None


def rounds_line(rounds: Sequence[RoundReport], records: Sequence[PeerRecord], state: str) -> str:
    """One line about the rounds that were committed since the last line; of several, it counts the peers of the worst.

    Args:
        rounds: The result of `committed_rounds`, at least one.
        records: Of all peers.
        state: The result of `present_state`.
    """
    first, last = rounds[0].round + 1, rounds[-1].round + 1
    fewest = min(rounds, key=lambda report: report.contributors / max(report.members, 1))
    seconds = sum(report.seconds for report in rounds) / len(rounds)
    digests = sorted(
        {
            (_own_stage(record) or 0, record.digest.hex()[:8])
            for record in records
            if record.role in TRAINING_ROLES and record.round == last and any(record.digest)
        }
    )
    is_cut = any(record.stages for record in records)
    shown = " ".join(f"{stage}:{digest}" if is_cut else digest for stage, digest in digests)
    return "  ".join(
        [
            f"round {last}" if first == last else f"rounds {first}-{last}",
            f"{fewest.contributors}/{fewest.members} peers",
            f"averaged in {seconds:.1f} s",
            *([state] if state else []),
            *([f"{'stage digests' if is_cut else 'digest'} {shown}"] if digests else []),
        ]
    )


def present_state(records: Iterable[PeerRecord], tokens_per_second: float | None, held_out: float | None) -> str:
    """How a swarm is doing: the mean training loss, the held-out loss and the speed, as far as they are known."""
    losses = [record.loss for record in records if record.role in TRAINING_ROLES and record.loss is not None]
    return "  ".join(
        [
            *([f"loss {sum(losses) / len(losses):.3f}"] if losses else []),
            *([f"held-out {held_out:.2f}"] if held_out is not None else []),
            *([f"{human_count(tokens_per_second)} tokens/s"] if tokens_per_second is not None else []),
        ]
    )


def human_time(seconds: float) -> str:
    """Minutes and seconds: ``0:07``, ``12:34``; with hours where there are any: ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
