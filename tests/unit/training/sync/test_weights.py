"""The vector alone, of one snapshot, from several sources: verified against the digest of the whole state."""

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
import torch

from p2ptrain.errors import IncompatibleError, IntegrityError, PeerRefusedError
from p2ptrain.hashing import HASH_BYTES
from p2ptrain.network.chunks.fetch import BadContentError, FetchReport, fetch
from p2ptrain.network.chunks.messages import Open
from p2ptrain.network.chunks.server import ChunkServer
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.state.shared_state import SharedState, Snapshot
from p2ptrain.training.sync.weights import WEIGHTS, WeightSupply, WeightTarget
from tests.support.coroutines import simulated
from tests.support.sim.downloads import CHUNK_VALUES, FAST, NUM_VALUES, advance, shared_state
from tests.support.sim.peers import Member, members


def new_memory(num_bytes: int) -> memoryview:
    return memoryview(bytearray(num_bytes))


def copy_of(state: SharedState) -> Snapshot:
    copy = state.snapshot(new_memory)
    assert copy is not None
    return copy


class Sources:
    """A receiver (member 0), and sources of one snapshot each."""

    def __init__(self, everyone: Sequence[Member]) -> None:
        self.receiver, *self.sources = everyone
        self.state = shared_state()
        self.copies = [copy_of(self.state) for _ in self.sources]
        self.sent = [0] * len(self.sources)
        self.memory = new_memory(4 * NUM_VALUES)
        for number, member in enumerate(self.sources):
            self._serve(number, member)

    def _serve(self, number: int, member: Member) -> None:
        sources = self

        class Counting(WeightSupply):
            async def read(self, index: int) -> bytes:
                found = await super().read(index)
                sources.sent[number] += len(found)
                return found

        async def supply(request: Open) -> WeightSupply:
            copy = self.copies[number]
            if request.key != copy.head.digest:
                raise PeerRefusedError(member.rpc.peer_id, "holds other weights")
            return Counting(self.state.layout, copy, functools.partial(asyncio.sleep, 0))

        ChunkServer(member.rpc, WEIGHTS, supply)

    @property
    def ids(self) -> list[str]:
        return [member.rpc.peer_id for member in self.sources]

    def target(self) -> WeightTarget:
        state = self.state
        return WeightTarget(self.receiver.rpc.runtime, state.layout, state.head.digest, self.memory)

    async def fetch(self, target: WeightTarget | None = None) -> FetchReport:
        target = target or self.target()
        return await fetch(self.receiver.rpc, WEIGHTS, self.state.head.digest, target, lambda: self.ids)

    def is_right(self) -> bool:
        return torch.equal(torch.frombuffer(self.memory, dtype=torch.float32), self.state.vector)


@asynccontextmanager
async def sources(network: SimulatedNetwork, count: int) -> AsyncIterator[Sources]:
    async with members(network, count + 1) as everyone:
        yield Sources(everyone)


@simulated(sources, 1, seed=1, model=FAST)
async def test_the_vector_comes_without_the_optimizers_state(swarm: Sources) -> None:
    report = await swarm.fetch()
    assert swarm.is_right()
    assert sum(report.bytes_from.values()) == 4 * NUM_VALUES
    assert sum(swarm.sent) < 1.1 * 4 * NUM_VALUES  # The momentum is as large again.


@simulated(sources, 2, seed=1, model=FAST)
async def test_a_snapshot_stays_while_rounds_go_on(swarm: Sources) -> None:
    wanted, target = swarm.state.vector.clone(), swarm.target()
    advance(swarm.state)
    await fetch(swarm.receiver.rpc, WEIGHTS, swarm.copies[0].head.digest, target, lambda: swarm.ids)
    assert torch.equal(torch.frombuffer(swarm.memory, dtype=torch.float32), wanted)


@pytest.mark.parametrize("lies_about_run", [True, False])
@simulated(sources, 2, seed=range(3), model=FAST)
async def test_a_source_that_lies_about_a_run_or_its_rest_is_given_up(swarm: Sources, lies_about_run: bool) -> None:
    wrong = swarm.copies[0]
    if lies_about_run:
        for start in range(0, len(wrong.vector), 4 * CHUNK_VALUES):
            wrong.vector[start + 3] ^= 1
    else:
        rests = [bytes(HASH_BYTES)] * len(wrong.tree.rests)
        swarm.copies[0] = replace(wrong, tree=replace(wrong.tree, rests=rests))
    report = await swarm.fetch()
    assert swarm.is_right()
    assert report.liars == swarm.ids[:1]


@simulated(sources, 1, seed=1, model=FAST)
async def test_a_description_without_proof_is_refused(swarm: Sources) -> None:
    vector, momentum = swarm.copies[0].specs
    swarm.copies[0] = replace(swarm.copies[0], specs=(vector, msgspec.structs.replace(momentum, name="outer.other")))
    with pytest.raises(IntegrityError, match="described a state"):
        await swarm.fetch()
    assert not any(swarm.memory)


@simulated(sources, 1, seed=1, model=FAST)
async def test_another_model_and_values_that_are_not_finite_are_refused(swarm: Sources) -> None:
    other = shared_state(NUM_VALUES // 2)
    target = WeightTarget(swarm.receiver.rpc.runtime, other.layout, swarm.state.head.digest, swarm.memory)
    with pytest.raises(IncompatibleError, match="another shape"):
        await swarm.fetch(target)
    swarm.state.vector[7] = torch.inf
    swarm.state.head = replace(swarm.state.head, digest=swarm.state.tree().root)
    swarm.copies[0] = copy_of(swarm.state)
    with pytest.raises(BadContentError, match="not finite"):
        await swarm.fetch()


def test_there_is_no_snapshot_while_a_round_changes_the_state() -> None:
    state = shared_state(1000)
    state.apply(torch.ones(1000), 0)
    assert state.snapshot(new_memory) is None
