"""A draw is a pure function with equal results on all machines, and follows the distribution that is asked for."""

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.errors import IntegrityError
from p2ptrain.models.exact.elementary import exp
from p2ptrain.network.schema import from_wire, to_wire
from p2ptrain.serving import sampling
from p2ptrain.serving.sampling import Sampling, draw, exponentials, gumbel, order
from tests.support.exact import kernels

BUILDS = kernels()
LOGITS = torch.randn(50, generator=torch.Generator().manual_seed(1)) * 2
NAN = math.nan


def draws(settings: Sampling, number: int, logits: torch.Tensor = LOGITS) -> Counter[int]:
    return Counter(draw(logits, position, [], settings, 0).id for position in range(number))


def softmax(logits: torch.Tensor, temperature: float = 1.0) -> torch.Tensor:
    return torch.softmax(logits.double() / temperature, 0)


def chi_square(found: Counter[int], expected: torch.Tensor) -> float:
    """Per degree of freedom, of ids that are expected more than 5 times; the rest are one more."""
    total = sum(found.values())
    often = [each for each in range(len(expected)) if total * expected[each] > 5]
    rest = total * (1 - float(sum(expected[each] for each in often)))
    value = sum((found[each] - total * float(expected[each])) ** 2 / (total * float(expected[each])) for each in often)
    if rest > 5:
        value += (sum(n for each, n in found.items() if each not in often) - rest) ** 2 / rest
    return value / len(often)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_draws_follow_the_softmax(temperature: float) -> None:
    found = draws(Sampling(temperature=temperature, seed=7), 6000)
    assert chi_square(found, softmax(LOGITS, temperature)) < 2
    assert chi_square(found, softmax(LOGITS, temperature * 1.3)) > 2


def test_filters_keep_the_most_likely_ids_and_their_proportions() -> None:
    best = LOGITS.argsort(descending=True)
    for settings, kept in ((Sampling(top_k=5), 5), (Sampling(top_p=0.6), 0), (Sampling(top_k=9, top_p=0.9), 0)):
        probabilities = softmax(LOGITS)
        if settings.top_k:
            probabilities[best[settings.top_k :]] = 0
            probabilities /= probabilities.sum()
        if settings.top_p < 1:
            kept = int((probabilities[best].cumsum(0) < settings.top_p).sum()) + 1
            probabilities[best[kept:]] = 0
            probabilities /= probabilities.sum()
        found = draws(settings, 4000)
        assert set(found) == set(best[:kept].tolist())
        assert chi_square(found, probabilities) < 2.5


def test_seeds_and_positions_give_other_draws_and_equal_ones_give_equal_draws() -> None:
    logits = torch.zeros(1000)

    def ids(seed: int, first: int) -> list[int]:
        return [draw(logits, position, [], Sampling(seed=seed), 0).id for position in range(first, first + 20)]

    assert ids(1, 0) == ids(1, 0)
    assert ids(1, 5)[:15] == ids(1, 0)[5:]
    lists = [ids(seed, first) for seed in (1, 2, 1 << 32, (1 << 64) - 1) for first in (0, 100, 1 << 32)]
    assert len(set(map(tuple, lists))) == len(lists)


@pytest.mark.parametrize("settings", [Sampling(temperature=0), Sampling(temperature=0, top_k=3, top_p=0.5)])
def test_temperature_0_takes_the_largest_and_of_equal_ones_the_lowest_id(settings: Sampling) -> None:
    logits = torch.tensor([1.0, 3.0, -0.0, 3.0, 2.0])
    assert draw(logits, 0, [], settings, 0).id == 1
    assert draw(torch.tensor([-0.0, 0.0]), 0, [], settings, 0).id == 0
    assert draw(logits, 0, [], settings, 0, allowed=np.array([0, 2, 3])).id == 3


