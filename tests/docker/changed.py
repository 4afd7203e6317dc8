"""Decide which tests of containers a commit needs: ``all``, those of the image alone (``image``), or ``none``.

    python3 tests/docker/changed.py

prints the decision on standard output and its reason on standard error. Continuous integration asks it, since these
tests take as long as all others together. ``make test-all`` and ``make test-docker`` do not ask. Needs Python alone.
"""

import fnmatch
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

VARIABLE = "P2PTRAIN_BASE"
"""Environment variable: the commit to compare with, for a push of several."""
UPSTREAM = "origin/main"
CONTAINERS = (
    "Dockerfile", ".dockerignore", "compose*.yaml", "deploy/container/*", "deploy/public/*", "tests/docker/*",
    "tests/support/containers/compose.py",
)  # fmt: skip
"""What the tests of containers are about: a change asks for all of them."""
IMAGE = (
    "constraints.txt",
    "hatch_build.py",
    "pyproject.toml",
    "p2ptrain/cli/main.py",
    "p2ptrain/config.py",
    "p2ptrain/native/*",
)
"""What may break the image's build or its start: a change asks for the tests of the image."""


def decide(changed: Sequence[str] | None) -> tuple[str, str]:
    """Return the decision and its reason.

    ``changed`` has paths from the repository's root; None if they cannot be known.
    """
    if changed is None:
        return "image", "what changed cannot be known: no earlier commit is there"
    for patterns, decision in ((CONTAINERS, "all"), (IMAGE, "image")):
        for path in changed:
            if any(fnmatch.fnmatch(path, pattern) for pattern in patterns):
                return decision, f"{path} changed"
    return "none", f"none of the {len(changed)} changed files is about containers"


def changed_paths(root: Path) -> tuple[list[str] | None, str]:
    """Return the files that differ from the base, those that are not committed included, and what the base is.

    The base is `VARIABLE`, else where the branch left `UPSTREAM`, else the commit before.
    """
    head = _git(root, "rev-parse", "HEAD")
    merge_base = _git(root, "merge-base", "HEAD", UPSTREAM)
    base = os.environ.get(VARIABLE) or (merge_base if merge_base not in (None, head) else "HEAD~1")
    found = _git(root, "diff", "--name-only", base)
    return (None if found is None else found.splitlines()), base


def _git(root: Path, *arguments: str) -> str | None:
    """Return what git says; None if it fails."""
    try:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def main() -> int:
    changed, base = changed_paths(Path(__file__).resolve().parents[2])
    decision, reason = decide(changed)
    sys.stderr.write(f"tests of containers: {decision}: since {base}, {reason}\n")
    sys.stdout.write(decision + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
