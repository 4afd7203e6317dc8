"""Peers report their rounds and contributions as they happened."""

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.trainers import SimulatedSwarm, make_manifest


@pytest.mark.parametrize(("num_peers", "group_size"), [(1, 8), (3, 8), (6, 3)], ids=["alone", "group", "tree"])
@simulated(seed=(0, 4))
async def test_reports_add_up_to_the_lineage_and_name_the_state_that_all_hold(
    network: SimulatedNetwork, num_peers: int, group_size: int
) -> None:
    swarm = SimulatedSwarm(network, make_manifest(codec="fp32", group_size=group_size, min_peers=1), 0)
    for index in range(num_peers):
        swarm.start(f"t{index}")
    syncs = [trainer.sync for trainer in swarm.trainers.values()]

    def all_took_part_and_stand_at_one_head() -> bool:
        took_part = all(sync.replica.trained_rounds >= 3 for sync in syncs)
        return took_part and len({sync.head.lineage for sync in syncs}) == 1

    await swarm.until(all_took_part_and_stand_at_one_head, 180, "all are in a few rounds")
    assert sum(sync.replica.trained_tokens for sync in syncs) == syncs[0].head.tokens
    states: dict[int, set[bytes]] = {}
    for sync in syncs:
        done = [report for report in sync.reports if report.committed]
        for report in done:
            states.setdefault(report.round, set()).add(report.digest)
            assert report.matchmaking_seconds >= 0.0
            assert report.transfer_seconds >= 0.0
            assert report.matchmaking_seconds + report.transfer_seconds <= report.seconds + 1e-6
        assert sum(report.contributed for report in sync.reports) <= sync.replica.trained_rounds
        assert any(report.compute_seconds > 0.0 for report in done), "it trains between two rounds"
    assert all(len(digests) == 1 and bytes(32) not in digests for digests in states.values())