def test_equal_logits_are_ordered_by_id() -> None:
    logits = torch.tensor([0.0, 1.0, 1.0, -0.0, 1.0, 0.0])
    assert set(draws(Sampling(top_k=2), 200, logits)) == {1, 2}
    assert set(draws(Sampling(top_k=4), 400, logits)) == {0, 1, 2, 4}
    assert order(logits.numpy(), np.arange(6)).tolist() == [1, 2, 4, 0, 3, 5]


def test_top_p_keeps_ids_up_to_the_first_sum_that_reaches_it() -> None:
    logits = torch.zeros(4)  # sums of 1, 2, 3 and 4, exactly
    assert set(draws(Sampling(top_p=0.5), 200, logits)) == {0, 1}
    assert set(draws(Sampling(top_p=math.nextafter(0.5, 1)), 200, logits)) == {0, 1, 2}
    assert set(draws(Sampling(top_p=1e-9), 50, logits)) == {0}
    assert set(draws(Sampling(top_p=math.nextafter(1.0, 0)), 200, logits)) == {0, 1, 2, 3}


@given(st.lists(st.floats(-50, 50, width=32), min_size=2, max_size=40), st.floats(0.01, 1), st.floats(0.1, 2))
def test_top_p_adds_one_after_another(values: list[float], top_p: float, temperature: float) -> None:
    logits = torch.tensor(values)
    z = (logits.double() - logits.double().max()).numpy() / temperature
    ranked = sorted(range(len(values)), key=lambda each: (-values[each], each))
    weights = exp(z[ranked]).tolist()
    sums = [sum(weights[: end + 1], 0.0) for end in range(len(weights))]
    kept = next(end for end, each in enumerate(sums) if each >= top_p * sums[-1]) + 1 if top_p < 1 else len(values)
    settings = Sampling(top_p=top_p, temperature=temperature)
    noisy = {each: float(z[each] + gumbel(0, 3, np.array([each]), None)[0]) for each in ranked[:kept]}
    expected = max(noisy, key=lambda each: (noisy[each], -each))
    assert draw(logits, 3, [], settings, 0).id == expected


@pytest.mark.parametrize("name", BUILDS)
def test_kernels_compute_the_bits_of_the_plain_code(name: str) -> None:
    ids, build = np.arange(5000), BUILDS[name]
    for seed, position in ((0, 0), ((1 << 64) - 1, (1 << 33) + 5)):
        assert np.array_equal(gumbel(seed, position, ids, build), gumbel(seed, position, ids, None))
    values = np.concatenate([np.linspace(-705, 0, 4001), [-math.inf, -0.0]])
    assert np.array_equal(exponentials(values, build), exponentials(values, None))
    settings = Sampling(top_p=0.8, logprobs=3)
    plain = [draw(LOGITS, position, [], settings, 0, kernels=build) for position in range(50)]
    assert plain == [draw(LOGITS, position, [], settings, 0) for position in range(50)]


def test_noise_is_that_of_the_published_generator() -> None:
    """Known answers of Random123, ``philox4x32 10``."""
    words = sampling._philox(0, 0, np.zeros(1, dtype=np.uint64))
    assert [int(word[0]) for word in words] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    u = (np.array([0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]) + 0.5) / 2**32
    np.testing.assert_allclose(gumbel(0, 0, np.arange(4), None), -np.log(-np.log(u)), rtol=1e-14)


def test_penalties_change_logits_by_count_and_leave_the_prompt_out_where_they_should() -> None:
    logits, ids = torch.tensor([4.0, -4.0, 3.0, 2.9]), [0, 1, 1, 2, 2, 2]
    greedy: dict[str, Any] = {"temperature": 0.0}

    def adjusted(prompt: int, **values: Any) -> Any:
        return sampling._adjust(logits.numpy(), ids, Sampling(**values), prompt).tolist()

    assert adjusted(0, repetition_penalty=2.0) == [2.0, -8.0, 1.5, np.float32(2.9)]
    assert adjusted(6, repetition_penalty=2.0) == adjusted(0, repetition_penalty=2.0)
    assert adjusted(1, frequency_penalty=0.5) == [4.0, -5.0, 1.5, np.float32(2.9)]
    assert adjusted(1, presence_penalty=0.5) == [4.0, -4.5, 2.5, np.float32(2.9)]
    assert draw(logits, 6, ids, Sampling(**greedy), 0).id == 0
    assert draw(logits, 6, ids, Sampling(frequency_penalty=2.0, **greedy), 0).id == 3
    assert draw(logits, 6, ids, Sampling(logit_bias=((1, 9.0),), **greedy), 0).id == 1


