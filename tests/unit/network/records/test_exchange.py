"""The bytes that an exchange of records may cost."""

import asyncio

import pytest

from p2ptrain.network.records.exchange import Budget
from tests.support.coroutines import simulated


@pytest.mark.fault(43)
@simulated(seed=1)
async def test_who_asks_too_much_is_refused_and_leaves_no_debt_to_others() -> None:
    budget = Budget(rate=10.0, first=50.0)
    assert budget.spend(60)
    assert [budget.spend(1000) for _ in range(100)] == [False] * 100
    await asyncio.sleep(1.1)
    assert budget.spend(1)
    await asyncio.sleep(1000.0)
    assert budget.left() == budget.most == 100.0
