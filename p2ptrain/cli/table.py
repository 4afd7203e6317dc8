"""How peers look on a terminal: the rows of ``status`` and ``up``, and numbers as people read them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from p2ptrain.network.records import PeerRecord, RoundReport

COLUMNS = ("peer", "state", "round", "tokens/s", "loss", "group", "sent", "received", "reached", "digest")
_RIGHT = {"round", "tokens/s", "loss", "group", "sent", "received"}


def human_bytes(number: float) -> str:
    """Bytes in powers of ten with three digits: ``0 B``, ``1.5 kB``, ``12.3 MB``."""
    for unit in ("B", "kB", "MB", "GB"):
        if number < 999.5:
            return f"{number:.0f} {unit}" if unit == "B" or number >= 99.95 else f"{number:.1f} {unit}"
        number /= 1000
    return f"{number:.1f} TB"


def human_count(number: float) -> str:
    """A number with three digits: ``940``, ``12.3k``, ``1.2M``."""
    for unit in ("", "k", "M", "B"):
        if number < 999.5:
            return f"{number:.0f}{unit}" if not unit or number >= 99.95 else f"{number:.1f}{unit}"
        number /= 1000
    return f"{number:.1f}T"


def peer_row(record: PeerRecord) -> tuple[str, ...]:
    """One peer as text, in the order of `COLUMNS`; what a bootstrap peer has not is left out."""
    trains = record.role != "bootstrap"
    last = record.last_rounds[-1] if record.last_rounds else None
    return (
        record.name or record.peer[-8:],
        record.state if trains else record.role,
        str(record.round) if trains else "",
        human_count(record.tokens_per_second) if trains else "",
        f"{record.loss:.3f}" if record.loss is not None else "",
        str(last.members) if last is not None else "",
        human_bytes(record.bytes_sent),
        human_bytes(record.bytes_received),
        record.reachability,
        record.digest.hex()[:8] if trains else "",
    )


def peer_table(rows: Iterable[Sequence[str]], title: str = "") -> Table:
    """A rich table of rows made by `peer_row`."""
    from rich.table import Table
    from rich.text import Text

    table = Table(title=title or None, title_justify="left", header_style="bold")
    for column in COLUMNS:
        table.add_column(column, justify="right" if column in _RIGHT else "left", no_wrap=True)
    for row in rows:
        # Names and states come from strangers: as Text they cannot carry markup.
        table.add_row(*(Text(printable(cell)) for cell in row))
    return table


def plain_table(rows: Iterable[Sequence[str]]) -> str:
    """The same rows as aligned text without colours or lines."""
    lines = [COLUMNS, *(tuple(printable(cell) for cell in row) for row in rows)]
    widths = [max(len(line[index]) for line in lines) for index in range(len(COLUMNS))]
    return "\n".join(
        "  ".join(
            cell.rjust(width) if name in _RIGHT else cell.ljust(width)
            for cell, width, name in zip(line, widths, COLUMNS, strict=True)
        ).rstrip()
        for line in lines
    )


def printable(text: str) -> str:
    """Text from a stranger without control characters, which could command the terminal."""
    return "".join(character if character.isprintable() else "?" for character in text)


def record_values(record: PeerRecord) -> dict[str, Any]:
    """A record as plain values for JSON, hashes in hexadecimal."""
    values = asdict(record)
    return {key: value.hex() if isinstance(value, bytes) else value for key, value in values.items()}


def round_lines(records: Iterable[PeerRecord], after: int) -> list[tuple[int, str]]:
    """One line about each committed round that the peers report, the last with what they are doing now.

    Args:
        records: Of all peers.
        after: Leave out this round and those before it.

    Returns:
        The rounds' numbers, counted from 1, and lines, in order.
    """
    trainers = [record for record in records if record.role == "trainer"]
    done: dict[int, RoundReport] = {}
    for record in trainers:
        for report in record.last_rounds:
            # A report names the round that was worked on, counted from 0; people count the rounds that are done.
            number = report.round + 1
            if report.committed and number > after:
                done[number] = max(done.get(number, report), report, key=lambda other: other.contributors)
    lines = [
        (number, f"round {number}  {report.contributors}/{report.members} peers contributed  {report.seconds:.1f} s")
        for number, report in sorted(done.items())
    ]
    if lines:
        number, line = lines[-1]
        lines[-1] = (number, f"{line}  {_present_state(trainers)}")
    return lines


def _present_state(trainers: Sequence[PeerRecord]) -> str:
    losses = [record.loss for record in trainers if record.loss is not None]
    newest = max(record.round for record in trainers)
    digests = {record.digest.hex()[:8] for record in trainers if record.round == newest}
    return "  ".join(
        [
            *([f"loss {sum(losses) / len(losses):.3f}"] if losses else []),
            f"{human_count(sum(record.tokens_per_second for record in trainers))} tokens/s",
            f"sent {human_bytes(sum(record.bytes_sent for record in trainers))}",
            f"digest {' '.join(sorted(digests))}",
        ]
    )
