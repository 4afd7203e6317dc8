"""Random faults in simulated pipelines: what counts, counts once; nothing that was reported done is missing.

What must hold is said and checked in `tests.support.sim.pipeline_schedules`. A failure names its seed and the command
that runs it again; ``make schedules ARGS=--pipelines`` runs as many other seeds as one likes.
"""

import asyncio
from collections import Counter

import pytest

from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.seeds import changing_seeds
from tests.support.sim.counting import PLACES, CountedPipeline, CountingPeer
from tests.support.sim.peers import until
from tests.support.sim.pipeline_schedules import (
    FAULTS_IN,
    PASSES,
    PHASES,
    PipelineSchedule,
    draw_pipeline_schedule,
    find_pipeline_problems,
)
from tests.support.sim.pipelines import HOP_LIMITS, PipelinePeer, make_manifest, tell


def settled(peer: PipelinePeer) -> int:
    assert peer.hosted is not None
    return peer.hosted.host.ledger.settled_samples


async def begin(
    network: SimulatedNetwork, *stages: int, pass_seconds: float = 0.0
) -> tuple[CountedPipeline, PipelinePeer]:
    """A pipeline whose hosts have these stages, and a trainer; all know of all."""
    pipeline = CountedPipeline(network, make_manifest(2, layers=4, global_batch=12, local_batch=1))
    for stage in stages:
        await pipeline.add(f"host{len(pipeline.peers)}", stage, pass_seconds)
    await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)
    await asyncio.sleep(10.0)
    return pipeline, trainer


async def go_on(pipeline: CountedPipeline, trainer: PipelinePeer, numbers: range, least_done: int = 0) -> None:
    """Send microbatches, all of which come through, and check what counts once so many are done."""
    assert all((await pipeline.feed(trainer, numbers, 6)).values())
    await until(lambda: len(trainer.done) >= least_done)
    await until(pipeline.is_level)
    pipeline.check()


@pytest.mark.fault(27)
@pytest.mark.parametrize("seed", [*range(10), *changing_seeds("pipeline", 10)], ids=range(20))
def test_whatever_fails_each_microbatch_counts_once_and_what_is_done_is_everywhere(seed: int) -> None:
    assert find_pipeline_problems(draw_pipeline_schedule(seed)) == []


@pytest.mark.fault(27)
@pytest.mark.parametrize("seed", [638087045, 638087056, 638087474])
def test_so_it_is_in_schedules_that_failed_once(seed: int) -> None:
    """Members that left or stood still were followed by rounds of one host each, and idle hosts waited for ever."""
    assert find_pipeline_problems(draw_pipeline_schedule(seed)) == []


@pytest.mark.fault(27, 28)
@pytest.mark.parametrize(
    ("fault", "phase"),
    [  # Two of the faults in each phase; the third is slow.
        pytest.param(fault, phase, marks=[] if (number + at) % 3 else pytest.mark.slow)
        for number, fault in enumerate(FAULTS_IN)
        for at, phase in enumerate(PHASES)
    ],
)
def test_it_does_so_in_whatever_phase_a_host_or_its_trainer_is_hit(fault: str, phase: str) -> None:
    events = ((5.0, fault, PHASES.index(phase)), (10.0, "restart", 0))
    hits = Counter[str]()
    for seed in range(1, 4):  # In some, the stage cannot spare the host that comes to this phase.
        schedule = PipelineSchedule(seed, (8, 8, 2), (3, 3), trainers=2, own_losses=1, is_both=False, events=events)
        assert find_pipeline_problems(schedule, hits) == []
        if hits[f"{fault} {phase}"]:
            return
    pytest.fail("nobody was hit")


