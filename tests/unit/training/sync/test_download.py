"""A download ends with the right bytes or an error, whatever its sources do."""

import asyncio
import contextlib
import tracemalloc
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.errors import (
    DeadlineError,
    IncompatibleError,
    IntegrityError,
    P2PTrainError,
    PeerLostError,
)
from p2ptrain.network.chunks.fetch import FetchOptions
from p2ptrain.network.chunks.messages import Ask, FromReceiver, Open
from p2ptrain.network.rpc.channel import Channel, LeastRate
from p2ptrain.network.schema import to_bytes, to_wire
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.training.state.digest import (
    CHUNK_BYTES,
    ChunkedBytes,
    Description,
    TensorSpec,
    merkle_tree,
)
from p2ptrain.training.state.outer_optimizers import AverageStep
from p2ptrain.training.sync.download import PartialDownload, download_state
from p2ptrain.training.sync.state_server import HeldState
from tests.support.coroutines import simulated
from tests.support.sim.downloads import (
    CHUNK_VALUES,
    FAST,
    NUM_CHUNKS,
    NUM_VALUES,
    OneState,
    Sources,
    advance,
    shared_state,
    sources,
    tensors_of,
    until_started,
)
from tests.support.sim.peers import Member, members, start_member


@simulated(sources, 3, seed=1, model=FAST)
async def test_three_sources_share_the_work(swarm: Sources) -> None:
    told: list[tuple[int, int]] = []
    downloaded = await swarm.download(advance=lambda done, total: told.append((done, total)))
    assert swarm.is_right()
    assert set(downloaded.bytes_from) == set(swarm.ids)
    assert not downloaded.faults
    total = swarm.partial.num_bytes
    assert sum(downloaded.bytes_from.values()) >= total
    # One uplink alone would need total / 4e6 = 3 s.
    assert swarm.seconds < 0.6 * total / 4e6
    assert told == sorted(told)
    assert told[-1] == (total, total)


@simulated(sources, 2, seed=1, model=FAST)
async def test_chunks_are_kept_by_the_state_thread_and_descriptions_are_checked_beside_it(swarm: Sources) -> None:
    runtime, ran = swarm.newcomer.peer.runtime, dict[str, set[str]]()
    for where in ("compute", "offload"):
        run, names = getattr(runtime, where), ran.setdefault(where, set())

        async def noted(function: Any, *args: Any, run: Any = run, names: set[str] = names) -> Any:
            names.add(function.__name__)
            return await run(function, *args)

        setattr(runtime, where, noted)
    await swarm.download()
    assert ran["compute"] == {"put"}
    assert {"leaf", "verifies"} <= ran["offload"]


@simulated(sources, 1, seed=1, model=FAST)
async def test_one_source_uses_its_link_well_and_what_comes_becomes_the_state(swarm: Sources) -> None:
    await swarm.download()
    assert swarm.seconds < NUM_VALUES * 8 / 4e6 / 0.85
    own, partial = shared_state(), swarm.partial
    own.vector.zero_()
    own.patch(partial.specs, [(index, partial.chunk(index)) for index, _ in partial.chunks()])
    assert own.tree().root == swarm.head.digest
    own.head = swarm.head
    for state in (own, swarm.states[0]):
        advance(state)
    assert own.head == swarm.states[0].head


@simulated(sources, 2, seed=range(4), model=FAST)
async def test_a_lying_source_is_given_up_and_counted(swarm: Sources) -> None:
    swarm.states[0].vector[CHUNK_VALUES::1000] += 1.0  # after its hashes were made
    downloaded = await swarm.download()
    assert swarm.is_right()
    assert downloaded.liars == swarm.ids[:1]
    assert swarm.refusals(0) == 1
    assert swarm.refusals(1) == 0


@simulated(sources, 2, seed=1, model=FAST)
async def test_only_liars_is_an_integrity_error_and_nothing_false_is_kept(swarm: Sources) -> None:
    for state in swarm.states:
        state.vector[-1] += 1.0  # in the last chunk
    partial = PartialDownload()
    with pytest.raises(IntegrityError, match="no source"):
        await swarm.download(resume=partial)
    right = ChunkedBytes(shared_state().tensors())
    kept = [index for index, done in enumerate(partial.done) if done]
    assert kept
    assert all(partial.cut.leaf(index, partial.chunk(index)) == right.leaf(index)[0] for index in kept)
    assert not partial.done[-1]


