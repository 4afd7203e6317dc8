"""How tests of swarms are shared out among processes: by the test, but for files whose tests share one swarm."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling


class Scheduling(LoadScopeScheduling):  # type: ignore[misc]
    """Gives a process one test after the other, or all of a file with a fixture of its module."""

    def _split_scope(self, nodeid: str) -> str:
        file = nodeid.partition("::")[0]
        return file if _has_a_fixture_of_its_module(self.config.rootpath / file) else nodeid


@functools.cache
def _has_a_fixture_of_its_module(file: Path) -> bool:
    return 'scope="module"' in file.read_text()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Scheduling | None:
    """Apply to ``--dist loadscope``."""
    return Scheduling(config, log) if config.getvalue("dist") == "loadscope" else None
