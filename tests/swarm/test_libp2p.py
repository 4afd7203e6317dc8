"""The libp2p transport with real daemons on loopback: streams, limits, and what happens when something dies."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import socket
import stat
import threading
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest
import uvloop

from p2ptrain.errors import (
    LinkError,
    PeerError,
    PeerLostError,
    PeerUnreachableError,
    ResourceError,
    TemporaryError,
)
from p2ptrain.network import daemon as daemon_module
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p import Libp2pSettings, Libp2pTransport
from p2ptrain.network.transport import Stream
from tests.support.daemons import (
    LOOPBACK,
    eventually,
    free_port,
    is_alive,
    loopback_transport,
    peer_process,
    wait_until,
)

ECHO = "/test/echo"

PEER = """
import asyncio, json, os, sys
from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p import Libp2pSettings, Libp2pTransport

async def main():
    identity = Identity.create_or_load(sys.argv[1])
    transport = await Libp2pTransport.start(identity, Libp2pSettings(listen=("/ip4/127.0.0.1/tcp/0",)))
    async def echo(stream):
        while True:
            await stream.write(await stream.read(1))
    await transport.serve("/test/echo", echo)
    child = 0
    if "fork" in sys.argv:
        go_on, say = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(say, b"x")
            os.read(0, 1)
            os._exit(0)
        os.read(go_on, 1)
    told = {"daemon": transport.daemon.process_id, "directory": str(transport.daemon.directory), "child": child}
    print(json.dumps({**told, "addresses": await transport.addresses()}), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1))


def run(main: Callable[[], Awaitable[None]], on_uvloop: bool = False) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(60):
            await main()

    if on_uvloop:
        uvloop.run(bounded())
    else:
        asyncio.run(bounded())


def test_peer_ids_agree_with_hivemind_and_the_daemon(tmp_path: Path) -> None:
    from hivemind.p2p import PeerID

    async def main() -> None:
        async with loopback_transport(tmp_path) as (identity, transport):
            assert PeerID.from_identity(identity.path.read_bytes()).to_base58() == identity.peer_id
            assert transport.peer_id == identity.peer_id
            (address,) = await transport.addresses()
            assert address.endswith(f"/p2p/{identity.peer_id}")
            assert await transport.reachability() == "direct"

    run(main)


@pytest.mark.parametrize("on_uvloop", [False, True])
def test_bytes_arrive_exactly_although_the_sender_reuses_its_buffer(tmp_path: Path, on_uvloop: bool) -> None:
    num_chunks, chunk_bytes = 64, 300_000
    expected = hashlib.sha256()

    async def main() -> None:
        received = hashlib.sha256()

        async def receive(stream: Stream) -> None:
            for _ in range(num_chunks):
                received.update(await stream.read(chunk_bytes))
            await stream.write(received.digest())
            await stream.read(1)

        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            await b.serve("/test/bulk", receive)
            peer = await a.connect(await b.addresses(), 10)
            stream = await a.open(peer, "/test/bulk", 10)
            assert stream.remote == b.peer_id
            buffer = bytearray(chunk_bytes)
            for chunk in range(num_chunks):
                buffer[:] = bytes([chunk]) * chunk_bytes
                expected.update(buffer)
                await stream.write(memoryview(buffer))
            assert await stream.read(32) == expected.digest()
            await stream.close()
            await stream.close()

    run(main, on_uvloop)


def test_what_was_written_before_a_close_arrives(tmp_path: Path) -> None:
    async def main() -> None:
        arrived: asyncio.Queue[bytes] = asyncio.Queue()

        async def receive(stream: Stream) -> None:
            await arrived.put(await stream.read(3_000_000))

        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            await b.serve("/test/bulk", receive)
            peer = await a.connect(await b.addresses(), 10)
            for _ in range(5):
                stream = await a.open(peer, "/test/bulk", 10)
                await stream.write(b"x" * 3_000_000)
                await stream.close()
                assert await arrived.get() == b"x" * 3_000_000

    run(main)


