"""Swarms that lose voters: who goes on without them, after which wait, and what is left when they are back."""

import asyncio
from collections.abc import Sequence

import pytest

from p2ptrain.averaging.commit import round_log
from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.accounts import Accounts
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

WAIT_SECONDS = 20.0


async def start_swarm(network: SimulatedNetwork, size: int) -> tuple[SimulatedSwarm, Accounts, list[SimulatedTrainer]]:
    """Return a swarm whose trainers all vote."""
    swarm = SimulatedSwarm(network, make_manifest(matchmaking_seconds=WAIT_SECONDS), 0)
    accounts = Accounts(swarm)
    trainers = [swarm.start(f"t{number}") for number in range(size)]

    def all_vote() -> bool:
        return all(len(each.sync.head.table.electorate) == size + 1 for each in trainers)

    await swarm.until(all_vote, 120, "all vote")
    return swarm, accounts, trainers


def are_one_full_lineage(swarm: SimulatedSwarm, trainers: Sequence[SimulatedTrainer], rounds: int) -> bool:
    heads = [each.sync.head for each in trainers]
    return swarm.in_agreement(rounds) and not any(head.is_reduced for head in heads) and all_contribute(trainers)


def all_contribute(trainers: Sequence[SimulatedTrainer]) -> bool:
    names = {each.peer.peer_id for each in trainers}
    return all(set(each.sync.head.members) == names for each in trainers)


@pytest.mark.fault(2)
@simulated(seed=6)
async def test_the_majority_goes_on_at_once_and_a_minority_waits_and_yields_when_it_is_back(
    network: SimulatedNetwork,
) -> None:
    swarm, accounts, trainers = await start_swarm(network, 5)
    majority, minority = trainers[:3], trainers[3:]
    began = network.loop.time()
    network.partition([each.peer for each in minority])
    start = max(each.sync.head.round for each in majority)
    await swarm.until(lambda: min(t.sync.head.round for t in majority) >= start + 2, 30, "the majority goes on")
    majority_seconds = network.loop.time() - began
    assert not any(each.sync.head.is_reduced for each in majority)
    await swarm.until(lambda: all(t.sync.head.is_reduced for t in minority), 120, "the minority goes on")
    minority_seconds = network.loop.time() - began
    reduced = [body for body in accounts.bodies.values() if body.is_reduced]
    assert all({*body.members} <= {each.peer.peer_id for each in minority} for body in reduced)
    assert minority_seconds > WAIT_SECONDS
    told = f"{majority_seconds:.1f} s for two rounds, {minority_seconds:.1f} s to the first reduced one"
    assert majority_seconds < minority_seconds, told
    await asyncio.sleep(30.0)
    network.heal()
    rounds = max(each.sync.head.round for each in trainers) + 2
    await swarm.until(lambda: are_one_full_lineage(swarm, trainers, rounds), 240, "one lineage, and full")
    lineage = trainers[0].sync.head.lineage
    assert not any(accounts.is_within(body.next_lineage, lineage) for body in reduced), "the full one won"
    accounts.check_conservation()


@pytest.mark.fault(2)
@pytest.mark.parametrize("seed", [1, 6, 10])
@simulated(seed=lambda seed: seed)
async def test_a_minority_waits_once_whoever_comes_first(network: SimulatedNetwork, seed: int) -> None:
    """The ticket that begins the wait is signed before it: its peer agrees to a reduced round with a later one."""
    swarm, _, trainers = await start_swarm(network, 5)
    await asyncio.sleep(0.37 * seed)
    minority, began = trainers[:2], network.loop.time()
    network.partition([each.peer for each in minority])
    await swarm.until(lambda: all(t.sync.head.is_reduced for t in minority), 120, "the minority goes on")
    assert WAIT_SECONDS < network.loop.time() - began < 1.5 * WAIT_SECONDS


@pytest.mark.fault(1, 49)
@simulated(seed=7)
async def test_the_last_of_three_goes_on_after_its_wait_and_the_lineage_is_full_again_when_they_are_back(
    network: SimulatedNetwork,
) -> None:
    swarm, accounts, trainers = await start_swarm(network, 3)
    survivor, began = trainers[0], network.loop.time()
    network.crash(network.peers["seed"])
    for name in ("t1", "t2"):
        swarm.crash(name)
    before = survivor.sync.head
    await swarm.until(lambda: survivor.sync.head.is_reduced, 120, "the survivor goes on")
    assert network.loop.time() - began >= WAIT_SECONDS
    assert accounts.is_within(before.lineage, survivor.sync.head.lineage)
    await swarm.until(lambda: survivor.sync.head.round >= before.round + 6, 120, "round by round")
    reduced = survivor.sync.head
    again = [survivor, swarm.restart("t1"), swarm.restart("t2")]
    await swarm.until(lambda: are_one_full_lineage(swarm, again, reduced.round + 2), 240, "full again")
    assert accounts.is_within(reduced.lineage, survivor.sync.head.lineage), "nothing of the survivor's is lost"
    assert survivor.sync.head.full > before.round


@simulated(seed=5)
async def test_a_far_founder_that_missed_rounds_has_the_time_to_hear_of_them(network: SimulatedNetwork) -> None:
    """It asks for their certificates before it votes, which takes two more round trips."""
    swarm, _, (trainer,) = await start_swarm(network, 1)
    seed = swarm.founder.peer
    network.set_latency(seed, trainer.peer, 0.75)
    rounds = trainer.sync.head.round + 2
    await swarm.until(lambda: trainer.sync.head.round >= rounds, 60, "the seed votes")
    network.cut(seed)
    await swarm.until(lambda: trainer.sync.head.is_reduced, 120, "the trainer goes on")
    network.mend(seed)
    await swarm.until(lambda: not trainer.sync.head.is_reduced, 120, "full again")


