"""A source of a better lineage misbehaves: trained peers go on with their rounds beside the download."""

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial

import pytest

from p2ptrain.network.chunks.fetch import FetchOptions
from p2ptrain.network.chunks.messages import Ask, FromReceiver, Open
from p2ptrain.network.rpc.channel import Channel, LeastRate
from p2ptrain.network.schema import to_wire
from p2ptrain.network.simulated import SimulatedNetwork, SimulatedPeer
from p2ptrain.training.state import digest
from p2ptrain.training.state.digest import TensorSpec
from p2ptrain.training.sync import background_download, state_server
from p2ptrain.training.sync.download import download_state
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

WIDTH = 100
STATE_BYTES = 8 * WIDTH * (WIDTH + 1)
"""Parameters and outer momentum."""
CHUNK_BYTES = 2048
NUM_CHUNKS = -(-STATE_BYTES // CHUNK_BYTES)
LEAST = LeastRate(bytes_per_second=100.0, window_seconds=10.0)
"""A window's bytes are less than a chunk."""
PIECE_BYTES = 50
ROUND_SECONDS = 8.0
"""The trainers' local steps in one round."""
WATCHED_SECONDS = 300.0


class Swarm(SimulatedSwarm):
    """Honest trainers, and ``evil``, which trained alone: its lineage has more tokens than theirs."""

    def _launch(self, peer: SimulatedPeer, step_seconds: float) -> SimulatedTrainer:
        trainer = SimulatedTrainer(peer, self.manifest, self.ledger, step_seconds, self.seed, width=WIDTH)
        self.trainers[peer.name] = trainer
        self.tasks[peer.name] = peer.spawn(trainer.run())
        return trainer

    async def train(self, names: str, weight: int) -> None:
        """Let evil train alone, then the others without it, long enough that no round leads from one to the other."""
        evil = self.start("evil", step_seconds=0.05)
        add = evil.work.add_step
        evil.work.add_step = lambda samples, tokens: add(samples, weight * tokens)  # type: ignore[method-assign]
        await self.until(lambda: evil.sync.head.round >= 10, 600, "evil's rounds")
        self.network.cut(evil.peer)
        evil.step_seconds = 1e6
        await asyncio.sleep(120.0)
        for name in names:
            self.start(name, step_seconds=ROUND_SECONDS / 4)
        honest = [self.trainers[name] for name in names]
        await self.until(lambda: min(each.sync.head.round for each in honest) >= 4, 300, "the others' rounds")
        assert all(evil.sync.head.outranks(each.sync.head) for each in honest)

    def commits(self, name: str, since: float) -> int:
        return sum(by == name and at >= since for at, by, _ in self.ledger.commits)


Send = Callable[[Channel, int, bytes], Awaitable[None]]
"""(channel, number of the chunk, its bytes) -> what is sent of it."""
Describe = Callable[[tuple[TensorSpec, ...]], list[TensorSpec]]


def misbehave(
    evil: SimulatedTrainer,
    send: Send = lambda channel, index, data: channel.send_bytes(data),
    describe: Describe = list,
) -> None:
    """Serve the state as an honest source does, but for its description and how chunks are sent."""

    async def serve(channel: Channel, request: Open) -> None:
        described = evil.state.describe()
        assert described is not None
        tensors = {"tensors": [to_wire(spec) for spec in describe(described[1])]}
        await channel.send({"layout": evil.state.layout.fingerprint, "description": tensors})
        buffer = memoryview(bytearray(2 * CHUNK_BYTES))
        while isinstance(asked := await channel.receive(FromReceiver, 1e4), Ask):
            for index in asked.chunks:
                await send(channel, index, bytes(buffer[: evil.state.read(index, buffer, described[1])]))

    evil.rpc.serve_channel("chunks.state", Open, serve)


async def dribble(bytes_per_second: float, channel: Channel, index: int, data: bytes) -> None:
    for start in range(0, len(data), PIECE_BYTES):
        await asyncio.sleep(PIECE_BYTES / bytes_per_second)
        await channel.send_bytes(data[start : start + PIECE_BYTES], more=start + PIECE_BYTES < len(data))


async def stall_at_the_last_byte(channel: Channel, index: int, data: bytes) -> None:
    if index < NUM_CHUNKS - 1:
        return await channel.send_bytes(data)
    await channel.send_bytes(data[:-1], more=True)
    await asyncio.sleep(1e4)


async def spoil_one(channel: Channel, index: int, data: bytes) -> None:
    await channel.send_bytes(bytes(CHUNK_BYTES) + data[CHUNK_BYTES:] if index == 3 else data)


def grow(specs: tuple[TensorSpec, ...], num_values: int) -> list[TensorSpec]:
    return [specs[0], TensorSpec(specs[1].name, "float32", (num_values,))]


LIES: dict[str, Callable[[SimulatedTrainer], None]] = {
    "dribbles just below the least rate": partial(misbehave, send=partial(dribble, 0.8 * LEAST.bytes_per_second)),
    "stalls at the last byte": partial(misbehave, send=stall_at_the_last_byte),
    "sends one chunk of other bytes": partial(misbehave, send=spoil_one),
    "describes 1 TiB": partial(misbehave, describe=partial(grow, num_values=1 << 37)),
    "describes another tensor": partial(
        misbehave, describe=lambda specs: [*specs, TensorSpec("outer.more", "float32", (4,))]
    ),
    "describes 100,000 tensors more": partial(
        misbehave, describe=lambda specs: [*specs, *(TensorSpec(f"{n}", "bool", ()) for n in range(100_000))]
    ),
}


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    digest.cut_of.cache_clear()
    for module in (digest, state_server):
        monkeypatch.setattr(module, "CHUNK_BYTES", CHUNK_BYTES)
    options = FetchOptions(least=LEAST)
    monkeypatch.setattr(background_download, "download_state", partial(download_state, options=options))


async def watch(
    network: SimulatedNetwork, lie: Callable[[SimulatedTrainer], None], names: str = "ab", weight: int = 1000
) -> Swarm:
    """Let evil, whose tokens count for so many, appear before honest trainers: their rounds go on as before."""
    swarm = Swarm(network, make_manifest(history_rounds=4), 1)
    await swarm.train(names, weight)
    began, before = network.loop.time(), network.loop.time() - 60.0
    pace = swarm.commits("a", before) / 60.0
    lie(swarm.trainers["evil"])
    network.mend(swarm.trainers["evil"].peer)
    await asyncio.sleep(WATCHED_SECONDS)
    for name in names:
        assert swarm.commits(name, began) >= 0.8 * pace * WATCHED_SECONDS
    return swarm


@pytest.mark.fault(43)
@pytest.mark.usefixtures("small_chunks")
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES)
@simulated(seed=1)
async def test_rounds_go_on_beside_a_source_that_is_given_up(
    network: SimulatedNetwork, lie: Callable[[SimulatedTrainer], None]
) -> None:
    swarm = await watch(network, lie)
    evil = swarm.trainers["evil"]
    for name in "ab":
        trainer = swarm.trainers[name]
        assert trainer.membership._known[evil.peer.peer_id].broken_promises
        assert trainer.sync.catch_up.resyncs == 0
        assert trainer.sync.head.lineage != evil.sync.head.lineage
        assert trainer.state.tree().root == trainer.sync.head.digest


