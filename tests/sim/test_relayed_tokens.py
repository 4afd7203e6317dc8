"""Tokens and logits for a client that cannot dial the last host: they come up the chain, exact under every fault."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import msgspec
import pytest
import torch

from p2ptrain.errors import PeerRefusedError
from p2ptrain.serving.link import OPEN_SECONDS
from p2ptrain.serving.messages import LOGITS, TOKENS, DrawnToken, Listen, LogitsRequest
from p2ptrain.serving.sampling import Sampling
from tests.support.sim.peers import until
from tests.support.sim.serving import (
    DRAWN,
    CopyingStage,
    ServingSwarm,
    SimulatedClient,
    SmallStage,
    golden,
    golden_draws,
    golden_outputs,
    serve,
    served,
)

PROMPT = [5, 1, 4, 1, 5, 9, 2, 6]
LONG_PROMPT = [(7 * at) % 61 for at in range(700)]


def hide_last(swarm: ServingSwarm, *clients: SimulatedClient, from_first: bool = True) -> None:
    """Part clients from the hosts of the last stage and, with ``from_first``, those from the first stage's."""
    first, last = ([each for each in swarm.hosts.values() if each.number == number] for number in
                   (0, swarm.num_stages - 1))  # fmt: skip
    for host in last:
        for client in clients:
            swarm.network.block(client.peer, host.peer)
        for each in first if from_first else ():
            swarm.network.block(host.peer, each.peer)


@pytest.mark.parametrize("kind", [SmallStage, CopyingStage], ids=["plain", "drafted"])
@pytest.mark.parametrize("from_first", [True, False])
@pytest.mark.parametrize("num_stages", [2, 3, 4])
def test_tokens_come_up_the_chain_when_the_last_host_cannot_be_dialled(
    num_stages: int, from_first: bool, kind: type[SmallStage]
) -> None:
    sampling = Sampling(temperature=1.0, seed=7, logprobs=3, want_logprob=True)
    found: list[Any] = []
    times: list[float] = []

    async def main(swarm: ServingSwarm, client: SimulatedClient) -> int:
        def note(generation: Any, token: Any) -> None:
            found.append(token[1:])
            times.append(asyncio.get_running_loop().time())

        hide_last(swarm, client, from_first=from_first)
        return (await client.ask(PROMPT, 120, sampling, on_token=note))[1]

    assert serve(main, *[1] * num_stages, kind=kind) == 0
    assert found == [tuple(each) for each in golden_draws(PROMPT, 120, num_stages, sampling, kind)]
    assert times[0] < OPEN_SECONDS + 2.0
    assert max(after - before for before, after in itertools.pairwise(times)) < 0.5


@served(1, 1)
async def test_a_last_host_that_was_not_reached_is_not_dialled_for_each_answer(
    swarm: ServingSwarm, client: Any
) -> None:
    hide_last(swarm, client)
    await client.ask(PROMPT, 5)
    began = asyncio.get_running_loop().time()
    await client.ask(PROMPT, 5)
    assert asyncio.get_running_loop().time() - began < 2.0


@pytest.mark.parametrize("fault", ["crash", "stall"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@pytest.mark.parametrize("at", [0, 70])
def test_a_host_that_fails_is_replaced_with_the_same_tokens(fault: str, victim: int, at: int) -> None:
    times: list[float] = []

    async def main(swarm: ServingSwarm, client: SimulatedClient) -> Any:
        def strike(generation: Any, token: Any) -> None:
            times.append(asyncio.get_running_loop().time())
            if token.position == len(PROMPT) + at:
                getattr(swarm.network, fault)(swarm.host_of(generation.route[victim]).peer)

        hide_last(swarm, client)
        return await client.ask(PROMPT, 100, DRAWN, on_token=strike)

    tokens, failovers = serve(main, 2, 2, 2, seed=at)
    assert tokens == golden(PROMPT, 100, 3, DRAWN)
    assert failovers >= 1
    # The substitute of the last host is dialled, too.
    assert max(after - before for before, after in itertools.pairwise(times)) < 2.0 + OPEN_SECONDS * (victim == 2)


def test_all_choices_of_a_request_come_up_the_chain() -> None:
    """Each choice is a session; other clients reach the last host meanwhile."""

    async def main(swarm: ServingSwarm, client: SimulatedClient) -> list[list[int]]:
        other = await swarm.start_client("other")
        hide_last(swarm, client)
        samplings = [Sampling(temperature=1.0, seed=seed) for seed in range(5)]
        asking = [client.ask(PROMPT, 40, sampling) for sampling in samplings]
        answers = await asyncio.gather(*asking, other.peer.spawn(other.ask(PROMPT, 40, samplings[0])))
        await other.rpc.close()
        await other.peer.close()
        return [tokens for tokens, _ in answers]

    wanted = [golden(PROMPT, 40, 3, Sampling(temperature=1.0, seed=seed)) for seed in range(5)]
    assert serve(main, 1, 1, 1) == [*wanted, wanted[0]]


@pytest.mark.parametrize("fault", ["", "crash"])
def test_logits_come_up_the_chain(fault: str) -> None:
    async def main(swarm: ServingSwarm, client: SimulatedClient) -> Any:
        async def strike() -> None:
            middle = [each for each in swarm.hosts.values() if each.number == 1]
            await until(lambda: any(each.stage.rows > 300 for each in middle), 60.0)
            swarm.network.crash(max(middle, key=lambda each: each.stage.rows).peer)

        hide_last(swarm, client)
        async with asyncio.TaskGroup() as group:
            if fault:
                group.create_task(strike())
            return await client.generator.logits(LONG_PROMPT, with_states=True)

    assert torch.equal(serve(main, 2, 2, 2, serve_seconds=0.05), golden_outputs(LONG_PROMPT, 3))


@served(1, 1, 1)
async def test_a_cancelled_answer_frees_all_pages(swarm: ServingSwarm, client: Any) -> None:
    """`serve` checks that no host keeps a page, and that no task or stream is left."""
    hide_last(swarm, client)
    async with client.generator.generate(PROMPT, DRAWN, max_tokens=200) as generation:
        tokens = aiter(generation)
        for _ in range(20):
            await anext(tokens)
        assert not any(each.is_clean for each in swarm.hosts.values())
    await until(lambda: all(each.is_clean for each in swarm.hosts.values()), 1.0)


@pytest.mark.parametrize("name", [TOKENS, LOGITS])
@pytest.mark.parametrize("stage", [0, 1, 2])
@served(1, 1, 1)
async def test_a_stranger_gets_no_tokens_from_any_host(swarm: ServingSwarm, client: Any, stage: int, name: str) -> None:
    stranger = await swarm.start_client("stranger")
    async with client.generator.generate(PROMPT, DRAWN, max_tokens=30) as generation:
        await anext(aiter(generation))
        session = generation.ticket.session
        request: msgspec.Struct = LogitsRequest(session, 0)
        if name == TOKENS:
            request = Listen(session, 0, 100, generation.route[0])
        async with stranger.rpc.open(generation.route[stage], name, request, 5.0) as channel:
            with pytest.raises(PeerRefusedError, match="no such session of yours"):
                await channel.receive(DrawnToken, 5.0)
    await stranger.rpc.close()
    await stranger.peer.close()
