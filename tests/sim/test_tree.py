"""Swarms larger than a group: cells, delegates, and how everybody comes to the same result."""

import asyncio

import pytest
import torch

from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import Body
from p2ptrain.averaging.protocol.table import SLEEP_ROUNDS
from p2ptrain.averaging.vector.error_feedback import ErrorFeedback
from p2ptrain.codecs import get_codec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averagers import AveragingPeer, start_averagers
from tests.support.sim.peers import until
from tests.support.sim.trees import (
    SPEC,
    assert_all_took_part,
    averagers,
    before_representing,
    exact_mean,
    grow,
    hit_first_delegate,
)


@pytest.mark.parametrize(("num_peers", "seed"), [(12, 1), (12, 2), (24, 3), (64, 4)])
@simulated()
async def test_all_peers_come_to_the_exact_mean_of_all(network: SimulatedNetwork, num_peers: int, seed: int) -> None:
    async with averagers(network, num_peers) as started:
        await grow(started)
        waiting: set[AveragingPeer] = set()
        for _ in range(2):
            done = await asyncio.gather(*(each.try_round() for each in started))
            there = [each for each, committed in zip(started, done, strict=True) if committed]
            assert len({each.outcomes[-1].result.certificate.body.body_hash for each in there}) == 1
            body = there[0].outcomes[-1].result.certificate.body
            assert body.levels == Cells(SPEC.group_size).num_levels(num_peers) > 1
            contributed = [each for each in there if each.outcomes[-1].contributed]
            assert len(contributed) >= 0.8 * num_peers, "a cell that overflows leaves some out, seldom"
            assert len(waiting.intersection(contributed)) >= 0.8 * len(waiting), "and not the same ones again"
            waiting = set(started).difference(contributed)
            assert body.tokens == 10 * len(contributed)
            torch.testing.assert_close(there[0].mean(), exact_mean(contributed), rtol=1e-5, atol=1e-6)
            assert all(torch.equal(each.mean(), there[0].mean()) for each in there)
            places = sorted(each.outcomes[-1].position for each in there)
            assert places == [(rank, len(there)) for rank in range(len(there))]


@simulated(averagers, 12, SPEC.model_copy(update={"min_peers": 7}), seed=2)
async def test_cells_smaller_than_the_least_number_of_peers_average_in_a_swarm_that_has_it(
    started: list[AveragingPeer],
) -> None:
    await grow(started)
    await asyncio.gather(*(each.round() for each in started))
    body = started[0].outcomes[-1].result.certificate.body
    assert body.levels == 2
    assert sum(body.peers) == len(started)


@simulated(averagers, 24, seed=2)
async def test_voters_stand_for_their_cells_if_there_are_any(started: list[AveragingPeer]) -> None:
    head = await grow(started)
    voters = head.table.awake
    assert 0 < len(voters) < len(started)
    stood: list[tuple[str, frozenset[str]]] = []

    async def note(each: AveragingPeer, body: Body) -> None:
        stood.append((each.peer.peer_id, voters.intersection(body.contributing)))

    before_representing(started, note)
    await asyncio.gather(*(each.try_round() for each in started))
    assert sum(bool(there) for _, there in stood) > 1
    assert all(peer in there for peer, there in stood if there)


@simulated(averagers, 12, seed=2)
async def test_when_a_delegate_fails_the_next_one_brings_its_cell_s_result(started: list[AveragingPeer]) -> None:
    await grow(started)

    def fail(who: AveragingPeer) -> None:
        raise AttemptFailedError("something is wrong here")

    hit = hit_first_delegate(started, fail)
    await asyncio.gather(*(each.round() for each in started))
    assert hit
    assert len({each.outcomes[-1].result.certificate.body.body_hash for each in started}) == 1
    assert all(each.outcomes[-1].contributed for each in started)
    assert started[0].outcomes[-1].result.certificate.body.tokens == 10 * len(started)
    assert torch.equal(hit[0].mean(), started[0].mean())


