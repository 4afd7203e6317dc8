"""Random faults in simulated generations: every answer is that of one process, and nothing is left behind.

A failure names its seed; ``make schedules ARGS="--serving --first SEED --count 1"`` runs it again.
"""

from collections import Counter

import pytest

from tests.support.seeds import changing_seeds
from tests.support.sim.serving_schedules import draw_serving_schedule, find_serving_problems


@pytest.mark.fault(30)
@pytest.mark.parametrize("seed", [*range(20), *changing_seeds("serving", 20)], ids=range(40))
def test_whatever_fails_answers_are_exact_and_hosts_keep_nothing(seed: int) -> None:
    assert find_serving_problems(draw_serving_schedule(seed)) == []


def test_schedules_have_every_fault_and_every_question() -> None:
    hits = Counter[str]()
    for seed in range(5):
        assert find_serving_problems(draw_serving_schedule(seed), hits) == []
    faults = {"crash", "stall", "channels", "pages", "weights"}
    assert {"answer", "form", "logits", "draft", "audits that agreed"} | faults <= {*hits}


@pytest.mark.slow
@pytest.mark.fault(30)
@pytest.mark.parametrize("seed", changing_seeds("serving", 200), ids=range(200))
def test_fifty_sessions_among_failing_hosts(seed: int) -> None:
    assert find_serving_problems(draw_serving_schedule(seed, num_sessions=50)) == []
