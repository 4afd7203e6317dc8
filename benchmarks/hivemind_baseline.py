"""The yardstick: rounds of ``hivemind.averaging.DecentralizedAverager`` between real processes on loopback.

Each peer is a process with a DHT and an averager (which fork processes of their own), averaging one fp32 vector with
hivemind's fastest 8-bit codec, ``Uniform8BitQuantization``. What is timed excludes matchmaking: every peer calls
``step(wait=False, require_trigger=True)``, which finds the group and then waits at stage ``AWAITING_TRIGGER``; once all
are there, the parent says go, each calls ``allow_allreduce()``, and the round ends when the last has its result.

    python -m benchmarks.hivemind_baseline --peers 2 --json results/hivemind.json
"""

from __future__ import annotations

import argparse
import hashlib
import json
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from benchmarks.harness import Measured, cpu_seconds, report
from benchmarks.workers import Workers, memory_of_round

if TYPE_CHECKING:
    import torch

START_SECONDS = 90.0
ROUND_SECONDS = 90.0


@dataclass(frozen=True)
class Round:
    """One round of all peers: sums over their processes, errors of the worst."""

    seconds: float
    cpu_seconds: float
    matchmaking_seconds: float


@dataclass(frozen=True)
class Check:
    """The relative L2 error of the worst replica, and whether all have the same bits."""

    relative_error: float
    replicas_equal: bool

    @classmethod
    def of(cls, answers: Sequence[dict[str, Any]]) -> Check:
        """From what all peers say of their own."""
        return cls(
            max(answer["relative_error"] for answer in answers), len({answer["sha256"] for answer in answers}) == 1
        )


@dataclass(frozen=True)
class Baseline:
    """What `measure` found; lists have one value for each timed round, sums are over all peers' processes."""

    peers: int
    num_values: int
    round_seconds: tuple[float, ...]
    cpu_seconds: tuple[float, ...]
    matchmaking_seconds: tuple[float, ...]
    idle_pss_bytes: int
    peak_pss_bytes: int
    relative_error: float
    replicas_equal: bool


class HivemindSwarm(Workers):
    """Peers with an averager each, ready for rounds."""

    def __init__(self, peers: int, num_values: int, log: str | None = None) -> None:
        super().__init__("benchmarks.hivemind_baseline", log)
        self._common = ["--peers", str(peers), "--values", str(num_values)]
        self._num_peers = peers

    def begin(self) -> None:
        addresses = self.start("--worker", "0", *self._common).hear(START_SECONDS)["addresses"]
        for index in range(1, self._num_peers):
            self.start("--worker", str(index), *self._common, "--initial", *addresses)
        for worker in self.all[1:]:
            worker.hear(START_SECONDS)

    def round(self) -> Round:
        """One round of all peers.

        Raises:
            RuntimeError: A peer failed or took too long.
        """
        started = time.monotonic()
        self.tell_all("form")
        if not all(answer["formed"] for answer in self.hear_all(ROUND_SECONDS)):
            raise RuntimeError("hivemind formed no group; run with --log FILE to see why")
        processes = self.processes()
        cpu_before, go = cpu_seconds(processes), time.monotonic()
        self.tell_all("go")
        answers = self.hear_all(ROUND_SECONDS)
        cpu = cpu_seconds(processes) - cpu_before
        return Round(
            # CLOCK_MONOTONIC is one clock for all processes of a machine.
            seconds=max(answer["finished"] for answer in answers) - go,
            cpu_seconds=cpu,
            matchmaking_seconds=go - started,
        )

    def check(self) -> Check:
        """How good the mean is; meaningful after the first round."""
        self.tell_all("check")
        return Check.of(self.hear_all(ROUND_SECONDS))


def measure(peers: int = 2, num_values: int = 10_000_000, rounds: int = 5, log: str | None = None) -> Baseline:
    """Run ``rounds`` timed rounds after one to warm up, and one more while memory is sampled; end all processes.

    Raises:
        RuntimeError: A peer failed or took too long.
    """
    with HivemindSwarm(peers, num_values, log) as swarm:
        swarm.round()
        first = swarm.check()
        timed = [swarm.round() for _ in range(rounds)]
        idle, peak = memory_of_round(swarm, swarm.round)
    return Baseline(
        peers=peers,
        num_values=num_values,
        round_seconds=tuple(one.seconds for one in timed),
        cpu_seconds=tuple(one.cpu_seconds for one in timed),
        matchmaking_seconds=tuple(one.matchmaking_seconds for one in timed),
        idle_pss_bytes=idle,
        peak_pss_bytes=peak,
        relative_error=first.relative_error,
        replicas_equal=first.replicas_equal,
    )