@simulated(averagers, 12, seed=2)
async def test_a_delegate_that_falls_silent_costs_the_other_cells_no_round(
    started: list[AveragingPeer], network: SimulatedNetwork
) -> None:
    head = await grow(started)
    hit = hit_first_delegate(started, lambda who: network.cut(who.peer))
    tasks = {each: asyncio.create_task(each.try_round()) for each in started}
    await until(lambda: bool(hit), 60)
    silent = hit[0]
    cells = Cells(SPEC.group_size)
    key = cells.key_of(head, silent.peer.peer_id)
    elsewhere = [each for each in started if not cells.includes(key, each.peer.peer_id)]
    results = await asyncio.gather(*(tasks[each] for each in elsewhere))
    assert_all_took_part(started, dict(zip(elsewhere, results, strict=True)), head)
    there = [each for each, done in zip(elsewhere, results, strict=True) if done]
    assert len({each.outcomes[-1].result.certificate.body.body_hash for each in there}) == 1
    network.mend(silent.peer)
    await asyncio.gather(*tasks.values())
    before = {each: sum(outcome.contributed for outcome in each.outcomes) for each in started}
    for _ in range(4):  # Whoever missed the round comes back.
        await asyncio.gather(*(each.try_round() for each in started))
    last = max((each.outcomes[-1].result.certificate.body for each in started), key=lambda body: body.round)
    assert all(sum(outcome.contributed for outcome in each.outcomes) > before[each] for each in started)
    assert [each.outcomes[-1].result.certificate.body for each in started].count(last) > len(started) / 2


@simulated(averagers, 12, seed=2)
async def test_a_cell_whose_delegate_falls_silent_is_counted_in_the_same_round(
    started: list[AveragingPeer], network: SimulatedNetwork
) -> None:
    await grow(started)
    # Of two members one cannot certify what the other did not sign.
    hit = hit_first_delegate(started, lambda who: network.cut(who.peer), least=3)
    began = network.loop.time()
    tasks = {each: asyncio.create_task(each.try_round()) for each in started}
    await until(lambda: bool(hit), 60)
    others = [each for each in started if each is not hit[0]]
    assert all(await asyncio.gather(*(tasks[each] for each in others)))
    assert network.loop.time() - began < 6 * SPEC.grace_seconds
    last = [each.outcomes[-1] for each in others]
    assert len({outcome.result.certificate.body.body_hash for outcome in last}) == 1
    assert all(outcome.contributed for outcome in last)
    assert last[0].result.certificate.body.tokens == 10 * len(started), "the silent one's work is in its cell's"
    network.mend(hit[0].peer)
    await tasks[hit[0]]


@simulated(averagers, 12, SPEC.model_copy(update={"grace_seconds": 2.0}), seed=2)
async def test_a_delegate_that_falls_silent_with_a_ticket_in_makes_room_for_the_next(
    started: list[AveragingPeer], network: SimulatedNetwork
) -> None:
    await grow(started)
    late: list[AveragingPeer] = []  # Another cell's delegate, so that the ticket of the silent one waits.
    silent: list[AveragingPeer] = []

    async def hold_or_cut(each: AveragingPeer, body: Body) -> None:
        if not late:
            late.append(each)
            await asyncio.sleep(3.5)
        elif not silent and len(body.members) >= 3:
            silent.append(each)
            network.loop.call_later(0.2, network.cut, each.peer, context=network.context)

    before_representing(started, hold_or_cut)
    tasks = {each: asyncio.create_task(each.try_round()) for each in started}
    await until(lambda: bool(silent), 60)
    others = [each for each in started if each is not silent[0]]
    assert all(await asyncio.gather(*(tasks[each] for each in others)))
    body = others[0].outcomes[-1].result.certificate.body
    assert body.tokens == 10 * len(started)
    network.mend(silent[0].peer)
    await tasks[silent[0]]


