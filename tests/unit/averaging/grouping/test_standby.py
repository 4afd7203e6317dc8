"""Peers that compute what others bring: what they are granted, and how they sit a round out, whoever is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

import pytest

from p2ptrain.averaging.grouping.cells import Key
from p2ptrain.averaging.grouping.matchmaker import Matchmaker
from p2ptrain.averaging.grouping.membership import Membership
from p2ptrain.averaging.grouping.messages import TAKE_ON, Grant, TakeOn
from p2ptrain.averaging.grouping.reporting import Standby
from p2ptrain.averaging.timing.goal import HOLD_SECONDS, Goal
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.averagers import make_matchmaker
from tests.support.sim.averaging import HEAD, make_ticket
from tests.support.sim.peers import Member, members

SPEC = AveragingSpec(grace_seconds=2.0, matchmaking_seconds=8.0)
NEXT = replace(HEAD, round=1, lineage=b"n" * 32, tokens=10)
TARGET = 12


@dataclass
class Peer:
    """A host's side of averaging, without a state."""

    member: Member
    matchmaker: Matchmaker
    membership: Membership

    @property
    def id(self) -> str:
        return self.member.rpc.peer_id

    @property
    def standby(self) -> Standby:
        return self.matchmaker.standby

    def is_closing(self) -> bool:
        return self.matchmaker.position.is_closing

    def take_on(self, samples: int, held: int, wanted: int) -> asyncio.Task[int]:
        return self.member.peer.spawn(self.standby.take_on(samples, held, wanted))

    def sit_out(self, seconds: float) -> asyncio.Task[str]:
        return self.member.peer.spawn(self.standby.sit_out(seconds))


@asynccontextmanager
async def standing_by(network: SimulatedNetwork, count: int) -> AsyncIterator[list[Peer]]:
    """Peers that know of each other, in the order in which they lead."""
    async with members(network, count) as swarm:
        peers = []
        for member in swarm:
            matchmaker, membership = make_matchmaker(member, swarm, SPEC, HEAD, Goal(TARGET))
            matchmaker.participate(True)
            peers.append(Peer(member, matchmaker, membership))
        line = peers[0].matchmaker.leaders.candidates(Key(HEAD.round, HEAD.lineage), [])
        peers.sort(key=lambda peer: line.index(peer.id))
        try:
            yield peers
        finally:
            for peer in peers:
                if peer.member.peer.alive:
                    await peer.matchmaker.close()


def run(count: int, test: Callable[[SimulatedNetwork, list[Peer]], Awaitable[None]]) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with standing_by(network, count) as peers:
            await test(network, peers)

    simulate(main, seed=1)


def test_all_together_are_granted_the_global_batch_and_no_more() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        granted = await asyncio.gather(*(peer.take_on(0, 0, 5) for peer in peers))
        assert sum(granted) == TARGET
        assert await asyncio.gather(*(peer.take_on(0, n, 5) for peer, n in zip(peers, granted, strict=True))) == [0] * 3

    run(3, test)


def test_the_round_is_closed_when_what_is_done_fills_it() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        told = []
        for peer in peers:
            peer.standby.on_closing(lambda peer=peer: told.append(peer.id))  # type: ignore[misc]
        assert await peers[1].take_on(0, 0, 12) == 12
        assert await peers[2].take_on(0, 0, 1) == 0
        assert not peers[1].is_closing()
        assert await peers[1].take_on(12, 12, 1) == 0
        assert peers[1].is_closing()
        await asyncio.sleep(3.0)
        assert {peer.id for peer in peers[:2]} <= set(told), "the leader knows as well"

    run(3, test)


def test_a_round_of_which_nothing_is_left_begins_again() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        assert await peers[1].take_on(0, 0, 12) == 12
        assert await peers[1].take_on(12, 12, 1) == 0
        assert await peers[0].take_on(0, 0, 1) == 0
        assert peers[0].is_closing()
        network.crash(peers[1].member.peer)
        peers[0].standby.reopen()
        assert await peers[0].take_on(0, 0, 4) == 4
        assert not peers[0].is_closing()

    run(3, test)


def test_what_a_silent_peer_holds_is_granted_to_others() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        assert await peers[1].take_on(0, 0, 12) == 12
        network.crash(peers[1].member.peer)
        assert await peers[2].take_on(0, 0, 4) == 0
        await asyncio.sleep(HOLD_SECONDS + 1.0)
        assert await peers[2].take_on(0, 0, 4) == 4

    run(3, test)


