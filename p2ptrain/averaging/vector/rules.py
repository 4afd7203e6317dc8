"""Aggregation rules by the name in the manifest: p2ptrain's own, and those of installed packages.

All members of a group must run the same rule, because any member may recompute an owner's result. A rule judges a
member by its contribution alone, and cannot tell a lie from unusual data. It bounds how far a minority of Byzantine
members can move the result:

=================  ======  ===========================================================================================
rule               weight  bound on a minority
=================  ======  ===========================================================================================
``mean``           tokens  none but `out_of_proportion` and the limits on tokens and values
``norm_clip``      tokens  a contribution is at most ``clip_ratio`` times as long as the group's median (SparseLoCo,
                           arXiv 2508.15706); its direction is free
``centered_clip``  equal   a contribution pulls with at most ``center_ratio`` times the median distance
                           (Karimireddy et al., arXiv 2012.10333, algorithm 2)
``trimmed``        equal   each coordinate is a trimmed mean (Yin et al., arXiv 1803.01498, definition 2)
``median``         equal   each coordinate is a median (same paper, definition 1)
=================  ======  ===========================================================================================

Members report their own tokens: voting rules ignore them, and the others cap them at ``max_weight_ratio`` times the
group's median. Among strangers, a newcomer has a part of its weight (`Claim`), and counts as little in the medians.

An owner sees only its share of the vector, so norms and distances are per share or per chunk, as in BTARD (arXiv
2106.11257, section 3). A liar may still spend its whole allowance on one share, up to the group's median norm there.

**Bit-exact results.** A second owner can recompute a result: see `Rule`. Weights are computed in double and rounded
once. Results are never negative zero, because minimum and maximum may order the two zeros either way.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, ClassVar, NamedTuple

from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.extensions import Extensions
from p2ptrain.manifest import AveragingSpec

if TYPE_CHECKING:
    from torch import Tensor

MIN_FOR_MEDIAN = 3
"""Fewer values have no majority to compare with."""
CENTERED_CLIP_ITERATIONS = 1
"""More iterations gain nothing when the first starts at the median."""


# --- norms and weights ----------------------------------------------------------------------------------------------


class Claim(NamedTuple):
    """A contributor's tokens by its own account, and how many eighths of their weight it has."""

    tokens: int
    trust: int = FULL_TRUST


def typical(values: Sequence[float], trust: Sequence[int]) -> float:
    """Return the lower weighted median of the positive values, or 0 for fewer than `MIN_FOR_MEDIAN` of them.

    Who has less than half of the ``trust`` cannot move it out of the range of the others' values. Zeros do not count,
    because a share may hold parameters that most members' data did not touch.
    """
    positive = sorted((value, weight) for value, weight in zip(values, trust, strict=True) if value > 0)
    if len(positive) < MIN_FOR_MEDIAN:
        return 0.0
    sums = list(accumulate(weight for _, weight in positive))
    return positive[bisect_left(sums, sums[-1] / 2)][0]


def out_of_proportion(norms: Mapping[int, float], trust: Sequence[int], max_ratio: float) -> dict[int, float]:
    """Return the members whose norm in a share exceeds ``max_ratio`` times the `typical` norm, with this multiple.

    ``trust`` is that of all members, by index.
    """
    usual = typical(list(norms.values()), [trust[index] for index in norms])
    return {index: norm / usual for index, norm in norms.items() if usual and not norm <= max_ratio * usual}


def clip_factors(spec: AveragingSpec, norms: Sequence[float], claims: Sequence[Claim]) -> list[float]:
    """Return the factor that clips each contribution to the limit of ``norm_clip``; all 1 in a group of one or two.

    The limit is ``clip_ratio`` times the larger of two values: the `typical` norm, and the typical norm per token times
    the peer's tokens within `tokens_within_limit`. The second admits a fast peer, whose update after many steps is
    longer.
    """
    trust, counts = [claim.trust for claim in claims], tokens_within_limit(spec, claims)
    usual = typical(norms, trust)
    pace = typical([norm / count for norm, count in zip(norms, counts, strict=True)], trust)
    limits = [spec.clip_ratio * max(usual, pace * count) for count in counts]
    return [limit / norm if 0 < limit < norm else 1.0 for norm, limit in zip(norms, limits, strict=True)]