async def part_and_meet(network: SimulatedNetwork, rounds: int) -> tuple[Accounts, list[Head], Head]:
    """Return the heads that the halves had before they met, and the head of all after it."""
    swarm, accounts, trainers = await start_swarm(network, 4)
    network.partition([each.peer for each in trainers[2:]])
    start = max(each.sync.head.round for each in trainers)
    await swarm.until(lambda: min(t.sync.head.round for t in trainers) >= start + rounds, 6000, "both go on")
    heads = [each.sync.head for each in trainers]
    assert all(head.is_reduced for head in heads)
    network.heal()
    after = max(head.round for head in heads) + 2
    await swarm.until(lambda: are_one_full_lineage(swarm, trainers, after), 240, "one lineage, and full")
    accounts.check_conservation()
    return accounts, heads, trainers[0].sync.head


@pytest.mark.fault(20)
@pytest.mark.parametrize("rounds", [14, 40, 300])
@simulated(seed=9)
async def test_two_halves_come_together_however_many_rounds_each_closed_without_the_other(
    network: SimulatedNetwork, rounds: int
) -> None:
    accounts, heads, head = await part_and_meet(network, rounds)
    kept = [accounts.is_within(each.lineage, head.lineage) for each in heads]
    assert kept in ([True, True, False, False], [False, False, True, True])


@simulated(seed=9)
async def test_a_half_whose_rounds_nobody_can_prove_follows_the_founder(network: SimulatedNetwork) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(round_log, "MAX_CERTIFICATES", 16)
        patch.setattr(round_log, "MAX_REDUCED_SIGNATURES", 0)
        accounts, heads, head = await part_and_meet(network, 40)
    kept = [accounts.is_within(each.lineage, head.lineage) for each in heads]
    assert kept == [True, True, False, False], "the founder is with the first two"


@simulated(seed=3)
async def test_a_newcomer_whose_swarm_ended_without_it_follows_the_one_that_began_again(
    network: SimulatedNetwork,
) -> None:
    """It has the state, and closes no round alone, because it is no member."""
    swarm, accounts, trainers = await start_swarm(network, 3)
    rounds = swarm.manifest.averaging.history_rounds + 3
    await swarm.until(lambda: swarm.in_agreement(rounds), 240, "nobody keeps the first rounds")
    late = swarm.start("late")
    await swarm.until(lambda: late.sync.head.round > 0, 120, "it has the state")
    assert late.sync.head.table.row_of(late.peer.peer_id) is None, "and is no member"
    for each in trainers:
        swarm.crash(each.peer.name)
    network.partition([late.peer])
    before, other = late.sync.head, swarm.start("other")
    await swarm.until(lambda: other.sync.head.round > 0, 240, "the swarm begins again")
    assert late.sync.head == before
    network.heal()
    await swarm.until(lambda: all_contribute([late, other]) and swarm.in_agreement(3), 240, "both go on")
    assert not accounts.is_within(before.lineage, late.sync.head.lineage)


async def begin_apart(
    network: SimulatedNetwork, mode: str, seconds: float
) -> tuple[SimulatedSwarm, Accounts, list[SimulatedTrainer]]:
    """Return a swarm without founders that one peer and two others began, who meet after so many seconds."""
    swarm = SimulatedSwarm(network, make_manifest(matchmaking_seconds=WAIT_SECONDS), 0)
    admission = swarm.manifest.admission.model_copy(update={"mode": mode})
    swarm.manifest = swarm.manifest.model_copy(update={"founders": (), "admission": admission})
    accounts = Accounts(swarm)
    trainers = [swarm.start(f"t{number}") for number in range(3)]
    network.partition([trainers[0].peer])
    await swarm.until(lambda: min(t.sync.head.round for t in trainers) > 0, 120, "each side begins")
    await asyncio.sleep(seconds)
    network.heal()
    return swarm, accounts, trainers


@pytest.mark.fault(20)
@pytest.mark.parametrize("seconds", [0.0, 4.0, 25.0])
@simulated(seed=lambda seconds: int(seconds))
async def test_peers_that_began_a_swarm_without_each_other_come_together(
    network: SimulatedNetwork, seconds: float
) -> None:
    swarm, accounts, trainers = await begin_apart(network, "invite", seconds)
    assert not accounts.is_within(trainers[0].sync.head.lineage, trainers[1].sync.head.lineage)
    rounds = max(each.sync.head.round for each in trainers) + 2
    await swarm.until(lambda: are_one_full_lineage(swarm, trainers, rounds), 240, "one lineage, and full")
    accounts.check_conservation()


@simulated(seed=4)
async def test_members_of_an_open_swarm_follow_none_that_strangers_began(network: SimulatedNetwork) -> None:
    swarm, accounts, trainers = await begin_apart(network, "open", 4.0)
    before = [each.sync.head for each in trainers]
    await swarm.until(lambda: min(t.sync.head.round for t in trainers) > before[0].round + 20, 240, "all go on")
    assert all(accounts.is_within(was.lineage, t.sync.head.lineage) for was, t in zip(before, trainers, strict=True))
