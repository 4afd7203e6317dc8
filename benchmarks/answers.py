"""What a worker process and its parent say to each other; `benchmarks.workers.Worker` is the parent's end.

Imports nothing but the standard library: some workers may have no more.
"""

from __future__ import annotations

import asyncio
import json
import sys


async def hear() -> str:
    """The next command of the parent, without its line end; empty when there is none any more."""
    line: str = await asyncio.get_running_loop().run_in_executor(None, sys.stdin.readline)
    return line.strip()


def say(**answer: object) -> None:
    """One line for the parent; see `benchmarks.workers.Worker.hear`."""
    sys.stdout.write(json.dumps(answer) + "\n")
    sys.stdout.flush()