@pytest.mark.fault(27)
@pytest.mark.parametrize("phase", PASSES)
@pytest.mark.parametrize("fault", ["SIGKILL", "SIGSTOP"])
@simulated(seed=1, model=LinkModel(latency_seconds=(0.002, 0.02)))
async def test_the_next_microbatch_is_through_soon_after_a_host_dies_or_stops(
    network: SimulatedNetwork, fault: str, phase: str
) -> None:
    """In each stage, with round trips of up to 40 ms: a killed host's streams end, a stopped one falls silent.

    After that silence a microbatch may take half a second more than usual, also if its stage's leader was the one that
    stopped.
    """
    manifest = make_manifest(3, layers=4, global_batch=600, local_batch=1)  # No round ends meanwhile.
    pipeline = CountedPipeline(network, manifest)
    for number in range(6):
        await pipeline.add(f"host{number}", number % 3, pass_seconds=0.02)
    await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)
    await asyncio.sleep(10.0)
    next_number = iter(range(600))
    await pipeline.feed(trainer, (next(next_number) for _ in range(6)), 1)
    began = network.loop.time()
    await pipeline.feed(trainer, [next(next_number)], 1)
    usual = network.loop.time() - began
    most_seconds = 1.0 if fault == "SIGKILL" else HOP_LIMITS.quiet_seconds + 0.5 + usual
    for stage in range(3 if "backward" in phase else 2):  # The last stage goes back at once.
        hit_at: list[float] = []

        def harm(peer: CountingPeer, told: str) -> None:
            if told == phase and peer.stage == stage and not hit_at:  # noqa: B023
                hit_at.append(network.loop.time())  # noqa: B023
                (network.crash if fault == "SIGKILL" else network.stall)(peer.peer)

        for host in pipeline.hosts:
            assert isinstance(host, CountingPeer)
            host.told = harm
        while not hit_at:
            fed = await pipeline.feed(trainer, [next(next_number)], 1)
            assert None not in fed.values()
        seconds = network.loop.time() - hit_at[0]
        assert seconds < most_seconds, f"stage {stage}"
    pipeline.check()


@simulated(seed=1)
async def test_what_was_dropped_with_a_lineage_that_lost_is_never_reported_done(network: SimulatedNetwork) -> None:
    """One side of a partition has settled half a round, not averaged, when it finds that the other one is ahead."""
    pipeline = CountedPipeline(network, make_manifest(2, layers=4, global_batch=12, local_batch=1))
    pipeline.plan.manifest = pipeline.manifest.model_copy(update={"founders": ()})  # So that both sides can begin.
    sides = []
    for side in range(2):
        hosts = [await pipeline.add(f"host{stage}.{side}", stage) for stage in range(2)]
        sides.append((await pipeline.add(f"trainer{side}", None), *hosts))
    await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
    await asyncio.sleep(10.0)  # Until all know of all.
    network.partition([peer.peer for peer in sides[0]])
    await asyncio.sleep(60.0)  # Until each side knows only of its own.
    less, more = (trainer for trainer, *_ in sides)
    await asyncio.gather(pipeline.feed(less, range(3), 6), pipeline.feed(more, range(100, 112), 6))
    for host in sides[0][1:]:
        await tell(less, host, closing=True)
    await until(lambda: len(less.done) == 3 and len(more.done) == 12)
    await pipeline.feed(less, range(3, 9), 6)
    network.heal()
    await until(pipeline.is_level)
    await pipeline.feed(less, range(9, 45), 6)
    await until(lambda: len(less.done) > 24)
    await asyncio.sleep(30.0)  # All that it asks about has been answered.
    pipeline.check(may_fork=True)


@pytest.mark.fault(29)
@simulated(seed=1)
async def test_of_a_stage_whose_hosts_all_move_at_once_one_stays(network: SimulatedNetwork) -> None:
    pipeline, trainer = await begin(network, 0, 0, 0, 1)
    for _ in range(3):
        for mover in [peer for peer in pipeline.hosts if peer.stage == 0]:
            assert isinstance(mover, CountingPeer)
            mover.go(1)
        assert all((await pipeline.feed(trainer, range(len(pipeline.sent), len(pipeline.sent) + 24), 6)).values())
        assert any(peer.stage == 0 for peer in pipeline.hosts)
    await until(pipeline.is_level)
    pipeline.check()


