"""What an owner's share of a round costs under each rule: CPU of one thread, from arrival to the encoded result.

One owner's part in a round of so many values: it checks and measures the others' parts, reduces and encodes. Ratios are
to plain mean without the norms that every rule takes in a group of three or more.

    python -m benchmarks.bench_reduction --json results/reduction.json
"""

from __future__ import annotations

import asyncio
import random
import sys
from collections.abc import Callable, Sequence
from functools import partial

import torch

from benchmarks.findings import Finding, Section, run
from benchmarks.harness import alternate, arguments, thread_seconds
from p2ptrain.averaging.protocol.table import FULL_TRUST
from p2ptrain.averaging.vector import reduce as reduction
from p2ptrain.averaging.vector.chunks import cut
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.averaging.vector.rules import Claim
from p2ptrain.codecs import get_codec
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

RULES = ("mean", "norm_clip", "centered_clip", "trimmed", "median")
BARE = "mean, no norms"
GOAL = 1.1
"""Of the CPU of plain mean, for ``norm_clip``: both take norms."""


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
        share.judge([FULL_TRUST] * peers)
        mean = EncodedStream(bytearray(codec.encoded_bytes(size)))
        asyncio.run(share.reduce(runtime, everybody, [Claim(1000)] * peers, mean))

    return work


def compare(num_values: int, sizes: Sequence[int], codec_name: str, repeats: int) -> Section:
    """All rules in groups of all sizes."""
    names = (BARE, *RULES)
    section = Section(f"CPU of an owner's share, {num_values:,} values in all, {codec_name}", ("group", *names))
    codec, step = get_codec(codec_name), reduction.STACK_VALUES
    for peers in sizes:
        size = max(step, num_values // peers // step * step)
        own = torch.randn(size, generator=torch.Generator().manual_seed(peers))
        encoded = codec.encode(own)
        cases = {name: thread_seconds(own_share(name, codec_name, own, encoded, peers)) for name in names}
        found = alternate(cases, repeats)
        bare = found[BARE].median
        section.results[str(peers)] = {name: measured.to_json() for name, measured in found.items()}
        cells = (f"{1e3 * measured.median:.0f} ms x {measured.median / bare:.2f}" for measured in found.values())
        section.rows.append((f"{peers} peers", *cells))
        ratio = found["norm_clip"].median / found["mean"].median
        goal = GOAL if peers > 2 else None  # In a group of two, mean takes no norms.
        section.findings.append(Finding(f"CPU of norm_clip, {peers} peers", ratio, "mean", goal))
    return section


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "a million values, 2 and 8 peers, one measurement")
    parser.add_argument("--values", type=int, default=10_000_000, help="values in the whole vector")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16], help="sizes of the group")
    parser.add_argument("--codec", default="int8", help="codec of parts and result")
    parser.add_argument("--repeats", type=int, default=5, help="measurements of each")
    options = parser.parse_args()
    if options.quick:
        options.values, options.peers, options.repeats = 1_000_000, [2, 8], 1
    torch.set_num_threads(1)
    measured = partial(compare, options.values, options.peers, options.codec, options.repeats)
    return run("reduction", {"rules": measured}, options)


if __name__ == "__main__":
    sys.exit(main())
