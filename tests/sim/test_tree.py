"""Swarms larger than a group: cells, delegates, and how everybody comes to the same result."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2ptrain.averaging.attempt import AttemptFailedError
from p2ptrain.averaging.cells import Cells
from p2ptrain.averaging.descent import FALSE_PIECE
from p2ptrain.averaging.feedback import ErrorFeedback
from p2ptrain.averaging.head import Head
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support import false_owners
from tests.support.averagers import AveragingPeer, start_averagers, stop_averagers
from tests.support.false_owners import Corrupt, corrupt_rounds, falsify
from tests.support.simulation import until

NUM_VALUES = 512
SPEC = AveragingSpec(codec="fp32", aggregation="mean", group_size=8, grace_seconds=1.0)

Scenario = Callable[[SimulatedNetwork, list[AveragingPeer]], Awaitable[None]]


def run(num_peers: int, scenario: Scenario, seed: int = 1, spec: AveragingSpec = SPEC) -> None:
    async def main(network: SimulatedNetwork) -> None:
        peers = [network.add_peer(f"p{i}") for i in range(num_peers)]
        started = await start_averagers(network, peers, spec, NUM_VALUES)
        try:
            await scenario(network, started)
        finally:
            await stop_averagers(started)

    simulate(main, seed=seed)


async def grow(started: list[AveragingPeer]) -> None:
    """The first round, in which a group can only count those who do not fit in it."""
    await asyncio.gather(*(each.try_round() for each in started))
    assert max(len(each.outcomes) for each in started) == 1


def exact_mean(started: list[AveragingPeer]) -> torch.Tensor:
    return torch.stack([each.vector.double() for each in started]).mean(0).float()


@pytest.mark.parametrize(("num_peers", "seed"), [(12, 1), (12, 2), (24, 3), (64, 4)])
def test_all_peers_come_to_the_exact_mean_of_all(num_peers: int, seed: int) -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
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
            places = sorted(each.outcomes[-1].place for each in there)
            assert places == [(rank, len(there)) for rank in range(len(there))]

    run(num_peers, scenario, seed)


def test_cells_smaller_than_the_least_number_of_peers_average_in_a_swarm_that_has_it() -> None:
    spec = SPEC.model_copy(update={"min_peers": 7})

    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        await asyncio.gather(*(each.round() for each in started))
        body = started[0].outcomes[-1].result.certificate.body
        assert body.levels == 2
        assert sum(body.peers) == len(started)

    run(12, scenario, seed=2, spec=spec)


def hit_first_delegate(
    started: list[AveragingPeer], fault: Callable[[AveragingPeer], object], least: int = 1
) -> list[AveragingPeer]:
    """Let ``fault`` befall the first peer that is about to stand for a cell of ``least``; the list then holds it."""
    hit: list[AveragingPeer] = []

    def watch(each: AveragingPeer) -> None:
        represent = each.averager._represent

        async def represent_or_fail(*arguments: Any) -> Any:
            if not hit and len(arguments[1].certificate.body.members) >= least:
                hit.append(each)
                fault(each)
            return await represent(*arguments)

        each.averager._represent = represent_or_fail  # type: ignore[method-assign, assignment]

    for each in started:
        watch(each)
    return hit


def test_when_a_delegate_fails_the_next_one_brings_its_cell_s_result() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
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

    run(12, scenario, seed=2)


def test_a_delegate_that_falls_silent_costs_the_other_cells_no_round() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        hit = hit_first_delegate(started, lambda who: network.cut(who.peer))
        tasks = {each: asyncio.create_task(each.try_round()) for each in started}
        await until(lambda: bool(hit), 60)
        silent = hit[0]
        cells = Cells(SPEC.group_size)
        key = cells.key_of(silent.averager.head, silent.peer.peer_id)
        elsewhere = [each for each in started if not cells.includes(key, each.peer.peer_id)]
        assert all(await asyncio.gather(*(tasks[each] for each in elsewhere)))
        assert len({each.outcomes[-1].result.certificate.body.body_hash for each in elsewhere}) == 1
        network.mend(silent.peer)
        await asyncio.gather(*tasks.values())
        for _ in range(3):  # Whoever missed the round comes back.
            await asyncio.gather(*(each.try_round() for each in started))
        last = [each.outcomes[-1] for each in started]
        assert len({outcome.result.certificate.body.body_hash for outcome in last}) == 1
        assert all(outcome.contributed for outcome in last)

    run(12, scenario, seed=2)


def test_a_cell_whose_delegate_falls_silent_is_counted_in_the_same_round() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        # Of two members one cannot certify what the other did not sign.
        hit = hit_first_delegate(started, lambda who: network.cut(who.peer), least=3)
        began = network.loop.time()
        tasks = {each: asyncio.create_task(each.try_round()) for each in started}
        await until(lambda: bool(hit), 60)
        others = [each for each in started if each is not hit[0]]
        assert all(await asyncio.gather(*(tasks[each] for each in others)))
        assert network.loop.time() - began < 5 * SPEC.grace_seconds
        last = [each.outcomes[-1] for each in others]
        assert len({outcome.result.certificate.body.body_hash for outcome in last}) == 1
        assert all(outcome.contributed for outcome in last)
        assert last[0].result.certificate.body.tokens == 10 * len(started), "the silent one's work is in its cell's"
        network.mend(hit[0].peer)
        await tasks[hit[0]]

    run(12, scenario, seed=2)


def test_a_delegate_that_falls_silent_with_a_ticket_in_makes_room_for_the_next() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        late: list[AveragingPeer] = []  # Another cell's delegate, so that the ticket of the silent one waits.
        silent: list[AveragingPeer] = []

        def hold_or_cut(each: AveragingPeer) -> None:
            represent = each.averager._represent

            async def changed(*arguments: Any) -> Any:
                if not late:
                    late.append(each)
                    await asyncio.sleep(3.5)
                elif not silent and len(arguments[1].certificate.body.members) >= 3:
                    silent.append(each)
                    network.loop.call_later(0.2, network.cut, each.peer, context=network.context)
                return await represent(*arguments)

            each.averager._represent = changed  # type: ignore[method-assign, assignment]

        for each in started:
            hold_or_cut(each)
        tasks = {each: asyncio.create_task(each.try_round()) for each in started}
        await until(lambda: bool(silent), 60)
        others = [each for each in started if each is not silent[0]]
        assert all(await asyncio.gather(*(tasks[each] for each in others)))
        body = others[0].outcomes[-1].result.certificate.body
        assert body.tokens == 10 * len(started)
        network.mend(silent[0].peer)
        await tasks[silent[0]]

    run(12, scenario, seed=2, spec=SPEC.model_copy(update={"grace_seconds": 2.0}))


def test_nobody_stands_in_for_a_delegate_at_a_tenth_of_the_speed() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        for each in started:
            each.vector = torch.randn(100_000, generator=torch.Generator().manual_seed(1))
        stood: list[bytes] = []

        def count(each: AveragingPeer) -> None:
            represent = each.averager._represent

            async def counted(*arguments: Any) -> Any:
                stood.append(arguments[1].certificate.body.body_hash)
                return await represent(*arguments)

            each.averager._represent = counted  # type: ignore[method-assign, assignment]

        def crawl(who: AveragingPeer) -> None:
            who.peer.uplink.bytes_per_second = who.peer.downlink.bytes_per_second = 1.25e6
            crawling.append(network.loop.create_task(stop_and_go(who), context=network.context.copy()))

        async def stop_and_go(who: AveragingPeer) -> None:
            while True:
                network.stall(who.peer, 0.09)
                await asyncio.sleep(0.1)

        crawling: list[asyncio.Task[None]] = []
        for each in started:
            count(each)
        hit_first_delegate(started, crawl, least=3)
        assert all(await asyncio.gather(*(each.try_round() for each in started)))
        crawling[0].cancel()
        assert len(stood) == len(set(stood)), "two stood for one cell"
        assert started[0].outcomes[-1].result.certificate.body.tokens == 10 * len(started)

    run(12, scenario, seed=2)


def test_a_delegate_that_claims_more_than_its_cell_has_is_left_out() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        liars: list[str] = []

        def claim_more(who: AveragingPeer) -> None:
            ticket = who.averager._ticket

            def exaggerated(head: Head, wish: Any) -> Any:
                if wish.level:
                    liars.append(who.peer.peer_id)
                    wish = replace(wish, tokens=wish.tokens * 50)
                return ticket(head, wish)

            who.averager._ticket = exaggerated  # type: ignore[method-assign]

        hit = hit_first_delegate(started, claim_more)
        results = await asyncio.gather(*(each.try_round() for each in started))
        assert hit
        assert liars
        committed = [each for each, done in zip(started, results, strict=True) if done and each not in hit]
        assert committed
        for each in committed:
            body = each.outcomes[-1].result.certificate.body
            assert hit[0].peer.peer_id not in [body.members[index] for index, *_ in body.contributors]
            assert body.tokens <= 10 * len(started)

    run(12, scenario, seed=2)


CHECKED = SPEC.model_copy(update={"codec": "int8", "spot_checks": 4})


def test_a_delegate_that_hands_in_something_else_than_its_cell_s_result_is_left_out() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)

        def lie(who: AveragingPeer) -> None:
            decoded = who.averager._decoded
            who.averager._decoded = lambda *arguments: -decoded(*arguments)  # type: ignore[method-assign]

        hit = hit_first_delegate(started, lie)
        results = await asyncio.gather(*(each.try_round() for each in started))
        liar = hit[0].peer.peer_id
        committed = [each for each, done in zip(started, results, strict=True) if done and each not in hit]
        assert len(committed) >= 12
        for each in committed:
            body = each.outcomes[-1].result.certificate.body
            assert body.levels == 2
            assert liar not in [body.members[index] for index, *_ in body.contributors]
            counted = [other for other in committed if other.outcomes[-1].contributed]
            counted += hit if body.tokens > 10 * len(counted) else []  # By way of the next delegate of its cell.
            assert body.tokens == 10 * len(counted)
            torch.testing.assert_close(each.mean(), exact_mean(counted), rtol=0.0, atol=0.05)
        assert liar in {peer for each in started for peer, _ in each.rpc.refusals}
        for _ in range(2):  # Its cell's members carry their work.
            await asyncio.gather(*(each.try_round() for each in started if each not in hit))
        assert all(each.outcomes[-1].contributed for each in started if each not in hit)

    run(24, scenario, seed=2, spec=CHECKED)


def lie_above(who: AveragingPeer, lie: Corrupt) -> None:
    corrupt_rounds(
        who.averager, lambda butterfly: lie(butterfly) if butterfly.attempt.roster.tickets[0].level else None
    )


def test_delegates_check_each_other_s_shares_and_convict_before_all() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        hit = hit_first_delegate(started, lambda who: lie_above(who, falsify(None)))
        await asyncio.gather(*(each.try_round() for each in started))
        honest = [each for each in started if each not in hit]
        accused = hit[0].peer.peer_id
        await until(lambda: all(list(each.averager.evidence.convicted) == [accused] for each in honest), 20)
        await asyncio.gather(*(each.try_round() for each in honest))
        body = honest[0].outcomes[-1].result.certificate.body
        assert all(each.outcomes[-1].result.certificate.body == body for each in honest)

    run(12, scenario, seed=2, spec=CHECKED)


def test_a_delegate_that_complains_for_nothing_has_the_others_look_and_go_on() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        hit = hit_first_delegate(started, lambda who: lie_above(who, false_owners.complain))
        results = await asyncio.gather(*(each.try_round() for each in started))
        honest = [(each, done) for each, done in zip(started, results, strict=True) if each not in hit]
        wrong = {peer for each, _ in honest for peer, cause in each.rpc.refusals if cause == "ProtocolError"}
        assert not wrong, "who asks on behalf of another one is a member still"
        assert sum(done for _, done in honest) >= 0.6 * len(honest), "all but its own cell"
        assert not any(each.averager.evidence.convicted for each in started)

    run(24, scenario, seed=2, spec=CHECKED)


def test_false_pieces_of_a_result_are_fetched_elsewhere_and_counted_against_who_sent_them() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        await grow(started)
        evil = started[3]

        async def send_other_bytes(channel: Channel, request: dict[str, Any]) -> None:
            pieces = evil.averager._descent._kept.get(request["body"])
            if pieces is not None:
                for piece in request["pieces"]:
                    await channel.send_bytes(bytes(len(pieces.view(piece))))
            await channel.send({"done": True})

        evil.rpc.serve_channel("descent.pieces", send_other_bytes)
        honest = [each for each in started if each is not evil]
        committed = 0
        for _ in range(6):
            done = await asyncio.gather(*(each.try_round() for each in honest), evil.try_round())
            results = [each.outcomes[-1].result for each, ok in zip(honest, done, strict=False) if ok]
            front = max((result.certificate.body.round for result in results), default=0)
            ended = [result for result in results if result.certificate.body.round == front]
            assert len({result.certificate.body.body_hash for result in ended}) <= 1
            assert len({tuple(map(bytes, result.means)) for result in ended}) <= 1
            committed += len(ended)
        assert committed >= 6 * len(honest) / 2  # The others' delegate was the liar, or their cell was full.
        refused = {peer for each in honest for peer, cause in each.rpc.refusals if cause == FALSE_PIECE}
        assert refused == {evil.peer.peer_id}

    run(12, scenario, seed=2, spec=SPEC.model_copy(update={"codec": "fp32"}))


def test_a_swarm_that_grows_beyond_a_group_and_shrinks_again_goes_on() -> None:
    async def scenario(network: SimulatedNetwork, started: list[AveragingPeer]) -> None:
        levels = []
        for present in (6, 6, 16, 16, 16, 5, 5, 5):
            there = started[:present]
            for each in started:
                each.others = [other for other in there if other is not each]
            await asyncio.gather(*(each.try_round() for each in there))
            levels.append(there[0].outcomes[-1].result.certificate.body.levels)
            for each in there:
                for gone in started[present:]:
                    each.membership.suspect(gone.peer.peer_id, "left")
        assert levels[0] == 1
        assert max(levels) > 1
        assert levels[-1] == 1
        body = started[0].outcomes[-1].result.certificate.body
        assert sum(body.peers) == 5

    run(16, scenario, seed=3)


@pytest.mark.parametrize("codec", ["int8", "topk"])
def test_what_codecs_drop_on_all_levels_comes_again(codec: str) -> None:
    """Summed over rounds, what was applied and what the peers keep for later is what they contributed."""
    spec = SPEC.model_copy(update={"codec": codec, "group_size": 4})
    num_rounds, num_values = 6, 2 * 4096

    async def main(network: SimulatedNetwork) -> None:
        peers = [network.add_peer(f"p{i}") for i in range(9)]
        started = await start_averagers(network, peers, spec, num_values)
        feedbacks = [ErrorFeedback(num_values, get_codec(codec)) for _ in started]
        wanted, got = torch.zeros(num_values, dtype=torch.float64), torch.zeros(num_values, dtype=torch.float64)
        updates = [torch.randn(num_values, generator=torch.Generator().manual_seed(i)) for i in range(len(started))]
        counted = 0
        for _ in range(num_rounds):
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
        assert counted >= 2
        kept = torch.stack([f.residual.double() for f in feedbacks if f.residual is not None]).mean(0)
        torch.testing.assert_close(wanted - got, kept, rtol=0, atol=1e-3)
        await stop_averagers(started)

    simulate(main, seed=4)
