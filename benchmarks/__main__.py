"""Run all benchmarks one after another, then show their headline ratios in one table.

python -m benchmarks --json results/all.json
python -m benchmarks --only download

Of the comparison with hivemind's averaging this measures rounds alone; ``make bench-averaging`` measures all of it. Of
the ways to synchronise it measures some; ``make bench-convergence`` measures all. Of the sizes of swarms it leaves out
the large ones; ``make bench-groups`` measures them too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.harness import exit_on_signals, format_table, machine

BENCHMARKS: dict[str, list[str]] = {
    "codecs": ["benchmarks.bench_codecs"],
    "averaging": ["benchmarks.bench_averaging", "--only", "rounds"],
    "overhead": ["benchmarks.bench_overhead"],
    "download": ["benchmarks.bench_download"],
    "transport": ["benchmarks.bench_transport"],
    "direct": ["benchmarks.bench_direct"],
    "equal_tokens": ["benchmarks.bench_equal_tokens"],
    "convergence": ["benchmarks.bench_convergence", "--only", "DiLoCo", "SparseLoCo", "streaming"],
    "moshpit": ["benchmarks.bench_moshpit"],
    "cells": ["benchmarks.bench_cells"],
    "groups": ["benchmarks.bench_groups", "--sizes", "8x16", "64x16"],
    "reduction": ["benchmarks.bench_reduction"],
    "part_lists": ["benchmarks.bench_part_lists"],
    "attacks": ["benchmarks.bench_attacks"],
    "monitor": ["benchmarks.bench_monitor"],
}
"""By name: the module and its arguments."""


def main() -> int:
    """Run them; 1 when one failed, though the others ran."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), help="run this one; repeatable")
    parser.add_argument("--json", metavar="FILE", help="also write all results here")
    options = parser.parse_args()
    exit_on_signals()  # so that `run` ends what it started
    results: dict[str, Any] = {}
    failed: list[str] = []
    for name in options.only or BENCHMARKS:
        started = time.monotonic()
        found = run(BENCHMARKS[name])
        if found is None:
            failed.append(name)
        else:
            results[name] = found
        outcome = "failed" if found is None else "took"
        sys.stdout.write(f"\n({name} {outcome} {time.monotonic() - started:.0f} s)\n\n")
    rows = [row for name, found in results.items() for row in headlines(name, found)]
    sys.stdout.write(format_table(("ratio", "measured", "spread"), rows) + "\n")
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        payload = {"machine": machine(), "results": results, "failed": failed}
        Path(options.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"\nwritten to {options.json}\n")
    return 1 if failed else 0


def run(command: list[str]) -> Any:
    """Run one benchmark in a process of its own, which prints its table; its results, or None when it failed."""
    sys.stdout.write(f"$ python -m {' '.join(command)}\n\n")
    sys.stdout.flush()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "results.json"
        with subprocess.Popen([sys.executable, "-m", *command, "--json", str(path)]) as process:
            try:
                status = process.wait()
            except BaseException:
                process.terminate()
                raise
        if status != 0 or not path.exists():
            return None
        return json.loads(path.read_text(encoding="utf-8"))["results"]


def headlines(name: str, found: Any) -> list[tuple[str, str, str]]:
    """(what, ratio, spread) of what matters most in one benchmark's results."""
    if name == "codecs":
        ratios = found["ratio_to_copy"]
        return [
            (f"{name}: int8 {operation}, of the speed of a copy", f"{ratios[f'int8 {operation}']:.2f}", "")
            for operation in ("encode", "decode")
        ]
    if name == "averaging":
        compared = [one for section in found.values() for one in section["findings"] if one["against"] == "hivemind"]
        return [(f"{name}: {one['what']}, of hivemind's", f"{one['value']:.2f}", "") for one in compared]
    if name == "overhead":
        return [
            (f"{name}: {what}, of plain torch", f"{found[field]['median']:.3f}", _percent(found[field]["spread"]))
            for what, field in (("tokens a second", "ratio"), ("tokens a CPU second", "cpu_ratio"))
        ]
    if name == "download":
        ratio = found["speed_ratio"]
        return [(f"{name}: speed, of a raw stream", f"{ratio['median']:.2f}", _percent(ratio["spread"]))]
    if name == "transport":
        return [
            (f"{name}: {what} of direct connections, {way}, of the daemons'", f"{one[field]:.2f}", "")
            for way, one in found["direct_to_daemons"].items()
            for what, field in (("speed", "speed"), ("CPU", "cpu"))
        ]
    if name == "direct":
        return [(f"{name}: CPU a byte, {of}", f"{value:.2f}", "") for of, value in found["cpu_ratios"].items()]
    if name == "equal_tokens":
        ratio = found["loss_ratio"]
        return [(f"{name}: held-out loss, of one process", f"{ratio['median']:.4f}", _percent(ratio["spread"]))]
    if name == "moshpit":
        furthest = max(found["contraction"], key=lambda row: abs(row["ratio"] - 1))
        return [
            (f"{name}: published figures not met", str(len(found["far_off"])), ""),
            (f"{name}: variance after a round of random groups, of the formula's", f"{furthest['ratio']:.3f}", ""),
        ]
    if name == "cells":
        typical = next(each for each in found if (each["peers"], each["group_size"]) == (512, 16))
        return [(f"{name}: how full those of 512 peers in groups of 16 are", f"{typical['now']['fill']:.2f}", "")]
    if name == "groups":
        small, large = found[0]["steady"], found[-1]["steady"]
        ratio = statistics.median(large["group"]) / statistics.median(small["group"])
        return [
            (
                f"{name}: time until a group stands among {found[-1]['peers']}, of {found[0]['peers']}",
                f"{ratio:.2f}",
                "",
            )
        ]
    if name == "reduction":
        group = found["8"]
        return [
            (f"{name}: norm_clip, of mean's CPU", f"{group['norm_clip']['median'] / group['mean']['median']:.2f}", "")
        ]
    if name == "part_lists":
        listed, dense = (found["8"][way]["received_bytes"] for way in ("list", "int8"))
        return [(f"{name}: bytes of a list of 8 parts, of int8's", f"{listed / dense:.2f}", "")]
    if name == "attacks":
        ratios = [ratio["median"] for case, ratio in found.items() if case.endswith(", centered_clip")]
        return [(f"{name}: worst loss with liars, of the clean loss", f"{max(ratios):.2f}", "")]
    if name == "monitor":
        return [
            (f"{name}: a snapshot of 2,000 peers, of 1 s", f"{found['snapshot_seconds']['median']:.2f}", ""),
            (f"{name}: 95 % of answers to 50 viewers, of 0.1 s", f"{found['api_seconds']['p95'] / 0.1:.2f}", ""),
        ]
    return [
        (f"{name}: held-out loss, {one['name']}, of large batches", f"{one['row']['ratio']['median']:.4f}", "")
        for one in found["methods"]
    ]


def _percent(spread: float) -> str:
    return f"±{100 * spread:.0f} %"


if __name__ == "__main__":
    sys.exit(main())
