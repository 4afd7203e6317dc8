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
import time
from collections.abc import Sequence

import torch
import uvloop

from benchmarks.answers import hear, say
from benchmarks.harness import Measured, exit_on_signals, report
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
RAW = "/benchmark/raw"
RAW_PIECE_BYTES = 256 * 1024


def measure(num_values: int, turns: int, warm_up: int, log: str | None) -> dict[str, Measured]:
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
    return {kind: Measured(tuple(values)) for kind, values in seconds.items()}


async def serve(role: str, num_values: int) -> None:
    """The source, or the newcomer that answers ``raw`` and ``download`` on stdin."""
    module = torch.nn.Module()
    module.weight = torch.nn.Parameter(torch.randn(num_values, generator=torch.Generator().manual_seed(1)))
    layout = Layout.from_module(module)
    async with loopback_peer() as peer:
        if role == "source":
            state = SharedState(module, layout, AverageStep(layout, 0.7))
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
                await _download(peer, source, layout.fingerprint)
            say(seconds=time.monotonic() - started)


async def _download(peer: LoopbackPeer, source: str, fingerprint: bytes) -> None:
    async with asyncio.timeout(TURN_SECONDS):
        admission = _Admission(await fetch_head(peer.rpc, source))
        await download_state(peer.rpc, lambda: [source], fingerprint, PartialDownload(), admission)


class _Admission:
    """Takes the chunks of one state; see `p2ptrain.training.sync.download.Admission`."""

    def __init__(self, head: Head) -> None:
        self._stamp = Stamp.of(head)

    def check_size(self, num_bytes: int) -> None:
        pass

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000, help="fp32 values in the state")
    parser.add_argument("--turns", type=int, default=15, help="measurements of each")
    parser.add_argument("--quick", action="store_true", help="3 measurements, and one before them")
    parser.add_argument("--log", metavar="FILE", help="where the processes' error output goes")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    parser.add_argument("--worker", choices=("source", "newcomer"), help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        torch.set_num_threads(1)
        uvloop.run(serve(options.worker, options.values))
        return
    exit_on_signals()  # so that `measure` ends what it started
    turns, warm_up = (3, 1) if options.quick else (options.turns, WARM_UP_TURNS)
    seconds = measure(options.values, turns, warm_up, options.log)
    ratio = Measured(
        tuple(raw / ours for raw, ours in zip(seconds["raw"].values, seconds["download"].values, strict=True))
    )
    rows = [
        (kind, f"{one.median:.3f}", f"±{100 * one.spread:.0f} %", f"{4 * options.values / one.median / 1e6:.0f}")
        for kind, one in seconds.items()
    ]
    rows.append(("download / raw, in speed", f"{ratio.median:.2f}", f"±{100 * ratio.spread:.0f} %", ""))
    results = {**{kind: one.to_json() for kind, one in seconds.items()}, "speed_ratio": ratio.to_json()}
    title = f"Download of a state of {options.values:,} fp32 values"
    report(title, ("", "seconds", "spread", "MB/s"), rows, results, options.json)


if __name__ == "__main__":
    main()