@pytest.mark.parametrize("is_stalled", [False, True])
def test_when_the_leader_is_gone_the_next_one_grants(is_stalled: bool) -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        assert await peers[1].take_on(0, 0, 3) == 3
        (network.stall if is_stalled else network.crash)(peers[0].member.peer)
        began = network.loop.time()
        assert await peers[1].take_on(0, 3, 4) == 4
        assert network.loop.time() - began < 8.0
        assert await peers[2].take_on(0, 0, 12) == 5, "what others hold is known to the next leader, too"
        network.resume(peers[0].member.peer)

    run(3, test)


def test_without_anybody_else_a_peer_grants_itself() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        for peer in peers[1:]:
            network.crash(peer.member.peer)
        assert await peers[0].take_on(0, 0, 20) == 12
        peers[0].matchmaker.position.head = NEXT
        assert await peers[0].take_on(0, 0, 7) == 7, "a round after the other"

    run(3, test)


def test_a_leader_that_is_further_on_says_that_the_round_is_over() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        peers[0].matchmaker.set_head(NEXT)
        assert await peers[1].take_on(0, 0, 4) == 0
        assert peers[1].is_closing()

    run(2, test)


def test_a_leader_that_grants_too_much_grants_no_more_than_was_asked_for() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        async def answer(peer: str, request: TakeOn) -> Grant:
            return Grant(closing=False, granted=10**9)

        peers[0].member.rpc.serve(TAKE_ON, TakeOn, answer)
        assert await peers[1].take_on(0, 0, 4) == 4

    run(2, test)


# Sitting a round out


def test_nobody_waits_for_who_sits_a_round_out_and_it_learns_who_is_further_on() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        sitting = [peer.sit_out(20.0) for peer in peers[2:]]
        await asyncio.sleep(0.5)
        tickets = [(peer, make_ticket(peer.member)) for peer in peers[:2]]
        began = network.loop.time()
        rosters = await asyncio.gather(
            *(peer.member.peer.spawn(peer.matchmaker.find_group(ticket)) for peer, ticket in tickets)
        )
        assert network.loop.time() - began < 1.0
        assert {len(roster.tickets) for roster in rosters} == {2}
        assert not any(task.done() for task in sitting)
        peers[1].matchmaker.set_head(NEXT)
        peers[0].matchmaker.set_head(NEXT)
        sources = await asyncio.gather(*sitting)
        assert set(sources) <= {peer.id for peer in peers[:2]}
        assert network.loop.time() - began < 3.0

    run(4, test)


def test_a_leader_that_is_further_on_says_so_at_once() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        peers[0].matchmaker.set_head(NEXT)
        assert await peers[1].sit_out(20.0) == peers[0].id
        assert network.loop.time() < 2.0

    run(2, test)


@pytest.mark.parametrize("is_stalled", [False, True])
def test_when_the_leader_is_gone_others_tell_that_they_are_further_on(is_stalled: bool) -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        (network.stall if is_stalled else network.crash)(peers[0].member.peer)
        sitting = peers[1].sit_out(20.0)
        await asyncio.sleep(8.0)
        assert not sitting.done()
        peers[2].matchmaker.set_head(NEXT)
        assert await sitting == peers[2].id
        assert network.loop.time() < 12.0
        assert peers[1].membership.is_suspect(peers[0].id)
        network.resume(peers[0].member.peer)

    run(3, test)


def test_when_nobody_moves_it_is_told_of_nobody_after_the_time_that_it_gave() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        assert await peers[1].sit_out(5.0) == ""
        assert 5.0 <= network.loop.time() < 7.0
        for peer in (peers[0], peers[2]):
            network.crash(peer.member.peer)
        began = network.loop.time()
        assert await peers[1].sit_out(5.0) == ""
        assert network.loop.time() - began >= 5.0, "or it would ask again and again without a pause"

    run(3, test)


def test_the_leader_itself_may_sit_a_round_out() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        sitting = peers[0].sit_out(20.0)
        await asyncio.sleep(0.5)
        ticket = make_ticket(peers[1].member)
        roster = await peers[1].member.peer.spawn(peers[1].matchmaker.find_group(ticket))
        assert [each.peer for each in roster.tickets] == [peers[1].id]
        peers[1].matchmaker.set_head(NEXT)
        assert await sitting == peers[1].id

    run(2, test)


def test_who_sat_out_and_got_something_after_all_is_waited_for_again() -> None:
    async def test(network: SimulatedNetwork, peers: list[Peer]) -> None:
        sitting = peers[1].sit_out(1.0)
        await sitting
        assert await peers[1].take_on(0, 0, 4) == 4
        finding = peers[0].member.peer.spawn(peers[0].matchmaker.find_group(make_ticket(peers[0].member)))
        await asyncio.sleep(1.0)
        assert not finding.done()
        other = await peers[1].member.peer.spawn(peers[1].matchmaker.find_group(make_ticket(peers[1].member)))
        assert (await finding).tickets == other.tickets
        assert len(other.tickets) == 2

    run(2, test)
