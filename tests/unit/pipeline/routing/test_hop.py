"""A caller and the host that it sends to: what one hears of the other while tensors are on their way."""

from __future__ import annotations

from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.stage_hosts import HOP_LIMITS, check_sums, hosts


@simulated(model=LinkModel((0.01, 0.01), buffer_bytes=256))
async def test_a_host_that_stops_before_it_has_the_tensors_is_noticed_as_soon_as_one_that_stops_later(
    network: SimulatedNetwork,
) -> None:
    async with hosts(network, (0, 1, 1)) as swarm:
        trainer, (first, stopped, other) = swarm.trainers[0], swarm.hosts
        network.stall(stopped.peer)
        began = network.loop.time()
        reply = await swarm.send(trainer, swarm.hop(trainer, 0, stopped), first)
        assert [leg.host for leg in reply.legs] == [first.id, other.id]
        assert network.loop.time() - began < HOP_LIMITS.quiet_seconds + 2.0
        assert first.router.stages[1].has_failed(stopped.id)
        swarm.hosts.remove(stopped)
        check_sums(swarm, [0])
        swarm.hosts.append(stopped)
