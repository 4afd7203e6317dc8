"""Rules by name: against references of a few lines, what a minority can do under each, and the contract of all."""

import math
from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from p2ptrain.averaging.vector.conformance import check_rule
from p2ptrain.averaging.vector.error_feedback import feedback_scale
from p2ptrain.averaging.vector.rules import (
    RULES,
    Claim,
    NormClip,
    Rule,
    VotingRule,
    WeightedRule,
    centered_clip,
    clip_factors,
    get_rule,
    median,
    num_trimmed,
    out_of_proportion,
    trimmed,
    typical,
)
from p2ptrain.extensions import ContractError
from p2ptrain.manifest import AveragingSpec
from tests.support.sim.shares import claims

VOTING = ("median", "trimmed", "centered_clip")


def make_spec(rule: str, **settings: float) -> AveragingSpec:
    return AveragingSpec.model_validate({"aggregation": rule, **settings})


@pytest.mark.parametrize("name", RULES.own)
def test_rules_keep_their_contract(name: str) -> None:
    check_rule(get_rule(make_spec(name)))


class Loud(WeightedRule):
    name = "loud"

    def weights(self, spec: AveragingSpec, norms: Sequence[float], claims: Sequence[Claim]) -> list[float]:
        return [2 * share for share in self.shares(spec, claims)]


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

    def shares(self, spec: AveragingSpec, claims: Sequence[Claim]) -> list[float]:
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


@given(tokens=st.lists(st.integers(1, 10**9), min_size=1, max_size=12), name=st.sampled_from(["mean", "norm_clip"]))
def test_tokens_count_up_to_a_multiple_of_the_median(tokens: list[int], name: str) -> None:
    spec = make_spec(name, max_weight_ratio=4)
    most = 4 * sorted(tokens)[(len(tokens) - 1) // 2] if len(tokens) >= 3 else math.inf
    counted = [min(count, most) for count in tokens]
    assert get_rule(spec).shares(spec, claims(*tokens)) == pytest.approx([count / sum(counted) for count in counted])


@pytest.mark.parametrize("name", VOTING)
def test_under_a_rule_by_votes_claimed_tokens_count_for_nothing(name: str) -> None:
    assert get_rule(make_spec(name)).shares(make_spec(name), claims(1, 10**9, 5, 5)) == [0.25] * 4


def test_what_encoding_dropped_comes_back_once_where_the_rule_lets_it() -> None:
    given = claims(10, 30, 60)
    assert feedback_scale(make_spec("mean"), given, 1) == pytest.approx(100 / 30)
    assert feedback_scale(make_spec("centered_clip"), given, 1) == pytest.approx(3)
    assert feedback_scale(make_spec("median"), given, 1) == feedback_scale(make_spec("trimmed"), given, 1) == 0


seeds = st.integers(0, 1 << 30)


def draw(num_parts: int, num_values: int = 300, seed: int = 0) -> Tensor:
    """Parts [num_parts, num_values]; rounded to thirds, so that values repeat."""
    parts = torch.randn(num_parts, num_values, generator=torch.Generator().manual_seed(seed))
    return (parts * 3).round() / 3


def rows(parts: Tensor) -> list[Tensor]:
    return [row.clone() for row in parts]


def trimmed_mean(parts: Tensor, fraction: float) -> Tensor:
    cut = min(math.ceil(round(fraction * len(parts), 6)), (len(parts) - 1) // 2)
    assert num_trimmed(len(parts), fraction) == cut
    return parts.sort(0).values[cut : len(parts) - cut].mean(0)


def clipped_center(parts: Tensor, ratio: float, iterations: int) -> Tensor:
    center = parts.quantile(0.5, dim=0)
    for _ in range(iterations):
        differences = parts - center
        distances = differences.norm(dim=1)
        limit = ratio * distances.sort().values[(len(parts) - 1) // 2]
        factors = torch.where(distances > limit, limit / distances, 1.0)
        center = center + (differences * factors[:, None]).mean(0)
    return center


@settings(max_examples=100)
@given(
    num_parts=st.integers(1, 40), seed=seeds, fraction=st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.49]),
    ratio=st.sampled_from([0.5, 1.0, 3.0, 1000.0]), iterations=st.integers(0, 4),
)  # fmt: skip
def test_rules_are_those_of_their_papers(
    num_parts: int, seed: int, fraction: float, ratio: float, iterations: int
) -> None:
    parts = draw(num_parts, 300, seed)
    exact = parts.double()
    for found, expected, tolerance in (
        (median(rows(parts)), exact.quantile(0.5, dim=0), 1e-6),
        (trimmed(rows(parts), fraction), trimmed_mean(exact, fraction), 1e-5),
        (centered_clip(rows(parts), ratio, iterations), clipped_center(exact, ratio, iterations), 1e-4),
    ):
        torch.testing.assert_close(found, expected.float(), rtol=tolerance, atol=max(1e-6, tolerance / 10))


@settings(max_examples=60)
@given(
    num_honest=st.integers(2, 9),
    data=st.data(),
    magnitude=st.sampled_from([0.1, 3.0, 1e4, 1e30]),
    seed=seeds,
)
def test_a_hostile_minority_stays_within_the_bound(
    num_honest: int, data: st.DataObject, magnitude: float, seed: int
) -> None:
    num_hostile = data.draw(st.integers(0, num_honest - 1))
    generator = torch.Generator().manual_seed(seed)
    honest = torch.randn(num_honest, 64, generator=generator) + 5
    lies = torch.randn(num_hostile, 64, generator=generator) * magnitude
    if data.draw(st.booleans()):
        lies = lies[:1].expand(num_hostile, 64) if num_hostile else lies  # In collusion.
    parts = torch.cat([honest, lies])[torch.randperm(num_honest + num_hostile, generator=generator)]
    lowest, highest = honest.amin(0) - 1e-4, honest.amax(0) + 1e-4

    middle = median(rows(parts))
    assert bool(((middle >= lowest) & (middle <= highest)).all())
    kept = trimmed(rows(parts), num_hostile / len(parts))
    assert bool(((kept >= lowest) & (kept <= highest)).all())
    # The median is among the honest, the limit at most the distance of one of them, and so is every move.
    box = float((highest - lowest).norm())
    for ratio, iterations in ((1.0, 1), (2.0, 1), (1.0, 3)):
        center = centered_clip(rows(parts), ratio, iterations)
        assert float((center - honest.mean(0)).norm()) <= box * (1 + ratio) ** iterations * (1 + 1e-4)


# --- norms, tokens, weights -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "found"),
    [([5, 1, 3], 3), ([4, 1, 3, 2], 2), ([0, 0, 0, 7, 8, 9], 8), ([], 0), ([4], 0), ([1, 2], 0), ([0, 1, 2], 0)],
)
def test_typical_is_the_lower_median_of_what_is_not_zero_unless_it_is_too_few(
    values: list[float], found: float
) -> None:
    assert typical(values, [5] * len(values)) == found


