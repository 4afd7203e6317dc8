"""CPU quotas for processes: control groups of Linux, version 1 or 2, made here and removed at the end. Needs root."""

from __future__ import annotations

import contextlib
import os
import time
from pathlib import Path
from typing import Self

from benchmarks.harness import undisturbed

ROOT = Path("/sys/fs/cgroup")
PERIOD_US = 100_000
"""The kernel's default: a process that has used up its part of it stands still for the rest."""
MOST_SHARES, MOST_WEIGHT = 262144, 10000
"""The kernel's limits: what else runs on the machine then takes little of what the quotas leave to the groups."""
REMOVE_SECONDS = 5.0
"""How long processes that were ended may take to leave their group."""


class CpuQuota:
    """A group of processes that together get at most a part of a core; unlimited until `limit` is called."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        folder.mkdir()
        if (weight := folder / "cpu.weight").exists():
            weight.write_text(f"{MOST_WEIGHT}\n")
        else:
            (folder / "cpu.shares").write_text(f"{MOST_SHARES}\n")

    def add(self, pid: int) -> None:
        """Move a process here; what it starts from now on is here too."""
        (self._folder / "cgroup.procs").write_text(f"{pid}\n")

    def limit(self, cores: float | None) -> None:
        """Set the quota; None lifts it."""
        quota = None if cores is None else round(cores * PERIOD_US)
        if (new := self._folder / "cpu.max").exists():
            new.write_text(f"{'max' if quota is None else quota} {PERIOD_US}\n")
        else:
            (self._folder / "cpu.cfs_period_us").write_text(f"{PERIOD_US}\n")
            (self._folder / "cpu.cfs_quota_us").write_text(f"{-1 if quota is None else quota}\n")

    def remove(self) -> None:
        """Remove the group once its processes are gone."""
        deadline = time.monotonic() + REMOVE_SECONDS
        while True:
            try:
                self._folder.rmdir()
            except OSError:
                if time.monotonic() >= deadline:
                    raise
                time.sleep(0.05)
            else:
                return


class CpuQuotas:
    """Makes quotas, and removes their groups at the end of this context; enter it before what runs in them."""

    def __init__(self) -> None:
        self._all: list[CpuQuota] = []

    def make(self) -> CpuQuota:
        """Make one more.

        Raises:
            RuntimeError: This machine has no control groups for CPU time, or this process may not make any.
        """
        parent = ROOT / "cpu" if (ROOT / "cpu").is_dir() else ROOT
        try:
            if parent == ROOT:
                (ROOT / "cgroup.subtree_control").write_text("+cpu\n")
            quota = CpuQuota(parent / f"p2ptrain-bench-{os.getpid()}-{len(self._all)}")
        except OSError as error:
            raise RuntimeError(f"no CPU quotas here ({error}): they need root and control groups") from error
        self._all.append(quota)
        return quota

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with undisturbed():
            for quota in self._all:
                with contextlib.suppress(OSError):
                    quota.remove()
