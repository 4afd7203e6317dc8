"""The turns in which members lead: whose it is, when the next one begins, and how members of several turns meet."""

import asyncio
import contextlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.grouping.cells import Cells, Key
from p2ptrain.averaging.grouping.leaders import Leaders, RoundPosition
from p2ptrain.averaging.grouping.matchmaker import NoGroupError
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import JOIN, Join, Later, Redirected
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.averaging.protocol.table import Row, Table
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.runtime import Runtime
from tests.support.coroutines import simulated
from tests.support.sim.averagers import GroupingPeer, grouping_peers
from tests.support.sim.averaging import HEAD, make_ticket

SPEC = AveragingSpec(grace_seconds=2.0, matchmaking_seconds=8.0)
KEY = Key(HEAD.round, HEAD.lineage)
NAMES = "abcdefg"
Peers = list[GroupingPeer]


def table_of(names: Sequence[str]) -> Table:
    return Table(tuple(Row(name, votes=True, elects=True) for name in sorted(names)))


def leaders_of(own: str, names: Sequence[str] = NAMES, on_turn: Callable[[Key], None] = lambda key: None) -> Leaders:
    """One member's view of the leaders, with a member table of these names."""
    position = RoundPosition(replace(HEAD, table=table_of(names)), own, Cells(64), SPEC.matchmaking_seconds)
    return Leaders(position, Membership(own, Runtime(random.Random(0))), on_turn)


def know_the_table(peers: Peers) -> None:
    for peer in peers:
        peer.matchmaker.set_head(replace(HEAD, table=table_of([each.id for each in peers])))


@given(st.lists(st.tuples(st.sampled_from(NAMES), st.booleans()), max_size=20))
def test_members_in_one_turn_have_one_leader_whoever_failed_for_each(events: list[tuple[str, bool]]) -> None:
    """One sees peers fall silent, and passes over some of them; the other sees as many leaders fail."""
    one, other = leaders_of("a"), leaders_of("b")
    for peer, has_failed in events:
        if peer != "a":
            one.membership.suspect(peer, "is silent")
        if has_failed:
            one.failed(KEY, one.first(KEY))
    one.stand(KEY, one.first(KEY))
    while other.turn(KEY) < one.turn(KEY):
        other.failed(KEY, other.first(KEY))
    assert other.first(KEY) == one.first(KEY)


@pytest.mark.parametrize("count", range(2, 8))
def test_more_than_a_third_in_a_later_turn_take_a_member_there_and_fewer_do_not(count: int) -> None:
    names = NAMES[:count]
    for number_later in range(count):
        turns = list[Key]()
        leaders = leaders_of("a", names, turns.append)
        for peer in names[1 : 1 + number_later]:
            leaders.heard(KEY, peer, 2)
        assert leaders.turn(KEY) == (2 if 3 * number_later > count else 0)
        assert bool(turns) == (leaders.turn(KEY) > 0)


def test_a_turn_that_a_third_claim_or_a_stranger_counts_nothing_and_others_lead_to_the_least() -> None:
    leaders = leaders_of("a")
    leaders.heard(KEY, "stranger", 1 << 40)
    for peer, turn in (("b", 1 << 40), ("c", 3), ("d", 1)):
        leaders.heard(KEY, peer, turn)
    assert leaders.turn(KEY) == 1
    leaders.heard(KEY, "c", 1 << 40)
    leaders.heard(KEY, "d", 1 << 40)
    assert leaders.turn(KEY) <= 1 + len(NAMES), "one that counts without a bound would hold up the process"


def test_the_leader_that_others_passed_over_is_not_waited_for() -> None:
    leaders = leaders_of("a", "abc")
    first = leaders.first(KEY)
    for peer in "bc":
        leaders.heard(KEY, peer, 1)
    assert leaders.first(KEY) != first
    assert first not in leaders.probers(KEY)


def test_a_failure_counts_once_and_only_in_its_turn() -> None:
    leaders = leaders_of("a")
    first = leaders.first(KEY)
    leaders.failed(KEY, first)
    leaders.failed(KEY, first)
    assert leaders.turn(KEY) == 1
    for _ in NAMES[1:]:
        leaders.failed(KEY, leaders.first(KEY))
    assert (leaders.turn(KEY), leaders.first(KEY)) == (len(NAMES), first), "all had their turn"


def test_a_ticket_of_another_cell_does_not_make_a_peer_forget_who_failed_in_its_own() -> None:
    names, cells = [f"p{number}" for number in range(16)], Cells(4)
    head = replace(HEAD, table=table_of(names), present=len(names))
    own = next(name for name in names if sum(cells.includes(cells.key_of(head, name), each) for each in names) > 1)
    leaders = Leaders(
        RoundPosition(head, own, cells, SPEC.matchmaking_seconds), Membership(own, Runtime(random.Random(0)))
    )
    key = leaders.position.key
    leaders.failed(key, leaders.first(key))
    other = next(name for name in names if not cells.includes(key, name))
    leaders.heard(cells.key_of(head, other), other, 1)
    assert leaders.turn(key) == 1


