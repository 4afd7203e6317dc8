"""Contract check for aggregation rules; `p2ptrain.averaging.vector.rules` refuses a plugin rule that fails it."""

from __future__ import annotations

import math

import torch

from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector.rules import Claim, Rule, VotingRule, WeightedRule
from p2ptrain.extensions import require
from p2ptrain.manifest import AveragingSpec

NUM_VALUES = 300
_SLACK = 1 + 1e-9
"""Tolerance for the rounding of weights in double."""


def check_rule(rule: Rule) -> None:
    """Check the contract of a `Rule` on small groups.

    Raises:
        ContractError: The rule breaks its contract; the message names the clause.
        Exception: Any error of the rule itself.
    """
    require(isinstance(rule, WeightedRule | VotingRule), "a WeightedRule or a VotingRule")
    require(isinstance(rule.name, str), "a name")
    spec = AveragingSpec(aggregation=rule.name)
    for num_parts in (1, 2, 3, 4, 9, 16):
        claims = [Claim(1 + index**3, 1 + index % FULL_TRUST) for index in range(num_parts)]
        shares = rule.shares(spec, claims)
        require(len(shares) == num_parts and min(shares) >= 0, "one share for each contributor, none negative")
        require(math.isclose(sum(shares), 1, rel_tol=1e-9), "shares add up to 1")
        if isinstance(rule, WeightedRule):
            _check_weights(rule, spec, shares, claims)
        if isinstance(rule, VotingRule):
            _check_combining(rule, spec, num_parts)


def _check_weights(rule: WeightedRule, spec: AveragingSpec, shares: list[float], claims: list[Claim]) -> None:
    for norms in ([0.0] * len(claims), [1.0] * len(claims), [10.0**index for index in range(len(claims))]):
        weights = rule.weights(spec, norms, claims)
        require(weights == rule.weights(spec, norms, claims), "equal arguments give equal weights")
        within = [0 <= weight <= share * _SLACK for weight, share in zip(weights, shares, strict=True)]
        require(all(within), "no contribution weighs more than its share")


def _check_combining(rule: VotingRule, spec: AveragingSpec, num_parts: int) -> None:
    generator = torch.Generator().manual_seed(num_parts)
    parts = (torch.randn(num_parts, NUM_VALUES, generator=generator) * 3).round() / 3

    def combined(given: torch.Tensor) -> torch.Tensor:
        found = rule.combine(spec, [part.clone() for part in given])
        require(found.dtype == torch.float32 and found.shape == given[0].shape, "an fp32 result of the parts' length")
        return found

    found = combined(parts)
    require(torch.equal(found, combined(parts)), "equal parts give equal bits")
    require(bool(torch.isfinite(found).all()), "finite parts give a finite result")
    require(not bool(torch.signbit(found[found == 0]).any()), "no result is a negative zero")
    require(torch.equal(combined(parts[:1].expand_as(parts)), parts[0].add(0.0)), "parts that agree give themselves")
    if rule.by_coordinate:
        pieces = torch.cat([combined(parts[:, :100]), combined(parts[:, 100:])])
        require(torch.equal(found, pieces), "a rule by coordinate may be applied piece by piece")
