"""Audits over simulated hosts: who lies is left out, and no honest host ever is."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import torch

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.peers import until
from tests.support.sim.serving import DRAWN, ServingPeer, ServingSwarm, golden

PROMPT = [(7 * at) % 61 for at in range(200)]


def lie(host: ServingPeer, does_lie: Callable[[], bool] = lambda: True) -> None:
    """Make a host add to some of its outputs, or favour a token on the last stage."""
    step, logits = host.stage.step, host.stage.logits

    def false_step(parts: Any, inputs: Any, store: Any) -> torch.Tensor:
        outputs = step(parts, inputs, store)
        return (outputs + 5) % 997 if does_lie() else outputs

    def false_logits(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden)
        found[:, 4] += 12.0 * does_lie()
        return found

    host.stage.step, host.stage.logits = false_step, false_logits  # type: ignore[method-assign]


@contextlib.asynccontextmanager
async def audited(network: SimulatedNetwork, *replicas: int) -> AsyncIterator[tuple[ServingSwarm, Any]]:
    """Hosts, and a client whose answers are all audited, if no audit runs."""
    swarm = ServingSwarm(network, len(replicas))
    await swarm.start(*replicas)
    client = await swarm.start_client(wait_seconds=5.0, audit_share=1.0)
    auditing = client.peer.spawn(client.generator.auditor.run())
    try:
        yield swarm, client
    finally:
        auditing.cancel()
        await asyncio.wait({auditing})
        await swarm.end(client)


async def ask(swarm: ServingSwarm, client: Any, number: int = 40) -> bool:
    """Ask, and wait for the audit; return whether the answer was right."""
    before = sum(client.generator.audits.values())
    tokens, _ = await client.ask(PROMPT, number, DRAWN)
    await until(lambda: sum(client.generator.audits.values()) > before, 300.0)
    return bool(tokens == golden(PROMPT, number, swarm.num_stages, DRAWN))


def left_out(swarm: ServingSwarm, client: Any) -> set[str]:
    known = swarm.known(client.rpc)
    trusted = {host.peer for host in client.generator.auditor.trusted(known)}
    return {name for name, each in swarm.hosts.items() if each.peer.peer_id not in trusted}


@pytest.mark.parametrize("num_stages", [1, 3])
@simulated(seed=0)
async def test_honest_hosts_agree(network: SimulatedNetwork, num_stages: int) -> None:
    async with audited(network, *[2] * num_stages) as (swarm, client):
        for _ in range(4):
            assert await ask(swarm, client)
        assert client.generator.audits == {"agreed": 4}
        assert not left_out(swarm, client)


@pytest.mark.fault(56)
@pytest.mark.parametrize("stage", [0, 1, 2])
@simulated(audited, 3, 3, 3, seed=lambda stage: stage)
async def test_a_host_that_computes_other_tokens_is_left_out_and_answers_are_right_again(
    there: tuple[ServingSwarm, Any], stage: int
) -> None:
    """Also where the pages of its prompt are cached on honest hosts, which it fed."""
    swarm, client = there
    async with client.generator.generate(PROMPT[:64], DRAWN, max_tokens=1) as generation:
        async for _ in generation:
            route = generation.route
    await until(lambda: bool(client.generator.audits), 300.0)
    liar = swarm.host_of(route[stage])  # Further prompts of these tokens come to it.
    lie(liar)
    assert not await ask(swarm, client)
    while not left_out(swarm, client):
        await ask(swarm, client)
    assert [swarm.hosts[each] for each in left_out(swarm, client)] == [liar]
    for _ in range(3):
        assert await ask(swarm, client)
    assert client.generator.audits["differed"] == 1


@pytest.mark.parametrize("seed", range(8))
@simulated(audited, 3, 3, 3)
async def test_who_lies_now_and_then_casts_suspicion_on_nobody_else(there: tuple[ServingSwarm, Any], seed: int) -> None:
    (swarm, client), chance = there, random.Random(seed)
    liar, share = chance.choice(sorted(swarm.hosts)), chance.choice([0.02, 0.3, 0.9])
    lie(swarm.hosts[liar], lambda: chance.random() < share)
    for _ in range(15):
        await ask(swarm, client, 20)
        assert left_out(swarm, client) <= {liar}


@simulated(audited, 2, 1, seed=0)
async def test_two_hosts_that_differ_are_named_and_none_is_left_out(
    there: tuple[ServingSwarm, Any], caplog: pytest.LogCaptureFixture
) -> None:
    swarm, client = there
    lie(swarm.hosts["s0a"])
    await ask(swarm, client)
    assert client.generator.audits == {"undecided": 1}
    assert not left_out(swarm, client)
    assert "no majority shows who is right" in caplog.text


@simulated(audited, 1, 1, seed=0)
async def test_a_swarm_without_further_hosts_has_no_audits(there: tuple[ServingSwarm, Any]) -> None:
    swarm, client = there
    tokens, _ = await client.ask(PROMPT, 20, DRAWN)
    await asyncio.sleep(10.0)
    assert tokens == golden(PROMPT, 20, 2, DRAWN)
    assert not client.generator.audits
    assert swarm.hosts["s0a"].host.executor.num_drawn == 0
    assert swarm.hosts["s1a"].host.executor.num_drawn == 20
