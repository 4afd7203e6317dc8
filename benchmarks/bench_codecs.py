"""Codec speed on one thread, native and plain, and the error of an encoded mean of four vectors.

Speeds count fp32 bytes (4 a value) for every codec, so that they compare with each other and with a plain copy of the
vector, which like everything here writes to memory that is there already.

    python -m benchmarks.bench_codecs --json results/codecs.json
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.harness import Measured, alternate, format_table, report, thread_seconds
from p2ptrain.codecs import Codec, codec_names, get_codec, warm_up
from p2ptrain.codecs.base import NativeCodec

NUM_PEERS = 4


def mean_error(codec: Codec, num_values: int) -> float:
    """Relative L2 error of the mean of four Gaussian vectors, each encoded, and the mean encoded once more."""
    generator = torch.Generator().manual_seed(1)
    total, exact = torch.zeros(num_values), torch.zeros(num_values, dtype=torch.float64)
    for _ in range(NUM_PEERS):
        vector = torch.randn(num_values, generator=generator)
        exact += vector.double() / NUM_PEERS
        codec.accumulate_into(codec.encode(vector), 1 / NUM_PEERS, total)
    decoded = torch.empty(num_values)
    codec.decode_into(codec.encode(total), decoded)
    return float((decoded.double() - exact).norm() / exact.norm())


OPERATIONS = ("encode", "decode", "accumulate", "validate")


def cases(vector: torch.Tensor, out: torch.Tensor) -> dict[str, Callable[[], float]]:
    """The copy, and every codec's operations: ``codec operation``, and ``... plain`` where that is native."""
    found: dict[str, Callable[[], float]] = {"copy": thread_seconds(lambda: out.copy_(vector))}
    for name in codec_names():
        codec, plain = get_codec(name), type(get_codec(name))()
        for operation in OPERATIONS:
            native = isinstance(codec, NativeCodec) and operation in codec.functions
            contenders = {"": codec, " plain": plain} if native else {"": codec}
            for suffix, contender in contenders.items():
                found[f"{name} {operation}{suffix}"] = thread_seconds(partial(run, contender, operation, vector, out))
    return found


_encoded: dict[str, bytearray] = {}


def run(codec: Codec, operation: str, vector: torch.Tensor, out: torch.Tensor) -> None:
    """Do ``operation`` once on the encoded vector, which is made when it is needed first."""
    data = _encoded.get(codec.name)
    if data is None:
        data = _encoded[codec.name] = codec.encode(vector)
    if operation == "encode":
        codec.encode_into(vector, data)
    elif operation == "decode":
        codec.decode_into(data, out)
    elif operation == "accumulate":
        codec.accumulate_into(data, 0.25, out)
    else:
        codec.validate(data, len(vector))


def main() -> None:
    """Measure and report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--values", type=int, default=10_000_000, help="values in the vector")
    parser.add_argument("--repeats", type=int, default=11, help="measurements of each operation")
    parser.add_argument("--json", metavar="FILE", help="also write the results here")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    started = time.perf_counter()
    is_native = warm_up()
    warm_up_seconds = time.perf_counter() - started
    vector = torch.randn(arguments.values, generator=torch.Generator().manual_seed(0))
    seconds = alternate(cases(vector, torch.zeros(arguments.values)), arguments.repeats)
    speeds = {
        name: Measured(tuple(4 * arguments.values / value / 1e9 for value in measured.values))
        for name, measured in seconds.items()
    }
    copy = speeds["copy"].median
    names = codec_names()
    sizes = {name: get_codec(name).encoded_bytes(arguments.values) / arguments.values for name in names}
    errors = {name: mean_error(get_codec(name), 1 << 20) for name in names}
    results = {
        "values": arguments.values,
        "is_native": is_native,
        "warm_up_seconds": warm_up_seconds,
        "gigabytes_per_second": {name: speed.to_json() for name, speed in speeds.items()},
        "ratio_to_copy": {name: speed.median / copy for name, speed in speeds.items()},
        "bytes_per_value": sizes,
        "relative_error_of_mean_of_4": errors,
    }
    rows = []
    for name, speed in speeds.items():
        if not name.endswith(" plain"):
            plain = speeds.get(f"{name} plain")
            rows.append(
                (
                    name, f"{speed.median:.2f}", f"±{100 * speed.spread:.0f} %", f"{speed.median / copy:.2f}",
                    f"{plain.median:.2f}" if plain else "", f"{speed.median / plain.median:.1f}" if plain else "",
                )
            )  # fmt: skip
    title = f"Codecs, {arguments.values:,} values, one thread, {'native' if is_native else 'NOT native'}"
    headers = ("operation", "fp32 GB/s", "spread", "of a copy", "plain", "times as fast")
    report(title, headers, rows, results, arguments.json)
    precision = [(name, f"{sizes[name]:.4f}", f"{100 * errors[name]:.4f} %") for name in names]
    table = format_table(("codec", "bytes a value", f"error of a mean of {NUM_PEERS}"), precision)
    sys.stdout.write(f"\n{table}\n")


if __name__ == "__main__":
    main()
