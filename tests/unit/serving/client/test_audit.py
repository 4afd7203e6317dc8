"""Which answers are audited, and who is the odd one."""

from __future__ import annotations

import random
from typing import Any

import pytest

from p2ptrain.runtime import Runtime
from p2ptrain.serving.client.audit import Answer, Auditor, odd_ones
from p2ptrain.serving.messages import Version
from p2ptrain.serving.sampling import Sampling


def answer(arithmetic: str = "exact-1/fp32", tokens: tuple[int, ...] = (1, 2)) -> Answer:
    return Answer(Version(5, (bytes(32),), arithmetic), (3,), Sampling(), (), tokens, ("host",))


def auditor(share: float) -> Auditor:
    async def again(answer: Answer, route: Any) -> tuple[int, ...]:
        raise AssertionError

    return Auditor(Runtime(random=random.Random(0)), share, again, list)


@pytest.mark.parametrize(
    ("results", "odd"),
    [
        ({"a": (1,), "b": (1,), "c": (2,)}, {"c"}),
        ({"a": (1,), "b": (2,)}, set()),
        ({"a": (1,), "b": (2,), "c": (3,)}, set()),
        ({"a": (1,), "b": (1,), "c": (2,), "d": (2,)}, set()),
        ({"a": (1,), "b": (1,), "c": (1,), "d": (2,), "e": (3,)}, {"d", "e"}),
        ({"a": (1,), "b": (1,)}, set()),
        ({"a": ()}, set()),
        ({}, set()),
    ],
)
def test_the_odd_ones_are_those_that_more_than_half_contradict(
    results: dict[str, tuple[int, ...]], odd: set[str]
) -> None:
    assert odd_ones(results) == odd


def test_the_share_of_audited_answers_is_the_given_one() -> None:
    checked = 0
    for _ in range(20):
        some = auditor(0.1)
        some._runtime.random.seed(checked + 1)
        for _ in range(100):
            some.offer(answer())
            checked += not some._answers.empty()
            while not some._answers.empty():
                some._answers.get_nowait()
    assert 150 < checked < 250


def test_answers_wait_for_one_audit_at_most_and_only_exact_ones_are_audited() -> None:
    some = auditor(1.0)
    some.offer(answer("torch-1/fp32"))
    some.offer(answer(tokens=()))
    assert some._answers.empty()
    for _ in range(5):
        some.offer(answer())
    assert some._answers.qsize() == 1