def test_a_reader_that_does_not_read_holds_the_writer_back(tmp_path: Path) -> None:
    async def main() -> None:
        hold = asyncio.Event()

        async def ignore(stream: Stream) -> None:
            await hold.wait()

        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            await b.serve("/test/ignore", ignore)
            stream = await a.open(await a.connect(await b.addresses(), 10), "/test/ignore", 10)
            sent = 0

            async def send_for_ever() -> None:
                nonlocal sent
                while True:
                    await stream.write(bytes(1 << 16))
                    sent += 1 << 16

            with pytest.raises(TimeoutError):
                await asyncio.wait_for(send_for_ever(), timeout=2)
            assert 0 < sent < 8 << 20
            stream.abort()
            hold.set()

    run(main)


def test_refusals_are_unreachable_peers_with_the_reason(tmp_path: Path) -> None:
    async def main() -> None:
        nobody = Identity.ephemeral(tmp_path)
        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            peer = await a.connect(await b.addresses(), 10)
            with pytest.raises(PeerUnreachableError, match="protocols not supported"):
                await a.open(peer, "/test/unknown", 10)
            with pytest.raises(PeerUnreachableError):
                await a.open(nobody.peer_id, ECHO, 10)
            with pytest.raises(PeerUnreachableError):
                await a.open("garbage", ECHO, 10)
            with pytest.raises(PeerUnreachableError, match="refused"):
                await a.connect([f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{nobody.peer_id}"], 10)
            wrong = (await b.addresses())[0].replace(b.peer_id, nobody.peer_id)
            with pytest.raises(PeerUnreachableError):
                await a.connect([wrong], 10)
            with pytest.raises(LinkError):
                await a.connect(["/ip4/127.0.0.1/tcp/1"], 10)
            with pytest.raises(PeerUnreachableError, match="no address"):
                await a.connect([], 10)

    run(main)


def test_connect_takes_whoever_answers(tmp_path: Path) -> None:
    async def main() -> None:
        nobody = Identity.ephemeral(tmp_path)
        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            dead = f"/ip4/127.0.0.1/tcp/{free_port()}/p2p/{nobody.peer_id}"
            assert await a.connect([dead, *await b.addresses()], 10) == b.peer_id
            assert await a.connected_peers() == [b.peer_id]

    run(main)


def test_opening_ends_by_its_deadline_even_when_the_own_daemon_hangs(tmp_path: Path) -> None:
    async def main() -> None:
        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            await b.serve(ECHO, echo)
            peer = await a.connect(await b.addresses(), 10)
            os.kill(a.daemon.process_id, signal.SIGSTOP)
            try:
                started = time.monotonic()
                with pytest.raises(PeerUnreachableError, match="time"):
                    await a.open(peer, ECHO, 0.01)
                assert time.monotonic() - started < 1
            finally:
                os.kill(a.daemon.process_id, signal.SIGCONT)
            stream = await a.open(peer, ECHO, 10)
            await stream.write(b"x")
            assert await stream.read(1) == b"x"
            stream.abort()

    run(main)


def test_a_failing_handler_breaks_its_stream_alone(tmp_path: Path) -> None:
    async def main() -> None:
        async def fail(stream: Stream) -> None:
            await stream.read(1)
            raise ValueError("broken on purpose")

        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            await b.serve("/test/fail", fail)
            await b.serve(ECHO, echo)
            peer = await a.connect(await b.addresses(), 10)
            good, bad = await a.open(peer, ECHO, 10), await a.open(peer, "/test/fail", 10)
            await bad.write(b"x")
            with pytest.raises(PeerLostError):
                await bad.read(1)
            await good.write(b"x")
            assert await good.read(1) == b"x"
            bad.abort()
            good.abort()

    run(main)


def test_streams_beyond_the_limit_are_refused_and_served_again_later(tmp_path: Path) -> None:
    async def main() -> None:
        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path, max_streams=2) as (_, b):
            await b.serve(ECHO, echo)
            peer = await a.connect(await b.addresses(), 10)

            async def works(stream: Stream) -> bool:
                try:
                    await stream.write(b"x")
                    return await stream.read(1) == b"x"
                except PeerLostError:
                    stream.abort()
                    return False

            first, second = await a.open(peer, ECHO, 10), await a.open(peer, ECHO, 10)
            assert await works(first)
            assert await works(second)
            assert not await works(await a.open(peer, ECHO, 10))
            assert await works(first)
            await first.close()
            for _ in range(100):
                retry = await a.open(peer, ECHO, 10)
                if await works(retry):
                    break
                await asyncio.sleep(0.05)
            assert await works(retry)
            retry.abort()
            second.abort()

    run(main)


def test_a_taken_port_is_named(tmp_path: Path) -> None:
    async def main() -> None:
        with socket.socket() as taken, Identity.ephemeral(tmp_path) as identity:
            taken.bind(("127.0.0.1", 0))
            taken.listen()
            port = taken.getsockname()[1]
            with pytest.raises(ResourceError, match=f"port {port} is taken"):
                await Libp2pTransport.start(identity, Libp2pSettings(listen=(f"/ip4/127.0.0.1/tcp/{port}",)))

    run(main)


def test_two_daemons_never_share_a_port(tmp_path: Path) -> None:
    listen = (f"/ip4/127.0.0.1/tcp/{free_port()}",)

    async def main() -> None:
        async with loopback_transport(tmp_path, listen=listen):
            with pytest.raises(ResourceError, match="is taken"):
                async with loopback_transport(tmp_path, listen=listen):
                    pass
        async with loopback_transport(tmp_path, listen=listen):  # free again at once
            pass

    run(main)


def fake_daemon(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> None:
    path = tmp_path / "p2pd"
    path.write_text(f"#!/bin/sh\necho x >> {tmp_path}/starts\n{script}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(daemon_module, "_binary", lambda: str(path))


@pytest.mark.parametrize(
    ("script", "reason"),
    [("echo the disk is on fire; exit 3", "the disk is on fire"), ("echo hm; exec sleep 60", "no answer.*hm")],
)
def test_a_daemon_that_does_not_start_is_tried_three_times_and_its_words_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, reason: str
) -> None:
    fake_daemon(tmp_path, monkeypatch, script)

    async def main() -> None:
        with Identity.ephemeral(tmp_path) as identity, pytest.raises(ResourceError, match=reason):
            await Libp2pTransport.start(identity, Libp2pSettings(listen=LOOPBACK, startup_timeout_seconds=0.5))

    run(main)
    assert (tmp_path / "starts").read_text().count("x") == 3


def test_a_daemon_that_fails_once_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = daemon_module._binary()
    fake_daemon(tmp_path, monkeypatch, f'[ $(wc -l < {tmp_path}/starts) -ge 2 ] && exec {real} "$@"; exit 1')

    async def main() -> None:
        async with loopback_transport(tmp_path) as (identity, transport):
            assert transport.peer_id == identity.peer_id

    run(main)


def test_a_killed_daemon_is_noticed_and_can_be_replaced(tmp_path: Path) -> None:
    async def main() -> None:
        reasons: list[str] = []
        async with loopback_transport(tmp_path) as (_, b), loopback_transport(tmp_path) as (identity, a):
            await b.serve(ECHO, echo)
            a.on_lost(reasons.append)
            peer = await a.connect(await b.addresses(), 10)
            stream = await a.open(peer, ECHO, 10)
            reading = asyncio.create_task(stream.read(1))
            os.kill(a.daemon.process_id, signal.SIGKILL)
            async with asyncio.timeout(5):
                with pytest.raises(PeerLostError):
                    await reading
                await a.lost.wait()
            assert len(reasons) == 1
            assert "signal 9" in reasons[0]
            with pytest.raises(PeerLostError):
                await stream.write(b"x")
            with pytest.raises(PeerUnreachableError, match="signal 9"):
                await a.open(peer, ECHO, 10)
            with pytest.raises(TemporaryError):
                await a.addresses()
            await a.close()
            replacement = await Libp2pTransport.start(identity, Libp2pSettings(listen=LOOPBACK))
            again = await replacement.open(await replacement.connect(await b.addresses(), 10), ECHO, 10)
            await again.write(b"y")
            assert await again.read(1) == b"y"
            await replacement.close()

    run(main)


@pytest.mark.parametrize("mode", ["alone", "fork"])
def test_no_daemon_survives_its_killed_owner(tmp_path: Path, mode: str) -> None:
    """With ``fork``, a child (as a data loader's worker) lives on and must not hold daemon, streams or identity."""
    key = tmp_path / "peer.key"

    async def main() -> None:
        async with loopback_transport(tmp_path) as (_, transport):
            with peer_process(PEER, str(key), mode) as (process, told):
                try:
                    stream = await transport.open(await transport.connect(told["addresses"], 10), ECHO, 10)
                    await stream.write(b"x")
                    assert await stream.read(1) == b"x"
                    process.kill()
                    await asyncio.to_thread(process.wait)
                    async with asyncio.timeout(5):
                        with pytest.raises(PeerLostError):
                            await stream.read(1)
                    stream.abort()
                    await asyncio.to_thread(wait_until, lambda: not is_alive(told["daemon"]), 5)
                    if mode == "fork":
                        assert is_alive(told["child"])
                    Identity.create_or_load(key).close()
                finally:
                    if told["child"]:
                        os.kill(told["child"], signal.SIGKILL)
        async with loopback_transport(tmp_path):
            assert not os.path.exists(told["directory"])  # noqa: ASYNC240 - the next peer cleans up after the killed one

    run(main)


def test_a_forked_child_has_no_descriptor_of_the_daemons_sockets(tmp_path: Path) -> None:
    async def main() -> None:
        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            await b.serve(ECHO, echo)
            stream = await a.open(await a.connect(await b.addresses(), 10), ECHO, 10)
            read_end, write_end = os.pipe()
            child = os.fork()
            if child == 0:
                os.write(write_end, str(len(_daemon_sockets(str(a.daemon.directory)))).encode())
                os._exit(0)
            await asyncio.to_thread(os.waitpid, child, 0)
            assert os.read(read_end, 10) == b"0"
            os.close(read_end)
            os.close(write_end)
            assert _daemon_sockets(str(a.daemon.directory))
            await stream.write(b"x")
            assert await stream.read(1) == b"x"
            stream.abort()

    run(main)


def _daemon_sockets(directory: str) -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        try:
            with socket.socket(fileno=os.dup(int(name))) as copy:
                ends = f"{copy.getsockname()} {copy.getpeername()}"
        except OSError:
            continue
        if directory in ends:
            found.append(name)
    return found


@pytest.mark.parametrize("on_uvloop", [False, True])
def test_it_runs_on_a_loop_of_another_thread(tmp_path: Path, on_uvloop: bool) -> None:
    outcome: list[Any] = []

    async def main() -> None:
        async with loopback_transport(tmp_path) as (_, a), loopback_transport(tmp_path) as (_, b):
            outcome.append(await a.connect(await b.addresses(), 10) == b.peer_id)

    thread = threading.Thread(target=run, args=(main, on_uvloop))
    thread.start()
    thread.join()
    assert outcome == [True]


def test_a_private_peer_is_reached_through_its_relay_at_once(tmp_path: Path) -> None:
    async def main() -> None:
        async with loopback_transport(tmp_path, relay=True, force_reachability="public") as (_, relay):
            relays = tuple(await relay.addresses())
            settings = {"bootstrap": relays, "trusted_relays": relays, "force_reachability": "private"}
            async with loopback_transport(tmp_path, **settings) as (_, a), loopback_transport(tmp_path) as (_, b):
                await a.serve(ECHO, echo)

                async def reserved() -> bool:
                    return await a.reachability() == "relay"

                await eventually(reserved, 10)
                relayed = [address for address in await a.addresses() if "/p2p-circuit/" in address]

                async def echoes() -> bool:
                    # A relayed connection may be replaced by a direct one, which breaks its streams.
                    try:
                        assert await b.connect(relayed, 5) == a.peer_id
                        stream = await b.open(a.peer_id, ECHO, 5)
                        await stream.write(b"x")
                        answer = await stream.read(1)
                    except PeerError:
                        return False
                    stream.abort()
                    return answer == b"x"

                await eventually(echoes, 15)

    run(main)


def test_settings_refuse_what_is_not_an_address() -> None:
    with pytest.raises(LinkError, match="not a multiaddr"):
        Libp2pSettings(listen=("127.0.0.1:4001",))
    with pytest.raises(LinkError, match="does not end in /p2p"):
        Libp2pSettings(bootstrap=("/ip4/127.0.0.1/tcp/4001",))


def test_nothing_speaks_to_the_gateway_unless_asked() -> None:
    arguments = Libp2pSettings().daemon_arguments("key")
    assert {"-natPortMap=0", "-autonat=0", "-relayService=0", "-autoRelay=0", "-relayDiscovery=0"} <= set(arguments)
    assert not any(argument.startswith(("-b", "-bootstrapPeers")) for argument in arguments)
