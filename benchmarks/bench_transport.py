"""How fast bytes move between two peers, and what they cost: through daemons, directly, and by other means.

Two processes on loopback move megabytes one way and both ways, in turn:

* ``daemons``: a stream through both daemons
* ``direct``: the same through a direct connection (`p2ptrain.network.libp2p.direct`)
* ``tcp``: plain TCP on the event loop, for comparison

They also open streams one after the other, each for one byte and its answer: the third kind is ``spare``, direct
connections that are used again.

CPU seconds are those of all processes, daemons included. `benchmarks.bench_direct` compares ways to encrypt.

    python -m benchmarks.bench_transport --json results/transport.json
    python -m benchmarks.bench_transport --quick
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Sequence
from functools import partial
from typing import Protocol

import uvloop

from benchmarks.answers import hear, say
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments, cpu_seconds, paired
from benchmarks.peers import LoopbackPeer, loopback_peer
from benchmarks.workers import Workers
from p2ptrain.errors import PeerLostError
from p2ptrain.network.libp2p.socket_stream import SocketStream
from p2ptrain.network.transport import Stream

START_SECONDS = 60.0
TURN_SECONDS = 120.0
PIECE_BYTES = 1 << 20
KINDS = ("daemons", "direct", "tcp")
WAYS = {"one way": 1, "both ways": 2}
SETUPS = 50
GOAL = 1.5
"""Speed of a direct connection, of a stream through both daemons."""


class Pipe(Protocol):
    """The methods that streams and sockets share."""

    async def write(self, *parts: bytes | bytearray | memoryview) -> None: ...
    async def read(self, num_bytes: int) -> bytes: ...
    async def read_into(self, view: memoryview) -> None: ...


def measure(megabytes: int, turns: int, log: str | None) -> Section:
    """MB/s and CPU seconds per GB of every kind and way, and the CPU milliseconds of setting up a direct connection.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    values: dict[str, dict[str, list[float]]] = {}
    with Workers("benchmarks.bench_transport", log) as workers:
        for _ in range(2):
            workers.start("--worker", "--megabytes", str(megabytes))
        workers.tell_all(json.dumps(workers.hear_all(START_SECONDS)))
        workers.hear_all(START_SECONDS)
        workers.tell_all(json.dumps([one["port"] for one in workers.hear_all(START_SECONDS)]))
        processes, first = workers.processes(), workers.all[0]

        def timed(command: str) -> tuple[float, float]:
            before = cpu_seconds(processes)
            first.tell(command)
            return float(first.hear(TURN_SECONDS)["seconds"]), cpu_seconds(processes) - before

        for turn in range(-1, turns):
            for kind in KINDS:
                for way, directions in WAYS.items():
                    seconds, cpu = timed(f"{kind} {directions}")
                    moved = directions * megabytes * PIECE_BYTES
                    found = values.setdefault(f"{kind}, {way}", {"mb_per_second": [], "cpu_seconds_per_gb": []})
                    if turn >= 0:
                        found["mb_per_second"].append(moved / seconds / 1e6)
                        found["cpu_seconds_per_gb"].append(cpu / moved * 1e9)
            for kind in ("daemons", "direct", "spare"):
                seconds, cpu = timed(f"{kind} 0")
                found = values.setdefault(f"{kind}, {SETUPS} small streams", {"ms": [], "cpu_ms": []})
                if turn >= 0:
                    found["ms"].append(seconds / SETUPS * 1e3)
                    found["cpu_ms"].append(cpu / SETUPS * 1e3)
    return compare(
        megabytes, {name: {unit: Measured(tuple(v)) for unit, v in found.items()} for name, found in values.items()}
    )


def compare(megabytes: int, found: dict[str, dict[str, Measured]]) -> Section:
    """Compare direct connections with streams through the daemons."""
    section = Section(
        f"{megabytes} MiB between two processes on loopback",
        ("", "speed", "CPU of all processes"),
        results={name: {unit: one.to_json() for unit, one in both.items()} for name, both in found.items()},
    )
    for name, both in found.items():
        units = (f"{one.median:.2f} {unit.replace('_', ' ')} ±{100 * one.spread:.0f} %" for unit, one in both.items())
        section.rows.append((name, *units))
    for way in WAYS:
        direct, daemons = found[f"direct, {way}"], found[f"daemons, {way}"]
        speed, cpu = (paired(direct[unit], daemons[unit]).median for unit in ("mb_per_second", "cpu_seconds_per_gb"))
        section.findings += [
            Finding(f"speed of direct connections, {way}", speed, "the daemons'", GOAL, at_least=True),
            Finding(f"CPU a byte of direct connections, {way}", cpu, "the daemons'"),
        ]
    for unit, what in (("ms", "time"), ("cpu_ms", "CPU")):
        spare, through = (found[f"{kind}, {SETUPS} small streams"][unit] for kind in ("spare", "daemons"))
        section.findings.append(
            Finding(f"{what} of a small stream, spare", paired(spare, through).median, "the daemons'")
        )
    return section


