"""Break the product on purpose, one behaviour at a time, and see that the named test notices.

``python -m tests.mutants`` runs all of them, ``--only WORD`` some, ``--list`` shows them. Each mutant of `mutants.txt`
replaces one piece of the product's text in a copy of the tree; its test passes without the change and has to fail
with it.
`tests/unit/test_mutants.py` checks that every mutant still applies.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

ROOT = Path(__file__).parents[1]
TEST_SECONDS = 180.0
"""How long one test may take, of which most take seconds; a longer one counts as a failure of the list."""
ALL_SECONDS = 900.0
"""The same for the tests of all mutants, without a change."""
PASSES, FAILS = "passes", "fails"


@dataclass(frozen=True)
class Mutant:
    """One change to the product, and the test that catches it.

    Attributes:
        name: The behaviour that breaks.
        file: Below ``p2ptrain/``.
        before: A piece of that file's text that stands there once.
        after: What replaces it.
        test: What pytest is told to run, below ``tests/``; ``FILE -k WORDS`` selects.
    """

    name: str
    file: str
    before: str
    after: str
    test: str


def read_mutants(text: str) -> tuple[Mutant, ...]:
    """Return the mutants of a list.

    Args:
        text: By an empty line between two of them: the name, ``FILE: TEST``, lines with ``-`` that are replaced, lines
            with ``+`` that replace them. The first and the last may be a part of a line.
    """
    found = []
    for block in text.strip("\n").split("\n\n"):
        name, where, *changes = block.split("\n")
        file, _, test = where.partition(": ")
        before, after = ("\n".join(line[1:] for line in changes if line.startswith(sign)) for sign in "-+")
        found.append(Mutant(name, file, before, after, test))
    return tuple(found)


MUTANTS = read_mutants((ROOT / "tests" / "mutants.txt").read_text())


def occurrences(mutant: Mutant) -> int:
    """How often the text that a mutant replaces stands in its file."""
    return (ROOT / "p2ptrain" / mutant.file).read_text().count(mutant.before)


def run(mutants: tuple[Mutant, ...], jobs: int = 1) -> list[str]:
    """Run mutants in copies of the tree; what is wrong, one line each."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder, ThreadPoolExecutor(jobs) as threads:
        copies: SimpleQueue[Path] = SimpleQueue()
        for number in range(jobs):
            copies.put(_copy_tree(Path(folder) / str(number)))
        began = time.monotonic()
        healthy, said = _with(copies, lambda copy: _pytest(copy, *_all_tests(mutants), seconds=ALL_SECONDS))
        wrong = [f"the tests do not pass without any change: pytest {healthy}\n{said}"] if healthy != PASSES else []
        print(f"all tests without any change: {time.monotonic() - began:.0f} s", flush=True)

        def judge(numbered: tuple[int, Mutant]) -> str:
            number, mutant = numbered
            began = time.monotonic()
            outcome = _with(copies, lambda copy: _broken_outcome(copy, mutant))
            verdict = "caught" if outcome == FAILS else "NOT CAUGHT"
            seconds = time.monotonic() - began
            print(f"{number:3} of {len(mutants)}  {seconds:5.1f} s  {verdict}  {mutant.name}", flush=True)
            return "" if outcome == FAILS else f"not caught by {mutant.test}, which {outcome}: {mutant.name}"

        return [*wrong, *filter(None, threads.map(judge, enumerate(mutants, 1)))]


def _copy_tree(copy: Path) -> Path:
    made = shutil.ignore_patterns(".git", ".venv", "build", "__pycache__", ".*_cache", ".hypothesis", "*.egg-info")
    return Path(shutil.copytree(ROOT, copy, ignore=made))


def _with(copies: SimpleQueue[Path], work: Callable[[Path], T]) -> T:
    """Do ``work`` in a copy that no other thread uses."""
    copy = copies.get()
    try:
        return work(copy)
    finally:
        copies.put(copy)


def _broken_outcome(copy: Path, mutant: Mutant) -> str:
    path = copy / "p2ptrain" / mutant.file
    text = path.read_text()
    if text.count(mutant.before) != 1:
        return "does not fit the product any more"
    path.write_text(text.replace(mutant.before, mutant.after, 1))
    try:
        return _outcome(copy, mutant.test)
    finally:
        path.write_text(text)


def _outcome(copy: Path, test: str) -> str:
    file, words = _parts(test)
    return _pytest(copy, "-x", f"tests/{file}", *(("-k", words) if words else ()), seconds=TEST_SECONDS)[0]


def _all_tests(mutants: tuple[Mutant, ...]) -> list[str]:
    """Arguments that select at least the tests of all mutants, so that one process runs them."""
    tests = sorted({_parts(mutant.test) for mutant in mutants})
    words = sorted({words or Path(file).stem for file, words in tests})
    return [*sorted({f"tests/{file}" for file, _ in tests}), "-k", " or ".join(f"({each})" for each in words)]


def _parts(test: str) -> tuple[str, str]:
    file, _, words = test.partition(" -k ")
    return file, words.strip("'")


def _pytest(copy: Path, *arguments: str, seconds: float) -> tuple[str, str]:
    """How pytest ends in the copy (it passes, or fails, or is of no use to the list), and the end of what it says."""
    command = [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", *arguments]
    environment = {
        "OMP_NUM_THREADS": "1",
        **os.environ,
        "CI": "true",
        "PYTHONPATH": str(copy),
        "PYTHONDONTWRITEBYTECODE": "1",
    }
    with subprocess.Popen(
        command, cwd=copy, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        start_new_session=True,
    ) as process:  # fmt: skip
        try:
            said, _ = process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)  # With all that the tests started.
            return f"takes more than {seconds:g} s", ""
    if process.returncode not in (0, 1):
        return f"does not run: {said[-1000:]}", ""
    return FAILS if process.returncode else PASSES, said[-3000:]


def main() -> int:
    """Run what the command line asks for; 1 if a mutant lives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="mutants whose name has this in it")
    parser.add_argument("--jobs", type=int, default=min(2, os.cpu_count() or 1), help="tests at a time")
    parser.add_argument("--list", action="store_true", help="show them, run nothing")
    options = parser.parse_args()
    chosen = tuple(mutant for mutant in MUTANTS if options.only in mutant.name)
    if options.list:
        for mutant in chosen:
            print(f"{mutant.name}\n    {mutant.file}; tests/{mutant.test}")
        return 0
    wrong = run(chosen, options.jobs)
    print(f"{len(chosen) - sum(line.startswith('not') for line in wrong)} of {len(chosen)} mutants caught")
    print(*wrong, sep="\n")
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main())
