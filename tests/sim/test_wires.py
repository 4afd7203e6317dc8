"""Generation with 8 bits between stages: equal tokens whatever fails, and no session with two encodings."""

from __future__ import annotations

from typing import Any

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.serving.generation import Token
from p2ptrain.serving.journal import Int8Wire
from tests.support.sim.serving import ARITHMETIC, DRAWN, WIDTH, ServingSwarm, golden, golden_draws, served

PROMPT = [(5 * at + at // 7) % 61 for at in range(150)]
EIGHT_BITS = f"{ARITHMETIC}/fp32/int8"


def golden_in_8_bits(prompt: list[int], num_tokens: int, num_stages: int) -> list[int]:
    draws = golden_draws(prompt, num_tokens, num_stages, DRAWN, wire=Int8Wire(WIDTH))
    return [drawn.id for drawn in draws]


@pytest.mark.parametrize("fault", ["crash", "stall"])
@pytest.mark.parametrize("victim", [0, 1, 2])
@served(2, 2, 2, arithmetic=EIGHT_BITS)
async def test_a_failover_between_hosts_of_8_bits_keeps_the_tokens(
    swarm: ServingSwarm, client: Any, fault: str, victim: int
) -> None:
    """Prefix pages and journals give a substitute the bytes that the first host had."""

    def strike(generation: Any, token: Token) -> None:
        if token.position == len(PROMPT) + 30:
            getattr(swarm.network, fault)(swarm.host_of(generation.route[victim]).peer)

    wanted = golden_in_8_bits(PROMPT, 80, 3)
    assert wanted != golden(PROMPT, 80, 3, DRAWN)
    tokens, failovers = await client.ask(PROMPT, 80, DRAWN, on_token=strike)
    assert (tokens, failovers > 0) == (wanted, True)
    assert (await client.ask(PROMPT, 80, DRAWN))[0] == wanted


def test_a_session_stays_within_one_wire_and_goes_on_in_another_one_where_it_must() -> None:
    async def run(network: SimulatedNetwork) -> None:
        swarm = ServingSwarm(network, 2)
        await swarm.start(1, 1)
        swarm.arithmetic = EIGHT_BITS
        for number in range(2):
            await swarm.start_host(f"s{number}b", number)
        client = await swarm.start_client(wait_seconds=5.0)
        versions: list[str] = []

        def strike(generation: Any, token: Token) -> None:
            versions.append(generation.version)
            for each in swarm.hosts.values():
                offer = each.host.book.offer
                assert all(
                    held.ticket.version.arithmetic == offer.arithmetic for held in each.host.executor.sessions.values()
                )
            if token.position == len(PROMPT) + 20:
                network.crash(swarm.host_of(generation.route[1]).peer)
                del swarm.hosts[next(name for name, each in swarm.hosts.items() if not each.peer.alive)]

        tokens, _ = await client.ask(PROMPT, 60, DRAWN, on_token=strike)
        assert [version.split("-", 2)[2] for version in (versions[0], versions[-1])] == [EIGHT_BITS, ARITHMETIC]
        switch = next(at for at, version in enumerate(versions) if version != versions[0])
        assert tokens[: switch - 1] == golden_in_8_bits(PROMPT, 60, 2)[: switch - 1]
        await swarm.end(client)

    simulate(run, 0)
