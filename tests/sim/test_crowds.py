"""Many newcomers at once in a swarm of strangers: they are let in, and decide little until they have worked."""

from dataclasses import replace

import pytest

from p2ptrain.averaging.protocol.table import LEAST_GUESTS
from p2ptrain.manifest import AdmissionSpec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.accounts import Accounts
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest


@pytest.mark.fault(37)
@pytest.mark.parametrize("min_peers", [1, 4])
@simulated(seed=4)
async def test_of_a_crowd_no_more_than_the_members_are_in_a_round_and_all_are_members_in_the_end(
    network: SimulatedNetwork, min_peers: int
) -> None:
    admission = AdmissionSpec(mode="open", puzzle_bits=0)
    manifest = make_manifest(min_peers=min_peers).model_copy(update={"admission": admission})
    swarm = SimulatedSwarm(network, manifest, 0)
    accounts = Accounts(swarm)
    members = [swarm.start(f"t{number}") for number in range(4)]
    names = {each.peer.peer_id for each in members}
    await swarm.until(lambda: all(t.sync.head.table.trust_of(p) == 8 for t in members for p in names), 240, "all trust")
    crowd = [swarm.start(f"n{number}") for number in range(10)]
    everybody = names | {each.peer.peer_id for each in crowd}

    def all_are_members() -> bool:
        return all(t.sync.head.table.row_of(peer) for t in swarm.alive for peer in everybody)

    await swarm.until(all_are_members, 400, "all are members")
    widest = 0
    for body in accounts.values.results.values():
        table = accounts.values.tables[body.body_hash]
        if table.begins:  # All of the first roster are newcomers.
            continue
        guests = [peer for peer in body.members if table.row_of(peer) is None]
        known = len(body.members) - len(guests)
        widest = max(widest, len(guests))
        assert len(guests) <= max(LEAST_GUESTS, known, min_peers - known)
    assert widest >= 4, "as many as there were members"
    accounts.check_conservation()


@pytest.mark.fault(48)
@pytest.mark.parametrize("lie", ["complains", "has another state"])
@simulated(seed=4)
async def test_a_crowd_that_outnumbers_the_members_keeps_none_of_them_out_of_a_round(
    network: SimulatedNetwork, lie: str
) -> None:
    """They say that rounds with each member broke, or that most peers hold another state."""
    admission = AdmissionSpec(mode="open", puzzle_bits=0)
    manifest = make_manifest(min_peers=1).model_copy(update={"admission": admission})
    swarm = SimulatedSwarm(network, manifest, 0)
    members = [swarm.start(f"t{number}") for number in range(3)]
    names = sorted(each.peer.peer_id for each in members)
    await swarm.until(lambda: all(t.sync.head.table.row_of(p) for t in members for p in names), 120, "all are members")

    def begin_to_lie(trainer: SimulatedTrainer) -> None:
        trainer.is_hostile = True
        trainer.membership.avoided = lambda: names if lie == "complains" else []  # type: ignore[method-assign]
        if lie == "complains":
            return
        averager, ticket = trainer.sync.averager, trainer.sync.averager._ticket
        averager._ticket = lambda *values: replace(ticket(*values), digest=b"d" * 32)  # type: ignore[method-assign]

    for number in range(5):
        begin_to_lie(swarm.start(f"n{number}"))
    await swarm.until(lambda: all(each.status == "training" for each in swarm.alive), 60, "the crowd is there")
    front = max(each.sync.head.round for each in members)
    await swarm.until(lambda: min(t.sync.head.round for t in members) >= front + 8, 60, "the members go on")