def test_a_sole_leader_is_passed_over_by_nobody() -> None:
    leaders = leaders_of("a")
    awake = replace(HEAD, table=Table((Row("b", votes=True), *(Row(name, sleeps=True) for name in "ac"))))
    leaders.position.head = awake
    key = leaders.position.key
    for _ in range(3):
        leaders.failed(key, leaders.first(key))
    leaders.heard(key, "b", 5)
    assert (leaders.turn(key), leaders.first(key)) == (0, "b")
    leaders.position.standstill = SPEC.matchmaking_seconds
    leaders.failed(key, leaders.first(key))
    assert leaders.turn(key) == 1


@pytest.mark.parametrize("others_wait", [True, False])
@simulated(grouping_peers, 4, SPEC, seed=21)
async def test_who_alone_passed_over_a_leader_comes_back_to_it(
    peers: Peers, network: SimulatedNetwork, others_wait: bool
) -> None:
    """It was there early and alone, for example, and that leader sent it away."""
    know_the_table(peers)
    peers[3].leaders.failed(KEY, peers[0].id)
    searches = [asyncio.create_task(peer.find_group()) for peer in (peers[:3] if others_wait else peers[3:])]
    await asyncio.sleep(0.2)
    searches += [asyncio.create_task(peer.find_group()) for peer in (peers[3:] if others_wait else peers[:3])]
    rosters = await asyncio.gather(*searches)
    assert [len(roster.tickets) for roster in rosters] == [4] * 4
    assert {peer.matchmaker.last_leader for peer in peers} == {peers[0].id}
    assert network.loop.time() < SPEC.grace_seconds


@simulated(grouping_peers, 4, SPEC, seed=22)
async def test_a_leader_steps_down_once_more_than_a_third_passed_over_it(
    peers: Peers, network: SimulatedNetwork
) -> None:
    know_the_table(peers)
    for unlucky in peers[2:]:
        unlucky.leaders.lost(peers[0].id, "does not answer")
    rosters = await asyncio.gather(*(peer.find_group() for peer in peers))
    assert [len(roster.tickets) for roster in rosters] == [4] * 4
    assert {(peer.matchmaker.last_leader, peer.leaders.turn(KEY)) for peer in peers} == {(peers[1].id, 1)}
    assert network.loop.time() < SPEC.grace_seconds


@simulated(grouping_peers, 4, SPEC, seed=23)
async def test_the_others_go_on_without_one_that_cannot_reach_their_leader(
    peers: Peers, network: SimulatedNetwork
) -> None:
    know_the_table(peers)
    network.block(peers[3].peer, peers[0].peer)
    alone = asyncio.create_task(peers[3].find_group())
    rosters = await asyncio.gather(*(peer.find_group() for peer in peers[:3]))
    assert [len(roster.tickets) for roster in rosters] == [3] * 3
    assert not alone.done(), "its ticket is held until the round is over"
    alone.cancel()
    await asyncio.gather(alone, return_exceptions=True)


@pytest.mark.parametrize("to", [None, 2, 0])
@simulated(grouping_peers, 4, SPEC, seed=24)
async def test_a_leader_that_sends_all_away_has_had_its_turn_and_does_not_choose_the_next(
    peers: Peers, network: SimulatedNetwork, to: int | None
) -> None:
    know_the_table(peers)
    asked = []

    async def send_away(channel: Channel, request: Join) -> None:
        asked.append(channel.remote)
        await channel.send(Later() if to is None else Redirected(peers[to].id))

    peers[0].rpc.serve_channel(JOIN, Join, send_away)
    rosters = await asyncio.gather(*(peer.find_group() for peer in peers[1:]))
    assert [len(roster.tickets) for roster in rosters] == [3] * 3
    assert {peer.matchmaker.last_leader for peer in peers[1:]} == {peers[1].id}
    assert len(asked) == 3


@simulated(grouping_peers, 4, SPEC, seed=25)
async def test_members_that_sleep_lead_once_they_are_stalled_if_the_only_one_awake_leads_nobody(
    peers: Peers, network: SimulatedNetwork
) -> None:
    """Only the seed votes, and it trains nothing: so each member that sleeps would be alone with its ticket."""

    async def send_away(channel: Channel, request: Join) -> None:
        await channel.send(Later())

    async def grouped(peer: GroupingPeer) -> Roster:
        position = peer.matchmaker.position
        while True:
            with contextlib.suppress(NoGroupError):
                return await peer.matchmaker.find_group(
                    lambda: make_ticket(peer.member, is_stalled=position.is_stalled)
                )

    awake, *others = peers
    rows = [Row(peer.id, sleeps=peer is not awake) for peer in peers]
    seed = Row("seed", votes=True, elects=True, is_witness=True)
    table = Table(tuple(sorted([*rows, seed], key=lambda row: row.peer)))
    for peer in peers:
        peer.matchmaker.set_head(replace(HEAD, table=table))
    awake.rpc.serve_channel(JOIN, Join, send_away)
    async with asyncio.timeout(5 * SPEC.matchmaking_seconds):
        rosters = await asyncio.gather(*map(grouped, others))
    assert [(len(roster.tickets), roster.is_reduced) for roster in rosters] == [(3, True)] * 3
    assert network.loop.time() > SPEC.matchmaking_seconds, "those that sleep led before they had waited"
