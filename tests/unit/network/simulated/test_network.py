"""The simulated network: links, faults, and the same trace from the same seed."""

import asyncio
import os
import subprocess
import sys

import pytest

from p2ptrain.errors import PeerLostError, PeerUnreachableError
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer, SimulationError, simulate
from p2ptrain.network.transport import Stream
from tests.sim.test_rpc_under_faults import run_schedule
from tests.support.coroutines import simulated
from tests.support.processes.commands import ROOT

ECHO = "/test/echo"
SINK = "/test/sink"
FIXED = LinkModel(latency_seconds=(0.05, 0.05), jitter=0.0, up_bytes_per_second=None, down_bytes_per_second=None)


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(4))


async def ignore(stream: Stream) -> None:
    await asyncio.sleep(3600)


async def pair(network: SimulatedNetwork) -> tuple[SimulatedPeer, SimulatedPeer]:
    first, second = network.add_peer("first"), network.add_peer("second")
    await second.transport.serve(ECHO, echo)
    await second.transport.serve(SINK, ignore)
    return first, second


@simulated(model=FIXED)
async def test_bandwidth_limits_and_is_shared_by_streams(network: SimulatedNetwork) -> None:
    received: list[float] = []

    async def take(stream: Stream) -> None:
        await stream.read(1_000_000)
        received.append(network.loop.time())

    sender = network.add_peer("sender", up_bytes_per_second=1e6)
    others = [network.add_peer(f"receiver{i}") for i in range(2)]
    streams = []
    for other in others:
        await other.transport.serve(SINK, take)
        streams.append(await sender.transport.open(other.peer_id, SINK, 5))
    await asyncio.gather(*(stream.write(bytes(1_000_000)) for stream in streams))
    await asyncio.sleep(5)
    for stream in streams:
        await stream.close()
    assert len(received) == 2
    assert all(1.9 < moment < 2.4 for moment in received), received


def test_loss_makes_it_slower_and_nothing_else() -> None:
    data = os.urandom(1 << 20)

    def seconds(loss: float) -> float:
        async def main(network: SimulatedNetwork) -> float:
            got = network.loop.create_future()

            async def take(stream: Stream) -> None:
                got.set_result(await stream.read(len(data)))

            first, second = await pair(network)
            await second.transport.serve(SINK, take)
            stream = await first.transport.open(second.peer_id, SINK, 5)
            await stream.write(data)
            assert await got == data
            await stream.close()
            return network.loop.time()

        return simulate(main, 3, model=LinkModel(loss=loss))

    assert seconds(0.0) < seconds(0.2)


@simulated(model=FIXED)
async def test_a_crash_ends_streams_and_tasks_and_refuses_dials(network: SimulatedNetwork) -> None:
    unwound: list[str] = []

    async def stubborn() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            try:
                await asyncio.sleep(3600)
            finally:
                unwound.append("done")

    first, second = await pair(network)
    stream = await first.transport.open(second.peer_id, ECHO, 5)
    second.spawn(stubborn())
    await asyncio.sleep(1)
    network.crash(second)
    crashed_at = network.loop.time()
    with pytest.raises(PeerLostError):
        await stream.read(1)
    assert network.loop.time() - crashed_at == pytest.approx(0.05)
    assert unwound == ["done"]
    with pytest.raises(PeerUnreachableError, match="refused"):
        await first.transport.open(second.peer_id, ECHO, 5)
    assert network.loop.time() - crashed_at < 0.5
    stream.abort()


