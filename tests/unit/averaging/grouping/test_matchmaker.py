"""Finding a group: leaders that fail, pass on, or lie; and what a leader keeps."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping import coordinator
from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.coordinator import MAX_PENDING_GROUPS
from p2ptrain.averaging.grouping.leaders import MOST_BELIEVED
from p2ptrain.averaging.grouping.matchmaker import BehindError, Matchmaker, MismatchError, NoGroupError
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import JOIN, Answer, Behind, Formed, Join, Redirected, Refused
from p2ptrain.averaging.grouping.pending_group import Decision, Situation, decide, without_conflicts
from p2ptrain.averaging.protocol.certificate import Ticket
from p2ptrain.errors import PeerRefusedError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.averagers import make_matchmaker
from tests.support.sim.averaging import HEAD, make_ticket
from tests.support.sim.peers import Member, members

SPEC = AveragingSpec(grace_seconds=2.0, matchmaking_seconds=8.0)
KEY = Key(HEAD.round, HEAD.lineage)


@asynccontextmanager
async def matchmakers(
    network: SimulatedNetwork, count: int, spec: AveragingSpec = SPEC
) -> AsyncIterator[list[tuple[Member, Matchmaker, Membership]]]:
    """Members that know of each other, with their matchmakers, in the order in which they lead."""
    async with members(network, count) as swarm:
        result = []
        for member in swarm:
            matchmaker, membership = make_matchmaker(member, swarm, spec, HEAD)
            matchmaker.participate(True)
            result.append((member, matchmaker, membership))
        line = result[0][1].leaders.candidates(Key(HEAD.round, HEAD.lineage), [])
        result.sort(key=lambda entry: line.index(entry[0].rpc.peer_id))
        try:
            yield result
        finally:
            for _, matchmaker, _ in result:
                await matchmaker.close()


def test_all_find_one_group() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 5) as all_:
            rosters = await asyncio.gather(*(m.find_group(make_ticket(member)) for member, m, _ in all_))
            assert len(set(rosters)) == 1
            assert len(rosters[0].tickets) == 5
            assert network.loop.time() < SPEC.grace_seconds

    simulate(main, seed=1)


def test_a_dead_leader_is_passed_over() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 4) as all_:
            network.crash(all_[0][0].peer)
            rosters = await asyncio.gather(*(m.find_group(make_ticket(member)) for member, m, _ in all_[1:]))
            assert len(set(rosters)) == 1
            assert len(rosters[0].tickets) == 3

    simulate(main, seed=2)


def test_a_leader_that_waits_for_the_answers_of_the_absent_rests(monkeypatch: pytest.MonkeyPatch) -> None:
    decided = []

    def counted(situation: Situation, spec: AveragingSpec) -> Decision:
        decided.append(situation)
        return decide(situation, spec)

    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 2) as all_:
            (leader, matchmaker, membership), (stopped, _, _) = all_
            network.stall(stopped.peer)
            membership.suspect(stopped.rpc.peer_id, "silent")
            roster = await matchmaker.find_group(make_ticket(leader))
            assert len(roster.tickets) == 1
            assert network.loop.time() > 2.0, "it asked, in vain"
            assert len(decided) < 100
            network.resume(stopped.peer)

    monkeypatch.setattr(coordinator, "decide", counted)
    simulate(main, seed=3)


def test_after_a_broken_group_another_peer_leads_also_for_those_that_come_new() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 4) as all_:
            in_group, new = all_[:3], all_[3]
            for _, matchmaker, _ in in_group:
                matchmaker.leaders.failed(Key(HEAD.round, HEAD.lineage), all_[0][0].rpc.peer_id)
            rosters = await asyncio.gather(*(m.find_group(make_ticket(member)) for member, m, _ in [*in_group, new]))
            assert len(set(rosters)) == 1
            assert len(rosters[0].tickets) == 4
            leader = all_[1][0].rpc.peer_id
            assert [m._last_leader for _, m, _ in all_] == [(Key(HEAD.round, HEAD.lineage), leader)] * 4

    simulate(main, seed=3)


@pytest.mark.parametrize("pause_seconds", [0.0, 0.5])
@pytest.mark.parametrize("first_in_line", [0, 1])
def test_two_that_each_take_the_other_for_the_leader_meet_at_once(first_in_line: int, pause_seconds: float) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 2) as all_:
            for (_, matchmaker, _), (other, _, _) in zip(all_, reversed(all_), strict=True):
                own = matchmaker._context.rpc.peer_id
                matchmaker.leaders.failed(KEY, own)
                assert matchmaker.leaders.candidates(KEY, [])[0] == other.rpc.peer_id
            searches = []
            for member, matchmaker, _ in (all_[first_in_line], all_[1 - first_in_line]):
                searches.append(asyncio.create_task(matchmaker.find_group(make_ticket(member))))
                await asyncio.sleep(pause_seconds)
            rosters = await asyncio.gather(*searches)
            assert len(set(rosters)) == 1
            assert network.loop.time() < SPEC.grace_seconds

    simulate(main, seed=11)


def test_a_leader_that_could_not_be_reached_is_last_in_line_until_it_is() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 3) as all_:
            first, second, own = (member.rpc.peer_id for member, _, _ in all_)
            network.crash(all_[0][0].peer)
            searches = [other.find_group(make_ticket(each)) for each, other, _ in all_[1:]]
            rosters = await asyncio.gather(*searches)
            assert len(rosters[0].tickets) == 2
            leaders = all_[2][1].leaders
            assert leaders.unreachable(KEY) == {first}
            assert sorted([first, second, own], key=lambda peer: leaders.order(KEY, peer)) == [second, own, first]
            leaders.probed_by(KEY, first)
            assert leaders.candidates(KEY, []) == [first, second, own]

    simulate(main, seed=12)


def test_a_leader_sends_nobody_on_to_a_peer_that_only_the_other_suspects_yet() -> None:
    """Members see an attempt break one after the other."""

    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 4) as all_:
            (broken, _, _), *rest = all_
            searches = []
            for member, matchmaker, membership in reversed(rest):
                membership.suspect(broken.rpc.peer_id, "broke the attempt")
                searches.append(asyncio.create_task(matchmaker.find_group(make_ticket(member))))
                await asyncio.sleep(0.3)
            rosters = await asyncio.gather(*searches)
            assert len(set(rosters)) == 1
            assert len(rosters[0].tickets) == 3
            assert {matchmaker.last_leader for _, matchmaker, _ in rest} == {rest[0][0].rpc.peer_id}

    simulate(main, seed=14)


def test_who_insists_on_leading_but_is_alone_follows_a_leader_that_has_a_quorum() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 4) as all_:
            *others, (_, insisting, _) = all_
            for other, _, _ in others:
                insisting.leaders.failed(KEY, other.rpc.peer_id)
            rosters = await asyncio.gather(*(m.find_group(make_ticket(member)) for member, m, _ in all_))
            assert len(set(rosters)) == 1
            assert len(rosters[0].tickets) == 4
            assert insisting.last_leader == others[0][0].rpc.peer_id
            assert network.loop.time() < SPEC.grace_seconds

    simulate(main, seed=15)


@pytest.mark.parametrize("failures_of_first", [0, 1])
def test_of_two_that_insist_and_both_have_followers_one_leads_all(failures_of_first: int) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 4) as all_:
            first, second = (member.rpc.peer_id for member, _, _ in all_[:2])
            # Each half was led in circles by all others; and of the first leader's failures everybody knows.
            for (_, matchmaker, _), own in zip(all_, (first, second, first, second), strict=True):
                for other, _, _ in all_:
                    if other.rpc.peer_id != own:
                        for _ in range(2):
                            matchmaker.leaders.redirect_loop(KEY, other.rpc.peer_id)
                for _ in range(failures_of_first):
                    matchmaker.leaders.failed(KEY, first)
                assert matchmaker.leaders.candidates(KEY, [])[0] == own
            rosters = await asyncio.gather(*(m.find_group(make_ticket(member)) for member, m, _ in all_))
            assert len(set(rosters)) == 1
            assert len(rosters[0].tickets) == 4
            assert {m.last_leader for _, m, _ in all_} == {second if failures_of_first else first}
            assert network.loop.time() < SPEC.grace_seconds

    simulate(main, seed=17)


def test_a_leader_that_nobody_came_to_still_leads() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 4) as all_:
            member, leader, _ = all_[0]
            with pytest.raises(NoGroupError, match="no quorum"):
                await leader.find_group(make_ticket(member))
            assert leader.leaders.candidates(KEY, [])[0] == member.rpc.peer_id

    simulate(main, seed=16)


def test_who_comes_new_learns_which_leaders_failed() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 3) as all_:
            failed = all_[0][0].rpc.peer_id
            for _, matchmaker, _ in all_[:2]:
                matchmaker.leaders.failed(KEY, failed)
            await all_[2][1].announce()
            lines = [matchmaker.leaders.candidates(KEY, []) for _, matchmaker, _ in all_]
            assert lines[0] == lines[1] == lines[2]
            assert lines[0][-1] == failed

    simulate(main, seed=13)


def test_only_a_peer_that_saw_no_failure_believes_gossip_and_not_all_of_it() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 2) as all_:
            leaders = all_[0][1].leaders
            leaders.learn(KEY, (("x", 1 << 40),))
            assert leaders.gossip(KEY) == (("x", MOST_BELIEVED),)
            leaders.learn(KEY, (("y", 1),))
            assert leaders.gossip(KEY) == (("x", MOST_BELIEVED),)

    simulate(main, seed=14)


def test_two_that_send_each_other_on_do_not_spin() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 3) as all_:
            dials = 0
            for (liar, _, _), (other, _, _) in ((all_[0], all_[1]), (all_[1], all_[0])):
                target = other.rpc.peer_id

                async def redirect(channel: Channel, request: object, target: str = target) -> None:
                    nonlocal dials
                    dials += 1
                    await channel.send(Redirected(target))

                liar.rpc.serve_channel(JOIN, Join, redirect)
            member, matchmaker, _ = all_[2]
            with pytest.raises(NoGroupError, match="1 of 3 peers are ready: no quorum"):
                await matchmaker.find_group(make_ticket(member))
            assert 2 <= dials <= 6

    simulate(main, seed=4)


def test_who_is_leaving_leads_nobody_and_looks_for_no_group() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 2) as all_:
            (member, matchmaker, _), (other, _, _) = all_
            await matchmaker.close()
            began = network.loop.time()
            with pytest.raises(NoGroupError, match="leaving"):
                await matchmaker.find_group(make_ticket(member))
            assert network.loop.time() == began
            with pytest.raises(PeerRefusedError, match="leaving"):
                await matchmaker._coordinator.enlist(make_ticket(other), matchmaker.position.head, [], 99, [])

    simulate(main, seed=1)


async def answered(network: SimulatedNetwork, answer: object) -> None:
    """What the last of three makes of a leader's answer."""
    async with matchmakers(network, 3) as all_:

        async def lie(channel: Channel, request: object) -> None:
            await channel.send(answer)

        all_[0][0].rpc.serve_channel(JOIN, Join, lie)
        member, matchmaker, _ = all_[2]
        try:
            await matchmaker.find_group(make_ticket(member))
        finally:
            # Whatever it said, the next attempt has another leader.
            assert matchmaker.leaders.candidates(Key(HEAD.round, HEAD.lineage), [])[0] == all_[1][0].rpc.peer_id


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
def test_answers_become_typed_errors_and_count_against_the_leader(answer: Answer, error: type[Exception]) -> None:
    async def main(network: SimulatedNetwork) -> None:
        with pytest.raises(error):
            await answered(network, answer)

    simulate(main, seed=5)


