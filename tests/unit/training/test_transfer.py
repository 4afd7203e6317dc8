"""A download ends with the right bytes or an error, whatever its sources do."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from p2ptrain.averaging.head import Head
from p2ptrain.errors import (
    DeadlineError,
    IncompatibleError,
    IntegrityError,
    P2PTrainError,
    PeerLostError,
)
from p2ptrain.network.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.training.digest import CHUNK_BYTES, ChunkedBytes, merkle_tree
from p2ptrain.training.partial_download import PartialDownload
from p2ptrain.training.state_server import StateServer
from p2ptrain.training.transfer import TransferTimes, download_state
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
from tests.support.simulation import members, start_member


def test_three_sources_share_the_work() -> None:
    async def check(swarm: Sources) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        downloaded = await swarm.download()
        seconds = loop.time() - started
        assert swarm.is_right(downloaded)
        assert downloaded.head == swarm.head
        assert set(downloaded.bytes_from) == set(swarm.ids)
        assert not downloaded.faults
        total = sum(tensor.nbytes for _, tensor in downloaded.tensors)
        assert sum(downloaded.bytes_from.values()) >= total
        # One uplink alone would need total / 4e6 = 3 s.
        assert seconds < 0.6 * total / 4e6

    with_sources(3, check)


def test_a_download_tells_how_far_it_is() -> None:
    told: list[tuple[int, int]] = []

    async def check(swarm: Sources) -> None:
        downloaded = await swarm.download(advance=lambda done, total: told.append((done, total)))
        size = sum(tensor.nbytes for _, tensor in downloaded.tensors)
        assert told == sorted(told)
        assert told[-1] == (size, size)

    with_sources(2, check)


def test_what_was_downloaded_becomes_the_state() -> None:
    async def check(swarm: Sources) -> None:
        downloaded = await swarm.download()
        own = shared_state()
        own.vector.zero_()
        own.replace(downloaded.tensors, downloaded.head)
        assert own.tree().root == swarm.head.digest
        advance(own)
        advance(swarm.states[0])
        assert own.head == swarm.states[0].head

    with_sources(1, check)


def test_one_source_uses_its_link_well() -> None:
    async def check(swarm: Sources) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await swarm.download()
        ideal = NUM_VALUES * 8 / 4e6
        assert loop.time() - started < ideal / 0.85

    with_sources(1, check)


@pytest.mark.parametrize("seed", range(4))
def test_a_lying_source_is_given_up_and_counted(seed: int) -> None:
    async def check(swarm: Sources) -> None:
        swarm.states[0].vector[::1000] += 1.0  # after its hashes were made
        downloaded = await swarm.download()
        assert swarm.is_right(downloaded)
        assert "hash" in downloaded.faults[swarm.ids[0]]
        assert swarm.refusals(0) == 1
        assert swarm.refusals(1) == 0

    with_sources(2, check, seed=seed)


def test_only_liars_is_an_integrity_error_and_nothing_false_is_kept() -> None:
    async def check(swarm: Sources) -> None:
        for state in swarm.states:
            state.vector[-1] += 1.0  # in chunk 5
        partial = PartialDownload()
        with pytest.raises(IntegrityError, match="no source"):
            await swarm.download(resume=partial)
        right = ChunkedBytes(shared_state().tensors())
        ours = ChunkedBytes(partial.tensors)
        kept = [index for index, done in enumerate(partial.done) if done]
        assert kept
        assert all(ours.leaf(index) == right.leaf(index) for index in kept)
        assert not partial.done[5]

    with_sources(2, check)


def test_a_false_description_is_found_before_memory_is_given_to_it() -> None:
    async def check(swarm: Sources) -> None:
        async def lie(channel: Channel, request: dict[str, Any]) -> None:
            huge = [["vector", "float32", [1 << 30], 1 << 32]]
            await channel.send({"layout": swarm.layout, "tensors": huge, "num_chunks": 4096})
            await channel.receive(10)
            await channel.send_bytes(bytes(32 * 4096))
            await channel.receive(10)

        swarm.sources[0].rpc.serve_channel("state.chunks", lie)
        downloaded = await swarm.download()
        assert swarm.is_right(downloaded)
        assert "digest" in downloaded.faults[swarm.ids[0]]
        assert swarm.refusals(0) == 1

    with_sources(2, check)


@pytest.mark.parametrize(
    "hello",
    [
        {},
        {"layout": None},
        {"layout": b"", "tensors": []},
        {"tensors": "x"},
        {"tensors": [["vector", "float32", [1 << 60], 1 << 62]]},
    ],
)
def test_garbage_from_a_source_is_survived(hello: dict[str, Any]) -> None:
    async def check(swarm: Sources) -> None:
        async def lie(channel: Channel, request: dict[str, Any]) -> None:
            await channel.send({"layout": swarm.layout, **hello})
            await channel.receive(10)

        swarm.sources[0].rpc.serve_channel("state.chunks", lie)
        downloaded = await swarm.download()
        assert swarm.is_right(downloaded)
        assert swarm.ids[0] in downloaded.faults

    with_sources(2, check)


@pytest.mark.parametrize("seed", range(4))
def test_a_source_that_dies_is_replaced_by_the_others(seed: int) -> None:
    async def check(swarm: Sources) -> None:
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await until_started(swarm, partial)
        swarm.network.crash(swarm.sources[0].peer)
        downloaded = await task
        assert swarm.is_right(downloaded)

    with_sources(2, check, seed=seed)


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_a_source_that_falls_silent_does_not_hold_up_the_rest(fault: str) -> None:
    async def check(swarm: Sources) -> None:
        loop = asyncio.get_running_loop()
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await until_started(swarm, partial)
        getattr(swarm.network, fault)(swarm.sources[0].peer)
        started = loop.time()
        assert swarm.is_right(await task)
        # All of it over one uplink takes 3 s: its silence was not waited for.
        assert loop.time() - started < 5.0

    with_sources(2, check)


def test_a_slow_source_does_not_set_the_pace() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as everyone:
            slow = network.add_peer("slow", up_bytes_per_second=1e5)
            everyone.append(await start_member(network, slow))
            swarm = Sources(network, everyone)
            loop = asyncio.get_running_loop()
            started = loop.time()
            assert swarm.is_right(await swarm.download())
            # 1 MiB from the slow source alone takes 10 s.
            assert loop.time() - started < 5.0
            await everyone[-1].rpc.close()

    simulate(main, seed=1, model=FAST)


def test_a_source_that_comes_back_is_resumed() -> None:
    async def check(swarm: Sources) -> None:
        """A relay that cuts the connection every few MiB: progress is kept, and attempts start anew."""
        served = [0]
        state = swarm.states[0]

        async def cut_off(channel: Channel, request: dict[str, Any]) -> None:
            snapshot = state.lease()
            try:
                specs = [spec.to_list() for spec in snapshot.specs] if request["describe"] else []
                await channel.send({"layout": swarm.layout, "tensors": specs, "num_chunks": snapshot.num_chunks})
                buffer = memoryview(bytearray(CHUNK_BYTES))
                budget = 2
                while True:
                    message = await channel.receive(10)
                    if message.get("leaves"):
                        await channel.send_bytes(b"".join(snapshot.tree.leaves))
                        continue
                    for index in range(message["first"], message["first"] + message["count"]):
                        if budget == 0:
                            channel.abort()
                            return
                        budget -= 1
                        served[0] += 1
                        await channel.send_bytes(buffer[: snapshot.read(index, buffer)])
            finally:
                snapshot.release()

        swarm.sources[0].rpc.serve_channel("state.chunks", cut_off)
        assert swarm.is_right(await swarm.download())
        # Cutting may lose what was under way, not what had arrived.
        assert NUM_CHUNKS <= served[0] <= 2 * NUM_CHUNKS

    with_sources(1, check)


def test_the_only_source_dies_and_another_completes_what_there_is() -> None:
    async def check(swarm: Sources) -> None:
        partial = PartialDownload()
        ids = swarm.ids
        task = swarm.newcomer.peer.spawn(
            download_state(
                swarm.newcomer.rpc,
                swarm.newcomer.peer.runtime,
                ids[:1],
                swarm.head,
                swarm.layout,
                60.0,
                resume=partial,
            )
        )
        await until_started(swarm, partial, 4)
        swarm.network.crash(swarm.sources[0].peer)
        with pytest.raises(PeerLostError, match="no source"):
            await task
        before = partial.num_done
        assert 4 <= before < NUM_CHUNKS
        downloaded = await download_state(
            swarm.newcomer.rpc, swarm.newcomer.peer.runtime, ids[1:], swarm.head, swarm.layout, 60.0, resume=partial
        )
        assert swarm.is_right(downloaded)
        assert downloaded.bytes_from[ids[1]] <= (NUM_CHUNKS - before) * CHUNK_BYTES

    with_sources(2, check)


def test_another_model_is_refused_as_incompatible() -> None:
    async def check(swarm: Sources) -> None:
        with pytest.raises(IncompatibleError, match="another shape"):
            await swarm.download(layout=b"x" * 32)

    with_sources(2, check)


def test_a_deadline_ends_it_and_leaves_nothing_behind() -> None:
    async def check(swarm: Sources) -> None:
        loop = asyncio.get_running_loop()
        for member in swarm.sources:
            swarm.network.stall(member.peer)
        started = loop.time()
        with pytest.raises(DeadlineError):
            await swarm.download(timeout_seconds=0.01)
        assert loop.time() - started < 1.0
        for member in swarm.sources:
            swarm.network.resume(member.peer)
        assert swarm.is_right(await swarm.download())

    with_sources(2, check)


def test_sources_that_never_answer_end_by_the_inner_deadlines() -> None:
    async def check(swarm: Sources) -> None:
        loop = asyncio.get_running_loop()
        swarm.network.stall(swarm.sources[0].peer)
        started = loop.time()
        with pytest.raises(P2PTrainError, match="no source"):
            await swarm.download(timeout_seconds=600.0, times=TransferTimes(open_seconds=2.0, chunk_seconds=2.0))
        assert loop.time() - started < 20.0

    with_sources(1, check)


def test_no_other_peer_is_said_at_once() -> None:
    async def check(swarm: Sources) -> None:
        me = swarm.newcomer
        with pytest.raises(PeerLostError, match="no other peer"):
            await download_state(me.rpc, me.peer.runtime, [me.rpc.peer_id], swarm.head, swarm.layout, 5.0)

    with_sources(1, check)


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_faults_ends_right_or_in_an_error(seed: int) -> None:
    async def check(swarm: Sources) -> None:
        random = swarm.network.random
        partial = PartialDownload()
        task = swarm.start(resume=partial, timeout_seconds=300.0)
        for source in range(4):
            await asyncio.sleep(random.random())
            peer, state = swarm.sources[source].peer, swarm.states[source]
            fault = random.choice(["crash", "stall", "cut", "lie", "move on", "none"])
            if fault == "crash":
                swarm.network.crash(peer)
            elif fault == "stall":
                swarm.network.stall(peer, random.choice([0.5, 5.0, 60.0]))
            elif fault == "cut":
                swarm.network.cut(peer)
            elif fault == "lie":
                state.vector.add_(1.0)
            elif fault == "move on":
                advance(state)
        try:
            downloaded = await task
        except P2PTrainError:
            assert partial.num_done < NUM_CHUNKS
        else:
            assert swarm.is_right(downloaded)

    with_sources(4, check, seed=seed)


def test_a_state_of_a_few_bytes_arrives() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (newcomer, source):
            state = shared_state(1)
            StateServer(source.rpc, state, source.peer.runtime)
            head: Head = state.head
            downloaded = await download_state(
                newcomer.rpc, newcomer.peer.runtime, [source.rpc.peer_id], head, state.layout.fingerprint, 10.0
            )
            assert merkle_tree(downloaded.tensors).root == head.digest

    simulate(main, seed=1)
