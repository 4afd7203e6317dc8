"""Prefix pages: a later prompt's rows are not computed again, and no bit, page or other client sees a difference."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any, cast

import msgspec
import pytest

from p2ptrain.models.exact import PAGE, ExactStage
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.serving.generation import Token
from p2ptrain.serving.sampling import Sampling
from tests.support.pairs import pairs
from tests.support.sim.peers import until
from tests.support.sim.serving import DRAWN, GREEDY, ServingPeer, ServingSwarm, digest, golden, serve, served

SHARED = [(11 * at + at // 9) % 61 for at in range(8 * PAGE)]
LOGPROBS = Sampling(temperature=1.0, seed=3, logprobs=2)


async def tokens_of(client: Any, prompt: Sequence[int], number: int = 20, **options: Any) -> tuple[list[Token], int]:
    """Return a generation's tokens with their log-probabilities, and how many tokens of its prompt were cached."""
    async with client.generator.generate(prompt, LOGPROBS, max_tokens=number, **options) as generation:
        return [token async for token in generation], generation.cached


async def rows_of(swarm: ServingSwarm, asking: Any) -> tuple[Any, dict[str, int]]:
    """Await a question; return its answer, and the rows that each host computed for it."""
    before = {name: each.stage.rows for name, each in swarm.hosts.items()}
    answer = await asking
    await settled(swarm)
    return answer, {name: each.stage.rows - before[name] for name, each in swarm.hosts.items()}


async def settled(swarm: ServingSwarm) -> None:
    await until(lambda: all(each.is_clean for each in swarm.hosts.values() if each.peer.alive), 60.0)


def num_cached(host: ServingPeer) -> int:
    return len(host.host.book.pool._shared)


@pytest.mark.parametrize("num_stages", [1, 3])
def test_a_shared_prefix_is_computed_once(num_stages: int) -> None:
    """Tokens and log-probabilities are those of hosts that compute it all."""

    async def cold(swarm: ServingSwarm, client: Any) -> Any:
        return await tokens_of(client, [*SHARED, 4, 4])

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        await tokens_of(client, [*SHARED, 9])
        await settled(swarm)
        found, rows = await rows_of(swarm, tokens_of(client, [*SHARED, 4, 4]))
        assert rows == dict.fromkeys(swarm.hosts, 2 + 20 - 1)
        for each in swarm.hosts.values():
            totals = each.host.report().totals
            assert totals.cached_tokens == (len(SHARED) if each.number == num_stages - 1 else 0)
            assert num_cached(each) == len(SHARED) // PAGE
        return found

    hosts = [1] * num_stages
    expected, _ = serve(cold, *hosts)
    assert serve(main, *hosts, speculates=False) == (expected, len(SHARED))
    assert [token.id for token in expected] == golden([*SHARED, 4, 4], 20, num_stages, LOGPROBS)


@served(1, 1)
async def test_a_prompt_of_full_pages_alone_keeps_the_row_that_the_last_stage_draws_from(
    swarm: ServingSwarm, client: Any
) -> None:
    first = await tokens_of(client, SHARED, 1)
    await settled(swarm)
    second, rows = await rows_of(swarm, tokens_of(client, SHARED, 1))
    assert rows == {"s0a": 0, "s1a": PAGE}
    assert second == (first[0], len(SHARED))


@served(1, 1)
async def test_the_next_turn_of_a_conversation_has_the_answer_cached_too(swarm: ServingSwarm, client: Any) -> None:
    answer, _ = await client.ask(SHARED[:100], 100)
    await settled(swarm)
    prompt = [*SHARED[:100], *answer, 7]
    (tokens, cached), rows = await rows_of(swarm, tokens_of(client, prompt))
    assert [token.id for token in tokens] == golden(prompt, 20, 2, LOGPROBS)
    assert cached == 199 // PAGE * PAGE
    assert rows == dict.fromkeys(swarm.hosts, len(prompt) - cached + 19)


@served(1)
async def test_a_prompt_is_cached_while_its_answer_goes_on(swarm: ServingSwarm, client: Any) -> None:
    async with client.generator.generate(SHARED, GREEDY, max_tokens=60) as generation:
        tokens = aiter(generation)
        first = (await anext(tokens)).id
        assert (await tokens_of(client, [*SHARED, 1]))[1] == len(SHARED)
        assert [first, *[token.id async for token in tokens]] == golden(SHARED, 60, 1)


def test_another_client_or_key_gets_no_hit() -> None:
    """Neither by the same prompt nor by the other's salt: the time to the first token would tell who asked what."""

    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 2)
        await swarm.start(1, 1)
        ada, eve = [await swarm.start_client(name) for name in ("ada", "eve")]
        await tokens_of(ada, SHARED, key="one")
        await settled(swarm)
        (found, cached), rows = await rows_of(swarm, tokens_of(eve, SHARED, key="one"))
        assert cached == 0
        assert rows == dict.fromkeys(swarm.hosts, len(SHARED) + 19)
        for key in ("two", ""):
            (_, cached), rows = await rows_of(swarm, tokens_of(ada, SHARED, key=key))
            assert cached == 0
            assert rows == dict.fromkeys(swarm.hosts, len(SHARED) + 19)
        assert await tokens_of(ada, SHARED, key="one") == (found, len(SHARED))
        await swarm.end(ada, eve)

    simulate(run, 0)


