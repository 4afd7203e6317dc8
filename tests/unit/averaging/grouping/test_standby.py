"""Peers that compute what others bring: what they are granted, and how they sit a round out, whoever is gone."""

import asyncio
from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping.messages import TAKE_ON, Grant, TakeOn
from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.averaging.timing.goal import HOLD_SECONDS, NO_PROGRESS_SECONDS, Goal
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averagers import GroupingPeer, grouping_peers
from tests.support.sim.averaging import HEAD

SPEC = AveragingSpec(grace_seconds=2.0, matchmaking_seconds=8.0)
NEXT = replace(HEAD, round=1, lineage=b"n" * 32, tokens=10)
TARGET = 12
PEERS = (SPEC, Goal(TARGET))
Peers = list[GroupingPeer]


def take_on(peer: GroupingPeer, samples: int, held: int, wanted: int) -> asyncio.Task[int]:
    return peer.peer.spawn(peer.matchmaker.standby.take_on(samples, held, wanted))


def sit_out(peer: GroupingPeer, seconds: float, *, may_join: bool = False) -> asyncio.Task[str | None]:
    return peer.peer.spawn(peer.matchmaker.standby.sit_out(seconds, may_join=may_join))


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_all_together_are_granted_the_global_batch_and_no_more(peers: Peers) -> None:
    granted = await asyncio.gather(*(take_on(peer, 0, 0, 5) for peer in peers))
    assert sum(granted) == TARGET
    assert await asyncio.gather(*(take_on(peer, 0, n, 5) for peer, n in zip(peers, granted, strict=True))) == [0] * 3


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_the_round_is_closed_when_what_is_done_fills_it(peers: Peers) -> None:
    told = []
    for peer in peers:
        peer.matchmaker.standby.on_closing(lambda peer=peer: told.append(peer.id))  # type: ignore[misc]
    assert await take_on(peers[1], 0, 0, 12) == 12
    assert await take_on(peers[2], 0, 0, 1) == 0
    assert not peers[1].is_closing()
    assert await take_on(peers[1], 12, 12, 1) == 0
    assert peers[1].is_closing()
    await asyncio.sleep(3.0)
    assert {peer.id for peer in peers[:2]} <= set(told), "the leader knows as well"


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_a_round_of_which_nothing_is_left_begins_again(peers: Peers, network: SimulatedNetwork) -> None:
    assert await take_on(peers[1], 0, 0, 12) == 12
    assert await take_on(peers[1], 12, 12, 1) == 0
    assert await take_on(peers[0], 0, 0, 1) == 0
    assert peers[0].is_closing()
    network.crash(peers[1].peer)
    peers[0].matchmaker.standby.reopen()
    assert await take_on(peers[0], 0, 0, 4) == 4
    assert not peers[0].is_closing()


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_what_a_silent_peer_holds_is_granted_to_others(peers: Peers, network: SimulatedNetwork) -> None:
    assert await take_on(peers[1], 0, 0, 12) == 12
    network.crash(peers[1].peer)
    assert await take_on(peers[2], 0, 0, 4) == 0
    await asyncio.sleep(HOLD_SECONDS + 1.0)
    assert await take_on(peers[2], 0, 0, 4) == 4


@pytest.mark.parametrize("is_stalled", [False, True])
@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_when_the_leader_is_gone_the_next_one_grants(
    peers: Peers, network: SimulatedNetwork, is_stalled: bool
) -> None:
    assert await take_on(peers[1], 0, 0, 3) == 3
    (network.stall if is_stalled else network.crash)(peers[0].peer)
    began = network.loop.time()
    assert await take_on(peers[1], 0, 3, 4) == 4
    assert network.loop.time() - began < 8.0
    assert await take_on(peers[2], 0, 0, 12) == 5, "what others hold is known to the next leader, too"
    network.resume(peers[0].peer)


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_without_anybody_else_a_peer_grants_itself(peers: Peers, network: SimulatedNetwork) -> None:
    for peer in peers[1:]:
        network.crash(peer.peer)
    assert await take_on(peers[0], 0, 0, 20) == 12
    peers[0].matchmaker.position.head = NEXT
    assert await take_on(peers[0], 0, 0, 7) == 7, "a round after the other"


