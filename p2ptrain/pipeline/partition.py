"""Cutting a model into stages: a pure function of what its blocks cost, so that all peers find the same stages."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate, pairwise

from p2ptrain.errors import ManifestError
from p2ptrain.models.family import Span


def equal_work(work: Sequence[int], num_stages: int) -> tuple[Span, ...]:
    """Stages of contiguous blocks of which the one with the most work has as little as can be.

    A stage's work sets the pace of a pipeline in which every stage has as many hosts. Within that, neighbours share
    their work out as evenly as a cut between them can. Integers alone, so that all machines find the same.

    Args:
        work: Of each block, not negative.
        num_stages: How many stages, each of at least one block.

    Raises:
        ManifestError: There are fewer blocks than that.
    """
    if not 1 <= num_stages <= len(work):
        raise ManifestError(
            f"pipeline.stages = {num_stages}: the model has {len(work)} blocks, so 1 to {len(work)} stages"
        )
    least, most = max(work), sum(work)
    while least < most:  # The least bound that so many stages can keep; greedy filling is optimal for a given bound.
        bound = (least + most) // 2
        if len(_filled(work, bound)) <= num_stages:
            most = bound
        else:
            least = bound + 1
    spans = _filled(work, least)
    while len(spans) < num_stages:  # Cutting a stage makes none heavier.
        heaviest = max(
            (span for span in spans if len(span) > 1), key=lambda span: (sum(work[slice(*span)]), -span.start)
        )
        position = spans.index(heaviest)
        spans[position : position + 1] = _halves(work, heaviest)
    return tuple(_evened(work, spans))


def _evened(work: Sequence[int], spans: list[Span]) -> list[Span]:
    """The same number of stages, none heavier than the heaviest, with the cuts moved to where neighbours are even."""
    for _ in range(len(spans)):  # Each pass brings what is over one stage further.
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
    """As few stages of contiguous blocks as can be, none of which needs more than ``max_bytes``.

    Args:
        sizes: What hosting each block takes, in bytes.
        max_bytes: What a volunteer has for a stage.

    Raises:
        ManifestError: One block alone needs more.
    """
    if max(sizes) > max_bytes:
        largest = max(range(len(sizes)), key=lambda number: sizes[number])
        raise ManifestError(
            f"pipeline.stage_memory = {max_bytes} bytes is not enough for block {largest}, which needs {sizes[largest]}"
        )
    return equal_work(sizes, len(_filled(sizes, max_bytes)))


def explicit(cuts: Sequence[int], num_blocks: int) -> tuple[Span, ...]:
    """The stages that begin at block 0 and at each of ``cuts``.

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
    """Stages filled one after another up to ``bound``, which no block exceeds."""
    spans, start, load = [], 0, 0
    for number, amount in enumerate(work):
        if load + amount > bound and number > start:
            spans.append(Span(start, number))
            start, load = number, 0
        load += amount
    return [*spans, Span(start, len(work))]


def _halves(work: Sequence[int], span: Span) -> tuple[Span, Span]:
    """The cut at which the heavier half is the lightest; the first of equals."""
    sums = [0, *accumulate(work[slice(*span)])]
    cut = min(range(1, len(span)), key=lambda at: (max(sums[at], sums[-1] - sums[at]), at))
    return Span(span.start, span.start + cut), Span(span.start + cut, span.stop)
