"""What holds for all tests: how hypothesis draws, which seeds change with the commit, and Ctrl-C for children."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

from tests.support import seeds, tools

# How long an example takes says how busy the machine is, and nothing about the property.
settings.register_profile("local", deadline=None, suppress_health_check=[HealthCheck.too_slow])
# The same examples in each run: a commit that passed does not fail when it is looked at again.
settings.register_profile("ci", settings.get_profile("local"), derandomize=True, print_blob=True)
settings.load_profile("ci" if os.environ.get("CI", "").lower() in ("1", "true") else "local")

# Modules and tests stay: looking among them for garbage took a sixth of the time of collecting the tests.
gc.disable()

# A shell without job control has its background jobs ignore SIGINT, which they pass on: no child could be interrupted.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Iterator[None]:
    """Enable garbage collection again, of what comes after the tests were collected."""
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_report_header() -> list[str]:
    """Tell what a run depends on beside the sources; refuse a `tools.VARIABLE` that names no tool."""
    needed = ", ".join(sorted(tools.required())) or "nothing"
    return [f"{seeds.VARIABLE}={seeds.base_seed()}, {tools.VARIABLE}: {needed}"]