def tokens_within_limit(spec: AveragingSpec, claims: Sequence[Claim]) -> list[float]:
    """Return each contributor's tokens, capped at ``max_weight_ratio`` times the `typical` count if there is one."""
    tokens = [float(claim.tokens) for claim in claims]
    usual = typical(tokens, [claim.trust for claim in claims])
    return [min(count, spec.max_weight_ratio * usual) if usual else count for count in tokens]


def counted_tokens(spec: AveragingSpec, claims: Sequence[Claim]) -> list[float]:
    """Return each contributor's weight: its `tokens_within_limit`, and of a newcomer a part of them."""
    counts = tokens_within_limit(spec, claims)
    return [count * claim.trust / FULL_TRUST for count, claim in zip(counts, claims, strict=True)]


# --- rules on a stack of parts --------------------------------------------------------------------------------------


def median(parts: list[Tensor]) -> Tensor:
    """Return the coordinate-wise median, for an even number the mean of the two middle values.

    If fewer than half of the parts are hostile, every coordinate lies between honest values.
    """
    return _middle(parts).add_(0.0)


def trimmed(parts: list[Tensor], fraction: float) -> Tensor:
    """Return the coordinate-wise mean without the ``ceil(fraction * n)`` smallest and largest values.

    That many hostile parts cannot move a coordinate out of the range of its honest values. At least one value stays, or
    two for an even number.
    """
    low = num_trimmed(len(parts), fraction)
    center, *others = _select(parts, low, len(parts) - low)[low : len(parts) - low]
    if others:  # Sum differences from one kept value, so that the mean of equal values is exact.
        total = others[0].sub_(center)
        for row in others[1:]:
            total.add_(row.sub_(center))
        center.add_(total.div_(1 + len(others)))
    return center.add_(0.0)


