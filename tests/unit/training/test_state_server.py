"""A peer serves its state while it trains, to no more newcomers and no faster than it wants."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.training.digest import CHUNK_BYTES, merkle_tree
from p2ptrain.training.partial_download import PartialDownload
from p2ptrain.training.state import MOVED_ON
from p2ptrain.training.state_server import RESERVATION_SECONDS, ServeLimits, StateServer
from p2ptrain.training.transfer import download_state, fetch_head
from tests.support.downloads import (
    FAST,
    NUM_CHUNKS,
    NUM_VALUES,
    Sources,
    advance,
    shared_state,
    until_started,
    with_sources,
)
from tests.support.simulation import Member, members


def test_too_many_downloads_wait_their_turn() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 5) as everyone:
            *newcomers, source = everyone
            state = shared_state()
            StateServer(source.rpc, state, source.peer.runtime, ServeLimits(downloads=2))
            seen: list[int] = []

            async def one(member: Member) -> str:
                try:
                    await download_state(
                        member.rpc,
                        member.peer.runtime,
                        [source.rpc.peer_id],
                        state.head,
                        state.layout.fingerprint,
                        100.0,
                    )
                except PeerRefusedError as error:
                    return str(error)
                seen.append(1)
                return ""

            results = await asyncio.gather(*(member.peer.spawn(one(member)) for member in newcomers))
            assert len(seen) >= 2
            assert all("busy" in result for result in results if result)

    simulate(main, seed=1, model=FAST)


def test_upload_keeps_to_its_rate() -> None:
    async def check(swarm: Sources) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await swarm.download()
        assert loop.time() - started >= 0.9 * NUM_VALUES * 8 / 1e6

    with_sources(1, check, limits=ServeLimits(bytes_per_second=1e6))


@pytest.mark.parametrize(
    "request_",
    [
        {"first": -1, "count": 1},
        {"first": 0, "count": 0},
        {"first": 0, "count": 17},
        {"first": 12, "count": 1},
        {"first": 0, "count": 1 << 62},
        {"first": True, "count": 1},
        {"first": "0", "count": 1},
        {},
    ],
)
def test_a_greedy_or_broken_newcomer_is_refused(request_: dict[str, Any]) -> None:
    async def check(swarm: Sources) -> None:
        hello = {"lineage": swarm.head.lineage, "describe": True}
        async with swarm.newcomer.rpc.open(swarm.ids[0], "state.chunks", hello, 5.0) as channel:
            await channel.receive(5.0, 1 << 20)
            await channel.send(request_)
            with pytest.raises(PeerRefusedError, match="chunks that there are not"):
                await channel.receive(5.0)
        await asyncio.sleep(10.0)
        assert swarm.states[0]._live is None

    with_sources(1, check)


def test_a_newcomer_cannot_download_for_ever() -> None:
    async def check(swarm: Sources) -> None:
        hello = {"lineage": swarm.head.lineage, "describe": False}
        async with swarm.newcomer.rpc.open(swarm.ids[0], "state.chunks", hello, 5.0) as channel:
            await channel.receive(5.0)
            for index in range(2 * NUM_CHUNKS):
                size = min(CHUNK_BYTES, NUM_VALUES * 8 - (index % NUM_CHUNKS) * CHUNK_BYTES)
                await channel.send({"first": index % NUM_CHUNKS, "count": 1})
                await channel.receive_bytes(size, 30.0)
            await channel.send({"first": 0, "count": 1})
            with pytest.raises(PeerRefusedError, match="too often"):
                await channel.receive(5.0)

    with_sources(1, check)


def test_cancelling_frees_the_lease_and_the_slot() -> None:
    async def check(swarm: Sources) -> None:
        for _ in range(4):
            partial = PartialDownload()
            task = swarm.start(resume=partial)
            await until_started(swarm, partial)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(1.0)
        assert swarm.states[0]._live is None
        assert swarm.sources[0].rpc.num_inbound == 0
        assert swarm.is_right(await swarm.download())

    with_sources(1, check)


def test_a_round_that_is_gone_is_refused_with_the_present_one() -> None:
    async def check(swarm: Sources) -> None:
        advance(swarm.states[0])
        with pytest.raises(PeerRefusedError, match=f"{MOVED_ON}1"):
            await swarm.download()
        assert await fetch_head(swarm.newcomer.rpc, swarm.ids[0]) == swarm.states[0].head

    with_sources(1, check)


def test_sources_that_moved_on_twice_say_so() -> None:
    async def check(swarm: Sources) -> None:
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await until_started(swarm, partial)
        others = []
        for state in swarm.states:
            advance(state)
            others.append(state.lease())
            advance(state)
        with pytest.raises(PeerRefusedError, match=f"{MOVED_ON}2"):
            await task
        assert not any(swarm.refusals(source) for source in range(2))
        assert [snapshot.head.round for snapshot in others] == [1, 1]

    with_sources(2, check)


def test_training_goes_on_while_the_state_is_served() -> None:
    async def check(swarm: Sources) -> None:
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await until_started(swarm, partial)
        for state in swarm.states:
            advance(state)
        assert swarm.is_right(await task)

    with_sources(2, check)


def test_a_source_whose_rounds_are_short_keeps_what_it_offers_until_the_download_begins() -> None:
    async def check(swarm: Sources) -> None:
        source, state = swarm.ids[0], swarm.states[0]
        head = await fetch_head(swarm.newcomer.rpc, source)
        for _ in range(3):
            advance(state)
        assert state.head.round == head.round + 3
        assert await fetch_head(swarm.newcomer.rpc, source) == head, "who comes now shares that copy"
        found = await download_state(
            swarm.newcomer.rpc, swarm.newcomer.peer.runtime, [source], head, swarm.layout, timeout_seconds=100.0
        )
        assert merkle_tree(found.tensors).root == head.digest
        assert (await fetch_head(swarm.newcomer.rpc, source, oldest_round=3)).round == 3

    with_sources(1, check)


def test_what_is_offered_is_let_go_when_nobody_comes_for_it() -> None:
    async def check(swarm: Sources) -> None:
        state = swarm.states[0]
        await fetch_head(swarm.newcomer.rpc, swarm.ids[0])
        advance(state)
        assert state._copied is not None
        await asyncio.sleep(RESERVATION_SECONDS + 1)
        assert state._copied is None

    with_sources(1, check)