@pytest.mark.fault(43)
@pytest.mark.usefixtures("small_chunks")
@simulated(seed=1)
async def test_rounds_go_on_beside_a_source_just_above_the_least_rate_and_its_state_is_taken_in_the_end(
    network: SimulatedNetwork,
) -> None:
    swarm = await watch(network, partial(misbehave, send=partial(dribble, 1.3 * LEAST.bytes_per_second)), "abcd")
    evil, trainer, other = (swarm.trainers[name] for name in ("evil", "a", "c"))
    network.stall(other.peer)
    await swarm.until(lambda: trainer.sync.head.round > other.sync.head.round + 1, 120, "rounds without c")
    network.resume(other.peer)
    await swarm.until(lambda: other.sync.head == trainer.sync.head, 60, "c replays rounds beside its download")
    assert trainer.sync.catch_up.resyncs == other.sync.catch_up.resyncs == 0
    await swarm.until(lambda: trainer.sync.catch_up.resyncs == 1, 900, "the download")
    assert trainer.sync.head.lineage == evil.sync.head.lineage


@pytest.mark.usefixtures("small_chunks")
@simulated(seed=1)
async def test_a_state_that_the_peer_s_own_rounds_have_overtaken_is_not_taken(network: SimulatedNetwork) -> None:
    swarm = await watch(network, partial(misbehave, send=partial(dribble, 1.3 * LEAST.bytes_per_second)), weight=4)
    evil, trainer = swarm.trainers["evil"], swarm.trainers["a"]
    assert trainer.sync.head.outranks(evil.sync.head)
    assert trainer.sync.catch_up.is_running
    await swarm.until(lambda: not trainer.sync.catch_up.is_running, 900, "the download")
    assert trainer.sync.catch_up.resyncs == 0
    assert trainer.sync.head.lineage != evil.sync.head.lineage