async def serve(megabytes: int) -> None:
    """One of the two processes; the first moves what it is told on stdin."""
    loop = asyncio.get_running_loop()
    num_bytes = megabytes * PIECE_BYTES
    async with loopback_peer() as peer:
        await peer.transport.serve("/benchmark/1", lambda stream: _answer(stream, num_bytes, 1))
        await peer.transport.serve("/benchmark/2", lambda stream: _answer(stream, num_bytes, 2))
        await peer.transport.serve("/benchmark/0", _answer_small)
        await peer.rpc.start()
        other = next(one for one in await peer.meet() if one != peer.rpc.peer_id)
        tasks: set[asyncio.Task[None]] = set()

        def on_connected(stream: SocketStream) -> None:
            async def answer() -> None:
                await _answer(stream, num_bytes, (await stream.read(1))[0])
                stream.abort()

            tasks.add(task := asyncio.create_task(answer()))
            task.add_done_callback(tasks.discard)

        tcp = await loop.create_server(lambda: SocketStream(on_connected), "127.0.0.1", 0)
        say(port=(port := tcp.sockets[0].getsockname()[1]))
        theirs = next(one for one in json.loads(await hear()) if one != port)
        while command := await hear():
            kind, directions = command.split()
            started = time.monotonic()
            if kind == "tcp":
                _, tcp_stream = await loop.create_connection(SocketStream, "127.0.0.1", theirs)
                await tcp_stream.write(bytes([int(directions)]))
                await _move(tcp_stream, num_bytes, int(directions))
                tcp_stream.abort()
            elif directions == "0":
                await _small_streams(peer, other, kind)
            else:
                pipe = await _open(peer, other, kind, directions)
                await _move(pipe, num_bytes, int(directions))
                await pipe.close()
            say(seconds=time.monotonic() - started)
        tcp.close()


async def _open(peer: LoopbackPeer, other: str, kind: str, name: str) -> Stream | SocketStream:
    """A stream through the daemons, or on a direct connection: a spare one if there is any."""
    if kind == "daemons":
        return await peer.transport.control.open_stream(other, f"/benchmark/{name}")
    return await peer.transport.open(other, f"/benchmark/{name}", TURN_SECONDS, expected_bytes=1 << 30)


async def _small_streams(peer: LoopbackPeer, other: str, kind: str) -> None:
    for _ in range(SETUPS):
        pipe = await _open(peer, other, kind, "0")
        await pipe.write(b"r" if kind == "spare" else b"c")
        await pipe.read(1)
        if kind == "spare" and isinstance(pipe, Stream):
            await pipe.rest()
        else:
            await pipe.close()


async def _answer_small(stream: Stream) -> None:
    is_kept = await stream.read(1) == b"r"
    await stream.write(b".")
    if is_kept:
        await stream.rest()
    else:
        with contextlib.suppress(PeerLostError):
            await stream.read(1)  # until the other end goes


async def _move(pipe: Pipe, num_bytes: int, directions: int) -> None:
    """The opener's end: write, read as much where both ways are measured, and hear that all has arrived."""
    async with asyncio.timeout(TURN_SECONDS), asyncio.TaskGroup() as group:
        group.create_task(_write(pipe, num_bytes))
        group.create_task(_read(pipe, num_bytes if directions == 2 else 0))
    await pipe.read(1)


async def _answer(pipe: Pipe, num_bytes: int, directions: int) -> None:
    async with asyncio.TaskGroup() as group:
        group.create_task(_read(pipe, num_bytes))
        group.create_task(_write(pipe, num_bytes if directions == 2 else 0))
    await pipe.write(b".")
    with contextlib.suppress(PeerLostError, OSError, EOFError):
        await pipe.read(1)  # until the other end goes


async def _write(pipe: Pipe, num_bytes: int) -> None:
    piece = bytes(PIECE_BYTES)
    for _ in range(num_bytes // PIECE_BYTES):
        await pipe.write(piece)


async def _read(pipe: Pipe, num_bytes: int) -> None:
    piece = memoryview(bytearray(PIECE_BYTES))
    for _ in range(num_bytes // PIECE_BYTES):
        await pipe.read_into(piece)


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = arguments(__doc__, "32 MiB, 2 turns")
    parser.add_argument("--megabytes", type=int, default=256, help="MiB to move in each direction")
    parser.add_argument("--turns", type=int, default=7, help="measurements of each")
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.worker:
        uvloop.run(serve(options.megabytes))
        return 0
    if options.quick:
        options.megabytes, options.turns = 32, 2
    return run("transport", {"streams": partial(measure, options.megabytes, options.turns, options.log)}, options)


if __name__ == "__main__":
    sys.exit(main())