@simulated(model=FIXED)
async def test_a_crashed_peers_own_network_calls_fail_at_once(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    stream = await first.transport.open(second.peer_id, ECHO, 5)
    network.crash(first)
    crashed_at = network.loop.time()
    with pytest.raises(PeerLostError):
        await stream.write(b"data")
    with pytest.raises(PeerLostError):
        await stream.read(1)
    with pytest.raises(PeerUnreachableError):
        await first.transport.open(second.peer_id, ECHO, 5)
    assert not await first.directory.publish("key", "sub", b"", 2e9, 5)
    assert await first.directory.look_up("key", 5) is None
    assert network.loop.time() == crashed_at


@simulated()
async def test_a_restarted_peer_keeps_its_identity(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    network.crash(second)
    again = network.restart(second)
    assert again.peer_id == second.peer_id
    assert again.runtime.random.random() != second.runtime.random.random()
    with pytest.raises(PeerUnreachableError):
        await first.transport.open(again.peer_id, ECHO, 5)
    await again.transport.serve(ECHO, echo)
    stream = await first.transport.open(again.peer_id, ECHO, 5)
    await stream.write(b"back")
    assert await stream.read(4) == b"back"
    await stream.close()


@simulated(model=FIXED)
async def test_a_stalled_peer_accepts_dials_and_answers_when_it_goes_on(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    network.stall(second, 30)
    stream = await first.transport.open(second.peer_id, ECHO, 5)
    await stream.write(b"late")
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(20):
            await stream.read(4)
    assert await stream.read(4) == b"late"
    assert network.loop.time() == pytest.approx(30.05)
    await stream.close()


@simulated()
async def test_a_partition_holds_data_and_healing_delivers_it(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    stream = await first.transport.open(second.peer_id, ECHO, 5)
    network.partition([first], [second])
    await stream.write(b"held")
    await stream.write(b"more")
    with pytest.raises(PeerUnreachableError, match="within"):
        await first.transport.open(second.peer_id, ECHO, 5)
    network.heal()
    assert await stream.read(8) == b"heldmore"
    await stream.close()


@simulated()
async def test_a_cut_cable_is_silent_and_ends_streams_after_the_timeout(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    stream = await first.transport.open(second.peer_id, ECHO, 5)
    network.cut(second)
    cut_at = network.loop.time()
    with pytest.raises(PeerLostError):
        await stream.read(1)
    assert network.loop.time() - cut_at == pytest.approx(40.0)
    network.mend(second)
    again = await first.transport.open(second.peer_id, ECHO, 5)
    await again.close()
    stream.abort()


@simulated(model=FIXED)
async def test_a_cancelled_dial_leaves_no_stream(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    for timeout_seconds in (0.01, 0.049, 0.051, 0.099, 0.0999999):
        with pytest.raises(PeerUnreachableError):
            await first.transport.open(second.peer_id, SINK, timeout_seconds)
    await asyncio.sleep(1)
    assert first.transport.num_streams == 0
    await second.close()


@simulated()
async def test_connect_finds_the_first_address_that_answers(network: SimulatedNetwork) -> None:
    first, second = await pair(network)
    gone = network.add_peer("gone")
    network.crash(gone)
    addresses = [gone.address, *await second.transport.addresses()]
    assert await first.transport.connect(addresses, 5) == second.peer_id
    with pytest.raises(PeerUnreachableError):
        await first.transport.connect([gone.address], 5)


@pytest.mark.parametrize("what", ["task", "stream", "exception"])
def test_what_is_left_behind_is_reported(what: str) -> None:
    async def fail() -> None:
        raise RuntimeError("nobody looks")

    async def main(network: SimulatedNetwork) -> None:
        first, second = await pair(network)
        if what == "task":
            first.spawn(asyncio.sleep(3600))
        elif what == "stream":
            network.keep = await first.transport.open(second.peer_id, ECHO, 5)  # type: ignore[attr-defined]
        else:
            first.spawn(fail())
            await asyncio.sleep(1)

    with pytest.raises(SimulationError, match={"exception": "lost"}.get(what, "left something behind")):
        simulate(main, 1)


def test_a_replay_does_not_depend_on_the_hash_seed() -> None:
    module = run_schedule.__module__
    script = f"from {module} import run_schedule; import sys; sys.stdout.write(run_schedule(11)[0])"
    digests = {
        subprocess.run(
            [sys.executable, "-c", script], capture_output=True, check=True, text=True,
            env={**os.environ, "PYTHONHASHSEED": hash_seed, "PYTHONPATH": str(ROOT)},
        ).stdout
        for hash_seed in ("1", "2")
    }  # fmt: skip
    assert digests == {run_schedule(11)[0]} != {run_schedule(12)[0]}
