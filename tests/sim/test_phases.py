"""A fault exactly as a peer enters a phase of a round; and networks, directories and clocks that are slow or wrong."""

import asyncio
import functools
import statistics
from collections import Counter
from collections.abc import Callable

import pytest

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.membership import rank
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, SimulatedPeer, simulate
from tests.support.coroutines import simulated
from tests.support.pairs import pairs
from tests.support.sim.accounts import Accounts
from tests.support.sim.trainers import SimulatedSwarm, SimulatedTrainer, make_manifest

PHASES = ("matchmaking", "scatter", "reduce", "gather", "commit")
ROLES = ("leader", "follower")
FAULTY_ROUND = 2
NUM_PEERS = 4
NOTICE_SECONDS = 15.0


def leads(swarm: SimulatedSwarm, trainer: SimulatedTrainer) -> bool:
    head = trainer.sync.head
    peers = [other.peer.peer_id for other in swarm.alive]
    return trainer.peer.peer_id == min(peers, key=lambda peer: rank(peer, Key(head.round, head.lineage, head.present)))


async def hit(
    swarm: SimulatedSwarm, phase: str, role: str, fault: Callable[[SimulatedTrainer], object]
) -> SimulatedTrainer:
    """Apply ``fault`` to the first trainer of this role that enters the phase, and return that trainer."""
    found: list[SimulatedTrainer] = []

    def on_phase(who: SimulatedTrainer, entered: str, round_: int) -> None:
        due = entered == phase and round_ >= FAULTY_ROUND and not found
        if due and leads(swarm, who) == (role == "leader"):
            found.append(who)
            fault(who)

    for each in swarm.trainers.values():
        each.sync.averager.phase_listeners = [functools.partial(on_phase, each)]
    await swarm.until(lambda: bool(found), 60, "the fault happens")
    return found[0]


def same_lineage(swarm: SimulatedSwarm) -> bool:
    front = max(trainer.sync.head.round for trainer in swarm.alive)
    return len({t.sync.head.lineage for t in swarm.alive if t.sync.head.round == front}) == 1


async def start(
    network: SimulatedNetwork, num_peers: int = NUM_PEERS, step_seconds: float = 0.5, **averaging: object
) -> SimulatedSwarm:
    """A swarm of which everybody has come to the round before the faulty one."""
    swarm, _ = await start_with_accounts(network, num_peers, step_seconds, **averaging)
    return swarm


async def start_with_accounts(
    network: SimulatedNetwork, num_peers: int = NUM_PEERS, step_seconds: float = 0.5, **averaging: object
) -> tuple[SimulatedSwarm, Accounts]:
    """`start`, with the books of the swarm."""
    # With fp32, which has no blocks, the tiny model has a share for everybody.
    swarm = SimulatedSwarm(network, make_manifest(**{"codec": "fp32", **averaging}), 0)
    accounts = Accounts(swarm)
    for index in range(num_peers):
        swarm.start(f"t{index}", step_seconds)
    await swarm.until(lambda: swarm.in_agreement(FAULTY_ROUND - 1), 90, "the swarm trains")
    return swarm, accounts


async def come_back(swarm: SimulatedSwarm, names: list[str]) -> None:
    """Repair every fault; all trainers agree again, and rounds go on."""
    for name in names:
        peer = swarm.trainers[name].peer
        swarm.network.mend(peer)
        if not peer.alive:
            swarm.restart(name)
        else:
            swarm.network.resume(peer)
    front = max(trainer.sync.head.round for trainer in swarm.alive)
    await swarm.until(lambda: swarm.in_agreement(front + 2) and same_lineage(swarm), 180, "all are back")


@pytest.mark.fault(2)
@pytest.mark.parametrize(("phase", "role", "fault"), pairs(PHASES, ROLES, ["crash", "stall"]))
@simulated(seed=lambda phase, **_: PHASES.index(phase))
async def test_survivors_commit_the_next_rounds(network: SimulatedNetwork, phase: str, role: str, fault: str) -> None:
    swarm = await start(network)
    act = {"crash": network.crash, "stall": network.stall}[fault]
    victim = await hit(swarm, phase, role, lambda who: act(who.peer))
    others = [trainer for trainer in swarm.trainers.values() if trainer is not victim]
    front = victim.sync.head.round
    await swarm.until(lambda: min(t.sync.head.round for t in others) >= front + 2, 90, "the others go on")
    assert len({trainer.sync.head.digest for trainer in others if trainer.sync.head == others[0].sync.head}) == 1
    await come_back(swarm, [victim.peer.name])


