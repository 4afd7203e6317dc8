"""Partition of a model into stages: pure functions of block costs, so all peers get the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from p2ptrain.errors import ManifestError
from p2ptrain.models.blocks import Span


def equal_work(work: Sequence[int], num_stages: int) -> tuple[Span, ...]:
    """Return contiguous stages whose largest work is minimal.

    The heaviest stage limits a pipeline with equally many hosts per stage. Within that minimum, each cut balances its
    two neighbours. Integer arithmetic gives the same result on all machines.

    Args:
        work: Per block, not negative.

    Raises:
        ManifestError: ``num_stages`` is not from 1 to the number of blocks.
    """
    if not 1 <= num_stages <= len(work):
        raise ManifestError(
            f"pipeline.stages = {num_stages}: the model has {len(work)} blocks, so 1 to {len(work)} stages"
        )
    least, most = max(work), sum(work)
    while least < most:  # Search for the least feasible bound; greedy filling is optimal for a given bound.
        bound = (least + most) // 2
        if len(_filled(work, bound)) <= num_stages:
            most = bound
        else:
            least = bound + 1
    spans = _filled(work, least)
    while len(spans) < num_stages:  # A cut makes no stage heavier.
        heaviest = max(
            (span for span in spans if len(span) > 1), key=lambda span: (sum(work[slice(*span)]), -span.start)
        )
        position = spans.index(heaviest)
        spans[position : position + 1] = _halves(work, heaviest)
    return tuple(_evened(work, spans))


def _evened(work: Sequence[int], spans: list[Span]) -> list[Span]:
    """Return as many stages with balanced neighbours; none exceeds the previous maximum."""
    for _ in range(len(spans)):  # Each pass moves excess work one stage further.
        before = list(spans)
        for left in range(len(spans) - 1):
            both = Span(spans[left].start, spans[left + 1].stop)
            heavier = max(sum(work[slice(*span)]) for span in spans[left : left + 2])
            halves = _halves(work, both)
            if max(sum(work[slice(*half)]) for half in halves) < heavier:
                spans[left : left + 2] = halves
        if spans == before:
            break
    return spans


def within_memory(sizes: Sequence[int], max_bytes: int) -> tuple[Span, ...]:
    """Return the fewest contiguous stages of at most ``max_bytes`` each.

    ``sizes`` are host memory per block; none exceeds ``max_bytes``.
    """
    return equal_work(sizes, len(_filled(sizes, max_bytes)))


def explicit(cuts: Sequence[int], num_blocks: int) -> tuple[Span, ...]:
    """Return the stages that begin at block 0 and at each of ``cuts``.

    Raises:
        ManifestError: The cuts do not ascend within the model.
    """
    ends = [0, *cuts, num_blocks]
    if any(start >= stop for start, stop in pairwise(ends)):
        raise ManifestError(
            f"pipeline.cuts = {list(cuts)}: give block numbers from 1 to {num_blocks - 1}, in order, each once"
        )
    return tuple(Span(start, stop) for start, stop in pairwise(ends))


def _filled(work: Sequence[int], bound: int) -> list[Span]:
    """Fill stages greedily up to ``bound``, which no block exceeds."""
    spans, start, load = [], 0, 0
    for number, amount in enumerate(work):
        if load + amount > bound and number > start:
            spans.append(Span(start, number))
            start, load = number, 0
        load += amount
    return [*spans, Span(start, len(work))]


def _halves(work: Sequence[int], span: Span) -> tuple[Span, Span]:
    """Return the cut that minimizes the heavier half; the first of equals."""
    sums = [0, *accumulate(work[slice(*span)])]
    cut = min(range(1, len(span)), key=lambda at: (max(sums[at], sums[-1] - sums[at]), at))
    return Span(span.start, span.start + cut), Span(span.start + cut, span.stop)
