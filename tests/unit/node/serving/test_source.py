"""A source of weights: one copy at a time, whoever asks for it, and only for peers that are admitted."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.admission import NOT_ADMITTED, Gate
from p2ptrain.network.chunks.fetch import fetch
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.node.serving.source import (
    COPY,
    COPY_SHARE,
    KEPT_SECONDS,
    LEAST_BYTES_PER_SECOND,
    MAX_WAITING,
    WAIT_SECONDS,
    YIELD_SECONDS,
    AskCopy,
    Copied,
    WeightSource,
)
from p2ptrain.training.sync.weights import WEIGHTS, WeightTarget
from tests.support.coroutines import simulated
from tests.support.sim.downloads import FAST, advance, shared_state
from tests.support.sim.peers import Member, members

COPY_SECONDS = 0.5
NUM_VALUES = 300_000  # three chunks


class Host:
    """A source (member 0) whose copies take `COPY_SECONDS`, and peers that ask it."""

    def __init__(self, everyone: list[Member]) -> None:
        self.member, *self.askers = everyone
        self.averager = SimpleNamespace(phase="idle")
        self.state, self.copies, self.copying_seconds = shared_state(NUM_VALUES), 0, 0.0
        runtime = self.member.rpc.runtime
        clock, snapshot = runtime.clock, self.state.snapshot
        runtime.clock = lambda: clock() + self.copying_seconds

        def counted(allocate: Any) -> Any:
            self.copies += 1
            self.copying_seconds += COPY_SECONDS
            return snapshot(allocate)

        self.state.snapshot = counted  # type: ignore[method-assign]
        peer = SimpleNamespace(
            rpc=self.member.rpc, runtime=runtime, identity=SimpleNamespace(peer_id=self.member.rpc.peer_id),
            held=SimpleNamespace(stages=[], synchronizer=SimpleNamespace(state=self.state, averager=self.averager)),
            manifest=SimpleNamespace(model=None), record=None, on_close=lambda close: None,
        )  # fmt: skip
        self.source = WeightSource(cast(Any, peer))

    async def ask(self, asker: int = 0, stage: int = 0, every: int = 1, has: bytes = b"") -> Copied:
        rpc = self.askers[asker].rpc
        return await rpc.call(self.member.rpc.peer_id, COPY, AskCopy(stage, every, has), Copied, 2 * WAIT_SECONDS)

    def target(self, asker: int = 0) -> tuple[Rpc, WeightTarget]:
        rpc, memory = self.askers[asker].rpc, memoryview(bytearray(4 * NUM_VALUES))
        return rpc, WeightTarget(rpc.runtime, self.state.layout, self.state.head.digest, memory)


@asynccontextmanager
async def host(network: SimulatedNetwork, count: int) -> AsyncIterator[Host]:
    async with members(network, count + 1) as everyone:
        made = Host(everyone)
        yield made
        await made.source._tasks.close()


@simulated(host, 1, seed=1, model=FAST)
async def test_it_copies_rounds_that_the_receiver_takes_or_a_head_at_rest(swarm: Host) -> None:
    first = await swarm.ask()
    assert [head.round for head in first.heads] == [0]
    has = first.heads[0].digest
    assert await swarm.ask(has=has) == Copied()
    asked = asyncio.create_task(swarm.ask(every=4, has=has))
    await asyncio.sleep(COPY_SECONDS / COPY_SHARE - WAIT_SECONDS)
    for _ in range(6):
        await asyncio.sleep(3.0)
        advance(swarm.state)
    assert [head.round for head in (await asked).heads] == [4]
    await asyncio.sleep(COPY_SECONDS / COPY_SHARE)
    has = (await swarm.ask()).heads[0].digest
    advance(swarm.state)
    await asyncio.sleep(COPY_SECONDS / COPY_SHARE)
    assert [head.round for head in (await swarm.ask(every=1 << 40, has=has)).heads] == [swarm.state.head.round]


@simulated(host, 1, seed=1, model=FAST)
async def test_a_round_that_ends_before_the_copy_begins_is_not_copied(swarm: Host) -> None:
    has = (await swarm.ask()).heads[0].digest
    await asyncio.sleep(KEPT_SECONDS + COPY_SECONDS / COPY_SHARE)
    advance(swarm.state)
    held = swarm.source._newest()
    assert held is not None
    advance(swarm.state)
    assert swarm.source._snapshots(held, has)[0] == []
    ((_, snapshot),) = swarm.source._snapshots(held, held.key[1])[0]
    assert snapshot.head == swarm.state.head


@simulated(host, 1, seed=1, model=FAST)
async def test_copies_for_a_peer_that_asks_again_and_again_take_a_bounded_share_of_time(swarm: Host) -> None:
    began = asyncio.get_running_loop().time()
    for _ in range(40):
        advance(swarm.state)
        await swarm.ask()
        await asyncio.sleep(4.0)
    seconds = asyncio.get_running_loop().time() - began
    assert 2 <= swarm.copies <= 1 + COPY_SHARE * seconds / COPY_SECONDS


@simulated(host, 1, seed=1, model=FAST)
async def test_a_receiver_that_does_not_receive_keeps_no_copy_in_place(swarm: Host) -> None:
    first = await swarm.ask()
    rpc, target = swarm.target()
    turn = asyncio.Event()
    target.wait_for_turn = turn.wait  # type: ignore[assignment, method-assign]
    digest, sources = first.heads[0].digest, [swarm.member.rpc.peer_id]
    receiving = asyncio.create_task(fetch(rpc, WEIGHTS, digest, target, lambda: sources))
    await asyncio.sleep(KEPT_SECONDS + 1.0)
    advance(swarm.state)
    assert (await swarm.ask()).heads == first.heads
    await asyncio.sleep(4 * NUM_VALUES / LEAST_BYTES_PER_SECOND)
    assert (await swarm.ask(has=digest)).heads[0].round == 1
    turn.set()
    with pytest.raises(PeerRefusedError, match="other weights now"):
        await receiving


@pytest.mark.parametrize(("phase", "pauses"), [("idle", 0), ("matchmaking", 0), ("scatter", 3), ("gather", 3)])
@simulated(host, 1, seed=1, model=FAST)
async def test_transfers_pause_while_a_round_sends_its_parts(swarm: Host, phase: str, pauses: int) -> None:
    digest, began = (await swarm.ask()).heads[0].digest, asyncio.get_running_loop().time()
    swarm.averager.phase = phase
    rpc, target = swarm.target()
    await fetch(rpc, WEIGHTS, digest, target, lambda: [swarm.member.rpc.peer_id])
    assert pauses * YIELD_SECONDS <= asyncio.get_running_loop().time() - began < (pauses + 1) * YIELD_SECONDS


@simulated(host, MAX_WAITING + 1, seed=1, model=FAST)
async def test_few_peers_wait_at_once_and_each_only_once(swarm: Host) -> None:
    has = (await swarm.ask()).heads[0].digest
    waiting = [asyncio.create_task(swarm.ask(number, has=has)) for number in range(MAX_WAITING)]
    await asyncio.sleep(1.0)
    for asker in (0, MAX_WAITING):
        with pytest.raises(PeerRefusedError, match="too many peers wait"):
            await swarm.ask(asker, has=has)
    assert [await each for each in waiting] == MAX_WAITING * [Copied()]


@simulated(host, 1, seed=1, model=FAST)
async def test_a_stranger_gets_neither_a_copy_nor_weights(swarm: Host) -> None:
    closed = SimpleNamespace(admitted=lambda peer, credential, **asked: "nobody vouches for it")
    swarm.member.rpc.gate = cast(Gate, closed)
    with pytest.raises(PeerRefusedError, match=NOT_ADMITTED):
        await swarm.ask()
    rpc, target = swarm.target()
    with pytest.raises(PeerRefusedError, match=NOT_ADMITTED):
        await fetch(rpc, WEIGHTS, swarm.state.head.digest, target, lambda: [swarm.member.rpc.peer_id])
    assert swarm.copies == 0


@simulated(host, 1, seed=1, model=FAST)
async def test_no_copy_is_made_of_a_state_that_a_round_changes(swarm: Host) -> None:
    has = (await swarm.ask()).heads[0].digest
    await asyncio.sleep(2 * KEPT_SECONDS + COPY_SECONDS / COPY_SHARE)
    swarm.state.apply(swarm.state.vector.clone(), 0)
    swarm.state._head = replace(swarm.state.head, digest=bytes(32))
    assert await swarm.ask(has=has) == Copied()
    assert swarm.copies == 1