def test_below_the_minimum_the_reason_says_so_within_the_deadline() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 1, SPEC.model_copy(update={"min_peers": 2})) as all_:
            member, matchmaker, _ = all_[0]
            with pytest.raises(NoGroupError, match="1 of at least 2"):
                await matchmaker.find_group(make_ticket(member))
            assert network.loop.time() <= SPEC.matchmaking_seconds + 1

    simulate(main, seed=6)


def test_pending_groups_are_bounded_and_the_real_one_stays() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 2) as all_:
            victim, evil = all_[0], all_[1]
            own = asyncio.create_task(victim[1].find_group(make_ticket(victim[0])))
            await asyncio.sleep(0.1)
            for number in range(50):
                head = replace(HEAD, round=number + 1, tokens=number + 1)
                ticket = make_ticket(evil[0], head=head)
                victim[1]._coordinator.group(head, Key(head.round, head.lineage)).add(ticket, network.loop.time())
                await asyncio.sleep(0.01)
                assert len(victim[1]._coordinator._groups) <= MAX_PENDING_GROUPS
            assert Key(HEAD.round, HEAD.lineage) in victim[1]._coordinator._groups
            assert not own.done()
            own.cancel()
            await asyncio.gather(own, return_exceptions=True)

    simulate(main, seed=7)