def test_log_probabilities_are_before_temperature_penalties_and_filters() -> None:
    expected = torch.log_softmax(LOGITS.double(), 0)
    settings = Sampling(temperature=0.3, top_k=1, logit_bias=((3, 100.0),), repetition_penalty=3.0, logprobs=4, seed=1)
    found = draw(LOGITS, 3, [1, 2], settings, 1)
    assert found.id == 3
    assert found.logprob == pytest.approx(float(expected[3]), abs=1e-12)
    assert [each for each, _ in found.top] == LOGITS.argsort(descending=True)[:4].tolist()
    assert [value for _, value in found.top] == pytest.approx(expected.topk(4).values.tolist(), abs=1e-12)
    assert draw(LOGITS, 3, [], Sampling(), 0)[1:] == (0.0, ())
    alone = draw(LOGITS, 3, [], Sampling(want_logprob=True), 0)
    assert alone.logprob < 0
    assert alone.top == ()


def test_only_allowed_ids_are_drawn() -> None:
    allowed = np.array([3, 17, 40])
    found = Counter(draw(LOGITS, position, [], Sampling(), 0, allowed=allowed).id for position in range(3000))
    probabilities = torch.zeros(50, dtype=torch.float64)
    probabilities[allowed] = softmax(LOGITS[allowed])
    assert set(found) == {3, 17, 40}
    assert chi_square(found, probabilities) < 3
    with pytest.raises(ValueError, match="no token is allowed"):
        draw(LOGITS, 0, [], Sampling(), 0, allowed=np.array([], dtype=np.int64))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": 2.1}, "temperature"), ({"temperature": -0.1}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -1}, "top_k"), ({"seed": -1}, "seed"), ({"seed": 1 << 63}, "seed"),
        ({"frequency_penalty": 2.1}, "frequency_penalty"), ({"presence_penalty": -3}, "presence_penalty"),
        ({"repetition_penalty": 0.0}, "repetition_penalty"), ({"logprobs": 21}, "logprobs"),
        ({"logit_bias": [[0, 1.0]] * 1025}, "logit_bias"), ({"logit_bias": [[-1, 1.0]]}, "logit_bias"),
        ({"temperature": NAN}, "temperature"), ({"logit_bias": [[1, NAN]]}, "logit_bias"), ({"top_p": "1"}, "top_p"),
    ],
    ids=str,
)  # fmt: skip
def test_settings_out_of_bounds_are_refused_by_name(values: dict[str, Any], message: str) -> None:
    with pytest.raises(IntegrityError, match=message):
        from_wire(Sampling, values)


def test_settings_travel() -> None:
    settings = Sampling(0.5, 0.9, 40, (1 << 63) - 1, 0.1, -0.2, 1.3, ((5, 1.5),), 3, True)
    assert from_wire(Sampling, to_wire(settings)) == settings
    with pytest.raises(ValueError, match="names token 50"):
        draw(LOGITS, 0, [], Sampling(logit_bias=((50, 1.0),)), 0)


@pytest.mark.parametrize("top_p", [1.0, 0.5])
def test_a_temperature_close_to_0_takes_the_largest_logit(top_p: float) -> None:
    assert draws(Sampling(temperature=5e-324, top_p=top_p), 20) == {int(LOGITS.argmax()): 20}
