"""The choice of hosts over simulated links: by what a token takes there, measured and not only claimed."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from p2ptrain.network.simulated import LinkModel
from tests.support.sim.serving import GREEDY, CopyingStage, ServingSwarm, served

PROMPT = [5, 1, 4, 1, 5]
LAN = LinkModel(latency_seconds=(0.001, 0.001))
FAR_SECONDS = 0.3


async def routes(swarm: ServingSwarm, client: Any, number: int, stage: int = 0) -> Counter[str]:
    """Return how many of some answers each host of a stage computed."""
    names = {each.peer.peer_id: name for name, each in swarm.hosts.items()}
    found: Counter[str] = Counter()
    for _ in range(number):
        async with client.generator.generate(PROMPT, GREEDY, max_tokens=20) as generation:
            assert len([token async for token in generation]) == 20
        found[names[generation.route[stage]]] += 1
    return found


@served(2, model=LAN)
async def test_a_slow_host_is_left_for_a_fast_one_by_what_both_measure(swarm: ServingSwarm, client: Any) -> None:
    swarm.hosts["s0a"].peer.runtime.serve_seconds = 0.3  # type: ignore[attr-defined]
    assert set(await routes(swarm, client, 8)) == {"s0a", "s0b"}  # What nobody has measured is tried.
    assert await routes(swarm, client, 12) == {"s0b": 12}
    other = await swarm.start_client("other")
    assert await routes(swarm, other, 12) == {"s0b": 12}  # It learns it from the record alone.
    await other.rpc.close()
    await other.peer.close()


@served(2, 1, kind=CopyingStage, num_pages=40, model=LAN)
async def test_a_client_tells_the_pages_and_the_drafts_of_all_hosts(swarm: ServingSwarm, client: Any) -> None:
    async with client.generator.generate([*range(9)] * 9, GREEDY, max_tokens=100) as generation:
        assert len([token async for token in generation]) == 100
        (first, last), told = client.generator.loads, swarm.hosts["s0a"].host.report().served
        assert told is not None
        assert (first.kv_pages, last.kv_pages, told.pages) == (80, 40, 40)
        assert first.drafted_tokens > first.accepted_tokens > 0 == last.drafted_tokens
    assert (told.free_pages, told.base_seconds) != (40, 0.0)


@served(3, model=LAN)
async def test_a_near_host_is_before_one_that_was_never_dialled(swarm: ServingSwarm, client: Any) -> None:
    for name in ("s0b", "s0c"):
        swarm.network.set_latency(client.peer, swarm.hosts[name].peer, FAR_SECONDS)
    for name, seconds in (("s0a", 0.002), ("s0b", 2 * FAR_SECONDS)):
        client.rpc.dial_seconds[swarm.hosts[name].peer.peer_id] = seconds
    assert await routes(swarm, client, 12) == {"s0a": 12}


@pytest.mark.parametrize("stage", [0, 1])
@served(2, 3, 2, model=LAN)
async def test_a_host_that_claims_no_time_is_found_out_by_the_pace_of_its_routes(
    swarm: ServingSwarm, client: Any, stage: int
) -> None:
    liar = f"s{stage}a"
    swarm.hosts[liar].peer.runtime.serve_seconds = 0.5  # type: ignore[attr-defined]
    swarm.claims[liar] = (1e-9, 1e-9)
    assert (await routes(swarm, client, 4, stage))[liar] in (1, 2)
    assert liar not in await routes(swarm, client, 12, stage)
