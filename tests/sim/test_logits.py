"""Logits and last states of a prompt's rows over simulated hosts: those of one process, of one version."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest
import torch

from p2ptrain.errors import PeerRefusedError
from p2ptrain.models.exact import PAGE, ExactStage
from p2ptrain.serving.errors import PromptTooLongError
from p2ptrain.serving.messages import LOGITS, LogitRows, LogitsRequest
from tests.support.sim.peers import until
from tests.support.sim.serving import GREEDY, VOCABULARY, ServingSwarm, digest, golden_outputs, serve, served

PROMPT = [5, 1, 4, 1, 5, 9, 2, 6]
LONG_PROMPT = [(7 * at) % 61 for at in range(700)]


@pytest.mark.parametrize("fault", ["", "crash", "stall"])
@pytest.mark.parametrize("victim", [0, 1])
def test_logits_of_all_rows_are_those_of_one_process_also_when_a_host_fails(fault: str, victim: int) -> None:
    struck: list[Any] = []

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        async def strike() -> None:
            await until(lambda: any(each.number == 1 and each.stage.rows > 100 for each in swarm.hosts.values()), 60.0)
            struck.append(max((each for each in swarm.hosts.values() if each.number == victim),
                              key=lambda each: each.stage.rows))  # fmt: skip
            getattr(swarm.network, fault)(struck[0].peer)

        async with asyncio.TaskGroup() as group:
            if fault:
                group.create_task(strike())
            return await client.generator.logits(LONG_PROMPT, with_states=True)

    assert torch.equal(serve(main, 2, 2, serve_seconds=0.05), golden_outputs(LONG_PROMPT, 2))
    assert bool(struck) == bool(fault)


@served(1, 1)
async def test_the_last_stage_computes_all_rows_for_their_logits_although_it_has_a_prefix(
    swarm: ServingSwarm, client: Any
) -> None:
    await client.ask(LONG_PROMPT, 1)
    await until(lambda: all(each.is_clean for each in swarm.hosts.values()), 60.0)
    before = [each.stage.rows for each in swarm.hosts.values()]
    logits = await client.generator.logits(LONG_PROMPT)
    rows = [each.stage.rows - start for each, start in zip(swarm.hosts.values(), before, strict=True)]
    assert rows == [len(LONG_PROMPT) % PAGE, len(LONG_PROMPT)]
    assert torch.equal(logits, golden_outputs(LONG_PROMPT, 2)[:, :VOCABULARY])


@served(1, 1, context=64)
async def test_a_prompt_whose_logits_are_asked_for_may_fill_the_context(swarm: ServingSwarm, client: Any) -> None:
    whole = LONG_PROMPT[:64]
    assert torch.equal(await client.generator.logits(whole), golden_outputs(whole, 2)[:, :VOCABULARY])
    with pytest.raises(PromptTooLongError, match="do not fit the context of 64"):
        await client.generator.logits(LONG_PROMPT[:65])


def test_logits_are_those_of_one_version() -> None:
    """The rows of a version that is gone are asked again of the newer one."""
    asked: list[tuple[bytes, int]] = []

    async def main(swarm: ServingSwarm, client: Any) -> Any:
        host = swarm.hosts["s0a"]
        serve_logits = host.host._tokens._serve_logits

        async def renew() -> None:
            await until(lambda: bool(asked) and host.stage.rows >= 100, 60.0)
            for round_ in (6, 7):
                host.host.serve((round_, digest(round_, 0)), cast(ExactStage, host.stage))
            swarm.rounds = (6, 7)

        async def note(channel: Any, request: Any) -> None:
            asked.append((request.session, request.start))
            await serve_logits(channel, request)

        host.rpc.withdraw(LOGITS)
        host.rpc.serve_channel(LOGITS, LogitsRequest, note)
        async with asyncio.TaskGroup() as group:
            group.create_task(renew())
            return await client.generator.logits(LONG_PROMPT)

    assert torch.equal(serve(main, 1, serve_seconds=0.05), golden_outputs(LONG_PROMPT, 1)[:, :VOCABULARY])
    assert len({session for session, _ in asked}) == 2
    assert asked[-1][1] == 0


@served(1)
async def test_logits_are_refused_to_a_session_that_did_not_ask_for_them(swarm: ServingSwarm, client: Any) -> None:
    async with client.generator.generate(PROMPT, GREEDY, max_tokens=5) as generation:
        await anext(aiter(generation))
        request = LogitsRequest(generation.ticket.session, 0)
        async with client.rpc.open(generation.route[-1], LOGITS, request, 5.0) as channel:
            with pytest.raises(PeerRefusedError, match="no logits"):
                await channel.receive(LogitRows, 5.0)
