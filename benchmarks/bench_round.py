"""One averaging round, p2ptrain against hivemind, as real processes on loopback.

Both average one fp32 vector a peer. The rounds of all contenders alternate in one run, so that ratios hold on a machine
whose speed drifts: p2ptrain for each codec, and hivemind's ``DecentralizedAverager`` with its fastest 8-bit codec (see
`benchmarks.hivemind_baseline`). A p2ptrain round is everything from the roster to the decoded mean: scatter, agreement
on contributors, reduction, gather, hashes, signatures, the certificate.
Memory is measured with one contender's processes alone.

    python -m benchmarks.bench_round --peers 2 --json results/round.json
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import signal
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import uvloop

from benchmarks.harness import Measured, cpu_seconds, report
from benchmarks.hivemind_baseline import Check, HivemindSwarm, Round, error_of_mean, initial_vector
from benchmarks.peers import SWARM, hear, loopback_peer, say
from benchmarks.workers import Workers, memory_of_round
from p2ptrain.averaging.averager import Averager, RoundOutcome
from p2ptrain.averaging.head import Head, genesis
from p2ptrain.averaging.membership import Membership
from p2ptrain.codecs import Codec, get_codec, warm_up
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.records import PeerRecord
from p2ptrain.runtime import Runtime

START_SECONDS = 60.0
ROUND_SECONDS = 90.0
SETTLE_SECONDS = 0.5
"""Between rounds, so that what the contender before still does afterwards does not slow the next."""
DIGEST = b"benchmark state".ljust(32, b".")
LAYOUT = b"benchmark layout".ljust(32, b".")


class P2PTrainSwarm(Workers):
    """Peers with an averager each that know of each other, ready for rounds."""

    def __init__(self, peers: int, num_values: int, codec: str, log: str | None = None) -> None:
        super().__init__("benchmarks.bench_round", log)
        self._arguments = ["--peers", str(peers), "--values", str(num_values), "--codecs", codec]
        self._num_peers = peers

    def begin(self) -> None:
        for index in range(self._num_peers):
            self.start("--worker", str(index), *self._arguments)
        self.tell_all(json.dumps(self.hear_all(START_SECONDS)))
        self.hear_all(START_SECONDS)

    def round(self) -> Round:
        """One round of all peers.

        Raises:
            RuntimeError: A peer failed or took too long.
        """
        processes = self.processes()
        cpu_before = cpu_seconds(processes)
        self.tell_all("go")
        answers = self.hear_all(ROUND_SECONDS)
        cpu = cpu_seconds(processes) - cpu_before
        if any(answer["contributors"] != self._num_peers for answer in answers):
            raise RuntimeError("a round went on without a peer; run with --log FILE to see why")
        return Round(
            seconds=max(answer["finished"] for answer in answers) - min(answer["matched"] for answer in answers),
            cpu_seconds=cpu,
            matchmaking_seconds=max(answer["matchmaking"] for answer in answers),
        )

    def check(self) -> Check:
        """How good the mean is; meaningful after the first round."""
        self.tell_all("check")
        return Check.of(self.hear_all(ROUND_SECONDS))


@dataclass(frozen=True)
class Contender:
    """What one contender showed: one value for each timed round; sums are over all peers' processes."""

    rounds: tuple[Round, ...]
    first: Check
    idle_pss_bytes: int
    peak_pss_bytes: int

    def measured(self, name: str) -> Measured:
        """All rounds' values of one field of `Round`."""
        return Measured(tuple(getattr(one, name) for one in self.rounds))

    def to_json(self) -> dict[str, Any]:
        """Plain values."""
        names = ("seconds", "cpu_seconds", "matchmaking_seconds")
        return {
            **{name: self.measured(name).to_json() for name in names},
            "relative_error": self.first.relative_error,
            "replicas_equal": self.first.replicas_equal,
            "idle_pss_bytes": self.idle_pss_bytes,
            "peak_pss_bytes": self.peak_pss_bytes,
        }


def measure(peers: int, num_values: int, codecs: Sequence[str], rounds: int, log: str | None) -> dict[str, Contender]:
    """Measure the memory of each contender alone, then ``rounds`` timed rounds of each in turn.

    Raises:
        RuntimeError: A peer failed or took too long.
    """
    makers: dict[str, Callable[[], HivemindSwarm | P2PTrainSwarm]] = {
        f"p2ptrain {codec}": partial(P2PTrainSwarm, peers, num_values, codec, log) for codec in codecs
    }
    makers["hivemind"] = partial(HivemindSwarm, peers, num_values, log)
    first: dict[str, Check] = {}
    memory: dict[str, tuple[int, int]] = {}
    for name, make in makers.items():
        alone = make()
        with alone:
            alone.round()
            first[name] = alone.check()
            alone.round()
            memory[name] = memory_of_round(alone, alone.round)
    timed: dict[str, list[Round]] = {name: [] for name in makers}
    with contextlib.ExitStack() as running:
        swarms = {name: make() for name, make in makers.items()}
        for swarm in swarms.values():
            running.enter_context(swarm)
        for turn in range(-1, rounds):
            for name, swarm in swarms.items():
                time.sleep(SETTLE_SECONDS)
                one = swarm.round()
                if turn >= 0:
                    timed[name].append(one)
    return {name: Contender(tuple(timed[name]), first[name], *memory[name]) for name in makers}