def patch_decoder() -> None:
    """Let hivemind 1.1.12 decode with NumPy 2.4, where ``int`` of a one-element array is an error.

    The original, with ``.item()``: an int64 codebook size, the codebook, and one index a value.
    """
    import numpy as np
    import torch
    from hivemind.compression import quantization

    def extract(self: Any, serialized_tensor: Any) -> Any:
        data = serialized_tensor.buffer
        size = np.frombuffer(data, count=1, dtype=np.int64).item()
        # Copies only because torch warns of read-only arrays; the codebook has 256 entries.
        codebook = torch.from_numpy(np.frombuffer(data, offset=8, count=size, dtype=self.codebook_dtype).copy())
        indices = np.frombuffer(data, offset=8 + 4 * size, dtype=self.indices_dtype).astype(np.int64)
        decoded = codebook[torch.from_numpy(indices).reshape(tuple(serialized_tensor.size))]
        return decoded.requires_grad_(serialized_tensor.requires_grad)

    quantization.Quantization.extract = extract  # type: ignore[method-assign, unused-ignore]


def initial_vector(peer: int, num_values: int) -> torch.Tensor:
    """What a peer starts with; the same in all contenders."""
    import torch

    return torch.randn(num_values, generator=torch.Generator().manual_seed(peer))


def error_of_mean(result: torch.Tensor, num_peers: int) -> float:
    """Relative L2 distance between ``result`` and the mean of the peers' initial vectors."""
    mean = initial_vector(0, len(result))
    for peer in range(1, num_peers):
        mean.add_(initial_vector(peer, len(result)))
    mean.div_(num_peers)
    return float(mean.sub(result).norm() / mean.norm())


def serve(index: int, peers: int, num_values: int, initial: Sequence[str]) -> None:
    """One peer: answers ``form``, ``go`` and ``check`` on stdin until it closes."""
    import hivemind
    from hivemind.averaging import DecentralizedAverager
    from hivemind.averaging.control import AveragingStage
    from hivemind.compression import Uniform8BitQuantization
    from hivemind.p2p import P2P

    patch_decoder()
    # Sockets go to the parent's folder, not to /tmp: daemons that are killed leave them behind.
    P2P._UNIX_SOCKET_PREFIX = f"/unix{tempfile.gettempdir()}/hivemind-"
    mine = initial_vector(index, num_values)
    dht = hivemind.DHT(
        initial_peers=list(initial),
        start=True,
        host_maddrs=["/ip4/127.0.0.1/tcp/0"],
        nat_port_map=False,
        auto_nat=False,
        use_relay=False,
    )
    averager = DecentralizedAverager(
        [mine],
        dht,
        start=True,
        prefix="baseline",
        target_group_size=peers,
        min_group_size=peers,
        min_matchmaking_time=2.0,
        request_timeout=1.0,
        compression=Uniform8BitQuantization(),
        allreduce_timeout=ROUND_SECONDS,
    )
    _say(addresses=[str(address) for address in dht.get_visible_maddrs()])
    step: Any = None
    for line in sys.stdin:
        if line.strip() == "form":
            step = averager.step(wait=False, require_trigger=True, timeout=ROUND_SECONDS)
            while step.stage != AveragingStage.AWAITING_TRIGGER and not step.done():
                time.sleep(0.01)
            _say(formed=not step.done())
        elif line.strip() == "go":
            step.allow_allreduce()
            group = step.result(timeout=ROUND_SECONDS)
            _say(finished=time.monotonic(), members=len(group))
        elif line.strip() == "check":
            with averager.get_tensors() as (result,):
                digest = hashlib.sha256(result.numpy().data).hexdigest()
                _say(relative_error=error_of_mean(result, peers), sha256=digest)
    averager.shutdown()
    dht.shutdown()


def _say(**answer: object) -> None:
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=int, default=2, help="processes that average together")
    parser.add_argument("--values", type=int, default=10_000_000, help="fp32 values in the vector")
    parser.add_argument("--rounds", type=int, default=5, help="timed rounds")
    parser.add_argument("--log", metavar="FILE", help="where the peers' error output goes")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    parser.add_argument("--worker", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--initial", nargs="*", default=[], help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that `measure` ends what it started
    if arguments.worker is not None:
        serve(arguments.worker, arguments.peers, arguments.values, arguments.initial)
        return
    found = measure(arguments.peers, arguments.values, arguments.rounds, arguments.log)
    seconds, cpu = Measured(found.round_seconds), Measured(found.cpu_seconds)
    rows = [
        ("round, without matchmaking (s)", f"{seconds.median:.3f}", f"±{100 * seconds.spread:.0f} %"),
        ("CPU of all processes in a round (s)", f"{cpu.median:.2f}", f"±{100 * cpu.spread:.0f} %"),
        ("matchmaking before it (s)", f"{Measured(found.matchmaking_seconds).median:.2f}", ""),
        ("PSS of all processes, idle (MB)", f"{found.idle_pss_bytes / 1e6:.0f}", ""),
        ("PSS of all processes, peak (MB)", f"{found.peak_pss_bytes / 1e6:.0f}", ""),
        ("relative L2 error of the first mean", f"{100 * found.relative_error:.2f} %", ""),
        ("replicas equal after it", "yes" if found.replicas_equal else "no", ""),
    ]
    title = f"hivemind DecentralizedAverager, Uniform8Bit, {found.peers} peers, {found.num_values:,} values"
    report(title, ("", "median", "spread"), rows, asdict(found), arguments.json)


if __name__ == "__main__":
    main()