@simulated(averagers, 12, seed=2)
async def test_nobody_stands_in_for_a_delegate_at_a_tenth_of_the_speed(
    started: list[AveragingPeer], network: SimulatedNetwork
) -> None:
    await grow(started)
    for each in started:
        each.vector = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
        log = each.averager.round_log
        log._parts = [(codec, len(each.vector)) for codec, _ in log._parts]
    stood: list[bytes] = []

    async def count(each: AveragingPeer, body: Body) -> None:
        stood.append(body.body_hash)

    def crawl(who: AveragingPeer) -> None:
        who.peer.uplink.bytes_per_second = who.peer.downlink.bytes_per_second = 1.25e6
        crawling.append(network.loop.create_task(stop_and_go(who), context=network.context.copy()))

    async def stop_and_go(who: AveragingPeer) -> None:
        while True:
            network.stall(who.peer, 0.09)
            await asyncio.sleep(0.1)

    crawling: list[asyncio.Task[None]] = []
    before_representing(started, count)
    hit_first_delegate(started, crawl, least=3)
    assert all(await asyncio.gather(*(each.try_round() for each in started)))
    crawling[0].cancel()
    assert len(stood) == len(set(stood)), "two stood for one cell"
    assert started[0].outcomes[-1].result.certificate.body.tokens == 10 * len(started)


@simulated(averagers, 16, seed=3)
async def test_a_swarm_that_grows_beyond_a_group_and_shrinks_again_goes_on(
    started: list[AveragingPeer], network: SimulatedNetwork
) -> None:
    levels: list[int] = []
    for present in (6, 6, 16, 16, 16, *[5] * (SLEEP_ROUNDS + 2)):  # As long as those that left are not asleep.
        there = started[:present]
        if levels and max(levels) > 1:
            for gone in started[present:]:
                network.crash(gone.peer)
        for each in started:
            each.others = [other for other in there if other is not each]
        # Where more than a third of the voters have left, the others wait before they go on without them.
        await asyncio.gather(*(each.round_until_committed() if present < 6 else each.try_round() for each in there))
        levels.append(there[0].outcomes[-1].result.certificate.body.levels)
        for each in there:
            for gone in started[present:]:
                each.membership.suspect(gone.peer.peer_id, "left")
    assert levels[0] == 1
    assert max(levels) > 1
    assert levels[-1] == 1
    body = started[0].outcomes[-1].result.certificate.body
    assert sum(body.peers) == 5


@pytest.mark.parametrize("codec", ["int8", "topk"])
@simulated(seed=4)
async def test_what_codecs_drop_on_all_levels_comes_again(network: SimulatedNetwork, codec: str) -> None:
    """Summed over rounds, what was applied and what the peers keep for later is what they contributed."""
    spec = SPEC.model_copy(update={"codec": codec, "group_size": 4})
    most_rounds, num_values = 20, 2 * 4096
    peers = [network.add_peer(f"p{i}") for i in range(9)]
    started = await start_averagers(network, peers, spec, num_values)
    feedbacks = [ErrorFeedback(num_values, get_codec(codec)) for _ in started]
    wanted, got = torch.zeros(num_values, dtype=torch.float64), torch.zeros(num_values, dtype=torch.float64)
    updates = [torch.randn(num_values, generator=torch.Generator().manual_seed(i)) for i in range(len(started))]
    counted = 0
    for _ in range(most_rounds):  # Of which the last three have room for all in their cells.
        for each, feedback, update in zip(started, feedbacks, updates, strict=True):
            each.vector = update.clone()
            feedback.add_to(each.vector)
        committed = await asyncio.gather(*(each.try_round() for each in started))
        if not all(committed) or not all(each.outcomes[-1].contributed for each in started):
            for feedback in feedbacks:
                feedback.reset()
            wanted.zero_()
            got.zero_()
            counted = 0
            continue
        counted += 1
        wanted += torch.stack(updates).double().mean(0)
        got += started[0].mean().double()
        for each, feedback in zip(started, feedbacks, strict=True):
            feedback.update(each.outcomes[-1].encoded)
        if counted == 3:
            break
    assert counted == 3
    kept = torch.stack([f.residual.double() for f in feedbacks if f.residual is not None]).mean(0)
    torch.testing.assert_close(wanted - got, kept, rtol=0, atol=1e-3)
