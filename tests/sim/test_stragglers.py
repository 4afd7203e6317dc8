"""Costs of slow, stopped and unreachable members for the others of a group. Time is virtual, sizes are real."""

import asyncio
import functools
import statistics

import pytest
import torch

from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.network.simulated.streams import SimulatedStream
from p2ptrain.tasks import together
from tests.support.coroutines import simulated
from tests.support.sim.averagers import AveragingPeer, start_averagers, stop_averagers
from tests.support.sim.peers import until

NUM_VALUES = 2_000_000
RATE = 1e6
"""Bytes per second of a usual peer: a round takes several times the latency and the grace period."""
COMPUTE_SECONDS = 30.0
SPEC = AveragingSpec(codec="int8", grace_seconds=1.0)


async def start(
    network: SimulatedNetwork, speeds: list[float], spec: AveragingSpec = SPEC, down: float | None = None
) -> list[AveragingPeer]:
    """Averagers whose links have these shares of `RATE`; downlinks have ``down`` instead if given."""
    peers = [
        network.add_peer(f"p{i}", up_bytes_per_second=RATE * speed, down_bytes_per_second=RATE * (down or speed))
        for i, speed in enumerate(speeds)
    ]
    return await start_averagers(network, peers, spec, NUM_VALUES)


async def average(started: list[AveragingPeer], count: int, slow: AveragingPeer | None = None) -> None:
    """All average so many times, beginning together as peers do that compute for as long; ``slow`` when it is there."""
    task: asyncio.Task[bool] | None = None
    for _ in range(count):
        if slow is not None and (task is None or task.done()):
            task = asyncio.create_task(slow.try_round())
        await asyncio.gather(*(each.round_until_committed() for each in started if each is not slow))
        if task is not None:
            await asyncio.wait({task}, timeout=COMPUTE_SECONDS)
    if task is not None:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@functools.cache
def usual_seconds(num_peers: int, spot_checks: int) -> float:
    """How long a round of so many equal peers takes from the roster to the certificate."""
    found: list[float] = []

    async def main(network: SimulatedNetwork) -> None:
        started = await start(network, [1.0] * num_peers, SPEC.model_copy(update={"spot_checks": spot_checks}))
        await average(started, 2)
        found.extend(each.seconds[-1] for each in started)
        await stop_averagers(started)

    simulate(main, 1)
    return statistics.median(found)


@pytest.fixture
def usual(num_peers: int, spot_checks: int) -> float:
    return usual_seconds(num_peers, spot_checks)


@simulated(seed=1)
async def test_two_peers_average_however_long_their_links_take(network: SimulatedNetwork) -> None:
    started = await start(network, [0.2, 0.2])
    await average(started, 2)
    for each in started:
        assert each.seconds[-1] > 4 * SPEC.grace_seconds
        assert len(each.outcomes[-1].result.certificate.body.contributors) == 2


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("num_peers", "seed", "spot_checks"),
    [*((4, seed, 4) for seed in range(1, 7)), (6, 1, 4), (4, 1, 0), (4, 3, 0), (4, 5, 0), (6, 1, 0)],
)
@simulated()
async def test_a_peer_at_a_tenth_of_the_speed_costs_the_others_a_fifth_and_grace_and_its_work_counts(
    network: SimulatedNetwork, num_peers: int, seed: int, spot_checks: int, usual: float
) -> None:
    spec = SPEC.model_copy(update={"spot_checks": spot_checks})
    slow, *quick = started = await start(network, [0.1] + [1.0] * (num_peers - 1), spec)
    await average(started, 6, slow)
    told = [o.result.certificate.body for o in quick[0].outcomes]
    for each in quick:
        assert max(each.seconds[1:]) <= 1.2 * usual + SPEC.grace_seconds
        assert [o.result.certificate.body for o in each.outcomes] == told
    assert all({each.peer.peer_id for each in quick} <= set(body.members) for body in told)
    assert slow.membership.avoided() == []  # It blames nobody for having gone on without it.
    counted = [slow.peer.peer_id in [body.members[i] for i, *_ in body.contributors] for body in told]
    assert sum(counted[2:]) >= len(counted[2:]) / 2
    last = told[-1]
    if slow.peer.peer_id in last.members:
        index = last.members.index(slow.peer.peer_id)
        assert last.bounds[index] == last.bounds[index + 1]  # It owns no share.