@pytest.mark.fault(19)
@pytest.mark.parametrize(("phase", "role", "num_cut"), pairs(PHASES, ROLES, [1, 3]))
@simulated(seed=lambda phase, **_: PHASES.index(phase))
async def test_the_others_end_a_round_without_those_cut_off_within_15_seconds(
    network: SimulatedNetwork, phase: str, role: str, num_cut: int
) -> None:
    """Three of five are a majority: it might as well be the others that are cut off, so these wait for them."""
    # As in the manifest by default.
    patience = NOTICE_SECONDS if num_cut == 1 else 20.0 + 2 * NOTICE_SECONDS
    swarm = await start(network, 5, grace_seconds=3.0, matchmaking_seconds=20.0, round_seconds=60.0, min_peers=2)
    names: list[str] = []

    def cut(who: SimulatedTrainer) -> None:
        first = who.peer.name
        names.extend([first, *[name for name in sorted(swarm.trainers) if name != first][: num_cut - 1]])
        for name in names:
            network.cut(swarm.trainers[name].peer)

    await hit(swarm, phase, role, cut)
    cut_at = network.loop.time()
    others = [trainer for name, trainer in swarm.trainers.items() if name not in names]
    seen = {each.peer.name: len(each.results) for each in others}

    def went_on() -> bool:
        return all(
            any(r.committed and r.members <= len(others) for r in each.results[seen[each.peer.name] :])
            for each in others
        )

    while not went_on():
        await asyncio.sleep(0.1)
        assert network.loop.time() <= cut_at + patience, "nobody goes on"
    assert same_lineage(swarm)
    await come_back(swarm, names)


@pytest.mark.fault(16)
@pytest.mark.parametrize(("phase", "role", "num_peers"), pairs(PHASES, ROLES, [2, 3, 4]))
@simulated(seed=lambda phase, **_: 40 + PHASES.index(phase))
async def test_who_was_stopped_does_not_end_alone_a_round_that_the_others_ended(
    network: SimulatedNetwork, phase: str, role: str, num_peers: int
) -> None:
    swarm, accounts = await start_with_accounts(network, num_peers)
    victim = await hit(swarm, phase, role, lambda who: network.stall(who.peer, 20.0))
    front = victim.sync.head.round
    await swarm.until(lambda: swarm.in_agreement(front + 8) and same_lineage(swarm), 180, "all are in one lineage")
    ends = Counter((body.round, body.lineage) for body in accounts.bodies.values())
    assert len(ends) >= front + 8
    assert max(ends.values()) == 1, "a round ended twice"


@pytest.mark.fault(16)
@simulated(seed=3)
async def test_who_was_stopped_in_a_round_of_its_own_does_not_end_it_when_another_has(
    network: SimulatedNetwork,
) -> None:
    swarm, accounts = await start_with_accounts(network, 2)
    absent, alone = swarm.trainers["t0"], swarm.trainers["t1"]
    stopped: list[int] = []

    def stop(phase: str, round: int) -> None:
        if phase == "reduce" and network.loop.is_frozen(absent.peer) and not stopped:
            stopped.append(round)
            network.stall(alone.peer, 40.0)

    alone.sync.averager.phase_listeners = [stop]
    network.stall(absent.peer, 25.0)
    await swarm.until(lambda: bool(stopped), 60, "one begins a round alone")
    front = stopped[0]
    await swarm.until(lambda: absent.sync.head.round > front + 2, 60, "the other one goes on")
    assert network.loop.is_frozen(alone.peer)
    await swarm.until(lambda: swarm.in_agreement(front + 8) and same_lineage(swarm), 180, "all are in one lineage")
    ends = Counter((body.round, body.lineage) for body in accounts.bodies.values())
    assert max(ends.values()) == 1, "a round ended twice"


