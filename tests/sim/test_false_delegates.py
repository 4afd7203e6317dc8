"""Delegates that lie about their cells, about each other's shares, or about the swarm's result."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2ptrain.averaging.allreduce.messages import Shown, Trace
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.grouping.cells import Cells
from p2ptrain.averaging.protocol.certificate import Roster, Ticket
from p2ptrain.network.chunks.messages import Ask, FromReceiver, Open
from p2ptrain.network.rpc.channel import Channel
from tests.support.coroutines import simulated
from tests.support.sim import false_owners
from tests.support.sim.averagers import AveragingPeer
from tests.support.sim.false_owners import Corrupt, corrupt_rounds, falsify
from tests.support.sim.peers import until
from tests.support.sim.trees import SPEC, assert_all_took_part, averagers, exact_mean, grow, hit_first_delegate


@pytest.mark.parametrize(("seed", "more_rounds"), [(2, 0), (4, 0), (5, 0), (8, 0), (1002, 0), (2, 3), (11, 3)])
@simulated(averagers, 12)
async def test_a_delegate_that_claims_more_than_its_cell_has_is_left_out(
    started: list[AveragingPeer], seed: int, more_rounds: int
) -> None:
    await grow(started)
    for _ in range(more_rounds):
        await asyncio.gather(*(each.try_round() for each in started))
    liars: list[str] = []

    def claim_more(who: AveragingPeer) -> None:
        sign = who.averager._signed

        def exaggerated(ticket: Ticket) -> Ticket:
            if ticket.level:
                liars.append(who.peer.peer_id)
                ticket = replace(ticket, tokens=ticket.tokens * 50)
            return sign(ticket)

        who.averager._signed = exaggerated  # type: ignore[method-assign]

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


@simulated(averagers, 12, seed=2)
async def test_a_delegate_that_is_alone_gets_no_vote_for_more_than_its_cell_s_result(
    started: list[AveragingPeer],
) -> None:
    head = await grow(started)
    all_rows = ((1 << len(head.table.rows)) - 1).to_bytes(-(-len(head.table.rows) // 8), "little")

    def be_alone(who: AveragingPeer) -> None:
        find, sign = who.averager.matchmaker.find_group, who.averager._signed

        def lied(ticket: Ticket) -> Ticket:
            if ticket.census is None:
                return sign(ticket)
            return sign(replace(ticket, census=ticket.census._replace(roster=all_rows, contributed=all_rows)))

        async def find_group(make: Callable[[], Ticket]) -> Roster:
            ticket = make()
            return Roster((ticket,), leader=ticket.peer) if ticket.level else await find(make)

        who.averager._signed = lied  # type: ignore[method-assign]
        who.averager.matchmaker.find_group = find_group  # type: ignore[method-assign, assignment]

    hit = hit_first_delegate(started, be_alone)
    done = await asyncio.gather(*(each.try_round() for each in started))
    last = [each.outcomes[-1].result.certificate.body for each, ok in zip(started, done, strict=True) if ok]
    assert last
    assert all(hit[0].peer.peer_id not in body.contributing for body in last)


CHECKED = SPEC.model_copy(update={"codec": "int8", "spot_checks": 4})


@simulated(averagers, 24, CHECKED, seed=2)
async def test_a_delegate_that_hands_in_something_else_than_its_cell_s_result_is_left_out(
    started: list[AveragingPeer],
) -> None:
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


@pytest.mark.parametrize("demand", [(0, 0), (99,), (), (0,) * 5])
@simulated(averagers, 24, CHECKED, seed=2)
async def test_an_owner_that_asks_for_more_than_it_may_gets_nothing_and_is_done_without(
    started: list[AveragingPeer], demand: tuple[int, ...]
) -> None:
    await grow(started)
    answers: list[Shown] = []

    def demand_more(session: AllReduceSession) -> None:
        async def demand_trace(channel: Channel, *rest: Any) -> None:
            await channel.send(Trace(demand))
            answers.append(await channel.receive(Shown, SPEC.round_seconds))

        session.incoming._trace = demand_trace  # type: ignore[method-assign, assignment]

    hit = hit_first_delegate(started, lambda who: lie_above(who, demand_more))
    for _ in range(2):
        await asyncio.gather(*(each.try_round() for each in started))
    assert hit
    assert not answers
    last = [each.outcomes[-1].result.certificate.body for each in started if each not in hit]
    assert last.count(max(last, key=lambda body: body.round)) >= 0.6 * len(last)
    assert max(body.round for body in last) >= 2


def lie_above(who: AveragingPeer, lie: Corrupt) -> None:
    corrupt_rounds(who.averager, lambda session: lie(session) if session.attempt.roster.tickets[0].level else None)


@simulated(averagers, 12, CHECKED, seed=2)
async def test_delegates_check_each_other_s_shares_and_convict_before_all(started: list[AveragingPeer]) -> None:
    await grow(started)
    hit = hit_first_delegate(started, lambda who: lie_above(who, falsify(None)))
    await asyncio.gather(*(each.try_round() for each in started))
    honest = [each for each in started if each not in hit]
    accused = hit[0].peer.peer_id
    await until(lambda: all(list(each.averager.evidence.convicted) == [accused] for each in honest), 20)
    await asyncio.gather(*(each.try_round() for each in honest))
    body = honest[0].outcomes[-1].result.certificate.body
    assert all(each.outcomes[-1].result.certificate.body == body for each in honest)


@pytest.mark.fault(40)
@simulated(averagers, 24, CHECKED, seed=2)
async def test_a_delegate_that_complains_for_nothing_has_the_others_look_and_go_on(
    started: list[AveragingPeer],
) -> None:
    head = await grow(started)
    hit = hit_first_delegate(started, lambda who: lie_above(who, false_owners.complain))
    results = await asyncio.gather(*(each.try_round() for each in started))
    honest = [(each, done) for each, done in zip(started, results, strict=True) if each not in hit]
    wrong = {peer for each, _ in honest for peer, cause in each.rpc.refusals if cause == "ProtocolError"}
    assert not wrong, "who asks on behalf of another one is a member still"
    cells = Cells(SPEC.group_size)
    liars = cells.key_of(head, hit[0].peer.peer_id)
    elsewhere = {each: done for each, done in honest if not cells.includes(liars, each.peer.peer_id)}
    assert_all_took_part(started, elsewhere, head)
    assert not any(each.averager.evidence.convicted for each in started)


@pytest.mark.parametrize("what", ["chunks", "hashes"])
@simulated(averagers, 12, SPEC.model_copy(update={"codec": "fp32"}), seed=2)
async def test_false_chunks_of_a_result_are_fetched_elsewhere_and_counted_against_who_sent_them(
    started: list[AveragingPeer], what: str
) -> None:
    await grow(started)
    evil = started[3]

    async def send_other_bytes(channel: Channel, request: Open) -> None:
        chunks = evil.averager.round_log.shared.get(request.key)
        while chunks is not None and isinstance(asked := await channel.receive(FromReceiver, 60.0), Ask):
            for index in asked.chunks:
                await channel.send_bytes(bytes(chunks.wire_bytes(index)))

    right = evil.averager.round_log.chunks_of

    def with_other_hashes(*arguments: Any) -> Any:
        chunks = right(*arguments)
        if chunks.is_complete:
            chunks.hashes = (bytes(32),) * chunks.num_chunks
        return chunks

    if what == "chunks":
        evil.rpc.serve_channel("chunks.result", Open, send_other_bytes)
    else:
        evil.averager.round_log.chunks_of = with_other_hashes  # type: ignore[method-assign, assignment]
    honest = [each for each in started if each is not evil]
    committed, rounds, refused = 0, 0, set[str]()
    while rounds < 6 or not refused:  # Who is asked for pieces is a matter of the round.
        rounds += 1
        assert rounds <= 40, "the liar was never asked, or never found out"
        done = await asyncio.gather(*(each.try_round() for each in honest), evil.try_round())
        results = [each.outcomes[-1].result for each, ok in zip(honest, done, strict=False) if ok]
        front = max((result.certificate.body.round for result in results), default=0)
        ended = [result for result in results if result.certificate.body.round == front]
        assert len({result.certificate.body.body_hash for result in ended}) <= 1
        assert len({tuple(map(bytes, result.means)) for result in ended}) <= 1
        committed += len(ended)
        refused = {peer for each in honest for peer, cause in each.rpc.refusals if cause == "bad result"}
    assert committed >= rounds * len(honest) / 2  # The others' delegate was the liar, or their cell was full.
    assert refused == {evil.peer.peer_id}
