"""Run all benchmarks one after another, then show all ratios beside their goals in one table.

python -m benchmarks --json results/all.json
python -m benchmarks --only download
python -m benchmarks --quick

Of the comparison with hivemind's averaging this measures rounds alone; ``make bench-averaging`` measures all of it. Of
the ways to synchronise it measures some; ``make bench-convergence`` measures all. Of the sizes of swarms it leaves out
the large ones; ``make bench-groups`` measures them too. Of pipelines it leaves out `benchmarks.pipeline_overhead`,
which takes long; ``make bench-pipeline`` measures that too. Of the comparison with Flower,
which needs ``build/flower``, it measures rounds alone; ``make bench-federated`` measures all of it. ``--quick`` sees
that each runs, in a few minutes.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.findings import Finding, goal_table
from benchmarks.harness import arguments, exit_on_signals, machine

BENCHMARKS: dict[str, list[str]] = {
    "codecs": [],
    "serving": [],
    "averaging": ["--only", "rounds"],
    "overhead": [],
    "download": [],
    "transport": [],
    "direct": [],
    "equal_tokens": [],
    "convergence": ["--only", "DiLoCo", "SparseLoCo", "streaming"],
    "moshpit": [],
    "groups": ["--sizes", "8x16", "64x16"],
    "reduction": [],
    "attacks": [],
    "freeze": [],
    "uneven": [],
    "pipeline": ["--only", "utilisation", "codecs", "recovery", "rebalancing"],
    "federated": ["--only", "rounds"],
    "monitor": [],
    "directory": ["--sizes", "100"],
}
"""By name: the arguments of the module ``benchmarks.bench_NAME``."""


def main() -> int:
    """Run them; 1 when one failed, though the others ran."""
    parser = arguments(__doc__, "little of each")
    parser.add_argument("--only", action="append", choices=list(BENCHMARKS), help="run this one; repeatable")
    options = parser.parse_args()
    exit_on_signals()  # so that `run` ends what it started
    results: dict[str, Any] = {}
    failed: list[str] = []
    for name in options.only or BENCHMARKS:
        started = time.monotonic()
        command = [f"benchmarks.bench_{name}", *BENCHMARKS[name], *(["--quick"] if options.quick else [])]
        is_complete, found = run(command)
        results[name] = found
        if not is_complete:
            failed.append(name)
        outcome = "took" if is_complete else "failed after"
        sys.stdout.write(f"\n({name} {outcome} {time.monotonic() - started:.0f} s)\n\n")
    sys.stdout.write(goal_table([each for name, found in results.items() for each in ratios(name, found)]) + "\n")
    if options.json:
        Path(options.json).parent.mkdir(parents=True, exist_ok=True)
        payload = {"machine": machine(), "results": results, "failed": failed}
        Path(options.json).write_text(json.dumps(payload, indent=2) + "\n", encoding="utf-8")
        sys.stdout.write(f"\nwritten to {options.json}\n")
    if failed:
        sys.stdout.write(f"\nfailed: {', '.join(failed)}\n")
    return 1 if failed else 0


def run(command: list[str]) -> tuple[bool, dict[str, Any]]:
    """Run one benchmark in a process of its own, which prints its tables; whether all of it ran, and its results."""
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
        found = json.loads(path.read_text(encoding="utf-8"))["results"] if path.exists() else {}
        return status == 0, found


def ratios(name: str, found: dict[str, Any]) -> list[Finding]:
    """All ratios of a benchmark, from what it wrote."""
    return [Finding.from_json(one, name) for section in found.values() for one in section["findings"]]


if __name__ == "__main__":
    sys.exit(main())
