"""What sending the mean of `topk` parts costs a member of a group: as the list of the parts, in topk again, in int8.

For each size of a group: what a member receives in a round (parts of its share, then all means); the CPU of one thread
for its own share, from the checked parts to the encoded mean, and for all means, checked and decoded; and how far what
everybody decodes is from the weighted mean of what was sent. What the encoding of parts drops is the same in all three.

    python -m benchmarks.bench_part_lists --json results/part_lists.json
"""

from __future__ import annotations

import argparse
import asyncio
import random
from dataclasses import dataclass, field

import torch

from benchmarks.harness import Measured, alternate, report, thread_seconds
from p2ptrain.averaging.vector.chunks import RangeCheck
from p2ptrain.averaging.vector.reduce import EncodedStream, OwnShare
from p2ptrain.codecs import Decoder, PartList, get_codec, warm_up
from p2ptrain.manifest import AveragingSpec
from p2ptrain.runtime import Runtime

TOPK = get_codec("topk")
WAYS = ("list", "topk again", "int8")
SPEC = AveragingSpec(codec="topk", aggregation="norm_clip")


@dataclass
class Case:
    """One way to send the mean of one owner's share of a group."""

    way: str
    parts: list[torch.Tensor]
    encoded: list[bytearray] = field(init=False)
    mean: bytearray = field(init=False)

    def __post_init__(self) -> None:
        self.encoded = [TOPK.encode(part) for part in self.parts]
        self.reader: Decoder = {
            "list": PartList(TOPK, len(self.parts)), "topk again": TOPK, "int8": get_codec("int8")
        }[self.way]  # fmt: skip
        self.out = torch.empty(len(self.parts[0]))
        self.reduce_seconds()
        self.means = [bytes(self.mean) for _ in self.parts]
        self.vector = torch.zeros(len(self.parts) * len(self.out))
        self.reader.decode_into(self.mean, self.out)

    def reduce_seconds(self) -> float:
        """The owner's work once all parts are checked: its own part encoded, weights, the mean."""
        codec = TOPK if self.way == "topk again" else get_codec("int8")
        share = OwnShare(codec, SPEC, self.parts[0], 0, len(self.parts), TOPK, self.way == "list")
        for index, part in enumerate(self.encoded[1:], start=1):
            check = share.new_check(TOPK)
            check(memoryview(part), 0, len(self.out))
            share.add(index, part, check)
        mean = EncodedStream(bytearray(self.reader.encoded_bytes(len(self.out))))
        everybody = list(range(len(self.parts)))

        def work() -> None:
            share.measure_own()
            asyncio.run(share.reduce(Runtime(random.Random(0)), everybody, [1000] * len(everybody), mean))

        seconds = thread_seconds(work)()
        self.mean = bytearray(mean.data)
        return seconds

    def read_seconds(self) -> float:
        """A member's work for all means: as many as there are members, each in memory of its own."""
        check, size = RangeCheck(self.reader, SPEC), len(self.out)

        def work() -> None:
            for index, mean in enumerate(self.means):
                check(memoryview(mean), 0, size)
                self.reader.decode_into(mean, self.vector[index * size : (index + 1) * size])

        return thread_seconds(work)()

    def received_bytes(self) -> int:
        """What a member receives: the others' parts of its share, and the means of theirs."""
        return (len(self.parts) - 1) * (len(self.encoded[0]) + len(self.mean))

    def error(self) -> float:
        """The norm of what the mean lost, as a share of that of the mean of what was sent."""
        exact, value = torch.zeros(len(self.out), dtype=torch.float64), torch.empty(len(self.out))
        for part in self.encoded:
            TOPK.decode_into(part, value)
            exact += value.double() / len(self.encoded)
        return float((self.out - exact).norm() / exact.norm())


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000, help="values in the whole vector")
    parser.add_argument("--peers", type=int, nargs="+", default=[2, 4, 8, 16, 64], help="sizes of the group")
    parser.add_argument("--repeats", type=int, default=7, help="measurements of each")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warm_up()
    rows, results = [], {}
    for peers in arguments.peers:
        size = max(1, arguments.values // peers // TOPK.block_size) * TOPK.block_size
        generator = torch.Generator().manual_seed(peers)
        parts = [torch.randn(size, generator=generator) for _ in range(peers)]
        cases = {way: Case(way, parts) for way in WAYS}
        found = alternate(
            {f"{way}, reduce": case.reduce_seconds for way, case in cases.items()}
            | {f"{way}, read": case.read_seconds for way, case in cases.items()},
            arguments.repeats,
        )
        results[str(peers)] = {name: measured.to_json() for name, measured in found.items()} | {
            way: {"received_bytes": case.received_bytes(), "error": case.error()} for way, case in cases.items()
        }
        rows += [row(peers, case, found) for case in cases.values()]
    title = f"the mean of topk parts, {arguments.values:,} values in all"
    headers = ("group", "mean as", "received, KB", "own share", "all means", "error of the mean")
    report(title, headers, rows, results, arguments.json)


def row(peers: int, case: Case, found: dict[str, Measured]) -> tuple[str, ...]:
    """One line of the table."""
    reduce, read = (1e3 * found[f"{case.way}, {what}"].median for what in ("reduce", "read"))
    size = f"{case.received_bytes() / 1e3:,.0f}"
    return (f"{peers} peers", case.way, size, f"{reduce:.1f} ms", f"{read:.1f} ms", f"{100 * case.error():.2g} %")


if __name__ == "__main__":
    main()