@served(1)
async def test_a_ticket_whose_salt_was_changed_is_refused(swarm: ServingSwarm, client: Any) -> None:
    """A host of an earlier stage cannot give a session another salt, or other pages, than its client signed."""
    signed = client.generator._signed

    async def changed(ticket: Any) -> Any:
        return msgspec.structs.replace(await signed(ticket), **change)

    client.generator._wait_seconds, client.generator._signed = 0.0, changed
    for change in ({"salt": b"other"}, {"pages": (bytes(32),)}):  # noqa: B007
        with pytest.raises(Exception, match="did not sign"):
            await tokens_of(client, SHARED)


@pytest.mark.parametrize("lacking", ["s0a", "s1a", "s2a"])
@served(1, 1, 1, speculates=False)
async def test_a_host_with_fewer_pages_gets_the_rows_from_the_outputs_of_the_one_before(
    swarm: ServingSwarm, client: Any, lacking: str
) -> None:
    await tokens_of(client, SHARED)
    await settled(swarm)
    swarm.hosts[lacking].host.book.pool.drop(lambda key: True)
    (tokens, _), rows = await rows_of(swarm, tokens_of(client, [*SHARED, 8]))
    assert [token.id for token in tokens] == golden([*SHARED, 8], 20, 3, LOGPROBS)
    assert rows == {name: 20 + len(SHARED) * (name == lacking) for name in swarm.hosts}
    assert all(num_cached(each) == len(SHARED) // PAGE for each in swarm.hosts.values())


@pytest.mark.parametrize(
    ("at", "victims", "fault"), pairs([0, 256, 512], [(0,), (1,), (2,), (0, 1), (1, 2)], ["crash", "stall"]), ids=str
)
def test_a_host_that_fails_with_a_hit_is_replaced_with_the_same_tokens(
    fault: str, victims: tuple[int, ...], at: int
) -> None:
    """Also in the middle of a replay: the second stage has lost its pages, and computes row ``at``."""

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        await tokens_of(client, SHARED)
        await settled(swarm)
        route: tuple[str, ...] = ()
        async with client.generator.generate(SHARED, GREEDY, max_tokens=1) as generation:
            async for _ in generation:
                route = generation.route
        await settled(swarm)
        middle, reached = swarm.host_of(route[1]), asyncio.Event()
        middle.host.book.pool.drop(lambda key: True)
        step = middle.stage.step

        def watched(parts: Any, inputs: Any, store: Any) -> Any:
            if any(part.first <= at < part.first + part.rows for part in parts):
                reached.set()
            return step(parts, inputs, store)

        middle.stage.step = watched  # type: ignore[method-assign]

        async def strike() -> None:
            await reached.wait()
            for victim in victims:
                getattr(swarm.network, fault)(swarm.host_of(route[victim]).peer)

        async with asyncio.TaskGroup() as group:
            group.create_task(strike())
            return (await client.ask([*SHARED, 3], 60, DRAWN))[0]

    assert serve(main, 2, 2, 2) == golden([*SHARED, 3], 60, 3, DRAWN)


@served(1, 1)
async def test_another_version_has_no_hit_and_its_pages_go_with_it(swarm: ServingSwarm, client: Any) -> None:
    await tokens_of(client, SHARED)
    await settled(swarm)
    for round_, cached, pages in ((6, 0, 16), (6, len(SHARED), 16), (7, 0, 16)):
        for each in swarm.hosts.values():
            each.host.serve((round_, digest(round_, each.number)), cast(ExactStage, each.stage))
        swarm.rounds = (round_ - 1, round_)
        assert (await tokens_of(client, SHARED))[1] == cached
        await settled(swarm)
        assert [num_cached(each) for each in swarm.hosts.values()] == [pages, pages]


@served(1, num_pages=17)
async def test_prefix_pages_make_room_for_sessions_the_least_recently_used_first(
    swarm: ServingSwarm, client: Any
) -> None:
    client.generator._wait_seconds = 0.0
    host, other = swarm.hosts["s0a"], SHARED[::-1]
    for prompt, cached in (([*SHARED, 1], 0), ([*other, 1], 0), ([*SHARED, 2], 512)):
        assert (await tokens_of(client, prompt, 10))[1] == cached
        await settled(swarm)
    assert num_cached(host) == 16
    fresh = [5] * (3 * PAGE)
    assert (await tokens_of(client, fresh, 1))[1] == 0  # It takes the free page, and two of `other`.
    await settled(swarm)
    assert (await tokens_of(client, [*SHARED, 3], 10))[1] == 512
    await settled(swarm)
    assert (await tokens_of(client, [*other, 3], 10))[1] == 5 * PAGE  # A third one went for the answer before.
    await settled(swarm)
    assert (await client.ask([7], 17 * PAGE))[0] == golden([7], 17 * PAGE, 1)  # The whole pool.


@served(4, 4)
async def test_later_sessions_go_to_the_hosts_that_have_the_prefix(swarm: ServingSwarm, client: Any) -> None:
    routes = set()
    for number in range(8):
        async with client.generator.generate([*SHARED, number], GREEDY, max_tokens=2) as generation:
            assert len([token async for token in generation]) == 2
            routes.add(generation.route)
            assert generation.cached == (len(SHARED) if number else 0)
        await settled(swarm)
    assert len(routes) == 1
