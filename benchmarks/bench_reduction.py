"""What an owner's share of a round costs under each rule: CPU of one thread, from arrival to the encoded result.

One owner's part in a round of so many values: it checks and measures the others' parts, reduces and encodes. Ratios are
to plain mean without the norms that every rule takes in a group of three or more.

    python -m benchmarks.bench_reduction --json results/reduction.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable

import torch

from benchmarks.harness import Measured, alternate, report, thread_seconds
from p2ptrain.averaging.vector import reduce as reduction
from p2ptrain.averaging.vector.chunks import cut
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

RULES = ("mean", "norm_clip", "centered_clip", "trimmed", "median")
BARE = "mean, no norms"


def own_share(rule: str, codec_name: str, own: torch.Tensor, encoded: bytearray, peers: int) -> Callable[[], None]:
    """One owner's work, from the others' parts (all with the same bytes, which costs the same) to the result."""
    is_bare, codec, size = rule == BARE, get_codec(codec_name), len(own)
    spec = AveragingSpec.model_validate({"codec": codec_name, "aggregation": "mean" if is_bare else rule})
    runtime, everybody = Runtime(random.Random(0)), list(range(peers))

    def work() -> None:
        share = OwnShare(codec, spec, own, 0, 1 if is_bare else peers)
        share.measure_own()
        for index in everybody[1:]:
            check = share.new_check(codec)
            for low, high in cut(size, codec.block_size):
                check(memoryview(encoded)[codec.encoded_bytes(low) : codec.encoded_bytes(high)], low, high)
            share.add(index, encoded, check)
        share.judge()
        mean = EncodedStream(bytearray(codec.encoded_bytes(size)))
        asyncio.run(share.reduce(runtime, everybody, [1000] * peers, mean))

    return work


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000, help="values in the whole vector")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16], help="sizes of the group")
    parser.add_argument("--codec", default="int8", help="codec of parts and result")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows, results = [], {}
    codec, step = get_codec(arguments.codec), reduction.STACK_VALUES
    for peers in arguments.peers:
        size = max(step, arguments.values // peers // step * step)
        own = torch.randn(size, generator=torch.Generator().manual_seed(peers))
        encoded = codec.encode(own)
        names = (BARE, *RULES)
        found = alternate(
            {name: thread_seconds(own_share(name, arguments.codec, own, encoded, peers)) for name in names},
            arguments.repeats,
        )
        bare = found[BARE].median
        results[str(peers)] = {name: measured.to_json() for name, measured in found.items()}

        def cell(measured: Measured, bare: float = bare) -> str:
            return f"{1e3 * measured.median:.0f} ms x {measured.median / bare:.2f}"

        rows.append((f"{peers} peers", *(cell(measured) for measured in found.values())))
    title = f"CPU of an owner's share, {arguments.values:,} values in all, {arguments.codec}"
    report(title, ("group", BARE, *RULES), rows, results, arguments.json)


if __name__ == "__main__":
    main()
