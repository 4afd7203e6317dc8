"""The simulated directory and identities."""

import asyncio

import pytest

from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated

T0 = 1.7e9


@simulated()
async def test_a_published_record_is_found_and_expires(network: SimulatedNetwork) -> None:
    first, second = network.add_peer("first"), network.add_peer("second")
    assert await first.directory.look_up("key", 5) == {}
    assert await first.directory.publish("key", first.peer_id, b"one", T0 + 30, 5)
    await asyncio.sleep(1)
    found = await second.directory.look_up("key", 5)
    assert found is not None
    assert [(sub, entry.value, entry.expires_at) for sub, entry in found.items()] == [(first.peer_id, b"one", T0 + 30)]
    await asyncio.sleep(30)
    assert await second.directory.look_up("key", 5) == {}


@simulated()
async def test_a_later_expiry_replaces_an_earlier_one_and_never_the_other_way_round(network: SimulatedNetwork) -> None:
    peer = network.add_peer("peer")
    assert await peer.directory.publish("key", "sub", b"new", T0 + 60, 5)
    assert not await peer.directory.publish("key", "sub", b"old", T0 + 50, 5)
    await asyncio.sleep(1)
    found = await peer.directory.look_up("key", 5)
    assert found is not None
    assert found["sub"].value == b"new"


@simulated()
async def test_each_side_of_a_partition_sees_what_it_stored_until_it_heals(network: SimulatedNetwork) -> None:
    a, b, c, d = (network.add_peer(name) for name in "abcd")

    async def seen(peer: object) -> list[str]:
        found = await peer.directory.look_up("key", 5)  # type: ignore[attr-defined]
        return sorted(found)

    await a.directory.publish("key", "before", b"", T0 + 300, 5)
    await asyncio.sleep(1)
    network.partition([a, b], [c, d])
    await a.directory.publish("key", "left", b"", T0 + 300, 5)
    await c.directory.publish("key", "right", b"", T0 + 300, 5)
    await asyncio.sleep(1)
    assert await seen(b) == ["before", "left"]
    assert await seen(d) == ["before", "right"]
    network.heal()
    assert await seen(b) == await seen(d) == ["before", "left", "right"]


@simulated()
async def test_a_cut_peer_is_told_that_nobody_could_be_asked(network: SimulatedNetwork) -> None:
    first, second = network.add_peer("first"), network.add_peer("second")
    network.cut(first)
    assert await first.directory.look_up("key", 3) is None
    assert network.loop.time() == pytest.approx(3)
    assert not await first.directory.publish("key", "sub", b"", T0 + 60, 3)
    assert await second.directory.look_up("key", 3) is None
    network.mend(first)
    assert await first.directory.look_up("key", 3) == {}


@simulated()
async def test_a_failing_or_slow_directory_answers_within_the_deadline(network: SimulatedNetwork) -> None:
    peer = network.add_peer("peer")
    peer.directory.delay_seconds = 4.0
    assert await peer.directory.look_up("key", 10) == {}
    assert 4.0 < network.loop.time() < 4.2
    assert await peer.directory.look_up("key", 1) is None
    peer.directory.delay_seconds, peer.directory.failing = 0.0, True
    before = network.loop.time()
    assert not await peer.directory.publish("key", "sub", b"", T0 + 60, 2)
    assert network.loop.time() - before == pytest.approx(2)


@simulated()
async def test_records_that_have_expired_are_not_stored(network: SimulatedNetwork) -> None:
    peer = network.add_peer("peer")
    assert not await peer.directory.publish("key", "sub", b"good", T0 - 60, 5)
    assert await peer.directory.publish("key", "sub", b"good", T0 + 60, 5)


@simulated()
async def test_a_reader_whose_clock_is_ahead_sees_records_as_expired(network: SimulatedNetwork) -> None:
    writer, reader = network.add_peer("writer"), network.add_peer("reader", skew_seconds=3600)
    await writer.directory.publish("key", "sub", b"", T0 + 60, 5)
    await asyncio.sleep(1)
    assert await reader.directory.look_up("key", 5) == {}
    reader.runtime.clock_offset_seconds = -3600
    assert list(await reader.directory.look_up("key", 5) or ()) == ["sub"]