class Peer:
    """One peer inside its process."""

    def __init__(self, averager: Averager, index: int, num_peers: int, num_values: int, codec: Codec) -> None:
        self.averager = averager
        self._num_peers = num_peers
        self._codec = codec
        self._vector = initial_vector(index, num_values)

    async def round(self, runtime: Runtime) -> dict[str, float]:
        """Average, replace the vector by the mean, and move on to the next round."""
        outcome = await self.averager.average(self._vector, tokens=1000, samples=1)
        certified = time.monotonic()
        body = outcome.result.certificate.body
        await runtime.compute(self._decode, outcome)
        finished = time.monotonic()
        self.averager.history.add(outcome.result)
        self.averager.set_head(body.next_head(DIGEST, outcome.result.certificate.to_bytes()))
        return {
            "contributors": len(body.contributors),
            "matched": certified - outcome.transfer_seconds,
            "matchmaking": outcome.matchmaking_seconds,
            "finished": finished,
        }

    def _decode(self, outcome: RoundOutcome) -> None:
        bounds = outcome.result.certificate.body.bounds
        for index, encoded in enumerate(outcome.result.means):
            if encoded:
                self._codec.decode_into(encoded, self._vector[bounds[index] : bounds[index + 1]])

    def check(self) -> dict[str, Any]:
        """How far the vector is from the exact mean, and a hash to compare replicas by."""
        return {
            "relative_error": error_of_mean(self._vector, self._num_peers),
            "sha256": hashlib.sha256(self._vector.numpy().data).hexdigest(),
        }


async def serve(index: int, peers: int, num_values: int, codec_name: str) -> None:
    """One peer: answers ``go`` and ``check`` on stdin until it closes."""
    codec = get_codec(codec_name)
    async with loopback_peer() as here:
        rpc, runtime, signer = here.rpc, here.runtime, here.identity
        await runtime.compute(warm_up)
        head, membership = genesis(SWARM, DIGEST), Membership(rpc.peer_id, runtime)
        averager = Averager(
            rpc, runtime, signer, SWARM, AveragingSpec(codec=codec_name), codec, membership, head, num_values, LAYOUT
        )
        averager.matchmaker.participates = True
        await rpc.start()
        peer = Peer(averager, index, peers, num_values, codec)
        try:
            for other in await here.meet():
                membership.update(_record(other, head), sequence=1, expires_at=runtime.now() + 1e6)
            while command := await hear():
                say(**(await peer.round(runtime) if command == "go" else await runtime.compute(peer.check)))
        finally:
            await averager.close()


def _record(peer: str, head: Head) -> PeerRecord:
    return PeerRecord(
        peer=peer, name="benchmark", version="0", protocol=1, role="trainer", state="training", device="cpu", round=0,
        lineage=head.lineage, digest=head.digest, lineage_tokens=0, round_tokens=0, loss=None, tokens_per_second=0.0,
        bytes_sent=0, bytes_received=0, reachability="direct", addresses=(), started_at=0.0, last_rounds=(),
    )  # fmt: skip


def table(found: dict[str, Contender]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows: a column for each contender, with its ratio to hivemind."""
    names, theirs = list(found), found["hivemind"]

    def row(title: str, value: Callable[[Contender], float], text: Callable[[Contender], str]) -> list[str]:
        cells = [title]
        for name in names:
            ratio = "" if name == "hivemind" else f"  x {value(found[name]) / value(theirs):.2f}"
            cells.append(text(found[name]) + ratio)
        return cells

    def timed(title: str, name: str) -> list[str]:
        return row(
            title,
            lambda one: one.measured(name).median,
            lambda one: f"{one.measured(name).median:.3f} ±{100 * one.measured(name).spread:.0f} %",
        )

    def memory(title: str, name: str) -> list[str]:
        return row(title, lambda one: getattr(one, name), lambda one: f"{getattr(one, name) / 1e6:.0f}")

    rows = [
        timed("round, without matchmaking (s)", "seconds"),
        timed("matchmaking before it (s)", "matchmaking_seconds"),
        timed("CPU of all processes (s)", "cpu_seconds"),
        memory("PSS of all processes, idle (MB)", "idle_pss_bytes"),
        memory("PSS of all processes, peak (MB)", "peak_pss_bytes"),
        ["relative L2 error of the mean", *(f"{100 * one.first.relative_error:.3f} %" for one in found.values())],
        ["replicas bit-identical", *("yes" if one.first.replicas_equal else "no" for one in found.values())],
    ]
    return ["", *names], rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2, help="processes that average together")
    parser.add_argument("--values", type=int, default=10_000_000, help="fp32 values in the vector")
    parser.add_argument("--codecs", nargs="+", default=["int8", "fp32"], help="codecs of p2ptrain to measure")
    parser.add_argument("--rounds", type=int, default=7, help="timed rounds of each contender")
    parser.add_argument("--log", metavar="FILE", help="where the peers' error output goes")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.worker is not None:
        torch.set_num_threads(1)
        uvloop.run(serve(options.worker, options.peers, options.values, options.codecs[0]))
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `measure` ends what it started
    found = measure(options.peers, options.values, options.codecs, options.rounds, options.log)
    title = f"An averaging round of {options.peers} peers, {options.values:,} values"
    results = {name: contender.to_json() for name, contender in found.items()}
    report(title, *table(found), results, options.json)


if __name__ == "__main__":
    main()