@given(
    honest=st.lists(st.floats(1.0, 10.0), min_size=3, max_size=9),
    hostile=st.lists(st.tuples(st.floats(0.0, 1e300), st.integers(1, 10**9)), max_size=70),
)
def test_newcomers_decide_nothing_however_many_they_are_while_they_are_trusted_less_together(
    honest: list[float], hostile: list[tuple[float, int]]
) -> None:
    hostile = hostile[: 8 * len(honest) - 1]
    norms = [*honest, *(norm for norm, _ in hostile)]
    given = [*claims(*[100] * len(honest)), *(Claim(tokens, 1) for _, tokens in hostile)]
    spec = make_spec("norm_clip", clip_ratio=1.0, max_weight_ratio=1.0)
    assert (
        out_of_proportion(dict(enumerate(norms)), [claim.trust for claim in given], max_ratio=10.0)
        .keys()
        .isdisjoint(range(len(honest)))
    )
    pulls = [weight * norm for weight, norm in zip(NormClip().weights(spec, norms, given), norms, strict=True)]
    assert sum(pulls[len(honest) :]) <= 10.0 * len(hostile) / (8 * len(honest) + len(hostile)) * (1 + 1e-9)


@given(
    honest=st.lists(st.floats(1.0, 10.0), min_size=3, max_size=9),
    hostile=st.lists(st.floats(0.0, 1e300), max_size=8),
)
def test_a_minority_neither_hides_nor_makes_others_disproportionate(honest: list[float], hostile: list[float]) -> None:
    hostile = hostile[: len(honest) - 1]
    refused = out_of_proportion(dict(enumerate([*honest, *hostile])), [8] * 20, max_ratio=20.0)
    assert all(index >= len(honest) for index in refused)
    loud = {index for index, norm in enumerate([*honest, *hostile]) if norm > 10 * 20}
    assert loud <= refused.keys()


@pytest.mark.parametrize("norms", [[1.0], [1.0, 1e9], [0.0, 1.0, 1e9], [0.0, 0.0, 0.0, 1e9]])
def test_without_a_majority_nobody_is_out_of_proportion(norms: list[float]) -> None:
    assert out_of_proportion(dict(enumerate(norms)), [8] * 4, max_ratio=2.0) == {}
    assert clip_factors(AveragingSpec(), norms, claims(*[1] * len(norms))) == [1.0] * len(norms)


def test_an_infinite_norm_is_out_of_proportion() -> None:
    assert out_of_proportion({0: 1.0, 1: 1.0, 2: math.inf}, [8] * 3, max_ratio=1e9).keys() == {2}


@given(
    norms=st.lists(st.floats(1e-3, 1e6), min_size=3, max_size=12),
    ratio=st.floats(0.1, 10),
)
def test_nobody_is_longer_than_the_clip_allows_and_only_the_long_are_clipped(norms: list[float], ratio: float) -> None:
    limit = ratio * sorted(norms)[(len(norms) - 1) // 2]
    factors = clip_factors(AveragingSpec(clip_ratio=ratio), norms, claims(*[10] * len(norms)))
    for norm, factor in zip(norms, factors, strict=True):
        assert factor * norm <= limit * (1 + 1e-9) or factor == 1.0
        assert (factor < 1.0) == (norm > limit * (1 + 1e-9)) or abs(norm - limit) <= 1e-6 * limit


def test_a_peer_that_did_more_may_have_come_further() -> None:
    spec = AveragingSpec(clip_ratio=1.0, max_weight_ratio=10)
    assert clip_factors(spec, [1.0, 1.0, 1.0, 5.0], claims(10, 10, 10, 50)) == [1.0] * 4
    assert clip_factors(spec, [1.0, 1.0, 1.0, 5.0], claims(10, 10, 10, 25))[3] == pytest.approx(0.5)
    assert clip_factors(spec, [1.0, 1.0, 1.0, 50.0], claims(10, 10, 10, 10**9))[3] == pytest.approx(0.2)
