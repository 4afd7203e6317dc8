"""Which rows a host computes next; pure."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

MAX_DECODE_ROWS, MAX_DRAFTED_ROWS = 64, 8
"""Rows of sessions that decode in a batch; of one of them beside others, most of which are drafts."""
MAX_PROMPT_ROWS = 64
"""Prompts' rows of a batch while sessions decode, at most."""
ALONE_ROWS = 256
"""Rows of a batch while nobody decodes, at most; > `MAX_PROMPT_ROWS`."""
FIRST_ROWS = 8
"""Prompts' rows of a batch while sessions decode and no cost of a row is known."""
TARGET_STEPS = 1.5
"""Predicted time of a batch with prompts' rows, in multiples of the one that decodes only."""
DECODING_SECONDS = 1.0
"""Time for which a session that decoded counts as decoding: its next token may be on its way."""
HOLD_SHARE = 0.5
"""Longest wait for rows that are about to come, as a share of a batch's base cost."""
KEPT = 0.95
"""Weight of the batches before in the costs, for each newer one."""
LEAST_SPREAD = 0.01
"""Least variance of the batches' rows that tells what a row costs, as a share of their mean square."""


class Waiting(NamedTuple):
    """A session with rows to compute.

    Attributes:
        rows: Received and not computed.
        is_prompt: True if they belong to its prompt.
        since: When it began to wait.
        is_shadow: True if another host serves it; its rows are computed when nobody else waits.
        together: Sessions whose rows are on their way with this one's, itself included; 0 if unknown.
    """

    rows: int
    is_prompt: bool
    since: float
    is_shadow: bool = False
    together: int = 0


class Costs:
    """Seconds of a batch: ``base + row * rows``, by least squares of the relative errors of recent batches.

    Attributes:
        row: None until batches of several sizes were measured.
    """

    def __init__(self) -> None:
        self.base = 0.0
        self.row: float | None = None
        self._sums: tuple[float, ...] = (0.0, 0.0, 0.0, 0.0, 0.0)

    def note(self, rows: int, seconds: float) -> None:
        """Record a batch of at least one row."""
        weight = 1.0 / rows**2  # A long batch's error would hide the time of a short one.
        terms = (1.0, rows, seconds, rows * rows, rows * seconds)
        self._sums = tuple(KEPT * total + weight * term for total, term in zip(self._sums, terms, strict=True))
        one, x, y, xx, xy = self._sums
        spread = one * xx - x * x
        if spread > LEAST_SPREAD * one * xx:
            self.row = max(0.0, (one * xy - x * y) / spread)
        self.base = max(0.0, (y - (self.row or 0.0) * x) / one)

    def prompt_rows(self, decoding: int) -> int:
        """Return how many rows of prompts a batch may have beside ``decoding`` rows."""
        if self.row is None:
            return FIRST_ROWS
        spare = (TARGET_STEPS - 1) * (self.base + self.row * decoding)
        return MAX_PROMPT_ROWS if self.row * MAX_PROMPT_ROWS <= spare else max(1, int(spare / self.row))

    def rows_alone(self, waiting: int, num_later: int) -> int:
        """Return the rows of a batch while nobody decodes, with which ``num_later`` later stages end soonest.

        ``n`` waiting rows take ``n / r + num_later`` batches of ``base + row * r``: least at
        ``r * r = n * base / (num_later * row)``.
        """
        if not num_later or self.row == 0.0:
            return ALONE_ROWS
        best = math.sqrt(waiting * self.base / (num_later * self.row)) if self.row else 0.0
        return min(max(MAX_PROMPT_ROWS, int(best)), ALONE_ROWS)


def hold_until(waiting: Iterable[Waiting], costs: Costs, returning: Iterable[tuple[float, float]] = ()) -> float:
    """Return when the next batch begins at the latest, if rows are about to come that it should have; else 0.

    These are the rest of those that were computed together, and before a batch of prompts' rows alone those of sessions
    that decode. A batch without them delays them by ``base``, and more.

    Args:
        returning: When each session that decodes did so last, and the seconds until its next row the time before.
    """
    patience = HOLD_SHARE * costs.base
    served = [each for each in waiting if not each.is_shadow]
    decoding = [each for each in served if not each.is_prompt]
    if not decoding and served:
        return max((at + patience for at, usual in returning if usual < patience), default=0.0)
    if max((each.together for each in decoding), default=0) <= len(decoding):
        return 0.0
    return min(each.since for each in decoding) + patience


def next_batch(
    waiting: Sequence[Waiting],
    costs: Costs,
    decoded_at: Iterable[float] = (),
    now: float = 0.0,
    num_later: int = 0,
) -> list[tuple[int, int]]:
    """Return the sessions of the next batch, by index, each with the number of its rows.

    Decoding sessions come first, the longest waiting before the others. Prompts get as many rows, in the same order, as
    delay those sessions little. A shadow is computed alone, when nobody else waits.

    Args:
        decoded_at: When each session decoded last, also those that do not wait.
        num_later: Stages after this one, which wait for its output.
    """
    order = sorted(range(len(waiting)), key=lambda index: waiting[index].since)
    served = [index for index in order if not waiting[index].is_shadow]
    decoding = [index for index in served if not waiting[index].is_prompt]
    num_recent = sum(now - at < DECODING_SECONDS for at in decoded_at)
    batch: list[tuple[int, int]] = []
    left = MAX_DECODE_ROWS
    most = left if max(len(decoding), num_recent) < 2 else MAX_DRAFTED_ROWS
    for index in decoding:
        if left > 0:
            batch.append((index, min(waiting[index].rows, left, most)))
            left -= batch[-1][1]
    num_decoding = max(MAX_DECODE_ROWS - left, min(num_recent, MAX_DECODE_ROWS))
    room = costs.prompt_rows(num_decoding)
    if not decoding and not num_recent:
        room = costs.rows_alone(sum(waiting[index].rows for index in served), num_later)
    if not served and order:
        return [(order[0], min(waiting[order[0]].rows, room, MAX_PROMPT_ROWS))]  # A short batch: others may come.
    for index in served:
        if waiting[index].is_prompt and room > 0:
            batch.append((index, min(waiting[index].rows, room)))
            room -= batch[-1][1]
    return batch
