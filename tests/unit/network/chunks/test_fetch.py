"""A fetch keeps to a plan, and a source to what it has and to its rations; downloads of states test the rest."""

from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager

import pytest

from p2ptrain.errors import PeerRefusedError
from p2ptrain.network.chunks.fetch import FetchOptions, FetchReport, fetch
from p2ptrain.network.chunks.messages import MAX_ASKED, Ask, Open, service
from p2ptrain.network.chunks.server import ChunkServer, Ration
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.schema import Nothing
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.peers import Member, members

NUM_CHUNKS = 40
CHUNK_BYTES = 10_000
CHUNKS = [bytes([index]) * CHUNK_BYTES for index in range(NUM_CHUNKS)]
LINKS = LinkModel(latency_seconds=(0.01, 0.02), up_bytes_per_second=1e5, down_bytes_per_second=1e7)


class Wanted:
    """Chunks that come; implements `Target`."""

    most_bytes = CHUNK_BYTES
    expected_bytes = NUM_CHUNKS * CHUNK_BYTES
    asks_at_once = True

    def __init__(self) -> None:
        self.done = bytearray(NUM_CHUNKS)
        self.arrived: list[tuple[str, int]] = []

    @property
    def is_complete(self) -> bool:
        return all(self.done)

    def wire_bytes(self, index: int) -> int:
        return CHUNK_BYTES

    async def agree(self, channel: Channel, options: FetchOptions) -> int:
        return 0

    async def put(self, source: str, index: int, received: memoryview) -> int:
        assert received == CHUNKS[index]
        self.done[index] = 1
        self.arrived.append((source, index))
        return len(received)

    async def wait_for_turn(self) -> None:
        pass


class Held:
    """Chunks that are here; implements `Supply`."""

    num_chunks = NUM_CHUNKS

    async def describe(self) -> None:
        return None

    async def read(self, index: int) -> bytes:
        return CHUNKS[index]


class World:
    """A receiver, and sources of the same chunks."""

    def __init__(self, receiver: Member, sources: list[Member], ration: Ration) -> None:
        self.receiver = receiver
        self.sources = sources
        self.ids = [source.rpc.peer_id for source in sources]
        self.target = Wanted()

        async def find(request: Open) -> Held:
            return Held()

        for source in sources:
            ChunkServer(source.rpc, "thing", find, ration)

    async def fetch(self, options: FetchOptions) -> FetchReport:
        return await fetch(self.receiver.rpc, "thing", b"", self.target, lambda: self.ids, options)

    def open(self) -> AbstractAsyncContextManager[Channel]:
        """Open a channel from the receiver to the first source."""
        return self.receiver.rpc.open(self.ids[0], service("thing"), Open(), 5.0)


@asynccontextmanager
async def with_sources(network: SimulatedNetwork, count: int, ration: Ration | None = None) -> AsyncIterator[World]:
    async with members(network, count + 1) as (receiver, *sources):
        yield World(receiver, sources, ration or Ration())


@pytest.mark.parametrize("idle_seconds", [10.0, 120.0])
@simulated(model=LinkModel(up_bytes_per_second=5_000.0))
async def test_a_source_with_a_slow_link_is_not_cut_while_chunks_arrive(
    network: SimulatedNetwork, idle_seconds: float
) -> None:
    async with with_sources(network, 1, Ration(idle_seconds=idle_seconds)) as world:
        report = await world.fetch(FetchOptions(first_span=8, attempts=1))
    assert report.faults == {}


@simulated(with_sources, 3, model=LINKS)
async def test_a_plan_is_kept_to_and_the_first_source_sends_what_another_fails_to(world: World) -> None:
    plan = {source: range(number, NUM_CHUNKS, 3) for number, source in enumerate(world.ids)}
    options = FetchOptions(attempts=1, plan=plan)

    async def refuse(channel: Channel, request: Open) -> None:
        raise PeerRefusedError("?", "not now")

    world.sources[2].rpc.serve_channel(service("thing"), Open, refuse)
    report = await world.fetch(options)
    assert set(report.faults) == {world.ids[2]}
    assert len(world.target.arrived) == NUM_CHUNKS
    expected = {index: world.ids[1 if index % 3 == 1 else 0] for index in range(NUM_CHUNKS)}
    assert {index: source for source, index in world.target.arrived} == expected


@pytest.mark.parametrize("indices", [[NUM_CHUNKS], [0, 1 << 31]])
@simulated(model=LINKS)
async def test_chunks_that_there_are_not_are_refused(network: SimulatedNetwork, indices: list[int]) -> None:
    async with with_sources(network, 1) as world, world.open() as channel:
        await channel.send(Ask(indices))
        with pytest.raises(PeerRefusedError, match="chunks that there are not"):
            await channel.receive(Nothing, 5.0)


@simulated(model=LINKS)
async def test_nobody_fetches_for_ever(network: SimulatedNetwork) -> None:
    async with with_sources(network, 1) as world, world.open() as channel:
        for _ in range(4 * NUM_CHUNKS + MAX_ASKED):
            await channel.send(Ask([3]))
            await channel.receive_bytes(CHUNK_BYTES, 30.0)
        await channel.send(Ask([0]))
        with pytest.raises(PeerRefusedError, match="too often"):
            await channel.receive(Nothing, 5.0)


@simulated(model=LINKS)
async def test_a_peer_gets_its_ration_and_others_theirs(network: SimulatedNetwork) -> None:
    async with with_sources(network, 2, Ration(transfers=2, transfers_per_peer=1)) as world, world.open() as first:
        await first.send(Ask([0]))
        await first.receive_bytes(CHUNK_BYTES, 5.0)
        async with world.open() as second:
            with pytest.raises(PeerRefusedError, match="busy"):
                await second.receive(Nothing, 5.0)
        async with world.sources[1].rpc.open(world.ids[0], service("thing"), Open(), 5.0) as other:
            await other.send(Ask([0]))
            await other.receive_bytes(CHUNK_BYTES, 5.0)
