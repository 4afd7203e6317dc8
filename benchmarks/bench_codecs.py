"""Codec speed on one thread, native and plain, and the error of an encoded mean of four vectors.

Speeds count fp32 bytes (4 a value) for every codec, so that they compare with each other and with a plain copy of the
vector, which like everything here writes to memory that is there already.

    python -m benchmarks.bench_codecs --json results/codecs.json
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from functools import partial

import torch

from benchmarks.findings import Finding, Section
from benchmarks.findings import run as run_parts
from benchmarks.harness import Measured, alternate, arguments, thread_seconds
from p2ptrain.codecs import CODECS, Codec, get_codec, warm_up
from p2ptrain.codecs.base import NativeCodec

NUM_PEERS = 4
GOAL = 1.0
"""Of a copy's speed, for what a round of int8 does with every value."""


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
    for name in CODECS.own:
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


def speeds(num_values: int, repeats: int) -> Section:
    """All operations of all codecs."""
    started = time.perf_counter()
    is_native = warm_up()
    warm_up_seconds = time.perf_counter() - started
    vector = torch.randn(num_values, generator=torch.Generator().manual_seed(0))
    seconds = alternate(cases(vector, torch.zeros(num_values)), repeats)
    found = {
        name: Measured(tuple(4 * num_values / value / 1e9 for value in measured.values))
        for name, measured in seconds.items()
    }
    copy = found["copy"].median
    section = Section(
        f"Codecs, {num_values:,} values, one thread, {'native' if is_native else 'NOT native'}",
        ("operation", "fp32 GB/s", "of a copy", "plain", "times as fast"),
        results={
            "warm_up_seconds": warm_up_seconds,
            "gigabytes_per_second": {name: speed.to_json() for name, speed in found.items()},
        },
    )
    for name, speed in found.items():
        if not name.endswith(" plain"):
            plain = found.get(f"{name} plain")
            times = (f"{plain.median:.2f}", f"{speed.median / plain.median:.1f}") if plain else ("", "")
            section.rows.append((name, speed, f"{speed.median / copy:.2f}", *times))
    for operation in ("encode", "decode", "accumulate"):
        ratio = found[f"int8 {operation}"].median / copy
        section.findings.append(Finding(f"speed of int8 {operation}", ratio, "a copy", GOAL, at_least=True))
    return section


def precision() -> Section:
    """Sizes and errors of all codecs."""
    section = Section("Precision", ("codec", "bytes a value", f"error of a mean of {NUM_PEERS}"))
    for name in CODECS.own:
        size, error = get_codec(name).encoded_bytes(1 << 20) / (1 << 20), mean_error(get_codec(name), 1 << 20)
        section.rows.append((name, f"{size:.4f}", f"{100 * error:.4f} %"))
        section.results[name] = {"bytes_per_value": size, "relative_error": error}
    return section


def main() -> int:
    """Measure and report."""
    parser = arguments(__doc__, "a million values, 3 measurements")
    parser.add_argument("--values", type=int, default=10_000_000, help="values in the vector")
    parser.add_argument("--repeats", type=int, default=11, help="measurements of each operation")
    options = parser.parse_args()
    if options.quick:
        options.values, options.repeats = 1_000_000, 3
    torch.set_num_threads(1)
    parts: dict[str, Callable[[], Section]] = {
        "speed": partial(speeds, options.values, options.repeats),
        "precision": precision,
    }
    return run_parts("codecs", parts, options)


if __name__ == "__main__":
    sys.exit(main())
