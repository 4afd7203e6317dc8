"""Callers are answered, or refused with a reason and counted; strangers cost a bounded amount."""

import asyncio
from typing import Any

import msgpack
import pytest

from p2ptrain.errors import DeadlineError, PeerBusyError, PeerLostError, PeerRefusedError
from p2ptrain.manifest import PROTOCOL_VERSION, Manifest, SignedManifest
from p2ptrain.network.admission import Admission, Issuer
from p2ptrain.network.rpc import endpoint
from p2ptrain.network.rpc.endpoint import MAX_CONCURRENT_REFUSALS, MAX_COUNTED_REFUSALS, PROTOCOL
from p2ptrain.network.rpc.frames import FRAME, Kind, Refusal, frame, pack, unpack
from p2ptrain.network.schema import to_bytes
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.signers import NamedSigner
from tests.support.sim.peers import SWARM, Member, members, until
from tests.support.sim.rpc_scenario import double, hang


def header(request: bytes = frame(Kind.MESSAGE, pack({"number": 1})), **changes: object) -> bytes:
    """A whole valid opening, with fields of its header changed."""
    return (
        frame(Kind.MESSAGE, pack({"protocol": PROTOCOL_VERSION, "swarm": SWARM, "name": "double", **changes})) + request
    )


async def raw(caller: Member, server: Member) -> Stream:
    return await caller.peer.transport.open(server.peer.peer_id, PROTOCOL, 5)


async def reason(stream: Stream, timeout_seconds: float = 30) -> str:
    """The reason of the ERROR frame that comes next."""
    async with asyncio.timeout(timeout_seconds):
        length, kind = FRAME.unpack(await stream.read(FRAME.size))
        assert kind == Kind.ERROR
        refusal = unpack(await stream.read(length), stream.remote, Refusal)
    stream.abort()
    return refusal.reason


@pytest.mark.parametrize("error", [RuntimeError("secret detail"), TimeoutError("secret detail")])
@simulated()
async def test_a_defect_in_a_handler_is_logged_and_stays_private(
    network: SimulatedNetwork, caplog: pytest.LogCaptureFixture, error: Exception
) -> None:
    async def fail(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        raise error

    async with members(network, 2) as (caller, server):
        server.rpc.serve("fail", dict, fail)
        with pytest.raises(PeerRefusedError) as refusal:
            await caller.rpc.call(server.rpc.peer_id, "fail", {}, dict, 5)
        assert refusal.value.reason == "internal error"
        assert server.rpc.refusals == {(caller.rpc.peer_id, "internal error"): 1}
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("data", "cause", "text"),
    [
        (b"\x00" * 64, "malformed header", "malformed header"),
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "malformed header", "malformed header"),
        (frame(Kind.MESSAGE, b"\xc1\xc1\xc1"), "malformed header", "not a message"),
        (frame(Kind.MESSAGE, msgpack.packb([1, 2])), "malformed header", "not a map"),
        (frame(Kind.MESSAGE, msgpack.packb({"protocol": PROTOCOL_VERSION})), "other swarm", "another swarm"),
        (header(swarm=b"\x08" * 32), "other swarm", "another swarm"),
        (header(protocol=1), "other protocol", f"protocol 1, this peer speaks {PROTOCOL_VERSION}"),
        (header(name=["double"]), "malformed header", "name: Expected `str`"),
        (header(protocol="x" * 100), "malformed header", "protocol: Expected `int`"),
        (FRAME.pack(100_000, Kind.MESSAGE), "oversized request", "1024 are allowed"),
        (header(request=b"") + FRAME.pack(1 << 31, 1), "oversized request", "65536 are allowed"),
        (frame(Kind.PING) + header(), "malformed header", "kind 4"),
    ],
)  # fmt: skip
@simulated()
async def test_garbage_and_strangers_are_refused_with_a_reason_and_counted(
    network: SimulatedNetwork, data: bytes, cause: str, text: str
) -> None:
    async with members(network, 2) as (stranger, server):
        server.rpc.serve("double", dict, double)
        stream = await raw(stranger, server)
        await stream.write(data)
        assert text in await reason(stream)
        assert server.rpc.refusals == {(stranger.rpc.peer_id, cause): 1}
        await until(lambda: server.rpc.inbound.total() == 0)
        reply = await stranger.rpc.call(server.rpc.peer_id, "double", {"number": 1}, dict, 5)
        assert reply["twice"] == 2