def num_trimmed(num_parts: int, fraction: float) -> int:
    return min(math.ceil(fraction * num_parts - 1e-9), (num_parts - 1) // 2)


def centered_clip(parts: list[Tensor], center_ratio: float, iterations: int) -> Tensor:
    """Return CenteredClip (arXiv 2012.10333, algorithm 2), started at the coordinate-wise median.

    Each iteration moves the center ``v`` by the mean of ``min(1, tau / |x - v|) * (x - v)``, where ``tau`` is
    ``center_ratio`` times the lower median of the distances. A hostile minority moves it by less than ``tau``. If all
    parts lie within ``tau``, the result is the plain mean.
    """
    import torch

    from p2ptrain.codecs.base import sum_of_squares

    num_parts = len(parts)
    center = _middle([part.clone() for part in parts])
    shift, scratch = center, torch.empty_like(center)
    for _ in range(iterations):
        distances = []
        for part in parts:  # parts now hold differences from the center
            distances.append(math.sqrt(sum_of_squares(part.sub_(shift), scratch)))
        limit = center_ratio * sorted(distances)[(num_parts - 1) // 2]
        shift = torch.zeros_like(center)
        for part, distance in zip(parts, distances, strict=True):
            shift.add_(part if distance <= limit else torch.mul(part, limit / distance, out=scratch))
        shift.div_(num_parts)
        center = center.add(shift)
    return center.add_(0.0)


def _middle(parts: list[Tensor]) -> Tensor:
    """Return the median of each coordinate; overwrites ``parts``."""
    low, high = (len(parts) - 1) // 2, len(parts) // 2
    ordered = _select(parts, low, high + 1)
    return ordered[low] if low == high else ordered[low].add_(ordered[high]).mul_(0.5)


# --- sorting --------------------------------------------------------------------------------------------------------


def _select(parts: list[Tensor], first: int, stop: int) -> list[Tensor]:
    """Sort the parts at each coordinate; only the rows ``[first, stop)`` of the result are valid.

    A sorting network on whole rows: minimum and maximum are exact and vectorised.
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
    """Return the comparators of `_batcher` on which the rows ``[first, stop)`` of its result depend.

    Returns:
        In order: (row of the smaller value, row of the larger, whether each is needed later).
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
    """Return the comparators of Batcher's odd-even merge sort for any number of rows (TAOCP 3, algorithm 5.2.2M)."""
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


class Rule(ABC):
    """Stateless rule that combines the contributions to a share; either a `WeightedRule` or a `VotingRule`.

    Other packages add rules through the entry point group ``p2ptrain.rules``. A rule must give the same bits on every
    machine: single fp32 operations in a fixed order, norms by `p2ptrain.codecs.base.sum_of_squares`, double scalars.
    `p2ptrain.averaging.vector.conformance` checks this.
    """

    name: ClassVar[str]
    by_coordinate: ClassVar[bool] = False
    """True if the rule treats each value separately and drops values from few members; unfit for sparse parts."""

    @abstractmethod
    def shares(self, spec: AveragingSpec, claims: Sequence[Claim]) -> list[float]:
        """Return each contributor's fraction of the result, in the order of ``claims``; they sum to 1."""


class WeightedRule(Rule):
    """Weighted sum of the contributions; by default weighted by `counted_tokens`."""

    def shares(self, spec: AveragingSpec, claims: Sequence[Claim]) -> list[float]:
        counted = counted_tokens(spec, claims)
        total = sum(counted)
        return [count / total for count in counted]

    def weights(self, spec: AveragingSpec, norms: Sequence[float], claims: Sequence[Claim]) -> list[float]:
        """Return the weight of each contribution in roster order, between 0 and its `shares` value.

        In a group of one or two, ``norms`` are zeros.
        """
        return self.shares(spec, claims)


class VotingRule(Rule):
    """Any function of all contributions that gives each one vote, whatever it claims."""

    def shares(self, spec: AveragingSpec, claims: Sequence[Claim]) -> list[float]:
        return [1 / len(claims)] * len(claims)

    @abstractmethod
    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        """Combine a chunk of a share.

        Args:
            parts: One for each contributor in roster order: finite, fp32, shape ``[values]``. The rule may overwrite
                them. If `by_coordinate`, any values of the share. Otherwise one whole chunk of
                `p2ptrain.averaging.vector.chunks.chunk_values`, or the share's shorter last chunk.

        Returns:
            fp32, ``[values]``; may be one of ``parts``.
        """


class Mean(WeightedRule):
    name = "mean"


class NormClip(WeightedRule):
    """The mean of contributions clipped by `clip_factors`, weighted by tokens."""

    name = "norm_clip"

    def weights(self, spec: AveragingSpec, norms: Sequence[float], claims: Sequence[Claim]) -> list[float]:
        """Return weights that sum to less than 1 if a contribution is clipped."""
        factors = clip_factors(spec, norms, claims)
        return [share * factor for share, factor in zip(self.shares(spec, claims), factors, strict=True)]


class CenteredClip(VotingRule):
    """One iteration of `centered_clip`."""

    name = "centered_clip"

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return centered_clip(parts, spec.center_ratio, CENTERED_CLIP_ITERATIONS)


class Trimmed(VotingRule):
    """The coordinate-wise mean without the extremes; see `trimmed`."""

    name = "trimmed"
    by_coordinate = True

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return trimmed(parts, spec.trim_fraction)


class Median(VotingRule):
    """The coordinate-wise median; see `median`."""

    name = "median"
    by_coordinate = True

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return median(parts)


RULES = Extensions(
    "p2ptrain.rules",
    "aggregation rule",
    Rule,
    {kind.name: f"{__name__}:{kind.__name__}" for kind in (Mean, NormClip, CenteredClip, Trimmed, Median)},
    "p2ptrain.averaging.vector.conformance:check_rule",
)


def get_rule(spec: AveragingSpec) -> Rule:
    """Return the rule that the manifest names.

    Raises:
        IncompatibleError: The rule is not installed, or a package's rule fails `check_rule`.
    """
    return RULES.get(spec.aggregation)
