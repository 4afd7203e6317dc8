"""Requests and channels: refusals with reasons, bounded strangers, deadlines, and nothing left behind."""

from __future__ import annotations

import asyncio
from typing import Any

import msgpack
import pytest

from p2ptrain.errors import (
    DeadlineError,
    IncompatibleError,
    PeerLostError,
    PeerRefusedError,
    PeerUnreachableError,
    ProtocolError,
)
from p2ptrain.network.channel import Channel
from p2ptrain.network.frames import FRAME, Kind, frame, pack
from p2ptrain.network.rpc import MAX_CONCURRENT_REFUSALS, MAX_COUNTED_REFUSALS, PROTOCOL, Rpc, RpcLimits
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork, simulate
from p2ptrain.network.transport import Stream
from tests.support.rpc_scenario import run_scenario, serve_scenario
from tests.support.simulation import SWARM, Member, members, start_member, until

FIXED = LinkModel(latency_seconds=(0.05, 0.05), jitter=0.0)


async def double(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    return {"twice": 2 * request["number"], "caller": peer}


async def hang(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    await asyncio.sleep(3600)
    return {}


def header(**changes: object) -> bytes:
    """A whole valid opening, with fields of its header changed."""
    fields = {"protocol": 1, "swarm": SWARM, "name": "double", **changes}
    return frame(Kind.MESSAGE, pack(fields)) + frame(Kind.MESSAGE, pack({"number": 1}))


async def raw(caller: Member, server: Member) -> Stream:
    return await caller.peer.transport.open(server.peer.peer_id, PROTOCOL, 5)


async def reason(stream: Stream, timeout_seconds: float = 30) -> str:
    """The reason of the ERROR frame that comes next."""
    async with asyncio.timeout(timeout_seconds):
        length, kind = FRAME.unpack(await stream.read(FRAME.size))
        assert kind == Kind.ERROR
        text = (await stream.read(length)).decode()
    stream.abort()
    return text


def test_a_call_takes_two_round_trips_and_returns_the_reply() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("double", double)
            reply = await caller.rpc.call(server.rpc.peer_id, "double", {"number": 21}, 5)
            assert reply == {"twice": 42, "caller": caller.rpc.peer_id}
            assert network.loop.time() < 0.201
            await until(lambda: server.rpc.num_inbound == 0)
            assert caller.rpc.bytes_sent == server.rpc.bytes_received > 0
            assert caller.rpc.bytes_received == server.rpc.bytes_sent > 0

    simulate(main, 1, model=FIXED)


def test_a_call_to_oneself_runs_the_handler_on_a_copy() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 1) as (member,):
            seen: list[dict[str, Any]] = []

            async def keep(peer: str, request: dict[str, Any]) -> dict[str, Any]:
                seen.append(request)
                if request.get("fail"):
                    raise IncompatibleError("not this one")
                return request

            member.rpc.serve("keep", keep)
            member.rpc.serve("hang", hang)
            request = {"list": [1, 2]}
            reply = await member.rpc.call(member.rpc.peer_id, "keep", request, 5)
            assert reply == seen[0] == request
            assert seen[0] is not request
            assert reply is not seen[0]
            with pytest.raises(PeerRefusedError, match="not this one"):
                await member.rpc.call(member.rpc.peer_id, "keep", {"fail": True}, 5)
            with pytest.raises(PeerRefusedError, match="not served"):
                await member.rpc.call(member.rpc.peer_id, "unknown", {}, 5)
            with pytest.raises(DeadlineError):
                await member.rpc.call(member.rpc.peer_id, "hang", {}, 5)
            with pytest.raises(ValueError, match="another peer"):
                member.rpc.open(member.rpc.peer_id, "keep", {}, 5)

    simulate(main, 1)


def test_a_peer_of_another_version_is_told_so() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 1) as (server,):
            server.rpc.serve("double", double)
            newer = await start_member(network, network.add_peer("newer"), protocol=2)
            with pytest.raises(PeerRefusedError) as refusal:
                await newer.rpc.call(server.rpc.peer_id, "double", {"number": 1}, 5)
            assert refusal.value.reason == "protocol 2, this peer speaks 1"
            assert server.rpc.refusals == {(newer.rpc.peer_id, "other protocol"): 1}
            await newer.rpc.close()

    simulate(main, 1)