def test_a_cancelled_search_leaves_no_ticket_behind() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 2) as all_:
            for member, matchmaker, _ in all_:
                search = asyncio.create_task(matchmaker.find_group(make_ticket(member)))
                await asyncio.sleep(0.5)
                search.cancel()
                await asyncio.gather(search, return_exceptions=True)
                await asyncio.sleep(0.5)
                assert matchmaker.position.following is None
                groups = [group for _, other, _ in all_ for group in other._coordinator._groups.values()]
                assert not any(group.members for group in groups)

    simulate(main, seed=8)


def test_tickets_in_a_roster_are_verified() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with matchmakers(network, 3) as all_:
            other: Ticket = make_ticket(all_[1][0])
            forged = replace(other, tokens=999)

            async def lie(channel: Channel, request: Join) -> None:
                await channel.send(Formed((request.ticket, forged)))

            all_[0][0].rpc.serve_channel(JOIN, Join, lie)
            member, matchmaker, membership = all_[2]
            with pytest.raises(NoGroupError, match="signature"):
                await matchmaker.find_group(make_ticket(member))
            assert membership.is_suspect(all_[0][0].rpc.peer_id)

    simulate(main, seed=9)


def nobody() -> frozenset[str]:
    return frozenset()


def test_of_a_pair_that_cannot_work_together_the_last_in_line_waits() -> None:
    avoid = {"a": frozenset({"c"}), "b": nobody(), "c": nobody()}
    assert without_conflicts(avoid) == ["a", "b"]
    assert without_conflicts(dict(reversed(avoid.items()))) == ["c", "b"]


def test_who_complains_about_everybody_leaves_out_itself() -> None:
    avoid = {"evil": frozenset("abc"), "a": nobody(), "b": nobody(), "c": nobody()}
    assert without_conflicts(avoid) == ["a", "b", "c"]


def test_whom_everybody_complains_about_is_left_out() -> None:
    avoid = {"evil": nobody(), "a": frozenset({"evil"}), "b": frozenset({"evil"}), "c": nobody()}
    assert without_conflicts(avoid) == ["a", "b", "c"]


def test_conflicts_never_push_a_group_below_the_minimum() -> None:
    avoid = {"a": frozenset({"b"}), "b": nobody()}
    assert without_conflicts(avoid, least=2) == ["a", "b"]
