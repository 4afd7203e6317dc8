"""How peers look on a terminal: the rows of ``status`` and ``up``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from p2ptrain.monitor.formats import human_bytes, human_count

if TYPE_CHECKING:
    from rich.console import Group
    from rich.table import Table

    from p2ptrain.network.records import PeerRecord, RoundReport

COLUMNS = ("peer", "state", "round", "tokens/s", "loss", "group", "sent", "received", "reached", "digest")
_RIGHT = {"round", "tokens/s", "loss", "group", "sent", "received"}
_LEAVE_OUT_FIRST = ("reached", "received", "group", "sent", "digest", "tokens/s")
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
        str(last.members) if last is not None else "",
        human_bytes(record.bytes_sent),
        human_bytes(record.bytes_received),
        record.reachability,
        record.digest.hex()[:8] if any(record.digest) else "",
    )


def peer_table(rows: Iterable[Sequence[str]], width: int, title: str = "") -> Table:
    """A rich table of rows made by `peer_row`, with the columns that `width` characters have room for."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = fit_columns(list(rows), width)
    table = Table(
        title=Text(title, no_wrap=True, overflow="ellipsis") if title else None,
        title_justify="left",
        title_style="bold",
        header_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
    )
    for column in shown[0]:
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True)
    for row in shown[1:]:
        # Names and states come from strangers: as Text they cannot carry markup.
        table.add_row(*map(Text, row))
    return table


def with_footer(table: Table, footer: str) -> Group:
    """A table and a line below it, which is short or empty.

    What a terminal shows of Ctrl-C (``^C``) goes behind it. Behind a full line it would start a new one, and the next
    table would be drawn in the wrong place.
    """
    from rich.console import Group
    from rich.text import Text

    return Group(table, Text(footer, style="dim", no_wrap=True, overflow="crop"))


def fit_columns(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """The header and rows made by `peer_row`, made to fit in lines of ``width`` characters.

    Long names are cut, and columns are left out, those first that say least, until the rest fits with two characters
    between columns. What is left of a line of fewer than 40 characters may still be too long.
    """
    lines = [COLUMNS, *(tuple(printable(cell) for cell in row) for row in rows)]
    lines = [(_shorten(line[0], _MAX_NAME_CHARS), *line[1:]) for line in lines]
    kept = list(range(len(COLUMNS)))
    for name in _LEAVE_OUT_FIRST:
        if sum(max(len(line[index]) for line in lines) + 2 for index in kept) - 2 <= width:
            break
        kept.remove(COLUMNS.index(name))
    return [tuple(line[index] for index in kept) for line in lines]


def _shorten(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def plain_table(rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Rows made by `peer_row` as aligned text without colours or lines; ``width`` None keeps all columns."""
    rows = list(rows)
    lines = fit_columns(rows, width) if width is not None else [COLUMNS, *(tuple(map(printable, row)) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(line, widths, lines[0], strict=True)
        ).rstrip()
        for line in lines
    )


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
