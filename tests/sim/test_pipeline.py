"""Simulated pipelines: stages train as one model, each microbatch counts once at each, whatever fails on the way."""

from __future__ import annotations

import pytest

from p2ptrain.network.simulated import SimulatedNetwork, simulate
from p2ptrain.pipeline.plan import PipelinePlan
from tests.support.pipelines import Pipeline, PipelinePeer, WholeModel, make_manifest
from tests.support.simulation import until

ROUND = 6
"""Microbatches in a round."""


def check_parameters(pipeline: Pipeline, whole: WholeModel) -> None:
    """All hosts hold what the whole model has in their stage.

    Adam's first steps are as long for the smallest gradients as for large ones, so rounding shows in single values.
    """
    rate = pipeline.manifest.training.learning_rate
    for peer in pipeline.hosts:
        assert peer.hosted is not None
        expected = whole.parameters_of(peer.hosted.number)
        for name, value in peer.hosted.module.named_parameters():
            if name in expected:
                off = (value.detach() - expected[name]).abs()
                assert float(off.max()) < 0.2 * rate, name
                assert float(off.mean()) < 1e-3 * rate, name


async def start(network: SimulatedNetwork, num_stages: int, replicas: int, **manifest: object) -> Pipeline:
    """A pipeline whose hosts all take part, and a trainer."""
    pipeline = Pipeline(network, make_manifest(num_stages, **manifest))  # type: ignore[arg-type]
    for stage in range(num_stages):
        for number in range(replicas):
            await pipeline.add(f"host{stage}.{number}", stage)
    await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
    await pipeline.add("trainer", None)
    return pipeline


def trainer_of(pipeline: Pipeline) -> PipelinePeer:
    return next(peer for peer in pipeline.peers if peer.feeder is not None)


@pytest.mark.parametrize(("num_stages", "replicas"), [(2, 1), (2, 2), (3, 2), (5, 3)])
@pytest.mark.parametrize("tied", [False, True])
def test_without_failures_stages_train_as_one_process_does(num_stages: int, replicas: int, tied: bool) -> None:
    async def main(network: SimulatedNetwork) -> None:
        pipeline = await start(network, num_stages, replicas, tied=tied)
        whole, trainer = WholeModel(pipeline.manifest), trainer_of(pipeline)
        for number in range(4):
            numbers = range(ROUND * number, ROUND * (number + 1))
            assert all((await pipeline.feed(trainer, numbers, at_once=4)).values())
            whole.step(list(numbers))
            await until(lambda: pipeline.rounds() == {number + 1})  # noqa: B023
            check_parameters(pipeline, whole)
        await until(lambda: len(trainer.done) == 4 * ROUND)
        assert trainer.feeder is not None
        assert trainer.feeder.tally.resent == trainer.feeder.tally.lost == 0
        await pipeline.close()

    simulate(main, seed=1)


def test_all_go_on_from_checkpoints_of_which_one_unit_is_a_round_behind() -> None:
    """As hosts leave them that are stopped while they average."""

    async def main(network: SimulatedNetwork) -> None:
        pipeline = await start(network, 2, 1, tied=True)
        assert all((await pipeline.feed(trainer_of(pipeline), range(ROUND), at_once=4)).values())
        await until(lambda: pipeline.rounds() == {1})
        hosts, plan = pipeline.hosts, PipelinePlan(pipeline.manifest)
        for before in hosts:
            assert before.hosted is not None
            state = before.hosted.units[0].synchronizer.state
            saved = [(name, tensor.clone()) for name, tensor in state.tensors()]
            network.crash(before.peer)
            after = PipelinePeer(network.restart(before.peer), plan, before.stage)
            assert after.hosted is not None
            own = after.hosted.units[0]
            own.synchronizer.state.replace(saved, state.head)
            own.synchronizer.averager.set_head(state.head)
            own.work.adopt(False, None)
            pipeline.peers.append(after)
            await after.peer.spawn(after.start())
            pipeline.tasks.append(after.peer.spawn(after.host()))
        assert all((await pipeline.feed(trainer_of(pipeline), range(ROUND, 2 * ROUND), at_once=4)).values())
        await until(lambda: pipeline.rounds() == {2})
        await pipeline.close()

    simulate(main, seed=3)
