"""How tests of swarms are shared out among processes: by the test, but for files whose tests share one swarm.

Waits in these tests have deadlines of their own. What ends a test that hangs all the same is far above what any takes
on a machine that does several other things.
"""

import functools
from pathlib import Path
from typing import Any

import pytest
from xdist.scheduler import LoadScopeScheduling

LONGEST_SECONDS = 600


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


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Apply to the tests of this folder."""
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.timeout(LONGEST_SECONDS))