@pytest.mark.fault(3)
@pytest.mark.parametrize("phase", ["matchmaking", "scatter", "reduce"])
@simulated(seed=lambda phase: 35 + PHASES.index(phase))
async def test_a_round_that_fails_for_everybody_is_applied_nowhere_and_its_work_counts_once(
    network: SimulatedNetwork, phase: str
) -> None:
    """All cables are pulled at once; `Accounts` counts the work."""
    swarm, accounts = await start_with_accounts(network, min_peers=2)

    def cut_all(who: SimulatedTrainer) -> None:
        for trainer in swarm.trainers.values():
            network.cut(trainer.peer)

    await hit(swarm, phase, "follower", cut_all)
    before = {name: trainer.sync.head for name, trainer in swarm.trainers.items()}
    await asyncio.sleep(90.0)
    assert {name: trainer.sync.head for name, trainer in swarm.trainers.items()} == before
    await come_back(swarm, list(swarm.trainers))
    accounts.check_conservation()


@pytest.mark.fault(18)
@simulated(seed=36)
async def test_a_peer_that_never_joins_a_round_is_not_waited_for_and_the_reason_is_known(
    network: SimulatedNetwork,
) -> None:
    swarm = await start(network, 3)
    idle = swarm.start("idle", step_seconds=1e6)
    await swarm.until(lambda: idle.status == "training", 60, "it has joined")
    others = [trainer for trainer in swarm.trainers.values() if trainer is not idle]
    front = max(trainer.sync.head.round for trainer in others)
    await swarm.until(lambda: min(t.sync.head.round for t in others) >= front + 12, 120, "the others go on")
    grace = idle.manifest.averaging.grace_seconds
    for trainer in others:
        waits = [result.matchmaking_seconds for result in trainer.results]
        # Each leader, the idle peer among them, finds out for itself.
        assert sum(seconds >= grace for seconds in waits) <= len(swarm.trainers), f"again and again: {waits}"
    await swarm.until(  # A leader that asks for it once more expects it meanwhile.
        lambda: all("did not join" in each.membership.why_not_expected(idle.peer.peer_id) for each in others),
        60,
        "all know the reason",
    )


@pytest.mark.parametrize("phase", ["idle", *PHASES])
@simulated(seed=40)
async def test_a_cancelled_synchronization_leaves_the_state_whole(network: SimulatedNetwork, phase: str) -> None:
    """`Bridge.cancel` cancels it so, and so does an interrupt of the training thread."""
    swarm = await start(network, 3)
    who = await hit(swarm, phase, "follower", lambda who: swarm.tasks[who.peer.name].cancel())
    await asyncio.gather(swarm.tasks[who.peer.name], return_exceptions=True)
    assert who.state.tree().root == who.sync.head.digest == who.state.head.digest
    assert who.sync.head == who.sync.averager.head
    assert who.sync.averager.phase == "idle"
    assert who.peer.transport.num_streams == 0
    network.crash(who.peer)
    await come_back(swarm, [who.peer.name])


@pytest.mark.fault(13)
@simulated(seed=50)
async def test_training_goes_on_while_the_directory_does_not_answer(network: SimulatedNetwork) -> None:
    swarm = await start(network)
    for peer in network.alive:
        peer.directory.failing = True
    front = swarm.alive[0].sync.head.round
    await asyncio.sleep(60)  # Twice the lifetime of a record.
    assert min(trainer.sync.head.round for trainer in swarm.alive) > front + 3
    for peer in network.alive:
        peer.directory.failing = False
    await come_back(swarm, [])


@pytest.mark.fault(14)
@pytest.mark.parametrize("seconds", [1.0, 5.0])
@simulated(seed=51)
async def test_a_slow_directory_only_slows_joining(network: SimulatedNetwork, seconds: float) -> None:
    swarm = await start(network)
    for peer in network.alive:
        peer.directory.delay_seconds = seconds
    late = swarm.start("late")
    late.peer.directory.delay_seconds = seconds
    await come_back(swarm, [])
    await swarm.until(lambda: any(result.contributed for result in late.results), 90, "the newcomer takes part")
    assert same_lineage(swarm)


