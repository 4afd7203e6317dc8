"""Simulated pipelines: stages train as one model, each microbatch counts once at each, whatever fails on the way."""

import asyncio
import hashlib
import math

import pytest
import torch

from p2ptrain.averaging.protocol.certificate import Head
from p2ptrain.manifest import LoraSpec
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.pipeline.client.sender import Opened
from p2ptrain.pipeline.messages import pack
from p2ptrain.pipeline.plan import PipelinePlan
from tests.support.coroutines import simulated
from tests.support.records import record_of
from tests.support.sim.peers import until
from tests.support.sim.pipelines import SAMPLES, Pipeline, PipelinePeer, WholeModel, make_manifest, sample, tell

ROUND = 6
"""Microbatches in a round."""


def check_parameters(pipeline: Pipeline, whole: WholeModel) -> None:
    """All hosts hold what the whole model has in their stage.

    Adam's first steps are as long for the smallest gradients as for large ones, so rounding shows in single values.
    """
    rate = pipeline.manifest.training.learning_rate
    for peer in pipeline.hosts:
        assert peer.hosted is not None
        expected = whole.parameters
        for name, value in peer.hosted.worker.compute.stage.named_parameters():
            if name in expected:
                off = (value.detach() - expected[name]).abs()
                assert float(off.max()) < 0.2 * rate, name
                assert float(off.mean()) < 1e-3 * rate, name


def frozen_of(peer: PipelinePeer) -> dict[str, str]:
    """Digests of what a host holds besides what is trained."""
    assert peer.hosted is not None
    trained = {name for name, each in peer.hosted.worker.compute.stage.named_parameters() if each.requires_grad}
    state = peer.hosted.worker.compute.stage.state_dict()
    return {
        name: hashlib.sha256(value.numpy().tobytes()).hexdigest()
        for name, value in state.items()
        if name not in trained
    }


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


async def train_round(pipeline: Pipeline, number: int, whole: WholeModel | None = None) -> None:
    """Send the microbatches of this round, and wait for its end; compare all hosts with the whole model then."""
    numbers = range(ROUND * number, ROUND * (number + 1))
    assert all((await pipeline.feed(trainer_of(pipeline), numbers, at_once=4)).values())
    await until(lambda: pipeline.rounds() == {number + 1})
    if whole is not None:
        whole.step(list(numbers))
        check_parameters(pipeline, whole)


@pytest.mark.parametrize(("num_stages", "replicas"), [(2, 1), (2, 2), (3, 2), (5, 3)])
@pytest.mark.parametrize("tied", [False, True])
@simulated(seed=1)
async def test_without_failures_stages_train_as_one_process_does(
    network: SimulatedNetwork, num_stages: int, replicas: int, tied: bool
) -> None:
    pipeline = await start(network, num_stages, replicas, tied=tied)
    whole, trainer = WholeModel(pipeline.manifest), trainer_of(pipeline)
    for number in range(4):
        await train_round(pipeline, number, whole)
    await until(lambda: len(trainer.done) == 4 * ROUND)
    assert trainer.feeder is not None
    assert trainer.feeder.resent == trainer.feeder.lost == 0


@pytest.mark.parametrize(
    ("num_stages", "targets"),
    [(1, ["q_proj"]), (2, ["q_proj", "v_proj", "down_proj"]), (5, ["layers.1.self_attn.q_proj"])],
    ids=["one stage", "two", "five, of which one has adapters"],
)
@pytest.mark.parametrize("quant", ["", "int8"])
@simulated(seed=7)
async def test_adapters_are_trained_as_in_one_process_and_nothing_else_is(
    network: SimulatedNetwork, num_stages: int, targets: list[str], quant: str
) -> None:
    lora = LoraSpec(targets=tuple(targets), rank=2)
    pipeline = await start(network, num_stages, 2, tied=True, quant=quant, lora=lora)
    whole = WholeModel(pipeline.manifest)
    frozen = {peer.peer.peer_id: frozen_of(peer) for peer in pipeline.hosts}
    for number in range(3):
        await train_round(pipeline, number, whole)
    for peer in pipeline.hosts:
        assert peer.hosted is not None
        assert frozen[peer.peer.peer_id] == frozen_of(peer)
        values = peer.hosted.units[0].synchronizer.state.layout.num_values
        held = [each for each in peer.hosted.worker.compute.stage.parameters() if each.requires_grad]
        assert values == max(1, sum(each.numel() for each in held)), "more is averaged than adapters"


