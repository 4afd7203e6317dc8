"""Finding a group: leaders that fail, pass on, or lie; and what a leader keeps."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.coordinator import MAX_PENDING_GROUPS
from p2ptrain.averaging.grouping.matchmaker import BehindError, MismatchError, NoGroupError
from p2ptrain.averaging.grouping.messages import JOIN, Answer, Behind, Formed, Join, Redirected, Refused
from p2ptrain.averaging.grouping.pending_group import without_conflicts
from p2ptrain.averaging.protocol.certificate import Roster
from p2ptrain.errors import PeerRefusedError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averagers import GroupingPeer, grouping_peers
from tests.support.sim.averaging import HEAD, make_ticket

SPEC = AveragingSpec(grace_seconds=2.0, matchmaking_seconds=8.0)
KEY = Key(HEAD.round, HEAD.lineage)
Peers = list[GroupingPeer]


async def common_roster(peers: Peers) -> Roster:
    """The roster that peers find who look at once; it is one for all."""
    rosters = await asyncio.gather(*(peer.find_group() for peer in peers))
    assert len(set(rosters)) == 1
    return rosters[0]


@simulated(grouping_peers, 4, SPEC, seed=3)
async def test_after_a_broken_group_another_peer_leads_also_for_those_that_come_new(peers: Peers) -> None:
    for peer in peers[:3]:
        peer.leaders.failed(KEY, peers[0].id)
    assert len((await common_roster(peers)).tickets) == 4
    assert [peer.matchmaker._last_leader for peer in peers] == [(KEY, peers[1].id)] * 4


@pytest.mark.parametrize("pause_seconds", [0.0, 0.5])
@pytest.mark.parametrize("first_in_line", [0, 1])
@simulated(grouping_peers, 2, SPEC, seed=11)
async def test_two_that_each_take_the_other_for_the_leader_meet_at_once(
    peers: Peers, network: SimulatedNetwork, first_in_line: int, pause_seconds: float
) -> None:
    for peer, other in zip(peers, reversed(peers), strict=True):
        peer.leaders._pass_over(KEY, peer.id)
        assert peer.line()[0] == other.id
    searches = []
    for peer in (peers[first_in_line], peers[1 - first_in_line]):
        searches.append(asyncio.create_task(peer.find_group()))
        await asyncio.sleep(pause_seconds)
    assert len(set(await asyncio.gather(*searches))) == 1
    assert network.loop.time() < SPEC.grace_seconds


@simulated(grouping_peers, 3, SPEC, seed=12)
async def test_a_dead_leader_is_passed_over_until_the_end_of_the_round(peers: Peers, network: SimulatedNetwork) -> None:
    first, second, own = (peer.id for peer in peers)
    network.crash(peers[0].peer)
    assert len((await common_roster(peers[1:])).tickets) == 2
    leaders = peers[2].leaders
    assert leaders.turn(KEY) == 1
    assert peers[2].line() == [second, own]
    leaders.probed_by(KEY, first)
    assert peers[2].line() == [second, own, first]


@simulated(grouping_peers, 2, SPEC, seed=13)
async def test_a_peer_that_says_that_it_is_in_the_round_is_suspected_no_more(peers: Peers) -> None:
    """It restarted: its record would be later, and the others are with it already."""
    restarted, other = peers
    other.membership.suspect(restarted.id, "was silent")
    await restarted.matchmaker.announce()
    assert not other.membership.is_suspect(restarted.id)


@simulated(grouping_peers, 4, SPEC, seed=14)
async def test_a_leader_sends_nobody_on_to_a_peer_that_only_the_other_suspects_yet(peers: Peers) -> None:
    """Members see an attempt break one after the other."""
    broken, *rest = peers
    searches = []
    for peer in reversed(rest):
        peer.membership.suspect(broken.id, "broke the attempt")
        searches.append(asyncio.create_task(peer.find_group()))
        await asyncio.sleep(0.3)
    rosters = await asyncio.gather(*searches)
    assert len(set(rosters)) == 1
    assert len(rosters[0].tickets) == 3
    assert {peer.matchmaker.last_leader for peer in rest} == {rest[0].id}


@simulated(grouping_peers, 4, SPEC, seed=15)
async def test_who_insists_on_leading_but_is_alone_follows_a_leader_that_has_a_quorum(
    peers: Peers, network: SimulatedNetwork
) -> None:
    *others, insisting = peers
    for other in others:
        insisting.leaders._pass_over(KEY, other.id)
    assert len((await common_roster(peers)).tickets) == 4
    assert insisting.matchmaker.last_leader == others[0].id
    assert network.loop.time() < SPEC.grace_seconds


@simulated(grouping_peers, 4, SPEC, seed=17)
async def test_of_two_that_insist_and_both_have_followers_one_leads_all(
    peers: Peers, network: SimulatedNetwork
) -> None:
    first, second = (peer.id for peer in peers[:2])
    # Each half passed over all others.
    for peer, own in zip(peers, (first, second, first, second), strict=True):
        for other in peers:
            if other.id != own:
                peer.leaders._pass_over(KEY, other.id)
        assert peer.line()[0] == own
    assert len((await common_roster(peers)).tickets) == 4
    assert {peer.matchmaker.last_leader for peer in peers} == {first}
    assert network.loop.time() < SPEC.grace_seconds


@simulated(grouping_peers, 4, SPEC, seed=16)
async def test_a_leader_that_nobody_came_to_still_leads(peers: Peers) -> None:
    with pytest.raises(NoGroupError, match="no quorum"):
        await peers[0].find_group()
    assert peers[0].line()[0] == peers[0].id


@simulated(grouping_peers, 3, SPEC, seed=4)
async def test_two_that_send_each_other_on_do_not_spin(peers: Peers) -> None:
    dials = []
    for liar, other in ((peers[0], peers[1]), (peers[1], peers[0])):

        async def redirect(channel: Channel, request: object, target: str = other.id) -> None:
            dials.append(target)
            await channel.send(Redirected(target))

        liar.rpc.serve_channel(JOIN, Join, redirect)
    with pytest.raises(NoGroupError, match="1 of 3 peers are ready: no quorum"):
        await peers[2].find_group()
    assert 2 <= len(dials) <= 6


@simulated(grouping_peers, 2, SPEC, seed=1)
async def test_who_is_leaving_leads_nobody_and_looks_for_no_group(peers: Peers, network: SimulatedNetwork) -> None:
    leaving, other = peers
    await leaving.matchmaker.close()
    began = network.loop.time()
    with pytest.raises(NoGroupError, match="leaving"):
        await leaving.find_group()
    assert network.loop.time() == began
    with pytest.raises(PeerRefusedError, match="leaving"):
        await leaving.matchmaker._coordinator.enlist(
            make_ticket(other.member), leaving.matchmaker.position.head, 0, [], []
        )


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (Behind("x"), BehindError),
        (Behind(""), BehindError),
        (Refused("no"), NoGroupError),
        (Refused("other state", mismatch=True), MismatchError),
    ],
    ids=str,
)
@simulated(grouping_peers, 3, SPEC, seed=5)
async def test_answers_become_typed_errors_and_count_against_the_leader(
    peers: Peers, answer: Answer, error: type[Exception]
) -> None:
    async def lie(channel: Channel, request: object) -> None:
        await channel.send(answer)

    peers[0].rpc.serve_channel(JOIN, Join, lie)
    with pytest.raises(error):
        await peers[2].find_group()
    assert peers[2].line()[0] == peers[1].id, "the next attempt has another leader"


@simulated(grouping_peers, 3, SPEC, seed=9)
async def test_tickets_in_a_roster_are_verified(peers: Peers) -> None:
    forged = replace(make_ticket(peers[1].member), tokens=999)

    async def lie(channel: Channel, request: Join) -> None:
        await channel.send(Formed((request.ticket, forged)))

    peers[0].rpc.serve_channel(JOIN, Join, lie)
    with pytest.raises(NoGroupError, match="signature"):
        await peers[2].find_group()
    assert peers[2].membership.is_suspect(peers[0].id)


@simulated(grouping_peers, 2, SPEC, seed=7)
async def test_pending_groups_are_bounded_and_the_real_one_stays(peers: Peers, network: SimulatedNetwork) -> None:
    victim, evil = peers
    groups = victim.matchmaker._coordinator
    own = asyncio.create_task(victim.find_group())
    await asyncio.sleep(0.1)
    for number in range(50):
        head = replace(HEAD, round=number + 1, tokens=number + 1)
        groups.group(head, Key(head.round, head.lineage)).add(make_ticket(evil.member, head=head), network.loop.time())
        assert len(groups._groups) <= MAX_PENDING_GROUPS
    assert KEY in groups._groups
    await asyncio.sleep(0.1)
    assert not own.done()
    own.cancel()
    await asyncio.gather(own, return_exceptions=True)


@simulated(grouping_peers, 2, SPEC, seed=8)
async def test_a_cancelled_search_leaves_no_ticket_behind(peers: Peers) -> None:
    for peer in peers:
        search = asyncio.create_task(peer.find_group())
        await asyncio.sleep(0.5)
        search.cancel()
        await asyncio.gather(search, return_exceptions=True)
        await asyncio.sleep(0.5)
        assert peer.matchmaker.position.following is None
        assert not any(group.members for each in peers for group in each.matchmaker._coordinator._groups.values())


@pytest.mark.parametrize(
    ("avoid", "left", "least"),
    [
        ({"a": "c", "b": "", "c": ""}, "ab", 1),
        ({"c": "", "b": "", "a": "c"}, "cb", 1),  # The last in line waits.
        ({"evil": "abc", "a": "", "b": "", "c": ""}, "abc", 1),
        ({"evil": "", "a": ("evil",), "b": ("evil",), "c": ""}, "abc", 1),
        ({"a": "b", "b": ""}, "ab", 2),
    ],
    ids=["a pair", "the other way round", "a complainer", "one that all complain of", "below the minimum"],
)
def test_of_those_that_cannot_work_together_as_many_stay_as_can(
    avoid: dict[str, Sequence[str]], left: str, least: int
) -> None:
    pairs = {peer: frozenset(others) for peer, others in avoid.items()}
    assert without_conflicts(pairs, least) == list(left)