@pytest.mark.parametrize("which", range(2))
@simulated(seed=1)
async def test_the_round_of_a_stage_goes_on_when_its_leader_moves_away_from_it(
    network: SimulatedNetwork, which: int
) -> None:
    """One of the two leads it, and grants microbatches; the other has heard from it that it takes part."""
    pipeline, trainer = await begin(network, 0, 0, 1)
    mover = pipeline.peers[which]
    assert isinstance(mover, CountingPeer)
    await tell(mover, pipeline.peers[1 - which], closing=False)
    mover.go(1)
    await until(lambda: mover.stage == 1)
    await go_on(pipeline, trainer, range(48), 24)


@simulated(seed=1)
async def test_a_host_that_ends_a_round_alone_leaves_when_another_has_its_result(network: SimulatedNetwork) -> None:
    pipeline, trainer = await begin(network, 0, 1, 1)
    assert all((await pipeline.feed(trainer, range(1), 1)).values())
    (mover,) = [peer for peer in pipeline.hosts if peer.stage == 1 and settled(peer)]
    assert isinstance(mover, CountingPeer)
    mover.go(0)
    await tell(trainer, pipeline.hosts[0], closing=True)
    await until(lambda: mover.stage == 0)
    await go_on(pipeline, trainer, range(1, 49), 24)
    assert 0 in {pipeline.sent[id] for id in trainer.done}


@simulated(seed=1)
async def test_hosts_that_end_a_round_together_leave_when_one_that_stays_has_its_result(
    network: SimulatedNetwork,
) -> None:
    pipeline, trainer = await begin(network, 0, 1, 1, 1)
    assert all((await pipeline.feed(trainer, range(6), 6)).values())
    first, second, stays = [peer for peer in pipeline.hosts if peer.stage == 1]
    for mover in (first, second):
        assert isinstance(mover, CountingPeer)
        mover.go(0)
    await until(lambda: all(mover.is_leaving for mover in (first, second) if isinstance(mover, CountingPeer)))
    await asyncio.sleep(0.5)  # Both have its promise.
    network.stall(stays.peer, 8.0)
    await until(lambda: first.stage == second.stage == 0)
    assert stays.hosted is not None
    assert stays.hosted.units[0].state.head.round == 1
    await go_on(pipeline, trainer, range(6, 48))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("stage", range(2))
@simulated(model=LinkModel(latency_seconds=(0.02, 0.1)))
async def test_a_host_that_moves_while_microbatches_come_loses_none(
    network: SimulatedNetwork, stage: int, seed: int
) -> None:
    pipeline, trainer = await begin(network, 0, 0, 0, 1, 1, 1, pass_seconds=0.2)
    feeding = asyncio.create_task(pipeline.feed(trainer, range(120), 8))
    mover = next(peer for peer in pipeline.hosts if peer.stage == stage)
    assert isinstance(mover, CountingPeer)
    mover.go(1 - stage)
    await until(lambda: mover.stage == 1 - stage)
    assert None not in (await feeding).values()
    await until(pipeline.is_level)
    pipeline.check()


@pytest.mark.parametrize("are_others_through", [False, True])
@simulated(seed=1)
async def test_a_round_that_died_with_the_host_that_had_it_goes_on_after_it_was_closed(
    network: SimulatedNetwork, are_others_through: bool
) -> None:
    pipeline, trainer = await begin(network, 0, 0, 1)
    assert all((await pipeline.feed(trainer, range(1), 1)).values())
    (holder,) = [peer for peer in pipeline.hosts if peer.stage == 0 and settled(peer)]
    (other,) = [peer for peer in pipeline.hosts if peer.stage == 0 and not settled(peer)]
    network.crash(holder.peer)
    for told in [other, pipeline.hosts[-1]] if are_others_through else [other]:
        await tell(trainer, told, closing=True)
    await go_on(pipeline, trainer, range(1, 49), 24)


@pytest.mark.fault(13)
@pytest.mark.parametrize("rounds", [1, 6])
@simulated(seed=1)
async def test_a_pipeline_goes_on_without_its_seed(network: SimulatedNetwork, rounds: int) -> None:
    """The hosts of a stage are members of its lineage, and vote like any trainer once they counted often enough."""
    pipeline, trainer = await begin(network, 0, 0, 1, 1)
    await go_on(pipeline, trainer, range(12 * rounds), 12 * rounds)
    network.crash(pipeline.founder.peer)
    await go_on(pipeline, trainer, range(12 * rounds, 12 * rounds + 36), 12 * rounds + 24)


