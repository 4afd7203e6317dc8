"""Seeds of random schedules: some are always the same, as many others change with the content of the tree.

``P2PTRAIN_SEED`` sets the number from which the changing ones follow; without it they follow from the tree that is
checked out. pytest prints it above the tests, and a failure names the command that runs its schedule again.
"""

import functools
import hashlib
import os
import subprocess

from tests.support.processes.commands import ROOT

VARIABLE = "P2PTRAIN_SEED"
FIRST = 1_000_000
"""The least changing seed: fixed ones and those of hand-picked failures are smaller."""


@functools.cache
def base_seed() -> int:
    given = os.environ.get(VARIABLE)
    if given:
        return int(given)
    done = subprocess.run(["git", "rev-parse", "HEAD^{tree}"], cwd=ROOT, capture_output=True, text=True, check=False)
    return int.from_bytes(hashlib.sha256(done.stdout.strip().encode()).digest()[:4], "big")


def changing_seeds(name: str, count: int) -> range:
    """Return so many consecutive seeds, other ones for each committed tree and each name."""
    digest = hashlib.sha256(f"{base_seed()} {name}".encode()).digest()
    first = FIRST + int.from_bytes(digest[:4], "big") % 1_000_000_000
    return range(first, first + count)


if __name__ == "__main__":  # For make: the first changing seed of this name.
    import sys

    sys.stdout.write(f"{changing_seeds(sys.argv[1], 1)[0]}\n")