@simulated(sources, 2, seed=1, model=FAST)
async def test_a_false_description_is_found_before_memory_is_given_to_it(swarm: Sources) -> None:
    async def lie(channel: Channel, request: Open) -> None:
        huge = (TensorSpec("vector", "float32", (1 << 30,)),)
        await channel.send(HeldState(swarm.layout, Description(huge)))
        await channel.receive(FromReceiver, 10)

    swarm.sources[0].rpc.serve_channel("chunks.state", Open, lie)
    downloaded = await swarm.download()
    assert swarm.is_right()
    assert "another model" in str(downloaded.faults[swarm.ids[0]])
    assert swarm.refusals(0) == 1


@simulated(sources, 1, seed=1, model=FAST)
async def test_a_state_of_other_tensors_is_refused_before_there_is_room_for_it(swarm: Sources) -> None:
    own = shared_state()
    own.stepper = AverageStep(own.layout, 0.7)
    with pytest.raises(IncompatibleError, match="same outer optimizer"):
        await swarm.download(own=own)
    assert not swarm.partial.specs
    assert swarm.refusals(0) == 1
    await swarm.download()
    assert swarm.is_right()


LIES: dict[str, list[TensorSpec]] = {
    "1 TiB": [TensorSpec("vector", "float32", (1 << 38,))],
    "other shapes": [TensorSpec("vector", "float32", (NUM_VALUES // 2, 2))],
    "one more": [
        TensorSpec("vector", "float32", (NUM_VALUES,)),
        TensorSpec("outer.momentum", "float32", (NUM_VALUES,)),
        TensorSpec("outer.more", "float32", (1,)),
    ],
    "another dtype": [
        TensorSpec("vector", "float32", (NUM_VALUES,)),
        TensorSpec("outer.momentum", "float64", (NUM_VALUES,)),
    ],
    "very many": [TensorSpec("vector", "float32", (NUM_VALUES,))]
    + [TensorSpec(f"{number}", "bool", (0,)) for number in range(200_000)],
}


@pytest.mark.fault(43)
@pytest.mark.parametrize("tensors", LIES.values(), ids=LIES)
@simulated(sources, 1, seed=1, model=FAST)
async def test_tensors_that_are_not_the_model_s_are_refused_and_nothing_of_them_is_kept(
    swarm: Sources, tensors: list[TensorSpec]
) -> None:
    asked = list[object]()
    message = {"layout": swarm.layout, "description": {"tensors": to_wire(tensors)}}

    async def lie(channel: Channel, request: Open) -> None:
        await channel.send(message)
        with contextlib.suppress(P2PTrainError):
            asked.append(await channel.receive(FromReceiver, 10))

    swarm.sources[0].rpc.serve_channel("chunks.state", Open, lie)
    tracemalloc.start()
    try:
        with pytest.raises((IncompatibleError, IntegrityError)):
            await swarm.download()
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert not asked
    assert not swarm.partial.specs
    assert swarm.refusals(0) == 1
    assert most < 15 * len(to_bytes(message)) + CHUNK_BYTES, "the sender's included"


@pytest.mark.fault(9)
@simulated(sources, 3, seed=range(3), model=FAST)
async def test_two_that_agree_on_other_bytes_or_another_digest_do_not_outdo_one_that_is_right(swarm: Sources) -> None:
    for state in swarm.states[:2]:
        state.vector[CHUNK_VALUES:].add_(1.0)
    swarm.states[1].head = replace(swarm.head, digest=swarm.states[1].tree().root)
    downloaded = await swarm.download()
    assert swarm.is_right()
    assert set(downloaded.liars) == set(swarm.ids[:2])
    assert [swarm.refusals(source) for source in range(3)] == [1, 1, 0]


@pytest.mark.parametrize("hello", [{}, {"description": {"tensors": [["vector", "float32", [3]]] * 2}}])
@simulated(sources, 2, seed=1, model=FAST)
async def test_a_source_that_describes_nonsense_is_given_up(swarm: Sources, hello: dict[str, Any]) -> None:
    async def lie(channel: Channel, request: Open) -> None:
        await channel.send({"layout": swarm.layout, **hello})
        await channel.receive(FromReceiver, 10)

    swarm.sources[0].rpc.serve_channel("chunks.state", Open, lie)
    downloaded = await swarm.download()
    assert swarm.is_right()
    assert downloaded.liars == swarm.ids[:1]


@pytest.mark.parametrize("fault", ["stall", "cut"])
@simulated(sources, 2, seed=1, model=FAST)
async def test_a_source_that_falls_silent_does_not_hold_up_the_rest(swarm: Sources, fault: str) -> None:
    partial = PartialDownload()
    task = swarm.start(resume=partial)
    await until_started(swarm, partial)
    getattr(swarm.network, fault)(swarm.sources[0].peer)
    await task
    assert swarm.is_right()
    # All of it over one uplink takes 3 s: its silence was not waited for.
    assert swarm.seconds < 5.0


@simulated(members, 2, seed=1, model=FAST)
async def test_a_slow_source_does_not_set_the_pace(everyone: list[Member], network: SimulatedNetwork) -> None:
    slow = network.add_peer("slow", up_bytes_per_second=1e5)
    everyone.append(await start_member(slow))
    swarm = Sources(network, everyone)
    await swarm.download()
    assert swarm.is_right()
    # 1 MiB from the slow source alone takes 10 s.
    assert swarm.seconds < 5.0
    await everyone[-1].rpc.close()


@simulated(sources, 1, seed=1, model=FAST)
async def test_a_source_that_comes_back_is_resumed(swarm: Sources) -> None:
    """A relay that cuts the connection every few MiB: progress is kept, and attempts start anew."""
    served, last = [0], [0]
    state = swarm.states[0]

    async def cut_off(channel: Channel, request: Open) -> None:
        described = state.describe()
        assert described is not None
        specs = described[1]
        await channel.send(HeldState(swarm.layout, Description(specs)))
        buffer = memoryview(bytearray(2 * CHUNK_BYTES))
        for _ in range(2):
            asked = await channel.receive(FromReceiver, 10)
            for index in asked.chunks if isinstance(asked, Ask) else []:
                if served[0] % 2 and served[0] != last[0]:
                    last[0] = served[0]
                    channel.abort()
                    return
                served[0] += 1
                await channel.send_bytes(buffer[: state.read(index, buffer, specs)])
        await channel.receive(FromReceiver, 10)

    swarm.sources[0].rpc.serve_channel("chunks.state", Open, cut_off)
    await swarm.download()
    assert swarm.is_right()
    # Cutting may lose what was under way, not what had arrived.
    assert NUM_CHUNKS <= served[0] <= 2 * NUM_CHUNKS


@simulated(sources, 2, seed=1, model=FAST)
async def test_the_only_source_dies_and_another_completes_what_there_is(swarm: Sources) -> None:
    partial = PartialDownload()
    ids, admission = swarm.ids, OneState(swarm.head)
    task = swarm.newcomer.peer.spawn(
        download_state(swarm.newcomer.rpc, lambda: ids[:1], swarm.states[0], partial, admission)
    )
    await until_started(swarm, partial, 4)
    swarm.network.crash(swarm.sources[0].peer)
    with pytest.raises(PeerLostError, match="no source"):
        await task
    before = partial.num_done
    assert 4 <= before < NUM_CHUNKS
    downloaded = await download_state(swarm.newcomer.rpc, lambda: ids[1:], swarm.states[0], partial, admission)
    assert merkle_tree(tensors_of(partial)).root == swarm.head.digest
    assert downloaded.bytes_from[ids[1]] <= (NUM_CHUNKS - before) * CHUNK_BYTES


@simulated(sources, 2, seed=1, model=replace(FAST, up_bytes_per_second=1e6))
async def test_a_source_that_comes_while_the_download_goes_on_is_asked_too(swarm: Sources) -> None:
    partial, known = PartialDownload(), swarm.ids[:1]
    task = swarm.newcomer.peer.spawn(
        download_state(swarm.newcomer.rpc, lambda: known, swarm.states[0], partial, OneState(swarm.head))
    )
    await until_started(swarm, partial, 2)
    known.append(swarm.ids[1])
    await asyncio.sleep(3.0)
    swarm.network.crash(swarm.sources[0].peer)
    assert (await task).bytes_from[swarm.ids[1]]
    assert merkle_tree(tensors_of(partial)).root == swarm.head.digest


@simulated(sources, 2, seed=1, model=FAST)
async def test_another_model_is_refused_as_incompatible(swarm: Sources) -> None:
    with pytest.raises(IncompatibleError, match="another shape"):
        await swarm.download(own=shared_state(NUM_VALUES - 1))


@simulated(sources, 1, seed=1, model=replace(FAST, up_bytes_per_second=5000.0))
async def test_a_dribbling_source_is_used_while_there_is_none_better(swarm: Sources) -> None:
    """At a rate that takes it far beyond any deadline that a download could have."""
    await swarm.download()
    assert swarm.is_right()
    assert swarm.seconds > 2000


@simulated(sources, 1, seed=1, model=replace(FAST, up_bytes_per_second=6000.0))
async def test_a_source_below_the_least_rate_is_given_up(swarm: Sources) -> None:
    """Something comes from it in each window, but not enough."""
    options = FetchOptions(least=LeastRate(bytes_per_second=8192.0, window_seconds=100.0))
    with pytest.raises(DeadlineError, match="less than 8192 bytes/s"):
        await swarm.download(options=options)
    assert swarm.seconds < 500.0


@simulated(members, 1, seed=1, model=FAST)
async def test_the_slowest_source_gives_its_place_to_one_that_was_not_asked_yet(
    everyone: list[Member], network: SimulatedNetwork
) -> None:
    for index in range(5):
        rate = 4e6 if index == 4 else 1e4
        everyone.append(await start_member(network.add_peer(f"s{index}", up_bytes_per_second=rate)))
    swarm = Sources(network, everyone)
    downloaded = await swarm.download()
    assert swarm.is_right()
    assert downloaded.bytes_from[swarm.ids[4]] > NUM_VALUES * 8 / 2
    assert swarm.seconds < 100.0, "four slow ones would have taken 300 s"
    for member in everyone[1:]:
        await member.rpc.close()


@simulated(sources, 1, seed=1, model=FAST)
async def test_sources_that_never_answer_end_by_the_inner_deadlines(swarm: Sources) -> None:
    swarm.network.stall(swarm.sources[0].peer)
    with pytest.raises(P2PTrainError, match="no source"):
        await swarm.download(options=FetchOptions(2.0, LeastRate(window_seconds=2.0)))
    assert swarm.seconds < 20.0


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@simulated(sources, 2, seed=1, model=FAST)
async def test_a_state_that_is_not_finite_is_refused_and_no_source_blamed(swarm: Sources, value: float) -> None:
    for state in swarm.states:
        state.vector[700_000] = value
        state.head = replace(state.head, digest=state.tree().root)
    swarm.head = swarm.states[0].head
    with pytest.raises(IntegrityError, match="not finite"):
        await swarm.download()
    assert not any(swarm.refusals(source) for source in range(2))


@simulated(sources, 1, seed=1, model=FAST)
async def test_no_other_peer_is_said_at_once(swarm: Sources) -> None:
    me = swarm.newcomer
    with pytest.raises(PeerLostError, match="no other peer"):
        await download_state(me.rpc, lambda: [me.rpc.peer_id], swarm.states[0], PartialDownload(), OneState(swarm.head))


@simulated(sources, 4, seed=range(12), model=FAST)
async def test_any_mixture_of_faults_ends_right_or_in_an_error(swarm: Sources) -> None:
    random = swarm.network.random
    partial = PartialDownload()
    task = swarm.start(resume=partial)
    for source in range(4):
        await asyncio.sleep(random.random())
        peer, state = swarm.sources[source].peer, swarm.states[source]
        fault = random.choice(["crash", "stall", "cut", "lie", "move on", "none"])
        if fault == "crash":
            swarm.network.crash(peer)
        elif fault == "stall":
            swarm.network.stall(peer, random.choice([0.5, 5.0, 60.0]))
        elif fault == "cut":
            swarm.network.cut(peer)
        elif fault == "lie":
            state.vector.add_(1.0)
        elif fault == "move on":
            advance(state)
    try:
        await task
    except P2PTrainError:
        assert partial.num_done < NUM_CHUNKS
    else:
        assert swarm.is_right()
