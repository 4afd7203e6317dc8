"""Run one of the examples as a script on loopback: ``python -m tests.support.processes.run_example FILE ARGUMENTS``."""

import functools
import runpy
import sys
from typing import Any

from p2ptrain import Swarm


def main() -> None:
    for name in ("join", "create"):
        method: Any = getattr(Swarm, name)
        setattr(Swarm, name, functools.partial(method, listen=("/ip4/127.0.0.1/tcp/0",)))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