@simulated(seed=8)
async def test_moments_in_8_bits_are_the_same_on_all_hosts_and_on_one_that_joins(network: SimulatedNetwork) -> None:
    pipeline, sizes = await start(network, 2, 2, moments="8bit"), set()
    for number in range(3):
        if number == 2:
            newcomer = await pipeline.add("newcomer", 0)
            await until(lambda: newcomer.status == "training")  # noqa: B023
        await train_round(pipeline, number)
        for stage in range(2):
            hosts = [peer.hosted for peer in pipeline.hosts if peer.hosted and peer.hosted.number == stage]
            assert len({hosted.units[0].synchronizer.head.digest for hosted in hosts}) == 1
    for peer in pipeline.hosts:
        assert peer.hosted is not None
        state = peer.hosted.units[0].synchronizer.state
        sizes.add(sum(tensor.nbytes for _, tensor in state.tensors()) / state.layout.num_parameters)
    assert max(sizes) < 6.2, "bytes of state for a parameter"


@simulated(seed=2)
async def test_a_stage_of_which_one_host_alone_hears_that_the_round_is_over_goes_on(network: SimulatedNetwork) -> None:
    """It is no half of them, and the batch is not full: nobody would close the round."""
    pipeline = Pipeline(network, make_manifest(2))
    for name, stage in (("first", 0), ("second", 1), ("third", 1), ("fourth", 1)):
        await pipeline.add(name, stage)
    await until(lambda: all(peer.status == "training" for peer in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)
    assert all((await pipeline.feed(trainer, range(3), at_once=3)).values())
    first = pipeline.hosts[0]
    assert first.hosted is not None
    await tell(trainer, first, closing=True)
    await until(lambda: first.hosted.host.ledger.round == 1)  # type: ignore[union-attr]
    sending = trainer.peer.spawn(trainer.send(3))
    await until(lambda: pipeline.rounds() == {1}, 30.0)
    await sending


@simulated(seed=3)
async def test_all_go_on_from_checkpoints_of_which_one_unit_is_a_round_behind(network: SimulatedNetwork) -> None:
    """As hosts leave them that are stopped while they average."""
    pipeline = await start(network, 2, 1, tied=True)
    await train_round(pipeline, 0)
    await restart_all(pipeline, [save(peer) for peer in pipeline.hosts])
    await train_round(pipeline, 1)


@pytest.mark.fault(11)
@simulated(seed=8)
async def test_stages_whose_checkpoints_are_all_older_than_the_founders_votes_go_on_at_once(
    network: SimulatedNetwork,
) -> None:
    pipeline = await start(network, 2, 1)
    await train_round(pipeline, 0)
    saved = [save(peer) for peer in pipeline.hosts]
    await train_round(pipeline, 1)
    await train_round(pipeline, 2)
    trainer = trainer_of(pipeline)
    pipeline.peers.remove(trainer)
    network.crash(trainer.peer)
    await restart_all(pipeline, saved)
    trainer = await pipeline.add("another trainer", None)
    feeding = asyncio.create_task(pipeline.feed(trainer, range(ROUND, 100 * ROUND), at_once=4))
    wait = 2 * pipeline.manifest.averaging.matchmaking_seconds
    await until(lambda: min(full_of(peer) for peer in pipeline.hosts) > saved[0][0].full, wait)
    pipeline.is_stopping = True
    await feeding


Saved = tuple[Head, list[tuple[str, torch.Tensor]]]


def save(host: PipelinePeer) -> Saved:
    """A checkpoint of a host's first unit."""
    assert host.hosted is not None
    state = host.hosted.units[0].synchronizer.state
    return state.head, [(name, tensor.clone()) for name, tensor in state.tensors()]


def full_of(host: PipelinePeer) -> int:
    assert host.hosted is not None
    return host.hosted.units[0].synchronizer.head.full


async def restart_all(pipeline: Pipeline, saved: list[Saved]) -> None:
    """Kill all hosts, and start them again from these checkpoints."""
    hosts, plan = pipeline.hosts, PipelinePlan(pipeline.manifest)
    for before, (head, tensors) in zip(hosts, saved, strict=True):
        pipeline.network.crash(before.peer)
        after = PipelinePeer(pipeline.network.restart(before.peer), plan, before.stage)
        assert after.hosted is not None
        own = after.hosted.units[0]
        own.synchronizer.state.replace(tensors, head)
        own.synchronizer.averager.begin_at(head)
        own.work.adopt(False, None)
        pipeline.peers.remove(before)
        pipeline.peers.append(after)
        await after.peer.spawn(after.start())
        pipeline.tasks.append(after.peer.spawn(after.host()))


@pytest.mark.parametrize("num_stages", [2, 3])
@simulated(seed=4)
async def test_a_trainer_that_makes_its_own_loss_trains_the_same_model(
    network: SimulatedNetwork, num_stages: int
) -> None:
    pipeline = await start(network, num_stages, 3)
    whole, trainer = WholeModel(pipeline.manifest), trainer_of(pipeline)
    for number in range(3):
        numbers = range(ROUND * number, ROUND * (number + 1))
        await asyncio.gather(*(trainer.peer.spawn(trainer.send_own(each)) for each in numbers))
        whole.step(list(numbers))
        await until(lambda: pipeline.rounds() == {number + 1})  # noqa: B023
    check_parameters(pipeline, whole)


@pytest.mark.parametrize("which", range(3))
@simulated(seed=6)
async def test_a_full_round_takes_on_what_a_first_host_had_that_dies_while_outputs_are_with_the_trainer(
    network: SimulatedNetwork, which: int
) -> None:
    """Whichever dies, of two of them another one leads the round, and keeps room for it until it is missed."""
    pipeline = await start(network, 2, 3)
    whole, trainer = WholeModel(pipeline.manifest), trainer_of(pipeline)
    await asyncio.sleep(10.0)  # Until all know of all.
    are_open, num_open = asyncio.Event(), 0

    async def harm(opened: Opened) -> None:
        nonlocal num_open
        num_open += 1
        if num_open == ROUND:
            network.crash(pipeline.hosts[which].peer)
            are_open.set()
        await are_open.wait()

    sending = [trainer.peer.spawn(trainer.send_own(number, harm)) for number in range(ROUND)]
    accepted = await asyncio.gather(*sending)
    assert {each.id.round for each in accepted} == {0}
    whole.step(list(range(ROUND)))
    await until(lambda: pipeline.rounds() == {1})
    del pipeline.peers[which]
    check_parameters(pipeline, whole)


@simulated(seed=5)
async def test_an_output_that_no_gradient_is_asked_for_counts_nowhere(network: SimulatedNetwork) -> None:
    pipeline = await start(network, 2, 1)
    whole, trainer = WholeModel(pipeline.manifest), trainer_of(pipeline)
    tokens = sample(pipeline.manifest, 0)
    assert trainer.feeder is not None
    inputs = pack(tokens[:, :-1], "fp32")
    shape = (*inputs.shape, pipeline.manifest.model.vocabulary)
    looking = trainer.feeder.open(
        inputs, inputs.shape[0], inputs.shape[0] * inputs.shape[1], shape, requires_grad=False
    )
    opened = await trainer.peer.spawn(looking)
    torch.testing.assert_close(opened.waiting.output.result(), whole.model(tokens[:, :-1]).detach())
    await opened.task
    assert all(peer.hosted and peer.hosted.host.ledger.samples() == 0 for peer in pipeline.hosts)


@pytest.mark.parametrize("tied", [False, True])
@simulated(seed=8)
async def test_a_host_that_came_before_the_first_round_ended_does_not_hold_it_up(
    network: SimulatedNetwork, tied: bool
) -> None:
    """The seed knows it, and waits for it; and it has no work, because the round has its microbatches."""
    pipeline = Pipeline(network, make_manifest(2, tied=tied, global_batch=ROUND * SAMPLES))
    for stage in range(2):
        await pipeline.add(f"h{stage}", stage, 0.5)
    await until(lambda: all(host.status == "training" for host in pipeline.hosts))
    trainer = await pipeline.add("trainer", None)
    feeding = asyncio.create_task(pipeline.feed(trainer, range(ROUND), at_once=ROUND))
    await asyncio.sleep(1.0)
    late = await pipeline.add("late", 1, 0.5)
    await until(lambda: late.status == "training")
    for host in pipeline.hosts[1:]:
        pipeline.founder.memberships["unit1"].update(record_of(host.peer.peer_id), 1, expires_at=math.inf)
    await feeding
    began = network.loop.time()
    await until(lambda: pipeline.rounds() == {1})
    assert network.loop.time() - began < pipeline.manifest.averaging.matchmaking_seconds / 2
    assert pipeline.hosts[1].hosted is not None
    assert pipeline.hosts[1].hosted.units[0].state.head.table.row_of(late.peer.peer_id) is not None
    await pipeline.close()
