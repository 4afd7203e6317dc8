"""Rules by name: what each counts, and the contract that those of packages keep, too."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.averaging.vector.conformance import check_rule
from p2ptrain.averaging.vector.rules import RULES, Rule, VotingRule, WeightedRule, feedback_scale, get_rule
from p2ptrain.extensions import ContractError
from p2ptrain.manifest import AveragingSpec

VOTING = ("median", "trimmed", "centered_clip")


def make_spec(rule: str, **settings: float) -> AveragingSpec:
    return AveragingSpec.model_validate({"aggregation": rule, **settings})


@pytest.mark.parametrize("name", RULES.own)
def test_rules_keep_their_contract(name: str) -> None:
    check_rule(get_rule(make_spec(name)))


class Loud(WeightedRule):
    name = "loud"

    def weights(self, spec: AveragingSpec, norms: Sequence[float], tokens: Sequence[int]) -> list[float]:
        return [2 * share for share in self.shares(spec, tokens)]


class First(VotingRule):
    name = "first"

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return parts[0].double()


class Sum(VotingRule):
    name = "sum"

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return torch.stack(parts).sum(0).add_(0.0)


class Spread(VotingRule):
    name = "spread"
    by_coordinate = True

    def combine(self, spec: AveragingSpec, parts: list[Tensor]) -> Tensor:
        return parts[0] + (torch.stack(parts) - parts[0]).mean() + 0.0


class Neither(Rule):
    name = "neither"

    def shares(self, spec: AveragingSpec, tokens: Sequence[int]) -> list[float]:
        return []


@pytest.mark.parametrize(
    ("rule", "promise"),
    [
        (Loud(), "more than its share"),
        (First(), "an fp32 result"),
        (Sum(), "parts that agree"),
        (Spread(), "piece by piece"),
        (Neither(), "a WeightedRule or a VotingRule"),
    ],
    ids=lambda value: value.name if isinstance(value, Rule) else "",
)
def test_a_broken_promise_is_named(rule: Rule, promise: str) -> None:
    with pytest.raises(ContractError, match=promise):
        check_rule(rule)


@pytest.mark.parametrize("name", VOTING)
@given(order=st.permutations(range(9)))
def test_the_order_of_parts_does_not_matter(name: str, order: list[int]) -> None:
    rule, spec = get_rule(make_spec(name)), make_spec(name)
    assert isinstance(rule, VotingRule)
    parts = torch.randn(9, 300, generator=torch.Generator().manual_seed(order[0]))
    one, other = (rule.combine(spec, [row.clone() for row in rows]) for rows in (parts, parts[order]))
    torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


@given(tokens=st.lists(st.integers(1, 10**9), min_size=1, max_size=12), name=st.sampled_from(["mean", "norm_clip"]))
def test_tokens_count_up_to_a_multiple_of_the_median(tokens: list[int], name: str) -> None:
    spec = make_spec(name, max_weight_ratio=4)
    most = 4 * sorted(tokens)[(len(tokens) - 1) // 2] if len(tokens) >= 3 else math.inf
    counted = [min(count, most) for count in tokens]
    assert get_rule(spec).shares(spec, tokens) == pytest.approx([count / sum(counted) for count in counted])


@pytest.mark.parametrize("name", VOTING)
def test_under_a_rule_by_votes_claimed_tokens_count_for_nothing(name: str) -> None:
    assert get_rule(make_spec(name)).shares(make_spec(name), [1, 10**9, 5, 5]) == [0.25] * 4


def test_what_encoding_dropped_comes_back_once_where_the_rule_lets_it() -> None:
    tokens = [10, 30, 60]
    assert feedback_scale(make_spec("mean"), tokens, 1) == pytest.approx(100 / 30)
    assert feedback_scale(make_spec("centered_clip"), tokens, 1) == pytest.approx(3)
    assert feedback_scale(make_spec("median"), tokens, 1) == feedback_scale(make_spec("trimmed"), tokens, 1) == 0
