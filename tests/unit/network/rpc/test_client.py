"""Calls and channels: replies, deadlines, silent peers, and nothing left behind."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from p2ptrain.errors import DeadlineError, IncompatibleError, PeerRefusedError, PeerUnreachableError, ProtocolError
from p2ptrain.network.rpc.endpoint import ANSWER_SECONDS, PROTOCOL
from p2ptrain.network.rpc.frames import Kind, frame
from p2ptrain.network.simulated import LinkModel, SimulatedNetwork
from p2ptrain.network.transport import Stream
from tests.support.coroutines import simulated
from tests.support.sim.peers import members, until
from tests.support.sim.rpc_scenario import double, hang, run_scenario, serve_scenario

FIXED = LinkModel(latency_seconds=(0.05, 0.05), jitter=0.0)


@simulated(model=FIXED)
async def test_calls_take_two_round_trips_however_many_there_are(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        server.rpc.serve("double", dict, double)
        calls = [caller.rpc.call(server.rpc.peer_id, "double", {"number": number}, dict, 5) for number in range(60)]
        assert [reply["twice"] for reply in await asyncio.gather(*calls)] == list(range(0, 120, 2))
        assert network.loop.time() < 0.201
        await until(lambda: server.rpc.inbound.total() == 0)
        assert caller.rpc.traffic.sent == server.rpc.traffic.received > 0
        assert caller.rpc.traffic.received == server.rpc.traffic.sent > 0


@simulated()
async def test_a_call_to_oneself_runs_the_handler_on_a_copy(network: SimulatedNetwork) -> None:
    async with members(network, 1) as (member,):
        seen: list[dict[str, Any]] = []

        async def keep(peer: str, request: dict[str, Any]) -> dict[str, Any]:
            seen.append(request)
            if request.get("fail"):
                raise IncompatibleError("not this one")
            return request

        member.rpc.serve("keep", dict, keep)
        member.rpc.serve("hang", dict, hang)
        request = {"list": [1, 2]}
        reply = await member.rpc.call(member.rpc.peer_id, "keep", request, dict, 5)
        assert reply == seen[0] == request
        assert seen[0] is not request
        assert reply is not seen[0]
        with pytest.raises(PeerRefusedError, match="not this one"):
            await member.rpc.call(member.rpc.peer_id, "keep", {"fail": True}, dict, 5)
        with pytest.raises(PeerRefusedError, match="not served"):
            await member.rpc.call(member.rpc.peer_id, "unknown", {}, dict, 5)
        with pytest.raises(DeadlineError):
            await member.rpc.call(member.rpc.peer_id, "hang", {}, dict, 5)
        with pytest.raises(ValueError, match="another peer"):
            await member.rpc.open(member.rpc.peer_id, "keep", {}, 5).__aenter__()


@simulated()
async def test_a_call_to_oneself_has_the_size_limits_of_any_other(network: SimulatedNetwork) -> None:
    async def echo(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        return request

    async with members(network, 2) as (caller, server):
        for member in (caller, server):
            member.rpc.serve("echo", dict, echo, max_request_bytes=2000)
        for peer in (caller.rpc.peer_id, server.rpc.peer_id):
            assert await caller.rpc.call(peer, "echo", {"data": bytes(1000)}, dict, 5)
            with pytest.raises(PeerRefusedError, match="2000 are allowed"):
                await caller.rpc.call(peer, "echo", {"data": bytes(3000)}, dict, 5)
            with pytest.raises(ProtocolError, match="500 are allowed"):
                await caller.rpc.call(peer, "echo", {"data": bytes(1000)}, dict, 5, max_reply_bytes=500)


@simulated(model=FIXED)
async def test_what_dials_took_is_remembered_and_doubled_when_they_fail(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        peer = server.rpc.peer_id
        server.rpc.serve("double", dict, double)
        assert peer not in caller.rpc.dial_seconds
        await caller.rpc.call(peer, "double", {"number": 1}, dict, 5)
        took = caller.rpc.dial_seconds[peer]
        assert took == pytest.approx(0.1)
        network.cut(server.peer)
        for times in (2, 4):
            with pytest.raises((PeerUnreachableError, DeadlineError)):
                await caller.rpc.call(peer, "double", {"number": 1}, dict, 1)
            assert caller.rpc.dial_seconds[peer] == times * took
        network.mend(server.peer)


@simulated(model=FIXED)
async def test_peers_that_were_not_reached_are_remembered_up_to_a_bound(
    network: SimulatedNetwork, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("p2ptrain.network.rpc.endpoint.MAX_DIALS_REMEMBERED", 2)
    async with members(network, 4) as (caller, *servers):
        peers = [server.rpc.peer_id for server in servers]
        for server in servers:
            server.rpc.serve("double", dict, double)
            network.cut(server.peer)
            with pytest.raises(PeerUnreachableError):
                await caller.rpc.call(server.rpc.peer_id, "double", {"number": 1}, dict, 1)
            network.mend(server.peer)
        assert list(caller.rpc.unreached_at) == peers[1:]
        await caller.rpc.call(peers[1], "double", {"number": 1}, dict, 5)
        assert list(caller.rpc.unreached_at) == peers[2:], "an answer"


@simulated(model=replace(FIXED, are_dials_free=True))
async def test_the_first_answer_shows_the_round_trip_where_a_dial_takes_none(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        peer, dials = server.rpc.peer_id, caller.rpc.dial_seconds
        server.rpc.serve("double", dict, double)
        server.rpc.serve("hang", dict, hang)
        with pytest.raises(DeadlineError):
            await caller.rpc.call(peer, "hang", {}, dict, 0.05)
        assert peer not in dials, "nothing has come back yet"
        await caller.rpc.call(peer, "double", {"number": 1}, dict, 5)
        assert dials[peer] == pytest.approx(0.1)
        with pytest.raises(DeadlineError):
            await caller.rpc.call(peer, "hang", {}, dict, 5)
        assert dials[peer] == pytest.approx(0.1 + ANSWER_SECONDS), "a peer that works on a request says so"
        await caller.rpc.call(peer, "double", {"number": 1}, dict, 5)
        assert dials[peer] == pytest.approx(0.1)


@simulated(model=FIXED)
async def test_both_sides_know_while_they_talk_with_each_other(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        server.rpc.serve("hang", dict, hang)
        sides = [(caller.rpc, server.rpc.peer_id), (server.rpc, caller.rpc.peer_id)]
        assert not any(rpc.is_talking_with(other) for rpc, other in sides)
        call = asyncio.create_task(caller.rpc.call(server.rpc.peer_id, "hang", {}, dict, 5))
        await asyncio.sleep(1)
        assert all(rpc.is_talking_with(other) for rpc, other in sides)
        with pytest.raises(DeadlineError):
            await call
        await until(lambda: not any(rpc.is_talking_with(other) for rpc, other in sides))


@simulated()
async def test_oversized_and_malformed_replies_are_protocol_errors(network: SimulatedNetwork) -> None:
    async def big(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        return {"data": bytes(request["size"])}

    async with members(network, 2) as (caller, server):
        server.rpc.serve("big", dict, big)
        assert len((await caller.rpc.call(server.rpc.peer_id, "big", {"size": 500_000}, dict, 5))["data"]) == 500_000
        for size, limit in ((5000, 1000), (200_000, 1000), (2 << 20, 1 << 20)):
            with pytest.raises(ProtocolError, match="are allowed"):
                await caller.rpc.call(server.rpc.peer_id, "big", {"size": size}, dict, 5, max_reply_bytes=limit)

        async def garbage(stream: Stream) -> None:
            await stream.write(frame(Kind.MESSAGE, b"\xc1"))
            await asyncio.sleep(1)

        await server.peer.transport.serve(PROTOCOL, garbage)
        with pytest.raises(ProtocolError, match="not a message"):
            await caller.rpc.call(server.rpc.peer_id, "big", {}, dict, 5)


@simulated()
async def test_requests_that_cannot_be_sent_are_the_callers_mistake(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        with pytest.raises(ValueError, match="plain values"):
            await caller.rpc.call(server.rpc.peer_id, "double", {"object": object()}, dict, 5)
        assert caller.peer.transport.num_streams == 0


@simulated()
async def test_the_scenario_of_the_real_transport_runs_here_too(network: SimulatedNetwork) -> None:
    async with members(network, 2) as (caller, server):
        ended: list[str] = []
        await serve_scenario(server.rpc, ended)
        await run_scenario(caller.rpc, server.rpc, ended, until)
