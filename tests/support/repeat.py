"""Run tests again and again, quiet or beside busy loops, and name the tests that fail now and then.

    python -m tests.support.repeat tests/swarm --times 20 --busy 2 [-- PYTEST OPTIONS]

Each result is written to a log when its test ends. A run that was stopped goes on where it was: the log is kept by
commit and by number of busy loops. The exit code is 1 if a test failed, 130 after Ctrl-C.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from tests.support.processes.daemons import ROOT

LOG_VARIABLE = "P2PTRAIN_REPEAT_LOG"
BUSY_LOOP = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(100_000))\n"


# As a plugin of pytest: one line a test.


class _Recorder:
    """Writes the outcome of each test when it ends; with xdist only in the process that collects the reports."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._failed: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed.add(report.nodeid)
        if report.when == "teardown":
            outcome = "failed" if report.nodeid in self._failed else "ended"
            self._failed.discard(report.nodeid)
            with self._log.open("a") as log:
                log.write(json.dumps([report.nodeid, outcome]) + "\n")


def pytest_configure(config: pytest.Config) -> None:
    path = os.environ.get(LOG_VARIABLE)
    if path and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(Path(path)))


# As a program.


def collect(paths: Sequence[str], options: Sequence[str]) -> list[str]:
    """Return the ids of all tests at these paths."""
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-n", "0", *options, *paths]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    return [line for line in done.stdout.splitlines() if "::" in line]


def read_log(log: Path) -> tuple[Counter[str], Counter[str]]:
    """Return how often each test ended so far, and how often it failed."""
    ended, failed = Counter[str](), Counter[str]()
    if log.exists():
        for line in log.read_text().splitlines():
            test, outcome = json.loads(line)
            ended[test] += 1
            failed[test] += outcome == "failed"
    return ended, +failed


@contextlib.contextmanager
def busy_loops(number: int) -> Iterator[None]:
    """Keep so many processes busy meanwhile; they end with this process, too."""
    # In sessions of their own: Linux may give a session no more time than another one (autogroup), and tests have many.
    loops = [subprocess.Popen([sys.executable, "-c", BUSY_LOOP], start_new_session=True) for _ in range(number)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def run_pass(tests: Sequence[str], log: Path, options: Sequence[str]) -> None:
    wanted = log.with_suffix(".tests")
    wanted.write_text("\n".join(tests))
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "tests.support.repeat", *options, f"@{wanted}"]
    environment = {**os.environ, LOG_VARIABLE: str(log), "PYTHONPATH": str(ROOT)}
    code = subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode
    if code not in (0, 1):
        raise SystemExit(f"pytest ended with {code}")


def default_log(busy: int) -> Path:
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    return ROOT / "build" / "repeat" / f"{commit or 'unknown'}-busy{busy}.jsonl"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run tests until each has ended so many times; the exit code says whether one failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.repeat", description=__doc__)
    parser.add_argument("paths", nargs="+", help="files, folders or ids of tests")
    parser.add_argument("--times", type=int, default=20, help="how often each test runs, earlier runs included")
    parser.add_argument("--busy", type=int, default=0, help="how many busy loops run beside them")
    parser.add_argument("--log", type=Path, help="where results are kept, in place of build/repeat/COMMIT-busyN.jsonl")
    given = list(sys.argv[1:] if arguments is None else arguments)
    split = given.index("--") if "--" in given else len(given)
    options, pytest_options = parser.parse_args(given[:split]), given[split + 1 :]
    log = options.log or default_log(options.busy)
    log.parent.mkdir(parents=True, exist_ok=True)
    tests, code = collect(options.paths, pytest_options), 0
    try:
        with busy_loops(options.busy):
            for number in range(1, options.times + 1):
                ended, _ = read_log(log)
                if due := [test for test in tests if ended[test] < number]:
                    run_pass(due, log, pytest_options)
    except KeyboardInterrupt:
        code = 130
    ended, failed = read_log(log)
    for test in tests:
        if failed[test]:
            sys.stdout.write(f"{failed[test]} of {ended[test]} failed: {test}\n")
    runs = sum(ended[test] for test in tests)
    sys.stdout.write(f"{len(tests)} tests, {runs} runs, {sum(failed[test] for test in tests)} failed: {log}\n")
    return code or int(any(failed[test] for test in tests))


if __name__ == "__main__":
    sys.exit(main())