@simulated()
async def test_a_slow_header_is_cut_off_however_slowly_it_drips(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (stranger, server):
        server.rpc.serve("double", dict, double)
        stream = await raw(stranger, server)
        opened_at = network.loop.time()

        async def drip() -> None:
            for byte in header():
                await stream.write(bytes([byte]))
                await asyncio.sleep(1)

        dripping = asyncio.create_task(drip())
        assert "took too long" in await reason(stream)
        assert network.loop.time() - opened_at < 11
        with pytest.raises(PeerLostError):
            await dripping
        assert server.rpc.refusals == {(stranger.rpc.peer_id, "slow header"): 1}
        await until(lambda: server.peer.transport.num_streams == 0)


@pytest.mark.parametrize("bound", ["MAX_INBOUND_STREAMS", "MAX_INBOUND_STREAMS_PER_PEER"])
@simulated()
async def test_a_caller_beyond_the_streams_that_a_peer_serves_is_told_that_it_is_busy(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch, bound: str
) -> None:
    monkeypatch.setattr(endpoint, bound, 0)
    async with members(network, 2) as (caller, server):
        server.rpc.serve("double", dict, double)
        with pytest.raises(PeerBusyError, match="too many streams"):
            await caller.rpc.call(server.rpc.peer_id, "double", {"number": 4}, dict, 5)


@simulated()
async def test_a_flood_of_streams_is_bounded_and_honest_peers_are_served(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(endpoint, "MAX_INBOUND_STREAMS", 48)
    monkeypatch.setattr(endpoint, "MAX_INBOUND_STREAMS_PER_PEER", 32)
    async with members(network, 3) as (flooder, honest, server):
        server.rpc.serve("double", dict, double)
        streams = await asyncio.gather(*(raw(flooder, server) for _ in range(200)))
        assert server.rpc.inbound.total() == 32
        reply = await honest.rpc.call(server.rpc.peer_id, "double", {"number": 4}, dict, 5)
        assert reply["twice"] == 8
        assert server.rpc.refusals == {(flooder.rpc.peer_id, "too many streams"): 168}
        answers = await asyncio.gather(*(reason(stream) for stream in streams), return_exceptions=True)
        told = [answer for answer in answers if isinstance(answer, str) and "too many streams" in answer]
        assert len(told) == MAX_CONCURRENT_REFUSALS
        await until(lambda: server.peer.transport.num_streams == 0, 30)
        for stream in streams:
            stream.abort()


@simulated()
async def test_the_number_of_counted_peers_is_bounded(network: SimulatedNetwork) -> None:
    async with members(network, 1) as (member,):
        for number in range(MAX_COUNTED_REFUSALS + 500):
            member.rpc.count_refusal(f"peer{number}", "test")
        assert len(member.rpc.refusals) == MAX_COUNTED_REFUSALS + 1
        assert member.rpc.refusals["others", "test"] == 500


@simulated()
async def test_a_handler_is_cancelled_when_its_caller_gives_up_or_dies(network: SimulatedNetwork) -> None:
    cancelled: list[str] = []

    async def wait(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.append(request["why"])
        return {}

    async with members(network, 4) as (impatient, mortal, cuttable, server):
        server.rpc.serve("wait", dict, wait)
        with pytest.raises(DeadlineError):
            await impatient.rpc.call(server.rpc.peer_id, "wait", {"why": "deadline"}, dict, 1)
        mortal.peer.spawn(mortal.rpc.call(server.rpc.peer_id, "wait", {"why": "crash"}, dict, 3600))
        await asyncio.sleep(1)
        network.crash(mortal.peer)
        await asyncio.sleep(1)
        assert cancelled == ["deadline", "crash"]
        call = cuttable.peer.spawn(cuttable.rpc.call(server.rpc.peer_id, "wait", {"why": "cut"}, dict, 3600))
        await asyncio.sleep(1)
        network.cut(cuttable.peer)
        assert await until(lambda: len(cancelled) == 3) < 15
        with pytest.raises(PeerLostError):
            await call
        assert server.rpc.inbound.total() == 0
        assert not server.rpc.refusals


@simulated()
async def test_closing_cancels_handlers_and_refuses_newcomers(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        server.rpc.serve("hang", dict, hang)
        call = asyncio.create_task(caller.rpc.call(server.rpc.peer_id, "hang", {}, dict, 600))
        await asyncio.sleep(1)
        await server.rpc.close()
        with pytest.raises(PeerLostError):
            await call
        with pytest.raises(PeerRefusedError, match="leaving"):
            await caller.rpc.call(server.rpc.peer_id, "hang", {}, dict, 5)


@pytest.mark.fault(37)
@simulated()
async def test_streams_of_strangers_are_refused_with_the_reason_and_a_newcomer_needs_no_round_trip(
    network: SimulatedNetwork,
) -> None:
    organizer = NamedSigner("organizer")
    manifest = SignedManifest.create(Manifest(), organizer).manifest
    admission = Admission(manifest, lambda: 0.0)
    async with members(network, 2) as (newcomer, server):
        own = newcomer.rpc.peer_id
        for name in ("double", "manifest", "unit/history.after", "unit/double"):
            server.rpc.serve(name, dict, double)
        server.rpc.gate = admission
        for name in ("manifest", "unit/history.after"):
            assert (await newcomer.rpc.call(server.rpc.peer_id, name, {"number": 1}, dict, 5))["twice"] == 2
        for name in ("double", "unit/double"):
            with pytest.raises(PeerRefusedError) as refusal:
                await newcomer.rpc.call(server.rpc.peer_id, name, {"number": 1}, dict, 5)
            assert refusal.value.reason == "not admitted: it has neither an invite to this swarm nor a pass"
        assert server.rpc.refusals == {(own, "not admitted"): 2}
        newcomer.rpc.credential = to_bytes(admission.use(Issuer(manifest, organizer).standing_invite(), own))
        reply = await newcomer.rpc.scoped("unit").call(server.rpc.peer_id, "double", {"number": 1}, dict, 5)
        assert reply["twice"] == 2
        assert admission.admitted(own) == ""  # As tickets and certificates ask.