def test_a_peer_of_another_swarm_is_told_so() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 1) as (server,):
            server.rpc.serve("double", double)
            other = network.add_peer("other")
            rpc = Rpc(other.transport, other.runtime, b"\x08" * 32)
            with pytest.raises(PeerRefusedError, match="another swarm"):
                await rpc.call(server.rpc.peer_id, "double", {"number": 1}, 5)
            assert server.rpc.refusals == {(other.peer_id, "other swarm"): 1}

    simulate(main, 1)


def test_an_unknown_name_is_refused_for_calls_and_channels() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            with pytest.raises(PeerRefusedError, match="'nothing' is not served"):
                await caller.rpc.call(server.rpc.peer_id, "nothing", {}, 5)
            async with caller.rpc.open(server.rpc.peer_id, "nothing", {}, 5) as channel:
                with pytest.raises(PeerRefusedError, match="'nothing' is not served"):
                    await channel.receive(5)
            assert server.rpc.refusals == {(caller.rpc.peer_id, "unknown name"): 2}

    simulate(main, 1)


def test_a_refusal_reaches_whoever_is_still_sending() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            with pytest.raises(PeerRefusedError, match="not served"):
                async with caller.rpc.open(server.rpc.peer_id, "nothing", {}, 5) as channel:
                    await channel.send_bytes(bytes(64 << 20))
            assert network.loop.time() < 5

    simulate(main, 1)


