"""A download ends with the right bytes or an error, whatever its sources do."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from p2ptrain.averaging.head import Head, genesis
from p2ptrain.errors import (
    DeadlineError,
    IncompatibleError,
    IntegrityError,
    P2PTrainError,
    PeerLostError,
    PeerRefusedError,
)
from p2ptrain.network.channel import Channel
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.training.digest import CHUNK_BYTES, ChunkedBytes, merkle_tree
from p2ptrain.training.layout import Layout
from p2ptrain.training.outer import NesterovStep
from p2ptrain.training.state import MOVED_ON, SharedState
from p2ptrain.training.transfer import (
    DownloadedState,
    PartialDownload,
    ServeLimits,
    StateServer,
    TransferTimes,
    download_state,
    fetch_head,
)
from tests.support.simulation import Member, members, start_member

NUM_VALUES = 1_500_000  # 11.4 MiB with momentum: 12 chunks
NUM_CHUNKS = 12
FAST = LinkModel(latency_seconds=(0.005, 0.02), up_bytes_per_second=4e6, down_bytes_per_second=40e6)


def _state(num_values: int = NUM_VALUES) -> SharedState:
    module = nn.Module()
    module.weight = nn.Parameter(torch.randn(num_values, generator=torch.Generator().manual_seed(3)))
    layout = Layout.from_module(module)
    state = SharedState.from_module(module, layout, NesterovStep(layout, 0.7, 0.9))
    state.stepper.state_tensors()[0][1].copy_(torch.randn(num_values, generator=torch.Generator().manual_seed(4)))
    state.head = genesis(b"s" * 32, state.tree().root)
    return state


def _advance(state: SharedState) -> None:
    state.apply(torch.ones(state.layout.num_values))
    root = state.tree().root
    state.head = replace(state.head, round=state.head.round + 1, lineage=root, digest=root)


class Swarm:
    """A newcomer (member 0) and sources with equal states."""

    def __init__(self, network: SimulatedNetwork, everyone: list[Member], limits: ServeLimits | None = None) -> None:
        self.network = network
        self.newcomer, *self.sources = everyone
        self.states = [_state() for _ in self.sources]
        self.head = self.states[0].head
        self.layout = self.states[0].layout.fingerprint
        for member, state in zip(self.sources, self.states, strict=True):
            StateServer(member.rpc, state, member.peer.runtime, limits)

    @property
    def ids(self) -> list[str]:
        return [member.rpc.peer_id for member in self.sources]

    async def download(self, timeout_seconds: float = 120.0, **options: Any) -> DownloadedState:
        runtime = self.newcomer.peer.runtime
        layout = options.pop("layout", self.layout)
        return await download_state(self.newcomer.rpc, runtime, self.ids, self.head, layout, timeout_seconds, **options)

    def start(self, **options: Any) -> asyncio.Task[DownloadedState]:
        return self.newcomer.peer.spawn(self.download(**options))

    def is_right(self, downloaded: DownloadedState) -> bool:
        return merkle_tree(downloaded.tensors).root == self.head.digest

    def refusals(self, source: int) -> int:
        """How often the newcomer counted that a source sent bad state."""
        return self.newcomer.rpc.refusals[self.ids[source], "bad state"]


def _run(
    num_sources: int,
    check: Callable[[Swarm], Awaitable[None]],
    limits: ServeLimits | None = None,
    model: LinkModel = FAST,
    seed: int = 1,
) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, num_sources + 1) as everyone:
            await check(Swarm(network, everyone, limits))

    simulate(main, seed=seed, model=model)


async def _until_started(swarm: Swarm, partial: PartialDownload, chunks: int = 1) -> None:
    async with asyncio.timeout(60):
        while partial.num_done < chunks:  # noqa: ASYNC110 - virtual time
            await asyncio.sleep(0.01)


def test_three_sources_share_the_work() -> None:
    async def check(swarm: Swarm) -> None:
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

    _run(3, check)


def test_what_was_downloaded_becomes_the_state() -> None:
    async def check(swarm: Swarm) -> None:
        downloaded = await swarm.download()
        own = _state()
        own.vector.zero_()
        own.replace(downloaded.tensors, downloaded.head)
        assert own.tree().root == swarm.head.digest
        _advance(own)
        _advance(swarm.states[0])
        assert own.head == swarm.states[0].head

    _run(1, check)


def test_one_source_uses_its_link_well() -> None:
    async def check(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await swarm.download()
        ideal = NUM_VALUES * 8 / 4e6
        assert loop.time() - started < ideal / 0.85

    _run(1, check)


@pytest.mark.parametrize("seed", range(4))
def test_a_lying_source_is_given_up_and_counted(seed: int) -> None:
    async def check(swarm: Swarm) -> None:
        swarm.states[0].vector[::1000] += 1.0  # after its hashes were made
        downloaded = await swarm.download()
        assert swarm.is_right(downloaded)
        assert "hash" in downloaded.faults[swarm.ids[0]]
        assert swarm.refusals(0) == 1
        assert swarm.refusals(1) == 0

    _run(2, check, seed=seed)


def test_only_liars_is_an_integrity_error_and_nothing_false_is_kept() -> None:
    async def check(swarm: Swarm) -> None:
        for state in swarm.states:
            state.vector[-1] += 1.0  # in chunk 5
        partial = PartialDownload()
        with pytest.raises(IntegrityError, match="no source"):
            await swarm.download(resume=partial)
        right = ChunkedBytes(_state().tensors())
        ours = ChunkedBytes(partial.tensors)
        kept = [index for index, done in enumerate(partial.done) if done]
        assert kept
        assert all(ours.leaf(index) == right.leaf(index) for index in kept)
        assert not partial.done[5]

    _run(2, check)


def test_a_false_description_is_found_before_memory_is_given_to_it() -> None:
    async def check(swarm: Swarm) -> None:
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

    _run(2, check)


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
    async def check(swarm: Swarm) -> None:
        async def lie(channel: Channel, request: dict[str, Any]) -> None:
            await channel.send({"layout": swarm.layout, **hello})
            await channel.receive(10)

        swarm.sources[0].rpc.serve_channel("state.chunks", lie)
        downloaded = await swarm.download()
        assert swarm.is_right(downloaded)
        assert swarm.ids[0] in downloaded.faults

    _run(2, check)


@pytest.mark.parametrize("seed", range(4))
def test_a_source_that_dies_is_replaced_by_the_others(seed: int) -> None:
    async def check(swarm: Swarm) -> None:
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await _until_started(swarm, partial)
        swarm.network.crash(swarm.sources[0].peer)
        downloaded = await task
        assert swarm.is_right(downloaded)

    _run(2, check, seed=seed)


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_a_source_that_falls_silent_does_not_hold_up_the_rest(fault: str) -> None:
    async def check(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await _until_started(swarm, partial)
        getattr(swarm.network, fault)(swarm.sources[0].peer)
        started = loop.time()
        assert swarm.is_right(await task)
        # All of it over one uplink takes 3 s: its silence was not waited for.
        assert loop.time() - started < 5.0

    _run(2, check)


def test_a_slow_source_does_not_set_the_pace() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as everyone:
            slow = network.add_peer("slow", up_bytes_per_second=1e5)
            everyone.append(await start_member(network, slow))
            swarm = Swarm(network, everyone)
            loop = asyncio.get_running_loop()
            started = loop.time()
            assert swarm.is_right(await swarm.download())
            # 1 MiB from the slow source alone takes 10 s.
            assert loop.time() - started < 5.0
            await everyone[-1].rpc.close()

    simulate(main, seed=1, model=FAST)


def test_a_source_that_comes_back_is_resumed() -> None:
    async def check(swarm: Swarm) -> None:
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

    _run(1, check)


def test_the_only_source_dies_and_another_completes_what_there_is() -> None:
    async def check(swarm: Swarm) -> None:
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
        await _until_started(swarm, partial, 4)
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

    _run(2, check)


def test_training_goes_on_while_the_state_is_served() -> None:
    async def check(swarm: Swarm) -> None:
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await _until_started(swarm, partial)
        for state in swarm.states:
            _advance(state)
        assert swarm.is_right(await task)

    _run(2, check)


def test_sources_that_moved_on_twice_say_so() -> None:
    async def check(swarm: Swarm) -> None:
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await _until_started(swarm, partial)
        others = []
        for state in swarm.states:
            _advance(state)
            others.append(state.lease())
            _advance(state)
        with pytest.raises(PeerRefusedError, match=f"{MOVED_ON}2"):
            await task
        assert not any(swarm.refusals(source) for source in range(2))
        assert [snapshot.head.round for snapshot in others] == [1, 1]

    _run(2, check)


def test_a_round_that_is_gone_is_refused_with_the_present_one() -> None:
    async def check(swarm: Swarm) -> None:
        _advance(swarm.states[0])
        with pytest.raises(PeerRefusedError, match=f"{MOVED_ON}1"):
            await swarm.download()
        assert await fetch_head(swarm.newcomer.rpc, swarm.ids[0]) == swarm.states[0].head

    _run(1, check)


def test_another_model_is_refused_as_incompatible() -> None:
    async def check(swarm: Swarm) -> None:
        with pytest.raises(IncompatibleError, match="another shape"):
            await swarm.download(layout=b"x" * 32)

    _run(2, check)


def test_a_deadline_ends_it_and_leaves_nothing_behind() -> None:
    async def check(swarm: Swarm) -> None:
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

    _run(2, check)


def test_sources_that_never_answer_end_by_the_inner_deadlines() -> None:
    async def check(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        swarm.network.stall(swarm.sources[0].peer)
        started = loop.time()
        with pytest.raises(P2PTrainError, match="no source"):
            await swarm.download(timeout_seconds=600.0, times=TransferTimes(open_seconds=2.0, chunk_seconds=2.0))
        assert loop.time() - started < 20.0

    _run(1, check)


def test_no_other_peer_is_said_at_once() -> None:
    async def check(swarm: Swarm) -> None:
        me = swarm.newcomer
        with pytest.raises(PeerLostError, match="no other peer"):
            await download_state(me.rpc, me.peer.runtime, [me.rpc.peer_id], swarm.head, swarm.layout, 5.0)

    _run(1, check)


def test_cancelling_frees_the_lease_and_the_slot() -> None:
    async def check(swarm: Swarm) -> None:
        for _ in range(4):
            partial = PartialDownload()
            task = swarm.start(resume=partial)
            await _until_started(swarm, partial)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled()
            await asyncio.sleep(1.0)
        assert swarm.states[0]._live is None
        assert swarm.sources[0].rpc.num_inbound == 0
        assert swarm.is_right(await swarm.download())

    _run(1, check)


def test_too_many_downloads_wait_their_turn() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 5) as everyone:
            *newcomers, source = everyone
            state = _state()
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
    async def check(swarm: Swarm) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        await swarm.download()
        assert loop.time() - started >= 0.9 * NUM_VALUES * 8 / 1e6

    _run(1, check, limits=ServeLimits(bytes_per_second=1e6))


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
    async def check(swarm: Swarm) -> None:
        hello = {"lineage": swarm.head.lineage, "describe": True}
        async with swarm.newcomer.rpc.open(swarm.ids[0], "state.chunks", hello, 5.0) as channel:
            await channel.receive(5.0, 1 << 20)
            await channel.send(request_)
            with pytest.raises(PeerRefusedError, match="chunks that there are not"):
                await channel.receive(5.0)
        await asyncio.sleep(10.0)
        assert swarm.states[0]._live is None

    _run(1, check)


def test_a_newcomer_cannot_download_for_ever() -> None:
    async def check(swarm: Swarm) -> None:
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

    _run(1, check)


@pytest.mark.parametrize("seed", range(12))
def test_any_mixture_of_faults_ends_right_or_in_an_error(seed: int) -> None:
    async def check(swarm: Swarm) -> None:
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
                _advance(state)
        try:
            downloaded = await task
        except P2PTrainError:
            assert partial.num_done < NUM_CHUNKS
        else:
            assert swarm.is_right(downloaded)

    _run(4, check, seed=seed)


def test_a_state_of_a_few_bytes_arrives() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (newcomer, source):
            state = _state(1)
            StateServer(source.rpc, state, source.peer.runtime)
            head: Head = state.head
            downloaded = await download_state(
                newcomer.rpc, newcomer.peer.runtime, [source.rpc.peer_id], head, state.layout.fingerprint, 10.0
            )
            assert merkle_tree(downloaded.tensors).root == head.digest

    simulate(main, seed=1)