@simulated(grouping_peers, 2, *PEERS, seed=1)
async def test_a_leader_that_is_further_on_says_so_at_once(peers: Peers, network: SimulatedNetwork) -> None:
    peers[0].matchmaker.set_head(NEXT)
    assert await sit_out(peers[1], 20.0) == peers[0].id
    assert await take_on(peers[1], 0, 0, 4) == 0
    assert peers[1].is_closing()
    assert network.loop.time() < 2.0


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_a_leader_that_never_grants_anything_is_passed_over(peers: Peers, network: SimulatedNetwork) -> None:
    async def answer(peer: str, request: TakeOn) -> Grant:
        return Grant(closing=False, granted=0)

    peers[0].rpc.serve(TAKE_ON, TakeOn, answer)
    granted = 0
    while not granted and network.loop.time() < 2 * NO_PROGRESS_SECONDS:
        granted = await take_on(peers[1], 0, 0, 4)
        await asyncio.sleep(2.0)
    assert granted == 4
    assert network.loop.time() >= NO_PROGRESS_SECONDS, "a round may be full for long, and its leader honest"


@simulated(grouping_peers, 2, *PEERS, seed=1)
async def test_a_leader_that_grants_too_much_grants_no_more_than_was_asked_for(peers: Peers) -> None:
    async def answer(peer: str, request: TakeOn) -> Grant:
        return Grant(closing=False, granted=10**9)

    peers[0].rpc.serve(TAKE_ON, TakeOn, answer)
    assert await take_on(peers[1], 0, 0, 4) == 4


# Sitting a round out


@simulated(grouping_peers, 4, *PEERS, seed=1)
async def test_nobody_waits_for_who_sits_a_round_out_and_it_learns_who_is_further_on(
    peers: Peers, network: SimulatedNetwork
) -> None:
    sitting = [sit_out(peer, 20.0) for peer in peers[2:]]
    await asyncio.sleep(0.5)
    began = network.loop.time()
    rosters = await asyncio.gather(*(peer.peer.spawn(peer.find_group()) for peer in peers[:2]))
    assert network.loop.time() - began < 1.0
    assert {len(roster.tickets) for roster in rosters} == {2}
    assert not any(task.done() for task in sitting)
    peers[1].matchmaker.set_head(NEXT)
    peers[0].matchmaker.set_head(NEXT)
    sources = await asyncio.gather(*sitting)
    assert set(sources) <= {peer.id for peer in peers[:2]}
    assert network.loop.time() - began < 3.0


@simulated(grouping_peers, 4, *PEERS, seed=1)
async def test_who_has_no_work_is_needed_if_too_few_voters_have_some(peers: Peers, network: SimulatedNetwork) -> None:
    worker, *voters, newcomer = peers
    rows = [Row(worker.id), *(Row(peer.id, votes=True, elects=True) for peer in voters)]
    table = Table(tuple(sorted(rows, key=lambda row: row.peer)))
    for peer in peers:
        peer.matchmaker.set_head(replace(HEAD, table=table))
    assert await sit_out(voters[0], 1.0, may_join=True) == "", "nobody has work"
    assert await take_on(worker, 0, 0, TARGET) == TARGET
    await take_on(worker, TARGET, TARGET, 1)
    began = network.loop.time()
    assert await sit_out(newcomer, 1.0, may_join=True) == ""
    assert await sit_out(voters[0], 1.0, may_join=True) == "", "the other one is half of the voters"
    assert network.loop.time() - began >= 2.0
    assert await sit_out(voters[1], 20.0, may_join=True) is None
    assert network.loop.time() - began < 4.0
    assert await sit_out(voters[1], 1.0) == ""
    (group,) = worker.matchmaker._coordinator._groups.values()
    assert voters[1].id in group.passed, "one that leaves is waited for by nobody"
    assert await sit_out(voters[1], 20.0, may_join=True) is None
    network.crash(voters[1].peer)
    worker.membership.suspect(voters[1].id, "is gone")
    assert await sit_out(voters[0], 20.0, may_join=True) is None


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_who_has_no_work_for_the_first_round_is_needed_all_the_same(peers: Peers) -> None:
    assert await take_on(peers[1], 0, 0, TARGET) == TARGET
    await take_on(peers[1], TARGET, TARGET, 1)
    assert await sit_out(peers[1], 1.0, may_join=True) == "", "it is the only one with work"
    assert await sit_out(peers[2], 20.0, may_join=True) is None


