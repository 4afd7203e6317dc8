"""The manifest's aggregation rules, by name: p2ptrain's own, and those of installed packages.

All members of a group must run the same rule, because any of them may recompute an owner's result.
`p2ptrain.averaging.vector.aggregation` has the formulas, and `p2ptrain.averaging.vector.conformance` a check of the
contract.
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
    """Combines the contributions to an owner's share; a `WeightedRule` or a `VotingRule`, without state.

    Other packages add theirs by the entry point group ``p2ptrain.rules``. A rule has the same bits on every machine:
    single fp32 operations in a fixed order, norms by `p2ptrain.codecs.norms.sum_of_squares`, scalars in double.
    """

    name: ClassVar[str]
    by_coordinate: ClassVar[bool] = False
    """True if it looks at each value by itself and drops values that few members bring: sparse parts do not fit."""

    @abstractmethod
    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        """Return each contributor's part of the result, in the order of ``tokens``; they add up to 1."""


class WeightedRule(Rule):
    """A weighted sum of the contributions. Unless overridden, each weighs its `counted_tokens`."""

    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        counted = counted_tokens(spec, tokens)
        total = sum(counted)
        return [count / total for count in counted]

    def weights(self, spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
        """Return what each contribution is multiplied by, in roster order: its share at most, and not negative.

        Args:
            spec: The rule's settings.
            norms: Of each contribution; zeros in a group of one or two.
            tokens: Of each contributor.
        """
        return self.shares(spec, tokens)


class VotingRule(Rule):
    """Any function of all contributions, in which each has one vote whatever its tokens."""

    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        return [1 / len(tokens)] * len(tokens)

    @abstractmethod
    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        """Combine a chunk of a share.

        Args:
            spec: The rule's settings.
            parts: One for each contributor in roster order: finite, fp32, shape ``[values]``. Scratch: they hold
                anything afterwards. If `by_coordinate`, any values of the share; else one whole chunk, of
                `p2ptrain.averaging.vector.reduce.chunk_values`, or the share's shorter last one.

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
        """Return weights that add up to less than 1 where a contribution is clipped."""
        factors = clip_factors(spec, norms, tokens)
        return [share * factor for share, factor in zip(self.shares(spec, tokens), factors, strict=True)]


class CenteredClip(VotingRule):
    """One iteration of `centered_clip`."""

    name = "centered_clip"

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return centered_clip(parts, spec.center_ratio, CENTERED_CLIP_ITERATIONS)


class Trimmed(VotingRule):
    """`trimmed`."""

    name = "trimmed"
    by_coordinate = True

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return trimmed(parts, spec.trim_fraction)


class Median(VotingRule):
    """`median`."""

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
    """Return the rule that a manifest names.

    Raises:
        IncompatibleError: This machine does not have it, or the one that a package brings fails `check_rule`.
    """
    return RULES.get(spec.aggregation)


def feedback_scale(spec: AveragingSpec, tokens: Sequence[int], position: int) -> float:
    """Return the factor of the loss of encoding a share's mean, with which the next mean regains it once.

    Args:
        spec: The rule and its settings.
        tokens: Of all contributors.
        position: Which of them asks.

    Returns:
        0 under rules by coordinate, which would drop as an outlier what only one member brings.
    """
    rule = get_rule(spec)
    return 0.0 if rule.by_coordinate else 1 / rule.shares(spec, tokens)[position]
