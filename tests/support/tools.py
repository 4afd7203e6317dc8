"""Tools that some tests need beside Python: without them these tests are skipped, or fail where the tool is required.

``P2PTRAIN_REQUIRE`` names the tools whose absence is a failure: a list with commas of `TOOLS`, or ``all``. Continuous
integration names those that it installed, so that a test that did not run cannot look like one that passed.
"""

import importlib
import importlib.util
import os

import pytest

VARIABLE = "P2PTRAIN_REQUIRE"
TOOLS = (
    "ip", "tc", "nft", "systemd-nspawn", "chromium", "docker", "compose-v2", "compose-1.29", "kernels", "matplotlib",
    "smollm2", "hatchling",
)  # fmt: skip
"""``kernels`` is the native library of the codecs, which a C compiler builds; ``smollm2`` is a pretrained model."""


def required() -> frozenset[str]:
    """Return the tools that must be here; UsageError if `VARIABLE` names something else than `TOOLS`."""
    named = {word.strip() for word in os.environ.get(VARIABLE, "").split(",")} - {""}
    if unknown := named - {*TOOLS, "all"}:
        raise pytest.UsageError(f"{VARIABLE}: {', '.join(sorted(unknown))} is none of {', '.join(TOOLS)}, all")
    return frozenset(TOOLS if "all" in named else named)


def unavailable(reason: str, *tools: str) -> None:
    """Skip the test that runs, for this reason; fail it instead if one of the tools that it needs is required.

    Nothing happens if the reason is empty.
    """
    _fail_if_required(reason, tools)
    if reason:
        pytest.skip(reason)


def needed(reason: str, *tools: str) -> pytest.MarkDecorator:
    """Return a mark that skips the tests of a module as `unavailable` does; fail the import if a tool is required."""
    _fail_if_required(reason, tools)
    return pytest.mark.skipif(bool(reason), reason=reason or "available")


def _fail_if_required(reason: str, tools: tuple[str, ...]) -> None:
    assert tools
    assert set(tools) <= set(TOOLS)
    if reason and (missed := required().intersection(tools)):
        pytest.fail(f"{VARIABLE} names {', '.join(sorted(missed))}: {reason}", pytrace=False)


def why_no_pictures() -> str:
    """Return why matplotlib cannot be used; empty if it can."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as error:
        return f"matplotlib is not there: make venv ({error})"
    return ""


def why_no_smollm2() -> str:
    """Return why SmolLM2 cannot be read; empty if it can."""
    from p2ptrain.models.smollm2 import PACKAGE

    if missing := [name for name in (PACKAGE, "gguf") if importlib.util.find_spec(name) is None]:
        return f"{' and '.join(missing)} not there: make smollm2"
    return ""
