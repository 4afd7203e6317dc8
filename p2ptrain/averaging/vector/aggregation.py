"""Robust aggregation: pure functions that combine the contributions of a group, some of which may lie.

`p2ptrain.averaging.vector.rules` makes the manifest's rules of them. A group's members are judged by their
contributions alone. Nothing here tells a liar from an honest peer with unusual data; the rules bound how far a
minority can move the result, at some price where all are honest:

=================  =============================  ======================================================================
rule               a peer counts                  what bounds a minority
=================  =============================  ======================================================================
``mean``           by its tokens                  nothing but `out_of_proportion` and the limits of tokens and values
``norm_clip``      by its tokens                  no contribution is longer than ``clip_ratio`` times the group's median
                                                  (SparseLoCo, arXiv 2508.15706); its direction is free
``centered_clip``  as one vote                    no contribution pulls from further than ``center_ratio`` times the
                                                  median distance (Karimireddy et al., arXiv 2012.10333, algorithm 2)
``trimmed``        as one vote                    each coordinate is the mean of what is left between the trimmed ends
                                                  (Yin et al., arXiv 1803.01498, definition 2)
``median``         as one vote                    each coordinate is the median (the same, definition 1)
=================  =============================  ======================================================================

Tokens are claims, and a vote that its caster may weigh is no bound: the rules that count votes ignore them, and the
other two cap each at ``max_weight_ratio`` times the group's median.

An owner sees its own share of the vector and no more, so norms and distances are taken share by share or chunk by
chunk. BTARD (arXiv 2106.11257, section 3) clips each peer's partition by itself too: squared errors add up over the
partitions, so that what holds of every one holds of the whole vector. What this does not bound is a liar that spends
all of its allowance on one share: within a share it may be as long as the group's median there.

**Same bits for everybody.** A second owner can recompute a result: arithmetic on values is single fp32 operations in
a fixed order (of the roster, or of a sorting network), norms are those of `p2ptrain.codecs.norms.sum_of_squares`, and
weights are computed in double and rounded once. Results are never negative zero, whose sign minimum and maximum may
treat in either way.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

from p2ptrain.manifest import AveragingSpec

if TYPE_CHECKING:
    from torch import Tensor

MIN_FOR_MEDIAN = 3
"""Of fewer norms, none can be called out of proportion: each may be the honest one."""

CENTERED_CLIP_ITERATIONS = 1
"""From the median, more of them were measured to gain nothing."""


# --- who counts, and how much ---------------------------------------------------------------------------------------


def typical(values: Sequence[float]) -> float:
    """The lower median of the values above zero, which no minority can raise or lower beyond the others' own.

    Zeros are left out, because a share may hold parameters that most members' data did not touch. 0 when fewer than
    three values are left: then there is no majority to compare with.
    """
    positive = sorted(value for value in values if value > 0)
    return positive[(len(positive) - 1) // 2] if len(positive) >= MIN_FOR_MEDIAN else 0.0


def out_of_proportion(norms: Mapping[int, float], max_ratio: float) -> dict[int, float]:
    """The contributions whose norm is more than ``max_ratio`` times the group's `typical` one.

    Args:
        norms: By member: the norm of its contribution to one share.
        max_ratio: The manifest's ``averaging.max_norm_ratio``.

    Returns:
        By member: its norm as a multiple of the typical one. Empty in a group of one or two.
    """
    usual = typical(list(norms.values()))
    if usual == 0:
        return {}
    return {index: norm / usual for index, norm in norms.items() if not norm <= max_ratio * usual}


def clip_factors(spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
    """Return the factor of each contribution that makes it no longer than ``norm_clip`` allows.

    That is ``clip_ratio`` times the `typical` norm, or, for who brings more tokens than others, times the typical norm
    per token and its tokens, as far as they count: a fast peer's update after many steps is longer than the others'.
    All factors are 1 in a group of one or two.

    Args:
        spec: The ratios.
        norms: Of each contribution.
        tokens: Of each contributor, in the same order.
    """
    usual, counted = typical(norms), counted_tokens(spec, tokens)
    pace = typical([norm / count for norm, count in zip(norms, counted, strict=True)])
    limits = [spec.clip_ratio * max(usual, pace * count) for count in counted]
    return [limit / norm if 0 < limit < norm else 1.0 for norm, limit in zip(norms, limits, strict=True)]


def counted_tokens(spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
    """The tokens of each contributor without what is beyond ``max_weight_ratio`` times the group's median (`typical`).

    All of them in a group of one or two.
    """
    usual = typical(tokens)
    return [min(float(count), spec.max_weight_ratio * usual) if usual else float(count) for count in tokens]


# --- rules on a stack of parts --------------------------------------------------------------------------------------


def median(parts: list[Tensor]) -> Tensor:
    """The coordinate-wise median, the mean of the two middle values for an even number; see `VotingRule.combine`.

    While fewer than half of the parts are hostile, every coordinate lies between honest values of it.
    """
    return _middle(parts).add_(0.0)


def trimmed(parts: list[Tensor], fraction: float) -> Tensor:
    """The coordinate-wise mean without the largest and the smallest values; see `VotingRule.combine`.

    At each end ``ceil(fraction * n)`` values go, so that so many hostile parts cannot move a coordinate out of the
    range of its honest values; but at least one value, or two, stay.
    """
    num_parts = len(parts)
    low = num_trimmed(num_parts, fraction)
    ordered = _select(parts, low, num_parts - low)
    # Around one of the kept values, so that equal values give themselves exactly.
    center = ordered[low]
    if num_parts - 2 * low > 1:
        total = ordered[low + 1].sub_(center)
        for row in ordered[low + 2 : num_parts - low]:
            total.add_(row.sub_(center))
        center.add_(total.div_(num_parts - 2 * low))
    return center.add_(0.0)


def num_trimmed(num_parts: int, fraction: float) -> int:
    """Return how many values `trimmed` drops at each end."""
    return min(math.ceil(fraction * num_parts - 1e-9), (num_parts - 1) // 2)


def centered_clip(parts: list[Tensor], center_ratio: float, iterations: int) -> Tensor:
    """CenteredClip (arXiv 2012.10333, algorithm 2) from the coordinate-wise median; see `VotingRule.combine`.

    Each iteration moves the center ``v`` by the mean of ``min(1, tau / |x - v|) * (x - v)``, with ``tau`` =
    ``center_ratio`` times the lower median of the distances. So a hostile minority moves it by less than ``tau``, and
    while all are within ``tau`` of it, the result is the plain mean.
    """
    import torch

    from p2ptrain.codecs.norms import sum_of_squares

    num_parts = len(parts)
    center = _middle([part.clone() for part in parts])
    shift, scratch = center, torch.empty_like(center)
    for _ in range(iterations):
        distances = []
        for part in parts:  # From here on, parts are differences from the center.
            distances.append(math.sqrt(sum_of_squares(part.sub_(shift), scratch)))
        limit = center_ratio * sorted(distances)[(num_parts - 1) // 2]
        shift = torch.zeros_like(center)
        for part, distance in zip(parts, distances, strict=True):
            shift.add_(part if distance <= limit else torch.mul(part, limit / distance, out=scratch))
        shift.div_(num_parts)
        center = center.add(shift)
    return center.add_(0.0)


def _middle(parts: list[Tensor]) -> Tensor:
    """The median of each coordinate; ``parts`` are scratch."""
    low, high = (len(parts) - 1) // 2, len(parts) // 2
    ordered = _select(parts, low, high + 1)
    return ordered[low] if low == high else ordered[low].add_(ordered[high]).mul_(0.5)


# --- sorting --------------------------------------------------------------------------------------------------------


def _select(parts: list[Tensor], first: int, stop: int) -> list[Tensor]:
    """The parts' values in ascending order at each coordinate; only the rows ``[first, stop)`` of them are right.

    Minimum and maximum of whole rows, which are exact and vectorised, instead of a sort of each column.
    """
    import torch

    rows, spare = list(parts), torch.empty_like(parts[0])
    for low, high, keeps_low, keeps_high in _selection_network(len(parts), first, stop):
        if not keeps_high:
            torch.minimum(rows[low], rows[high], out=rows[low])
        elif not keeps_low:
            torch.maximum(rows[low], rows[high], out=rows[high])
        else:
            torch.minimum(rows[low], rows[high], out=spare)
            torch.maximum(rows[low], rows[high], out=rows[high])
            rows[low], spare = spare, rows[low]
    return rows


@lru_cache(maxsize=256)
def _selection_network(num_rows: int, first: int, stop: int) -> tuple[tuple[int, int, bool, bool], ...]:
    """Batcher's odd-even merge sort without what the rows ``[first, stop)`` of its result do not depend on.

    Returns:
        Comparators in order: (row of the smaller value, row of the larger, whether each of them is needed later).
    """
    needed = set(range(first, stop))
    kept = []
    for low, high in reversed(_batcher(num_rows)):
        keeps_low, keeps_high = low in needed, high in needed
        if keeps_low or keeps_high:
            needed |= {low, high}
            kept.append((low, high, keeps_low, keeps_high))
    return tuple(reversed(kept))


def _batcher(num_rows: int) -> list[tuple[int, int]]:
    """Comparators of Batcher's odd-even merge sort for any number of rows (Knuth, TAOCP 3, algorithm 5.2.2M)."""
    comparators = []
    levels = max(1, math.ceil(math.log2(num_rows))) if num_rows > 1 else 0
    step = 1 << (levels - 1) if levels else 0
    while step:
        span, remainder, distance = 1 << (levels - 1), 0, step
        while True:
            comparators += [(i, i + distance) for i in range(num_rows - distance) if i & step == remainder]
            if span == step:
                break
            distance, span, remainder = span - step, span >> 1, step
        step >>= 1
    return comparators
