"""Fuzz every decoder with atheris: ``python -m tests.fuzz [TARGET…] [--seconds N] [--keep]``.

Each target of `tests.fuzz.targets` runs in a process of its own, from its seeds and from ``corpus/TARGET``, a msgpack
list of inputs. With ``--keep`` the inputs that reached new code go into that file, the shortest first, up to
`MOST_KEPT_BYTES`. An input that a decoder did not stand is written to ``build/fuzz``, with the command that repeats it.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import msgpack

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(__file__).parent / "corpus"
FOUND = ROOT / "build" / "fuzz"
NAMES = ("messages", "codecs", "certificates", "records", "manifests", "links", "checkpoints")
MOST_KEPT_BYTES = 24_000
MOST_INPUT_BYTES = 8192
SLOW_SECONDS = 10
"""One input that takes longer is a failure; > the slowest honest one on a busy machine."""
MEMORY_MB = 2048
START_SECONDS = 300


def corpus(name: str) -> list[bytes]:
    """Return the inputs that are kept for a target."""
    kept = CORPUS / name
    found: list[bytes] = msgpack.unpackb(kept.read_bytes()) if kept.exists() else []
    return found


def fuzz(name: str, seconds: int, keep: bool) -> str:
    """Fuzz one target; return what failed, or nothing."""
    FOUND.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="p2ptrain-fuzzing-") as scratch:
        folder = Path(scratch) / "corpus"
        folder.mkdir()
        for number, data in enumerate(corpus(name)):
            (folder / f"kept-{number}").write_bytes(data)
        options = [
            f"-max_total_time={seconds}", f"-artifact_prefix={FOUND}/{name}-", f"-timeout={SLOW_SECONDS}",
            f"-rss_limit_mb={MEMORY_MB}", f"-max_len={MOST_INPUT_BYTES}", "-print_final_stats=1", str(folder),
        ]  # fmt: skip
        command = [sys.executable, "-m", "tests.fuzz.one", name, *options]
        done = subprocess.run(
            command,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
            timeout=seconds + START_SECONDS,
            env={**os.environ, "TMPDIR": scratch},
        )
        shown = [line.split(":")[-1].strip() for line in done.stderr.splitlines() if "number_of_executed_units" in line]
        sys.stdout.write(f"{name:14} {' '.join(shown) or '?':>9} inputs in {seconds} s, exit code {done.returncode}\n")
        sys.stdout.flush()
        if done.returncode:
            again = f"python -m tests.fuzz.one {name} FILE, a file of {FOUND}"
            return f"{name}: again: {again}\n{done.stdout[-2000:]}\n{done.stderr[-400:]}"
        if keep:
            inputs = sorted({path.read_bytes() for path in folder.iterdir()}, key=lambda each: (len(each), each))
            while sum(map(len, inputs)) > MOST_KEPT_BYTES:
                inputs.pop()
            (CORPUS / name).write_bytes(msgpack.packb(inputs))
    return ""


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(NAMES)}; all by default")
    parser.add_argument("--seconds", type=int, default=20, help="for each target; 600 finds more")
    parser.add_argument("--keep", action="store_true", help="update the corpora")
    options = parser.parse_args()
    try:
        import atheris  # noqa: F401
    except ImportError:
        sys.stdout.write("atheris is not there: pip install -e '.[fuzz]'\n")
        return 2
    failures = [fuzz(name, options.seconds, options.keep) for name in options.targets or NAMES]
    for failure in filter(None, failures):
        sys.stdout.write(f"FAILED: {failure}\n")
    return int(any(failures))


if __name__ == "__main__":
    sys.exit(main())
