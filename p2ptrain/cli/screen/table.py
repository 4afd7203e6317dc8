"""The table of peers on a terminal, in ``status`` and ``up``."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from p2ptrain.status.formats import human_bytes, human_count, human_hash
from p2ptrain.status.stages import TRAINING_ROLES

if TYPE_CHECKING:
    from rich.text import Text

    from p2ptrain.status.views import Headline, PeerView, RoundView

COLUMNS = (
    "peer", "state", "stage", "round", "tokens/s", "loss", "given", "group", "sent", "received", "reached", "digest",
)  # fmt: skip
_RIGHT = {"round", "tokens/s", "loss", "given", "group", "sent", "received"}
_LEAVE_OUT_FIRST = ("given", "reached", "received", "group", "sent", "digest", "tokens/s")
_MAX_NAME_CHARS = 24
FEEDS = "feeds"
"""The ``stage`` cell of a trainer that hosts no stage and sends microbatches through all."""


def peer_row(peer: PeerView, num_stages: int = 1) -> tuple[str, ...]:
    """Return the cells of a peer, in the order of `COLUMNS`; empty where a value does not apply."""
    record = peer.record
    # A trainer without a stage of the pipeline takes part in no round.
    trains = record.role != "bootstrap" if num_stages == 1 else bool(peer.stages)
    last = record.last_rounds[-1] if record.last_rounds else None
    return (
        peer.name,
        record.state,
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


def _shown_columns(rows: Sequence[Sequence[str]]) -> list[int]:
    """Return the indices of `COLUMNS`, without that of the stage if no row has one."""
    stage = COLUMNS.index("stage")
    return [index for index in range(len(COLUMNS)) if index != stage or any(row[stage] for row in rows)]


def fit_columns(rows: Sequence[Sequence[str]], width: int) -> list[tuple[str, ...]]:
    """Return a header and the rows of `peer_row`, fitted to ``width`` terminal columns.

    Long names are truncated. The least important columns are dropped until the rest fits, with two characters between
    columns. Below 40 columns the result may still be too long.
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
    """Return printable text of at most ``width`` terminal columns, with an ellipsis if truncated."""
    from rich.cells import cell_len, set_cell_size

    text = printable(text)
    return text if cell_len(text) <= width else set_cell_size(text, max(0, width - 1)).rstrip() + "…"[: max(0, width)]


def plain_table(rows: Iterable[Sequence[str]], width: int | None = None) -> str:
    """Return the rows of `peer_row` as aligned text without colours or rules; a ``width`` of None keeps all columns."""
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
    """Return the table for a terminal: a header, a rule, at most ``most`` lines, and the number of omitted rows."""
    from rich.text import Text

    shown = rows if len(rows) <= most else rows[: max(0, most - 1)]
    header, *body = plain_table(shown, width).split("\n")
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
    digests = sorted(
        {
            (peer.stages[:1], human_hash(peer.record.digest)[:8])
            for peer in peers
            if peer.record.role in TRAINING_ROLES and peer.record.round == last and any(peer.record.digest)
        }
    )
    is_cut = any(peer.stages for peer in peers)
    shown = " ".join("".join([*(f"{stage}:" for stage in stages), digest]) for stages, digest in digests)
    return "  ".join(
        [
            f"round {last}" if first == last else f"rounds {first}-{last}",
            f"{fewest.contributors}/{fewest.members} peers",
            f"averaged in {seconds:.1f} s",
            *([state] if state else []),
            *([f"{'stage digests' if is_cut else 'digest'} {shown}"] if digests else []),
        ]
    )


def present_state(headline: Headline, held_out: float | None) -> str:
    rate = headline.tokens_per_second
    return "  ".join(
        [
            *([f"loss {headline.loss:.3f}"] if headline.loss is not None else []),
            *([f"held-out {held_out:.2f}"] if held_out is not None else []),
            *([f"{human_count(rate)} tokens/s"] if rate is not None else []),
        ]
    )


def human_time(seconds: float) -> str:
    """Return ``0:07``, ``12:34`` or ``1:02:03``."""
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
