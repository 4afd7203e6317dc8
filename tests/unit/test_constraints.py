"""constraints.txt names a version of all that an installation or a build fetches: a new release breaks nothing."""

import re
import tomllib
from importlib import metadata

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.processes.commands import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
CONSTRAINED = {
    canonicalize_name(line.partition("==")[0]): line.partition("==")[2]
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
}
EDITABLE = "editables"
"""What hatchling asks for when it builds an editable installation, beside its own requirements."""
PART_OF_TORCH = re.compile(r"nvidia-.*|cuda-.*|triton")
"""Of CUDA builds: torch names their versions exactly, and a CPU build has none of them."""


def roots() -> dict[str, list[str]]:
    """Return requirements by what asks for them: the package, its extras, its build."""
    extras = PROJECT["project"]["optional-dependencies"]
    return {
        "package": PROJECT["project"]["dependencies"],
        **extras,
        "build": [*PROJECT["build-system"]["requires"], EDITABLE],
    }


def closure(requirements: list[str]) -> set[str]:
    """Return the names of these requirements and of all that they need here, as far as they are installed."""
    found: set[str] = set()
    waiting = [Requirement(each) for each in requirements]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        requirement = waiting.pop()
        name = canonicalize_name(requirement.name)
        key = name, frozenset(requirement.extras)
        if key in seen:
            continue
        seen.add(key)
        found.add(name)
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        for each in map(Requirement, needed):
            contexts = [{"extra": extra} for extra in ("", *requirement.extras)]
            if each.marker is None or any(each.marker.evaluate(context) for context in contexts):
                waiting.append(each)
    return {name for name in found if not PART_OF_TORCH.fullmatch(name)}


@pytest.mark.parametrize("what", roots())
def test_everything_that_is_installed_has_a_version(what: str) -> None:
    assert closure(roots()[what]) - set(CONSTRAINED) == set()


def test_versions_fit_what_the_project_asks_for() -> None:
    for requirement in (Requirement(each) for requirements in roots().values() for each in requirements):
        version = CONSTRAINED[canonicalize_name(requirement.name)]
        assert requirement.specifier.contains(version), f"{requirement}: constraints.txt has {version}"
