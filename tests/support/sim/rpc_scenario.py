"""One conversation of two `Rpc`, for any transport: calls, channels, refusals, deadlines and cancellation."""

import asyncio
import random
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from p2ptrain.errors import DeadlineError, IncompatibleError, PeerRefusedError, ProtocolError
from p2ptrain.network.rpc.channel import Channel
from p2ptrain.network.rpc.endpoint import Rpc

NUM_BYTES = 3_000_001


async def double(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """A handler that says twice the number, and who asked."""
    return {"twice": 2 * request["number"], "caller": peer}


async def hang(peer: str, request: dict[str, Any]) -> dict[str, Any]:
    """A handler that does not answer within an hour."""
    await asyncio.sleep(3600)
    return {}


async def serve_scenario(server: Rpc, ended: list[str]) -> None:
    """Serve what `run_scenario` asks for; ``ended`` collects how its channels end."""

    async def refuse(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        raise IncompatibleError("stage 3 is not hosted here")

    async def hang_and_tell(peer: str, request: dict[str, Any]) -> dict[str, Any]:
        try:
            return await hang(peer, request)
        finally:
            ended.append("hang")

    async def echo(channel: Channel, request: dict[str, Any]) -> None:
        try:
            while True:
                size = (await channel.receive(dict, 20))["size"]
                await channel.send_bytes(await channel.receive_bytes(size, 20))
        except BaseException as error:
            ended.append(type(error).__name__)
            raise

    server.serve("double", dict, double)
    server.serve("refuse", dict, refuse)
    server.serve("hang", dict, hang_and_tell)
    server.serve_channel("echo", dict, echo)
    await server.start()


async def run_scenario(
    caller: Rpc, server: Rpc, ended: list[str], until: Callable[[Callable[[], bool]], Awaitable[object]]
) -> None:
    """Let ``caller`` do all that one peer does with another, and check each outcome."""
    peer = server.peer_id
    assert await caller.call(peer, "double", {"number": 21}, dict, 10) == {"twice": 42, "caller": caller.peer_id}
    replies = await asyncio.gather(*(caller.call(peer, "double", {"number": n}, dict, 20) for n in range(30)))
    assert [reply["twice"] for reply in replies] == list(range(0, 60, 2))

    with pytest.raises(PeerRefusedError) as refusal:
        await caller.call(peer, "refuse", {}, dict, 10)
    assert refusal.value.reason == "stage 3 is not hosted here"
    with pytest.raises(PeerRefusedError, match="'nothing' is not served"):
        await caller.call(peer, "nothing", {}, dict, 10)
    with pytest.raises(PeerRefusedError, match="65536 are allowed"):
        await caller.call(peer, "double", {"number": 1, "fill": bytes(70_000)}, dict, 10)
    with pytest.raises(DeadlineError):
        await caller.call(peer, "hang", {}, dict, 0.5)
    await until(lambda: ended == ["hang"])

    data = random.Random(3).randbytes(NUM_BYTES)
    async with caller.open(peer, "echo", {}, 10) as channel:
        assert channel.remote == peer
        for size in (0, 1, 65536, 65537, 262144, 262145, NUM_BYTES):
            await channel.send({"size": size})
            sending = asyncio.create_task(channel.send_bytes(memoryview(data)[:size]))
            assert bytes(await channel.receive_bytes(size, 20)) == data[:size]
            await sending
    await until(lambda: ended == ["hang", "PeerLostError"])

    async with caller.open(peer, "echo", {}, 10) as channel:
        await channel.send({"size": 1000})
        await channel.send_bytes(bytes(1001))
        with pytest.raises((PeerRefusedError, ProtocolError), match="not 1000 bytes"):
            await channel.receive(dict, 10)
    await until(lambda: ended[2:] == ["ProtocolError"])

    talking = asyncio.Event()

    async def cancelled() -> None:
        async with caller.open(peer, "echo", {}, 10) as channel:
            await channel.send({"size": 1})
            await channel.send_bytes(b"x")
            await channel.receive_bytes(1, 10)
            talking.set()
            await channel.receive(dict, 600)

    waiting = asyncio.create_task(cancelled())
    await talking.wait()
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    await until(lambda: ended[3:] == ["PeerLostError"])
    await until(lambda: server.inbound.total() == 0)
    assert server.refusals[caller.peer_id, "unknown name"] == 1
    assert server.refusals[caller.peer_id, "oversized request"] == 1
    assert server.refusals[caller.peer_id, "ProtocolError"] == 1
