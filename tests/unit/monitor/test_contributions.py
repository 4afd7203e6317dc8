"""What each peer gave: added up over its restarts, and never taken back, whatever it claims."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.monitor.store import MAX_CONTRIBUTED, Contribution
from tests.support.coroutines import on_loop
from tests.support.web.stores import open_store, peer
from tests.support.web.watched import START


async def contributions(*told: tuple[float, int, int]) -> Contribution:
    """What is kept after a peer told these (start, tokens, rounds), one after the other."""
    async with open_store() as store:
        kept = [Contribution("a", "", 0, 0, 0.0, START, START)]
        for started_at, tokens, rounds in told:
            now = peer(started_at=started_at, trained_tokens=tokens, trained_rounds=rounds)
            await store.contribute([now], START, 10.0)
            kept += await store.leaders(1)
            assert kept[-1].tokens >= kept[-2].tokens, "what was given is not taken back"
        return kept[-1]


@pytest.mark.parametrize(
    ("told", "tokens"),
    [
        ([(1.0, 100, 1), (1.0, 150, 2), (1.0, 150, 2)], 150),
        ([(1.0, 100, 1), (2.0, 0, 0), (2.0, 30, 1)], 130),
        ([(1.0, 100, 1), (2.0, 200, 1)], 300),
        ([(1.0, 100, 1), (1.0, 0, 0), (1.0, 100, 1), (1.0, 0, 0), (1.0, 110, 1)], 110),
        ([(1.0, 2**63 - 1, 1), (2.0, 2**63 - 1, 1), (3.0, 2**63 - 1, 2)], MAX_CONTRIBUTED),
    ],
    ids=["grows", "restarts", "restarts and is ahead", "goes up and down", "claims more than there can be"],
)
@on_loop
async def test_contributions_add_up_over_restarts(told: list[tuple[float, int, int]], tokens: int) -> None:
    kept = await contributions(*told)
    assert kept.tokens == tokens
    assert type(kept.tokens) is int
    assert kept.seconds == 10.0 * len(told)


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([1.0, 2.0]), st.integers(0, 2**63 - 1), st.integers(0, 9)), min_size=1))
@on_loop
async def test_contributions_never_fall(told: list[tuple[float, int, int]]) -> None:
    assert (await contributions(*told)).tokens <= MAX_CONTRIBUTED


@on_loop
async def test_only_who_trains_contributes_and_only_training_counts_as_time() -> None:
    async with open_store() as store:
        peers = [peer("a"), peer("b", state="paused"), peer("c", role="bootstrap")]
        await store.contribute(peers, START, 10.0)
        await store.contribute(peers, START + 10.0, 10.0)
        a, b = await store.contribution("a"), await store.contribution("b")
        assert a is not None
        assert b is not None
        assert (a.seconds, a.first_seen, a.last_seen, b.seconds) == (20.0, START, START + 10.0, 0.0)
        assert await store.contribution("c") is None


@on_loop
async def test_who_gave_most_comes_first() -> None:
    async with open_store() as store:
        given_by = [("a", 1), ("c", 9), ("b", 9)]
        await store.contribute([peer(name, trained_tokens=tokens) for name, tokens in given_by], START, 0.0)
        assert [each.peer for each in await store.leaders(2)] == ["b", "c"]