@pytest.mark.parametrize("is_stalled", [False, True])
@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_when_the_leader_is_gone_others_tell_that_they_are_further_on(
    peers: Peers, network: SimulatedNetwork, is_stalled: bool
) -> None:
    (network.stall if is_stalled else network.crash)(peers[0].peer)
    sitting = sit_out(peers[1], 20.0)
    await asyncio.sleep(8.0)
    assert not sitting.done()
    peers[2].matchmaker.set_head(NEXT)
    assert await sitting == peers[2].id
    assert network.loop.time() < 12.0
    assert peers[1].membership.is_suspect(peers[0].id)
    network.resume(peers[0].peer)


@simulated(grouping_peers, 3, *PEERS, seed=1)
async def test_when_nobody_moves_it_is_told_of_nobody_after_the_time_that_it_gave(
    peers: Peers, network: SimulatedNetwork
) -> None:
    assert await sit_out(peers[1], 5.0) == ""
    assert 5.0 <= network.loop.time() < 7.0
    for peer in (peers[0], peers[2]):
        network.crash(peer.peer)
    began = network.loop.time()
    assert await sit_out(peers[1], 5.0) == ""
    assert network.loop.time() - began >= 5.0, "or it would ask again and again without a pause"


@simulated(grouping_peers, 2, *PEERS, seed=1)
async def test_the_leader_itself_may_sit_a_round_out(peers: Peers) -> None:
    sitting = sit_out(peers[0], 20.0)
    await asyncio.sleep(0.5)
    roster = await peers[1].peer.spawn(peers[1].find_group())
    assert [each.peer for each in roster.tickets] == [peers[1].id]
    peers[1].matchmaker.set_head(NEXT)
    assert await sitting == peers[1].id


@simulated(grouping_peers, 2, *PEERS, seed=1)
async def test_who_sat_out_and_got_something_after_all_is_waited_for_again(peers: Peers) -> None:
    sitting = sit_out(peers[1], 1.0)
    await sitting
    assert await take_on(peers[1], 0, 0, 4) == 4
    finding = peers[0].peer.spawn(peers[0].find_group())
    await asyncio.sleep(1.0)
    assert not finding.done()
    other = await peers[1].peer.spawn(peers[1].find_group())
    assert (await finding).tickets == other.tickets
    assert len(other.tickets) == 2


@simulated(grouping_peers, 5, SPEC, seed=1)
async def test_a_round_begins_with_those_that_are_drawn_though_nothing_is_heard_of_the_others(peers: Peers) -> None:
    table = Table(tuple(Row(peer.id, votes=True, elects=True) for peer in peers))
    for peer in peers:
        object.__setattr__(peer.matchmaker._context, "participation", 0.4)
        peer.matchmaker.set_head(replace(HEAD, table=table))
    undrawn = table.undrawn(HEAD.lineage, 0.4, 1)
    drawn = [peer for peer in peers if peer.id not in undrawn]
    assert len(drawn) == 2
    began = asyncio.get_running_loop().time()
    rosters = await asyncio.gather(*(peer.peer.spawn(peer.find_group()) for peer in drawn))
    assert asyncio.get_running_loop().time() - began < SPEC.grace_seconds
    assert [set(roster.members) for roster in rosters] == [{peer.id for peer in drawn}] * 2
    assert not rosters[0].is_reduced
    assert not any(peer.membership.why_not_expected(each) for peer in drawn for each in undrawn), "they missed nothing"