@simulated(seed=1)
async def test_the_mean_with_a_slow_peer_s_fewer_bits_is_still_close(network: SimulatedNetwork) -> None:
    started = await start(network, [0.35, 1.0, 1.0, 1.0])
    await average(started, 3, started[0])
    body = started[1].outcomes[-1].result.certificate.body
    by_id = {each.peer.peer_id: each for each in started}
    exact = sum((by_id[body.members[i]].vector for i, *_ in body.contributors), torch.zeros(NUM_VALUES))
    exact.div_(len(body.contributors))
    assert float((started[1].mean() - exact).norm() / exact.norm()) < 0.15


@pytest.mark.fault(52)
@pytest.mark.parametrize("seed", [1, 4, 9, 27, 28, 29, 37])
@simulated()
async def test_an_owner_that_stops_costs_the_grace_period_and_another_round_of_all_others(
    network: SimulatedNetwork, seed: int
) -> None:
    """Also where one of them gives the attempt up while another still sends to it: nobody blames that one.

    One that did not see it stop may hand in to it, and must notice within the grace period: as by default, that is
    longer than a leader may be silent.
    """
    spec = SPEC.model_copy(update={"grace_seconds": AveragingSpec().grace_seconds})
    stopped, *others = started = await start(network, [1.0] * 4, spec)
    await average(started, 4)  # Deadlines follow what was usual.
    usual = statistics.median(each.seconds[1] for each in started)
    rounds = [each.peer.spawn(each.round()) for each in started]
    await until(lambda: stopped.averager.phase == "scatter")
    network.stall(stopped.peer)
    began = network.loop.time()
    try:
        await asyncio.gather(*rounds[1:])
        assert network.loop.time() - began <= 1.2 * usual + spec.grace_seconds
        assert all(len(each.outcomes[-1].result.certificate.body.members) == 3 for each in others)
        assert not any(set(each.membership.avoided()) - {stopped.peer.peer_id} for each in others)
    finally:
        network.resume(stopped.peer)
        rounds[0].cancel()
        await asyncio.gather(*rounds, return_exceptions=True)


@simulated(seed=1)
async def test_members_that_reach_only_one_other_get_the_same_certified_mean(network: SimulatedNetwork) -> None:
    hub, *clients = started = await start(network, [1.0] * 4, SPEC.model_copy(update={"min_peers": 4}))
    connected = network.connected

    def through_the_hub(first, second):  # type: ignore[no-untyped-def]
        return hub.peer.name in (first.name, second.name) and connected(first, second)

    for client in clients:
        client.owner.is_reachable = False
    network.connected = through_the_hub  # type: ignore[method-assign]
    for _ in range(20):  # Clients take turns as leaders, but the hub alone can gather all.
        if hub.outcomes:
            break
        await asyncio.gather(*(each.try_round() for each in started))
    body = hub.outcomes[-1].result.certificate.body
    assert len(body.contributors) == len(started)
    sizes = [high - low for low, high in zip(body.bounds, body.bounds[1:], strict=False)]
    assert sizes[body.members.index(hub.peer.peer_id)] == NUM_VALUES
    for client in clients:
        assert torch.equal(client.mean(), hub.mean())


@pytest.mark.parametrize("codec", ["int8", "fp32"])
@simulated(seed=1)
async def test_who_sends_slowly_does_not_blame_the_other_for_waiting(network: SimulatedNetwork, codec: str) -> None:
    """The other's mask can only come when this peer's part is there, however long ago the other's part came."""
    started = await start(network, [0.15, 1.0], SPEC.model_copy(update={"codec": codec}), down=1.0)
    await average(started, 3)
    for each in started:
        assert [outcome.attempts for outcome in each.outcomes] == [1, 1, 1]
        assert all(len(o.result.certificate.body.contributors) == 2 for o in each.outcomes)


@pytest.mark.parametrize("seed", range(3))
def test_a_round_without_failures_aborts_no_stream(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A real stream that is aborted ends its connection, and the spare ones to that peer."""
    aborted: list[str] = []
    abort = SimulatedStream.abort

    def count(stream: SimulatedStream) -> None:
        if not stream.over:
            aborted.append(stream.remote)
        abort(stream)

    async def main(network: SimulatedNetwork) -> None:
        peers = await start_averagers(network, [network.add_peer(f"peer-{index}") for index in range(4)], SPEC, 1000)
        monkeypatch.setattr(SimulatedStream, "abort", count)

        async def average(peer: AveragingPeer) -> None:
            await asyncio.sleep(network.random.uniform(0.0, 0.1))
            await peer.round()

        for _ in range(6):
            await together("round", map(average, peers))
        await asyncio.sleep(2.0)
        assert not aborted
        monkeypatch.undo()
        await stop_averagers(peers)

    simulate(main, seed, model=LinkModel(latency_seconds=(0.01, 0.05)))