@simulated(seed=1)
async def test_what_a_reduced_round_has_is_done_only_once_no_full_one_can_replace_it(network: SimulatedNetwork) -> None:
    pipeline, trainer = await begin(network, 0, 0, 0, 1, 1, 1)
    others = await pipeline.add("trainer of the others", None)
    await go_on(pipeline, trainer, range(24), 24)
    alone = [next(peer for peer in pipeline.hosts if peer.stage == stage) for stage in range(2)]
    network.partition([peer.peer for peer in (*alone, trainer)])
    await asyncio.sleep(30.0)  # Each side knows whom it reaches.
    feeding = [
        asyncio.create_task(pipeline.feed(each, numbers, 6))
        for each, numbers in ((trainer, range(24, 36)), (others, range(36, 60)))
    ]
    told = [peer.hosted.units[0].synchronizer for peer in alone if peer.hosted is not None]
    await until(lambda: any(each.head.is_reduced for each in told), 60.0)
    assert len(trainer.done) == 24
    network.heal()
    await asyncio.gather(*feeding)
    await until(pipeline.is_level)
    await asyncio.sleep(40.0)
    assert len(others.done) > 0
    pipeline.check()


@simulated(seed=1)
async def test_the_time_counts_for_which_a_host_without_work_waits(network: SimulatedNetwork) -> None:
    """It waits for the round to end. Later it follows the others into a reduced lineage."""
    pipeline, trainer = await begin(network, 0, 0, 1)
    assert all((await pipeline.feed(trainer, range(1), 1)).values())
    (holder,) = [peer for peer in pipeline.hosts if peer.stage == 0 and settled(peer)]
    (other,) = [peer for peer in pipeline.hosts if peer.stage == 0 and not settled(peer)]
    network.stall(holder.peer)
    await tell(trainer, other, closing=True)
    assert other.hosted is not None
    position = other.hosted.units[0].synchronizer.position
    await until(lambda: position.standstill > 2.0)


@pytest.mark.fault(29)
@pytest.mark.parametrize("fault", ["", "crash", "stall"])
@pytest.mark.parametrize("seed", range(2))
@simulated()
async def test_hosts_move_to_where_they_are_missed_and_no_stage_is_left_alone(
    network: SimulatedNetwork, seed: int, fault: str
) -> None:
    pipeline = CountedPipeline(network, make_manifest(3, layers=6, global_batch=12, local_batch=1), may_move=True)
    for number, stage in enumerate((0, 0, 0, 0, 0, 1, 1, 1, 2)):
        await pipeline.add(f"host{number}", stage, 0.4)
    trainer = await pipeline.add("trainer", None)
    feeding = asyncio.create_task(pipeline.feed(trainer, range(900), at_once=6))

    def hosts() -> list[int]:
        return sorted(peer.stage for peer in pipeline.alive if peer.stage is not None)

    least = {stage: 1 for stage in range(3)}
    harmed: list[PipelinePeer] = []

    async def watch() -> None:
        while True:
            for stage in least:
                least[stage] = min(least[stage], hosts().count(stage))
            for peer in pipeline.alive:
                if peer.is_moving and fault and not harmed:
                    harmed.append(peer)
                    network.crash(peer.peer) if fault == "crash" else network.stall(peer.peer, 30.0)
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    await until(lambda: hosts().count(2) >= 2, 600.0)
    assert min(least.values()) >= 1
    assert bool(harmed) == bool(fault)
    pipeline.is_stopping = True
    await feeding
    pipeline.is_stopping = False
    moves = sum(len(peer.moves) for peer in pipeline.peers)
    results = await pipeline.feed(trainer, range(PLACES - 36, PLACES), at_once=8)
    await until(pipeline.is_level, 120.0)
    watching.cancel()
    more = sum(len(peer.moves) for peer in pipeline.peers) - moves
    lost = [number for number, accepted in results.items() if accepted is None]
    assert not pipeline.failed.intersection(lost)
    assert len(lost) <= 8 * more  # Not settled yet at a host when it left.
    assert moves + more <= 4  # No stampede, and no wandering about.
    pipeline.check()