def test_a_handlers_deliberate_error_is_the_callers_reason_and_others_stay_private(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def refuse(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        raise IncompatibleError("stage 3 is not hosted here")

    async def fail(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        raise RuntimeError("secret detail")

    async def time_out(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        raise TimeoutError("inner")

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("refuse", refuse)
            server.rpc.serve("fail", fail)
            server.rpc.serve("time out", time_out)
            with pytest.raises(PeerRefusedError) as refusal:
                await caller.rpc.call(server.rpc.peer_id, "refuse", {}, 5)
            assert refusal.value.reason == "stage 3 is not hosted here"
            for name in ("fail", "time out"):
                with pytest.raises(PeerRefusedError) as refusal:
                    await caller.rpc.call(server.rpc.peer_id, name, {}, 5)
                assert refusal.value.reason == "internal error"
            assert server.rpc.refusals[caller.rpc.peer_id, "internal error"] == 2

    simulate(main, 1)
    assert "secret detail" in caplog.text


@pytest.mark.parametrize(
    ("data", "cause", "text"),
    [
        (b"\x00" * 64, "malformed header", "malformed header"),
        (b"GET / HTTP/1.1\r\nHost: example\r\n\r\n", "malformed header", "malformed header"),
        (frame(Kind.MESSAGE, b"\xc1\xc1\xc1"), "malformed header", "not a message"),
        (frame(Kind.MESSAGE, msgpack.packb([1, 2])), "malformed header", "not a map"),
        (frame(Kind.MESSAGE, msgpack.packb({"protocol": 1})), "other swarm", "another swarm"),
        (header(name=["double"]), "unknown name", "not served"),
        (header(protocol="x" * 100), "other protocol", "protocol ?"),
        (FRAME.pack(100_000, Kind.MESSAGE), "oversized request", "512 are allowed"),
        (frame(Kind.MESSAGE, pack({"protocol": 1, "swarm": SWARM, "name": "double"})) + FRAME.pack(1 << 31, 1),
         "oversized request", "65536 are allowed"),
        (frame(Kind.PING) + header(), "malformed header", "kind 4"),
    ],
)  # fmt: skip
def test_garbage_is_refused_with_a_reason_and_counted(data: bytes, cause: str, text: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (stranger, server):
            server.rpc.serve("double", double)
            stream = await raw(stranger, server)
            await stream.write(data)
            assert text in await reason(stream)
            assert server.rpc.refusals == {(stranger.rpc.peer_id, cause): 1}
            await until(lambda: server.rpc.num_inbound == 0)
            reply = await stranger.rpc.call(server.rpc.peer_id, "double", {"number": 1}, 5)
            assert reply["twice"] == 2

    simulate(main, 1)


def test_a_slow_header_is_cut_off_however_slowly_it_drips() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (stranger, server):
            server.rpc.serve("double", double)
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

    simulate(main, 1)


def test_a_flood_of_streams_is_bounded_and_honest_peers_are_served() -> None:
    limits = RpcLimits(inbound_streams=48, inbound_streams_per_peer=32)

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 3, limits=limits) as (flooder, honest, server):
            server.rpc.serve("double", double)
            streams = await asyncio.gather(*(raw(flooder, server) for _ in range(200)))
            assert server.rpc.num_inbound == 32
            reply = await honest.rpc.call(server.rpc.peer_id, "double", {"number": 4}, 5)
            assert reply["twice"] == 8
            assert server.rpc.refusals == {(flooder.rpc.peer_id, "too many streams"): 168}
            answers = await asyncio.gather(*(reason(stream) for stream in streams), return_exceptions=True)
            told = [answer for answer in answers if isinstance(answer, str) and "too many streams" in answer]
            assert len(told) == MAX_CONCURRENT_REFUSALS
            await until(lambda: server.peer.transport.num_streams == 0, 30)
            for stream in streams:
                stream.abort()

    simulate(main, 1)


def test_the_number_of_counted_peers_is_bounded() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 1) as (member,):
            for number in range(MAX_COUNTED_REFUSALS + 500):
                member.rpc.count_refusal(f"peer{number}", "test")
            assert len(member.rpc.refusals) == MAX_COUNTED_REFUSALS + 1
            assert member.rpc.refusals["others", "test"] == 500

    simulate(main, 1)


def test_oversized_and_malformed_replies_are_protocol_errors() -> None:
    async def big(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"data": bytes(request["size"])}

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("big", big)
            assert len((await caller.rpc.call(server.rpc.peer_id, "big", {"size": 500_000}, 5))["data"]) == 500_000
            for size, limit in ((5000, 1000), (200_000, 1000), (2 << 20, 1 << 20)):
                with pytest.raises(ProtocolError, match="are allowed"):
                    await caller.rpc.call(server.rpc.peer_id, "big", {"size": size}, 5, max_reply_bytes=limit)

            async def garbage(stream: Stream) -> None:
                await stream.write(frame(Kind.MESSAGE, b"\xc1"))
                await asyncio.sleep(1)

            await server.peer.transport.serve(PROTOCOL, garbage)
            with pytest.raises(ProtocolError, match="not a message"):
                await caller.rpc.call(server.rpc.peer_id, "big", {}, 5)

    simulate(main, 1)


def test_requests_that_cannot_be_sent_are_the_callers_mistake() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            with pytest.raises(ValueError, match="plain values"):
                await caller.rpc.call(server.rpc.peer_id, "double", {"object": object()}, 5)
            assert caller.peer.transport.num_streams == 0

    simulate(main, 1)


@pytest.mark.parametrize("latency_seconds", [0.001, 0.004, 0.006, 0.05, 2.0])
def test_ten_millisecond_deadlines_fail_in_time_and_leave_nothing(latency_seconds: float) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("hang", hang)

            async def listen(channel: Channel, request: dict[str, Any]) -> None:
                await channel.receive(0.01)

            server.rpc.serve_channel("listen", listen)
            started = network.loop.time()
            with pytest.raises((DeadlineError, PeerUnreachableError)):
                await caller.rpc.call(server.rpc.peer_id, "hang", {}, 0.01)
            assert network.loop.time() - started < 1
            started = network.loop.time()
            with pytest.raises((DeadlineError, PeerUnreachableError)):
                async with caller.rpc.open(server.rpc.peer_id, "listen", {}, 0.01) as channel:
                    await channel.receive(0.01)
            assert network.loop.time() - started < 1
            await asyncio.sleep(2 * latency_seconds + 2.5)
            assert caller.peer.transport.num_streams == server.peer.transport.num_streams == 0
            assert len(network.loop.pending_tasks()) == 1

    simulate(main, 1, model=LinkModel(latency_seconds=(latency_seconds, latency_seconds), jitter=0.0))


def test_a_handler_is_cancelled_when_its_caller_gives_up_or_dies() -> None:
    cancelled: list[str] = []

    async def wait(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            await asyncio.sleep(3600)
        finally:
            cancelled.append(request["why"])
        return {}

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as (impatient, mortal, cuttable, server):
            server.rpc.serve("wait", wait)
            with pytest.raises(DeadlineError):
                await impatient.rpc.call(server.rpc.peer_id, "wait", {"why": "deadline"}, 1)
            mortal.peer.spawn(mortal.rpc.call(server.rpc.peer_id, "wait", {"why": "crash"}, 3600))
            await asyncio.sleep(1)
            network.crash(mortal.peer)
            await asyncio.sleep(1)
            assert cancelled == ["deadline", "crash"]
            call = cuttable.peer.spawn(cuttable.rpc.call(server.rpc.peer_id, "wait", {"why": "cut"}, 3600))
            await asyncio.sleep(1)
            network.cut(cuttable.peer)
            assert await until(lambda: len(cancelled) == 3) < 15
            with pytest.raises(PeerLostError):
                await call
            assert server.rpc.num_inbound == 0
            assert not server.rpc.refusals

    simulate(main, 1)


def test_a_call_outlasts_the_heartbeat_while_the_handler_works() -> None:
    async def work(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        await asyncio.sleep(120)
        return {"done": True}

    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("work", work)
            assert await caller.rpc.call(server.rpc.peer_id, "work", {}, 300) == {"done": True}

    simulate(main, 1)


@pytest.mark.parametrize("fault", ["stall", "cut"])
def test_a_caller_notices_a_silent_server_within_15_seconds(fault: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("hang", hang)
            call = asyncio.create_task(caller.rpc.call(server.rpc.peer_id, "hang", {}, 600))
            await asyncio.sleep(7)
            struck_at = network.loop.time()
            getattr(network, fault)(server.peer)
            with pytest.raises(PeerLostError, match="sent nothing"):
                await call
            assert network.loop.time() - struck_at < 15

    simulate(main, 1)


def test_closing_cancels_handlers_and_refuses_newcomers() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            server.rpc.serve("hang", hang)
            call = asyncio.create_task(caller.rpc.call(server.rpc.peer_id, "hang", {}, 600))
            await asyncio.sleep(1)
            await server.rpc.close()
            with pytest.raises(PeerLostError):
                await call
            with pytest.raises(PeerRefusedError, match="leaving"):
                await caller.rpc.call(server.rpc.peer_id, "hang", {}, 5)

    simulate(main, 1)


def test_64_peers_call_each_other_within_a_second_of_virtual_time() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 64) as everyone:
            for member in everyone:
                member.rpc.serve("double", double)

            async def call_all(caller: Member) -> int:
                calls = [
                    caller.rpc.call(other.rpc.peer_id, "double", {"number": 1}, 10)
                    for other in everyone
                    if other is not caller
                ]
                return sum([reply["twice"] for reply in await asyncio.gather(*calls)])

            sums = await asyncio.gather(*(member.peer.spawn(call_all(member)) for member in everyone))
            assert sums == [126] * 64
            assert network.loop.time() < 1

    simulate(main, 1)


def test_the_scenario_of_the_real_transport_runs_here_too() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 2) as (caller, server):
            ended: list[str] = []
            await serve_scenario(server.rpc, ended)
            await run_scenario(caller.rpc, server.rpc, ended, until)

    simulate(main, 1)
