"""How fast a newcomer downloads the swarm's state, against a raw stream of as many bytes.

Both between the same two processes and daemons, in turn. The download includes its negotiation, the verification of
every chunk against the digest, and putting it in place; the raw stream only reads and drops.

    python -m benchmarks.bench_download --json results/download.json
    python -m benchmarks.bench_download --quick
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import time
from collections.abc import Sequence
from functools import partial

import torch
import uvloop

from benchmarks.answers import hear, say
from benchmarks.findings import Finding, Section, run
from benchmarks.harness import Measured, arguments, paired
from benchmarks.peers import SWARM, LoopbackPeer, loopback_peer
from benchmarks.workers import Workers
from p2ptrain.averaging.protocol.certificate import Head, genesis
from p2ptrain.errors import IntegrityError
from p2ptrain.network.transport import Stream
from p2ptrain.training.state.layout import Layout
from p2ptrain.training.state.outer_optimizers import AverageStep
from p2ptrain.training.state.shared_state import SharedState, Stamp
from p2ptrain.training.sync.download import PartialDownload, download_state
from p2ptrain.training.sync.state_server import StateServer, fetch_head

START_SECONDS = 60.0
TURN_SECONDS = 120.0
WARM_UP_TURNS = 5
"""A virtual machine takes long to hand out memory that was never used."""
GOAL = 0.7
"""Of a raw stream's speed."""
RAW = "/benchmark/raw"
RAW_PIECE_BYTES = 256 * 1024


def measure(num_values: int, turns: int, warm_up: int, log: str | None) -> Section:
    """Seconds of ``turns`` downloads and raw streams in turn, after ``warm_up`` of each.

    Raises:
        RuntimeError: A process failed or took too long.
    """
    seconds: dict[str, list[float]] = {"raw": [], "download": []}
    with Workers("benchmarks.bench_download", log) as workers:
        for role in ("source", "newcomer"):
            workers.start("--worker", role, "--values", str(num_values))
        workers.tell_all(json.dumps(workers.hear_all(START_SECONDS)))
        workers.hear_all(START_SECONDS)
        newcomer = workers.all[1]
        for turn in range(-warm_up, turns):
            for kind, values in seconds.items():
                newcomer.tell(kind)
                value = newcomer.hear(TURN_SECONDS)["seconds"]
                if turn >= 0:
                    values.append(value)
    found = {kind: Measured(tuple(values)) for kind, values in seconds.items()}
    ratio = paired(found["raw"], found["download"])
    return Section(
        f"Download of a state of {num_values:,} fp32 values",
        ("", "seconds", "MB/s"),
        [(kind, one, f"{4 * num_values / one.median / 1e6:.0f}") for kind, one in found.items()],
        [Finding("speed", ratio.median, "a raw stream", GOAL, at_least=True, note=f"±{100 * ratio.spread:.0f} %")],
        {**{kind: one.to_json() for kind, one in found.items()}, "speed_ratio": ratio.to_json()},
    )


async def serve(role: str, num_values: int) -> None:
    """The source, or the newcomer that answers ``raw`` and ``download`` on stdin."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(num_values, generator=torch.Generator().manual_seed(1)))
    layout = Layout.from_module(module)
    state = SharedState(module, layout, AverageStep(layout, 0.7))
    async with loopback_peer() as peer:
        if role == "source":
            state.head = genesis(SWARM, state.tree().root)
            StateServer(peer.rpc, state)
            await peer.transport.serve(RAW, lambda stream: _send_raw(stream, 4 * num_values))
        await peer.rpc.start()
        source, _ = await peer.meet()
        while command := await hear():
            started = time.monotonic()
            if command == "raw":
                await _receive_raw(peer, source, 4 * num_values)
            else:
                await _download(peer, source, state)
            say(seconds=time.monotonic() - started)


async def _download(peer: LoopbackPeer, source: str, own: SharedState) -> None:
    async with asyncio.timeout(TURN_SECONDS):
        admission = _Admission(await fetch_head(peer.rpc, source))
        await download_state(peer.rpc, lambda: [source], own, PartialDownload(), admission)


class _Admission:
    """Takes the chunks of one state; see `p2ptrain.training.sync.download.Admission`."""

    def __init__(self, head: Head) -> None:
        self._stamp = Stamp.of(head)

    async def admit(self, source: str, stamp: Stamp) -> None:
        if stamp != self._stamp:
            raise IntegrityError("the source sent a chunk of another state")

    async def wait_for_turn(self) -> None:
        pass


async def _send_raw(stream: Stream, num_bytes: int) -> None:
    piece = bytes(RAW_PIECE_BYTES)
    for start in range(0, num_bytes, RAW_PIECE_BYTES):
        await stream.write(piece[: num_bytes - start])
    await stream.read(1)


async def _receive_raw(peer: LoopbackPeer, source: str, num_bytes: int) -> None:
    stream = await peer.transport.open(source, RAW, TURN_SECONDS)
    async with asyncio.timeout(TURN_SECONDS):
        for start in range(0, num_bytes, RAW_PIECE_BYTES):
            await stream.read(min(RAW_PIECE_BYTES, num_bytes - start))
    await stream.write(b".")
    await stream.close()


def main(given: Sequence[str] | None = None) -> int:
    """Measure and report."""
    parser = arguments(__doc__, "3 measurements, and one before them")
    parser.add_argument("--values", type=int, default=10_000_000, help="fp32 values in the state")
    parser.add_argument("--turns", type=int, default=15, help="measurements of each")
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    parser.add_argument("--worker", choices=("source", "newcomer"), help=argparse.SUPPRESS)
    options = parser.parse_args(given)
    if options.worker is not None:
        torch.set_num_threads(1)
        uvloop.run(serve(options.worker, options.values))
        return 0
    turns, warm_up = (3, 1) if options.quick else (options.turns, WARM_UP_TURNS)
    return run("download", {"state": partial(measure, options.values, turns, warm_up, options.log)}, options)


if __name__ == "__main__":
    sys.exit(main())
