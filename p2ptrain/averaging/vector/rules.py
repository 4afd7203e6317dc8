"""Aggregation rules by the name that the manifest gives: p2ptrain's own, and those of installed packages.

All members of a group must run the same rule, because any member may recompute an owner's result.
`p2ptrain.averaging.vector.aggregation` holds the formulas, `p2ptrain.averaging.vector.conformance` the contract check.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

from p2ptrain.averaging.vector.aggregation import (
    CENTERED_CLIP_ITERATIONS,
    centered_clip,
    clip_factors,
    counted_tokens,
    median,
    trimmed,
)
from p2ptrain.extensions import Extensions
from p2ptrain.manifest import AveragingSpec

if TYPE_CHECKING:
    from torch import Tensor


class Rule(ABC):
    """Stateless rule that combines the contributions to a share; either a `WeightedRule` or a `VotingRule`.

    Other packages add rules through the entry point group ``p2ptrain.rules``. A rule must give the same bits on every
    machine: single fp32 operations in a fixed order, norms by `p2ptrain.codecs.arrays.sum_of_squares`, double scalars.
    """

    name: ClassVar[str]
    by_coordinate: ClassVar[bool] = False
    """True if the rule treats each value separately and drops values from few members; unfit for sparse parts."""

    @abstractmethod
    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        """Return each contributor's fraction of the result, in the order of ``tokens``; they sum to 1."""


class WeightedRule(Rule):
    """Weighted sum of the contributions; by default weighted by `counted_tokens`."""

    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        counted = counted_tokens(spec, tokens)
        total = sum(counted)
        return [count / total for count in counted]

    def weights(self, spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
        """Return the weight of each contribution in roster order, between 0 and its `shares` value.

        In a group of one or two, ``norms`` are zeros.
        """
        return self.shares(spec, tokens)


class VotingRule(Rule):
    """Any function of all contributions that gives each one vote, whatever its tokens."""

    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        return [1 / len(tokens)] * len(tokens)

    @abstractmethod
    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        """Combine a chunk of a share.

        Args:
            parts: One for each contributor in roster order: finite, fp32, shape ``[values]``. The rule may overwrite
                them. If `by_coordinate`, any values of the share. Otherwise one whole chunk of
                `p2ptrain.averaging.vector.reduce.chunk_values`, or the share's shorter last chunk.

        Returns:
            fp32, ``[values]``; may be one of ``parts``.
        """


class Mean(WeightedRule):
    """The mean, weighted by tokens."""

    name = "mean"


class NormClip(WeightedRule):
    """The mean of contributions clipped by `clip_factors`, weighted by tokens."""

    name = "norm_clip"

    def weights(self, spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
        """Return weights that sum to less than 1 if a contribution is clipped."""
        factors = clip_factors(spec, norms, tokens)
        return [share * factor for share, factor in zip(self.shares(spec, tokens), factors, strict=True)]


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


def feedback_scale(spec: AveragingSpec, tokens: Sequence[int], position: int) -> float:
    """Return the factor by which an owner adds its mean's encoding error, so that the next mean counts it once.

    Args:
        position: Index of the owner in ``tokens``.

    Returns:
        1 / (the owner's share); 0 under rules by coordinate, which would drop a value from one member as an outlier.
    """
    rule = get_rule(spec)
    return 0.0 if rule.by_coordinate else 1 / rule.shares(spec, tokens)[position]
