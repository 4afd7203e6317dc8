"""A peer serves its state while it trains, to no more newcomers and no faster than it wants."""

import asyncio
import tracemalloc
from typing import Any

import pytest
import torch

from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.chunks.messages import Ask, Open
from p2ptrain.network.chunks.server import Ration
from p2ptrain.training.state.digest import CHUNK_BYTES, cut_of
from p2ptrain.training.state.shared_state import SharedState, Stamp, stamped_bytes
from p2ptrain.training.sync.download import PartialDownload, download_state
from p2ptrain.training.sync.state_server import HeldState, StateServer, count_digests, fetch_head
from tests.support.coroutines import simulated
from tests.support.sim.downloads import (
    FAST,
    NUM_VALUES,
    Sources,
    advance,
    shared_state,
    sources,
    until_started,
)
from tests.support.sim.peers import Member, members


async def download_from(source: Member, state: SharedState, newcomer: Member, partial: PartialDownload) -> str:
    """Why a source refused a download; empty if it did not."""
    try:
        await download_state(newcomer.rpc, lambda: [source.rpc.peer_id], state, partial, AnyState())
    except PeerRefusedError as error:
        return str(error)
    return ""


def test_newcomers_do_not_tell_which_state_members_hold() -> None:
    table = Table((Row("a", votes=True, elects=True), Row("b")), is_open=True)
    digests = {"a": b"right", "b": b"right", **dict.fromkeys(("n1", "n2", "n3"), b"false")}
    assert count_digests(digests, table) == {b"right": 2}
    assert count_digests(digests, Table(is_open=True)) == {b"right": 2, b"false": 3}


@simulated(members, 5, seed=1, model=FAST)
async def test_too_many_downloads_wait_their_turn(everyone: list[Member]) -> None:
    *newcomers, source = everyone
    state = shared_state()
    StateServer(source.rpc, state).chunks._ration = Ration(transfers=2)
    results = await asyncio.gather(
        *(each.peer.spawn(download_from(source, state, each, PartialDownload())) for each in newcomers)
    )
    assert results.count("") >= 2
    assert all("busy" in result for result in results if result)


@simulated(sources, 1, seed=1, model=FAST)
async def test_cancelling_frees_the_slot(swarm: Sources) -> None:
    for _ in range(4):
        partial = PartialDownload()
        task = swarm.start(resume=partial)
        await until_started(swarm, partial)
        task.cancel()
        await asyncio.wait([task])
        assert task.cancelled()
        await asyncio.sleep(1.0)
    assert swarm.sources[0].rpc.inbound.total() == 0
    await swarm.download()
    assert swarm.is_right()


@simulated(sources, 1, seed=1, model=FAST)
async def test_a_source_that_moves_on_in_the_middle_sends_what_it_holds_and_says_of_which_round(swarm: Sources) -> None:
    state, source = swarm.states[0], swarm.ids[0]
    cut = cut_of(state.describe()[1])  # type: ignore[index]
    async with swarm.newcomer.rpc.open(source, "chunks.state", Open(), 5.0) as channel:
        await channel.receive(HeldState, 5.0)
        for round_ in range(3):
            assert (await fetch_head(swarm.newcomer.rpc, source)).round == round_
            await channel.send(Ask([2]))
            size = cut.chunk_bytes(2)
            received = memoryview(await channel.receive_bytes(stamped_bytes(size, cut.depth), 30.0))
            assert Stamp.from_bytes(received[size : size + Stamp.NUM_BYTES]) == Stamp.of(state.head)
            advance(state)


@simulated(members, 9, seed=1, model=FAST)
async def test_no_copy_of_the_state_is_made_however_many_download_while_rounds_go_on(
    everyone: list[Member], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Eight newcomers hold eight buffers of a chunk at the source, and nothing else."""
    copies, clone = [], torch.Tensor.clone

    def counted(tensor: torch.Tensor, **options: Any) -> torch.Tensor:
        if tensor.numel() >= NUM_VALUES // 2:
            copies.append(tensor.numel())
        return clone(tensor, **options)

    *newcomers, source = everyone
    state, num_bytes = shared_state(), 8 * NUM_VALUES
    StateServer(source.rpc, state)
    partials = [PartialDownload() for _ in newcomers]
    monkeypatch.setattr(torch.Tensor, "clone", counted)
    tasks = [
        member.peer.spawn(download_from(source, state, member, partial))
        for member, partial in zip(newcomers, partials, strict=True)
    ]
    tracemalloc.start()
    try:
        while not all(task.done() for task in tasks):
            advance(state)
            held = sum(one.num_bytes for one in partials)
            assert tracemalloc.get_traced_memory()[0] < 0.5 * num_bytes + 8 * 6 * CHUNK_BYTES
            await asyncio.sleep(2.0)
    finally:
        tracemalloc.stop()
    assert held == 8 * num_bytes
    assert all(partial.is_complete for partial in partials)
    assert len({stamp.round for _, stamp in partials[0].chunks()}) > 3
    assert not copies


class AnyState:
    """Admits all chunks; implements `p2ptrain.training.sync.download.Admission`."""

    async def admit(self, source: str, stamp: Stamp) -> None:
        pass

    async def wait_for_turn(self) -> None:
        pass
