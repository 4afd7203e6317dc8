"""What spot checks cost: rounds of the same size with and without them, in turn, as real processes.

On loopback, where a round is nothing but work; or with ``--rate`` over links of that rate, in network namespaces.
"""

from __future__ import annotations

import argparse
import contextlib
import statistics
import time

from benchmarks.bench_round import SETTLE_SECONDS
from benchmarks.namespaces import LimitedNetwork, why_unavailable
from benchmarks.swarms import P2PTrainSwarm, Place, Setup
from benchmarks.workers import memory_of_round
from p2ptrain.codecs import codec_names


def main() -> None:
    """Measure one size, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--peers", type=int, default=2)
    parser.add_argument("--values", type=int, default=10_000_000)
    parser.add_argument("--codec", choices=codec_names(), default="int8")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--checks", type=int, default=4)
    parser.add_argument("--rate", type=float, metavar="MBIT", help="Mbit/s of each peer's link; needs root")
    parser.add_argument("--log", metavar="FILE", help="where the peers' error output goes")
    arguments = parser.parse_args()
    if arguments.rate is not None and (why := why_unavailable()):
        parser.error(f"--rate: {why}")
    with contextlib.ExitStack() as running:
        places: tuple[Place, ...] = ()
        if arguments.rate is not None:
            network = running.enter_context(LimitedNetwork(arguments.peers))
            network.limit(1e6 * arguments.rate)
            places = network.places
        compare(arguments, places)


def compare(arguments: argparse.Namespace, places: tuple[Place, ...]) -> None:
    """Rounds of both kinds of peers, which run in these places."""
    setups = {
        checks: Setup(
            arguments.peers, arguments.values, arguments.codec, places=places, spot_checks=checks, log=arguments.log
        )
        for checks in (0, arguments.checks)
    }
    peaks = {}
    for checks, setup in setups.items():
        with P2PTrainSwarm(setup) as alone:
            for _ in range(3):
                alone.round()
            time.sleep(SETTLE_SECONDS)
            memory = memory_of_round(alone, alone.round)
            peaks[checks] = (memory.peak - memory.rest) / arguments.peers
    seconds: dict[int, list[float]] = {checks: [] for checks in setups}
    cpu: dict[int, list[float]] = {checks: [] for checks in setups}
    with P2PTrainSwarm(setups[0]) as without, P2PTrainSwarm(setups[arguments.checks]) as with_checks:
        for swarm in (without, with_checks):
            swarm.round()
        for number in range(arguments.rounds):
            pair = [(0, without), (arguments.checks, with_checks)]
            for checks, swarm in pair if number % 2 else pair[::-1]:
                time.sleep(SETTLE_SECONDS)
                result = swarm.round()
                seconds[checks].append(result.seconds)
                cpu[checks].append(result.cpu_seconds / arguments.peers)
    for checks in setups:
        print(
            f"{checks} checks: {1e3 * statistics.median(seconds[checks]):.0f} ms a round, "
            f"{1e3 * statistics.median(cpu[checks]):.0f} ms CPU and {peaks[checks] / 1e6:.1f} MB above rest a peer"
        )
    ratios = sorted(on / off for on, off in zip(seconds[arguments.checks], seconds[0], strict=True))
    middle = ratios[len(ratios) // 4 : -len(ratios) // 4]
    cpu_ratio = statistics.median(cpu[arguments.checks]) / statistics.median(cpu[0])
    print(
        f"with / without: {statistics.median(ratios):.3f} (half of the pairs: {middle[0]:.3f} to {middle[-1]:.3f}), "
        f"CPU {cpu_ratio:.3f}"
    )


if __name__ == "__main__":
    main()