@pytest.mark.fault(8)
def test_a_joiner_behind_two_seconds_of_latency_takes_part() -> None:
    """Within a grace period that covers the round trips of a part: opening a stream, and sending on it.

    When it contributes first depends on where in a round it comes: of 60 draws half took 3 rounds, all at most 12.
    """

    async def main(network: SimulatedNetwork) -> int:
        swarm = await start(network, step_seconds=5.0, grace_seconds=12.0, round_seconds=60.0)
        front = swarm.alive[0].sync.head.round
        late = swarm.start("late", step_seconds=5.0, latency_seconds=2.0)
        await swarm.until(lambda: any(r.contributed for r in late.results), 600, "the newcomer contributes")
        rounds = late.sync.head.round - front
        assert same_lineage(swarm)
        assert swarm.ledger.forked_rounds == []
        await swarm.end()
        return rounds

    rounds = [simulate(main, seed=seed) for seed in range(9)]
    assert 0 < statistics.median(rounds) <= 4, rounds
    assert max(rounds) <= 12, rounds


@pytest.mark.fault(14)
@simulated(seed=[0, 1, 4], model=LinkModel(latency_seconds=(0.001, 0.01), are_dials_free=True))
async def test_a_member_far_from_the_newcomer_only_slows_rounds_also_if_dials_tell_nothing(
    network: SimulatedNetwork,
) -> None:
    """Streams open at once, as on a daemon's connection: only answers show how far a peer is.

    A grace period of matchmaking and two for stragglers bound a round. The newcomer follows the near member meanwhile.
    """
    swarm = await start(network, 2, step_seconds=0.25, grace_seconds=2.0, matchmaking_seconds=10.0)
    members = swarm.alive
    late = swarm.start("late", step_seconds=0.25)
    network.set_latency(late.peer, members[0].peer, 0.75)
    await swarm.until(lambda: any(result.contributed for result in late.results), 40, "the newcomer takes part")
    marks = {trainer.peer.name: len(trainer.results) for trainer in swarm.alive}
    await asyncio.sleep(40)
    since = {trainer.peer.name: trainer.results[marks[trainer.peer.name] :] for trainer in swarm.alive}
    assert sum(result.contributed for result in since["late"]) >= 6
    for trainer in members:
        results = since[trainer.peer.name]
        assert all(result.committed and result.contributed for result in results), results
        assert max(result.seconds for result in results) <= 6.0
    assert swarm.ledger.forked_rounds == []


@pytest.mark.fault(23)
@simulated(seed=54)
async def test_deadlines_of_ten_milliseconds_give_reasons_in_under_a_second(network: SimulatedNetwork) -> None:
    manifest = make_manifest(grace_seconds=0.01, matchmaking_seconds=0.01, round_seconds=0.01, min_peers=2)
    swarm = SimulatedSwarm(network, manifest, 0)
    for index in range(3):
        swarm.start(f"t{index}")
    await swarm.until(lambda: all(len(t.results) >= 3 for t in swarm.alive), 120, "everybody tried")
    failed = [result for trainer in swarm.alive for result in trainer.results if not result.committed]
    assert failed
    assert all(result.reason for result in failed)
    assert sorted(result.seconds for result in failed)[len(failed) // 2] < 1.0


@pytest.mark.fault(38)
@pytest.mark.parametrize("skew_seconds", [-300.0, -20.0, 20.0, 300.0])
@simulated(seed=55)
async def test_a_clock_that_is_off_forks_nothing_for_good(network: SimulatedNetwork, skew_seconds: float) -> None:
    swarm = await start(network)
    skewed = swarm.start("skewed", skew_seconds=skew_seconds)
    skewed.peer.runtime.clock_offset_seconds = -skew_seconds  # As a peer does once it has asked the others.
    await swarm.until(lambda: any(r.contributed for r in skewed.results), 120, "the skewed peer contributes")
    await come_back(swarm, [])
    assert same_lineage(swarm)


@simulated(seed=3)
async def test_two_peers_that_reach_everybody_but_each_other_take_turns(network: SimulatedNetwork) -> None:
    swarm = await start(network)
    connected = network.connected
    apart = {"t0", "t1"}

    def connected_but_for_two(first: SimulatedPeer, second: SimulatedPeer) -> bool:
        return {first.name, second.name} != apart and connected(first, second)

    network.connected = connected_but_for_two  # type: ignore[method-assign]
    front = swarm.alive[0].sync.head.round
    told = dict(swarm.ledger.contributed)
    await swarm.until(lambda: min(t.sync.head.round for t in swarm.alive) >= front + 12, 400, "rounds go on")
    contributed = swarm.ledger.contributed
    await swarm.until(lambda: all(contributed[name] > told.get(name, 0) for name in apart), 400, "both had a turn")
