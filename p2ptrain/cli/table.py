"""How peers look on a terminal: the rows of ``status`` and ``up``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from p2ptrain.monitor.formats import human_bytes, human_count

if TYPE_CHECKING:
    from rich.text import Text

    from p2ptrain.network.records import PeerRecord, RoundReport

COLUMNS = (
    "peer", "state", "round", "tokens/s", "loss", "given", "group", "sent", "received", "reached", "digest",
)  # fmt: skip
_RIGHT = {"round", "tokens/s", "loss", "given", "group", "sent", "received"}
_LEAVE_OUT_FIRST = ("given", "reached", "received", "group", "sent", "digest", "tokens/s")
_MAX_NAME_CHARS = 24


def peer_row(record: PeerRecord) -> tuple[str, ...]:
    """One peer as text, in the order of `COLUMNS`; what a bootstrap peer has not is left out."""
    trains = record.role != "bootstrap"
    last = record.last_rounds[-1] if record.last_rounds else None
    return (
        record.name or record.peer[-8:],
        record.state,
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


def fit_columns(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """The header and rows made by `peer_row`, made to fit in lines of ``width`` characters.

    Long names are cut, and columns are left out, those first that say least, until the rest fits with two characters
    between columns. What is left of a line of fewer than 40 characters may still be too long.
    """
    from rich.cells import cell_len

    lines = [COLUMNS, *(tuple(printable(cell) for cell in row) for row in rows)]
    lines = [(clipped(line[0], _MAX_NAME_CHARS), *line[1:]) for line in lines]
    kept = list(range(len(COLUMNS)))
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
    lines = fit_columns(rows, width) if width is not None else [COLUMNS, *(tuple(map(printable, row)) for row in rows)]
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
    """Tokens of the lineage that is furthest, for `TokenRate`; None while nobody trains."""
    return max(
        (record.lineage_tokens for record in records if record.role == "trainer" and record.state != "starting"),
        default=None,
    )


def committed_rounds(records: Iterable[PeerRecord], after: int) -> list[RoundReport]:
    """The committed rounds that the trainers report, in order, each as the peer saw it that saw most contributors.

    Args:
        records: Of all peers.
        after: Leave out this many of the swarm's first rounds.
    """
    done: dict[int, RoundReport] = {}
    for record in records:
        for report in record.last_rounds if record.role == "trainer" else ():
            # A report names the round that was worked on, counted from 0; people count the rounds that are done.
            if report.committed and report.round + 1 > after:
                done[report.round] = max(done.get(report.round, report), report, key=lambda other: other.contributors)
    return [done[number] for number in sorted(done)]


def rounds_line(rounds: Sequence[RoundReport], records: Iterable[PeerRecord], state: str) -> str:
    """One line about the rounds that were committed since the last line; of several, it counts the peers of the worst.

    Args:
        rounds: The result of `committed_rounds`, at least one.
        records: Of all peers.
        state: The result of `present_state`.
    """
    first, last = rounds[0].round + 1, rounds[-1].round + 1
    fewest = min(rounds, key=lambda report: report.contributors / max(report.members, 1))
    seconds = sum(report.seconds for report in rounds) / len(rounds)
    digests = {record.digest.hex()[:8] for record in records if record.role == "trainer" and record.round == last}
    return "  ".join(
        [
            f"round {last}" if first == last else f"rounds {first}-{last}",
            f"{fewest.contributors}/{fewest.members} peers",
            f"averaged in {seconds:.1f} s",
            *([state] if state else []),
            *([f"digest {' '.join(sorted(digests))}"] if digests else []),
        ]
    )


def present_state(records: Iterable[PeerRecord], tokens_per_second: float | None, held_out: float | None) -> str:
    """How a swarm is doing: the mean training loss, the held-out loss and the speed, as far as they are known."""
    losses = [record.loss for record in records if record.role == "trainer" and record.loss is not None]
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
