"""Which rows a host computes next; pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, TypeVar

MAX_DECODE_ROWS = 64
TARGET_ROWS = 64
"""Rows of a batch while sessions decode: their tokens wait for the prompts' rows of the same batch."""
ALONE_ROWS = 256
"""Rows of a batch while nobody decodes."""
LEAST_PREFILL_ROWS = 8
"""Rows of a prompt in each batch, so that none starves."""

T = TypeVar("T")


class Waiting(NamedTuple):
    """A session with rows to compute.

    Attributes:
        rows: Received and not computed.
        is_prompt: True if they belong to its prompt.
        since: When it began to wait.
        is_shadow: True if another host serves it; its rows are computed when nobody else waits.
    """

    rows: int
    is_prompt: bool
    since: float
    is_shadow: bool = False


def next_batch(waiting: Sequence[Waiting]) -> list[tuple[int, int]]:
    """Return the sessions of the next batch, by index, each with the number of its rows.

    Decoding sessions come first, the longest waiting before the others. Prompts fill the rest of the batch, in the same
    order, and get a few rows even of a full one. A shadow is computed alone, when nobody else waits.
    """
    order = sorted(range(len(waiting)), key=lambda index: waiting[index].since)
    served = [index for index in order if not waiting[index].is_shadow]
    if not served and order:
        return [(order[0], min(waiting[order[0]].rows, TARGET_ROWS))]  # A short batch: others may come.
    order = served
    decoding = [index for index in order if not waiting[index].is_prompt]
    batch: list[tuple[int, int]] = []
    left = MAX_DECODE_ROWS
    for index in decoding:
        if left > 0:
            batch.append((index, min(waiting[index].rows, left)))
            left -= batch[-1][1]
    used = MAX_DECODE_ROWS - left
    room = max(LEAST_PREFILL_ROWS, TARGET_ROWS - used) if decoding else ALONE_ROWS
    for index in order:
        if waiting[index].is_prompt and room > 0:
            batch.append((index, min(waiting[index].rows, room)))
            room -= batch[-1][1]
    return batch
