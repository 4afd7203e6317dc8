"""Real peers for swarm tests: transports on loopback, peers in processes of their own, and waiting with a deadline."""

import asyncio
import contextlib
import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

from p2ptrain.network.identity import Identity
from p2ptrain.network.libp2p.transport import Libp2pSettings, Libp2pTransport
from p2ptrain.network.link import SwarmLink
from p2ptrain.network.transport import Stream, StreamHandler

ROOT = Path(__file__).parents[3]
LOOPBACK = ("/ip4/127.0.0.1/tcp/0",)
ECHO = "/test/echo"


RPC_SERVER = """
import asyncio, json, sys
from pathlib import Path
from p2ptrain.network.rpc.endpoint import Rpc
from p2ptrain.network.schema import Nothing
from p2ptrain.runtime import real_runtime
from tests.support.processes.daemons import loopback_transport

{handler}

async def main():
    async with loopback_transport() as (_, transport):
        rpc = Rpc(transport, real_runtime(), bytes([7]) * 32)
        rpc.{serve}("hang", Nothing, hang)
        await rpc.start()
        sys.stdout.write(json.dumps({{"addresses": await transport.addresses()}}) + "\\n")
        sys.stdout.flush()
        await asyncio.sleep(3600)

asyncio.run(main())
"""
"""For `peer_process`: a peer of the swarm of 32 bytes 7 that serves ``hang``, when it is told how."""


async def echo(stream: Stream) -> None:
    while True:
        await stream.write(await stream.read(1))


async def echoes(stream: Stream) -> bool:
    await stream.write(b"x")
    return await stream.read(1) == b"x"


def free_port() -> int:
    """A TCP port on loopback that nobody listens on, and that no connection gets before the caller listens there."""
    first_of_connections = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for port in random.SystemRandom().sample(range(10_000, first_of_connections), 100):
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
    raise AssertionError("no port is free")


def port_of(link: str) -> int:
    return int(SwarmLink.parse(link).addresses[0].split("/")[4])


@contextlib.contextmanager
def refusing(port: int) -> Iterator[None]:
    """Hold a TCP port on loopback once its owner is gone: connections are refused, and no other process gets it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # Connections of the owner may linger.

        def is_held() -> bool:
            with contextlib.suppress(OSError):
                holder.bind(("127.0.0.1", port))
                return True
            return False

        wait_until(is_held, 10.0)
        yield


def is_alive(process_id: int) -> bool:
    try:
        state = Path(f"/proc/{process_id}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state not in "ZX"


def is_stopped(process_id: int) -> bool:
    """Whether SIGSTOP has reached all threads of a process: some run on for a moment while its first one is woken."""
    stats = Path(f"/proc/{process_id}/task").glob("*/stat")
    return all(stat.read_text().rpartition(")")[2].split()[0] == "T" for stat in stats)


def wait_until(condition: Callable[[], bool], timeout_seconds: float = 60.0) -> None:
    """Poll until ``condition()`` holds; AssertionError when it does not within the time."""
    deadline = time.monotonic() + timeout_seconds
    while not condition():
        assert time.monotonic() < deadline, f"not so within {timeout_seconds} s"
        time.sleep(0.02)


async def eventually(condition: Callable[[], Awaitable[bool]], timeout_seconds: float = 60.0) -> None:
    """As `wait_until`, for a condition that is awaited."""
    deadline = time.monotonic() + timeout_seconds
    while not await condition():
        assert time.monotonic() < deadline, f"not so within {timeout_seconds} s"
        await asyncio.sleep(0.05)


@contextlib.asynccontextmanager
async def loopback_transport(
    key: Path | None = None, **settings: Any
) -> AsyncIterator[tuple[Identity, Libp2pTransport]]:
    """An identity, ephemeral unless its key is given, and its transport; at the end the daemon must be gone."""
    settings = {"listen": LOOPBACK, **settings}
    with Identity.create_or_load(key) if key is not None else Identity.ephemeral() as identity:
        transport = await Libp2pTransport.start(identity, Libp2pSettings(**settings))
        try:
            yield identity, transport
        finally:
            await transport.close()
            assert not is_alive(transport.daemon.process_id)
            assert not transport.daemon.directory.exists()


@contextlib.asynccontextmanager
async def connected(
    handler: StreamHandler = echo, **settings: Any
) -> AsyncIterator[tuple[Libp2pTransport, Libp2pTransport]]:
    """A transport that is connected to another one, which has these settings and serves `ECHO`."""
    async with loopback_transport() as (_, a), loopback_transport(**settings) as (_, b):
        await b.serve(ECHO, handler)
        await a.connect(await b.addresses(), 10)
        yield a, b


@contextlib.contextmanager
def peer_process(script: str, *arguments: str) -> Iterator[tuple[subprocess.Popen[str], dict[str, Any]]]:
    """Run ``script`` in a process of its own; yields it and the JSON object that it prints first. Killed at the end."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, f"the peer ended with status {process.wait()}"
        yield process, json.loads(line)
    finally:
        process.kill()
        process.communicate()
