"""Peers know each other without the directory: soon, at a bounded cost, and beside strangers that flood them."""

import asyncio
import random
import statistics
from dataclasses import replace

import pytest

from p2ptrain.averaging.grouping.membership import RECORD_DELAY_SECONDS
from p2ptrain.network.records.book import MAX_HELD
from p2ptrain.network.records.record import MAX_RECORD_BYTES, seal_record
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.simulated.network import SimulatedSigner
from p2ptrain.node.presence import PUBLISH_SECONDS
from tests.support.coroutines import simulated
from tests.support.records import record_of
from tests.support.sim.presences import SWARM, PresentPeer
from tests.support.sim.trainers import SimulatedSwarm, make_manifest


async def started(network: SimulatedNetwork, count: int) -> list[PresentPeer]:
    peers = [PresentPeer(network, f"p{number}") for number in range(count)]
    for each in peers:
        await each.start()
    return peers


async def ended(peers: list[PresentPeer]) -> None:
    for each in peers:
        await each.close()


@pytest.mark.fault(46)
@simulated(seed=1)
async def test_trainers_go_on_when_no_directory_answers_any_more(network: SimulatedNetwork) -> None:
    swarm = SimulatedSwarm(network, make_manifest(min_peers=3), seed=1)
    for name in "abc":
        swarm.start(name, step_seconds=2.0)
    await swarm.until(lambda: swarm.in_agreement(3), 600.0, "rounds are committed")
    for trainer in swarm.trainers.values():
        trainer.peer.directory.failing = True
    before = max(trainer.sync.head.round for trainer in swarm.alive)
    await asyncio.sleep(300.0)
    assert all(len(trainer.membership.records()) == 2 for trainer in swarm.alive)
    assert all(trainer.presence.directory_answers for trainer in swarm.alive)
    await swarm.until(lambda: swarm.in_agreement(before + 20), 10.0, "and go on")
    await swarm.end()


@simulated(seed=2)
async def test_a_record_reaches_64_peers_about_5_seconds_after_its_writing(network: SimulatedNetwork) -> None:
    peers = await started(network, 64)
    await asyncio.sleep(60.0)
    ages = list[float]()
    for _ in range(10):
        await asyncio.sleep(1.0)
        ages += [age for each in peers for age in each.ages().values()]
    assert len(ages) == 10 * 64 * 63
    assert statistics.quantiles(ages, n=100)[98] < 1.2 * PUBLISH_SECONDS + RECORD_DELAY_SECONDS
    await ended(peers)


@pytest.mark.fault(29)
@simulated(seed=5)
async def test_partners_that_hang_or_are_far_do_not_delay_what_the_others_hear(network: SimulatedNetwork) -> None:
    peers = await started(network, 8)
    await asyncio.sleep(30.0)
    network.stall(peers[0].peer)
    for each in peers[2:]:
        network.set_latency(peers[1].peer, each.peer, 3.0)
    teller, *others = peers[2:]
    for _ in range(10):
        teller.presence.changed()
        await asyncio.sleep(3.0)
        assert max(each.ages()[teller.id] for each in others) < 3.0, "the record of this change"
    network.resume(peers[0].peer)
    await ended(peers)


@simulated(seed=6)
async def test_each_peer_gets_each_record_about_once(network: SimulatedNetwork) -> None:
    peers = await started(network, 6)
    await asyncio.sleep(30.0)
    received = sum(each.rpc.traffic.received for each in peers)
    await asyncio.sleep(120.0)
    size = len(peers[0].presence.exchange.own)
    num_written = 6 * 120.0 / PUBLISH_SECONDS
    assert sum(each.rpc.traffic.received for each in peers) - received < 1.6 * num_written * 5 * size
    await ended(peers)


@pytest.mark.fault(29)
@simulated(seed=7)
async def test_a_peer_on_a_slow_link_keeps_up_with_the_records(network: SimulatedNetwork) -> None:
    """An answer takes so long on its link that other exchanges begin meanwhile, with the same records on offer."""
    peers = await started(network, 6)
    slow, *others = peers
    size = len(slow.presence.exchange.own)
    slow.peer.downlink.bytes_per_second = slow.peer.uplink.bytes_per_second = 4.0 * size
    await asyncio.sleep(30.0)
    written = set[tuple[str, int]]()
    received = slow.rpc.traffic.received
    for _ in range(120):
        await asyncio.sleep(1.0)
        for each in others:
            each.presence.changed()
        written |= {(held.record.peer, held.sequence) for held in others[0].presence.book.held()}
    assert slow.rpc.traffic.received - received < len(written) * size, "the link takes less than what is written"
    assert max(slow.ages().values()) < 8.0
    await ended(peers)


@pytest.mark.fault(45)
@simulated(seed=3)
async def test_peers_know_each_other_beside_a_flood_of_records_of_strangers(network: SimulatedNetwork) -> None:
    """One peer offers 1,250 of the largest records, and new ones of the same strangers at any time."""
    peers = await started(network, 10)
    await asyncio.sleep(20.0)
    liar = PresentPeer(network, "liar")
    strangers = [SimulatedSigner(3, f"stranger {number}", network.keyring) for number in range(1250)]
    payload = record_of("stranger").to_payload()
    payload["padding"] = bytes(MAX_RECORD_BYTES - 800)

    async def flood() -> None:
        book = liar.presence.book
        while True:
            now = liar.peer.runtime.now()
            for stranger in strangers:
                value = seal_record(SWARM, payload, int(now * 1000), now + 500.0, stranger)
                book.take(value)
                book.meet(stranger.peer_id)
            await asyncio.sleep(10.0)

    await liar.start()
    flooding = liar.peer.spawn(flood())
    await asyncio.sleep(60.0)
    newcomer = PresentPeer(network, "newcomer")
    await newcomer.start()
    received = sum(each.rpc.traffic.received for each in peers)
    await asyncio.sleep(60.0)
    rate = (sum(each.rpc.traffic.received for each in peers) - received) / 60.0 / len(peers)
    assert rate < 25_000.0
    honest = {each.id for each in (*peers, newcomer)}
    for each in (*peers, newcomer):
        ages = {peer: age for peer, age in each.ages().items() if peer in honest}
        assert ages.keys() == honest - {each.id}
        assert max(ages.values()) < 15.0
        assert len(each.presence.book) <= MAX_HELD
    flooding.cancel()
    await ended([*peers, liar, newcomer])


@pytest.mark.fault(35)
@simulated(seed=4)
async def test_an_invalid_record_is_verified_once_and_its_sender_left_alone(network: SimulatedNetwork) -> None:
    a, liar = await started(network, 2)
    await liar.presence._tasks.close()
    await a.presence._tasks.close()
    book = liar.presence.book
    held = replace(book.held()[-1], value=random.Random(4).randbytes(200), sequence=1 << 60)
    book._held = {liar.id: held}
    for _ in range(3):
        assert not await a.presence.exchange.exchange(liar.id)
    assert a.presence.book.rejected == 1
    assert liar.id not in a.presence.exchange.partners(4)
    await ended([a, liar])
