"""Packages that a test installs: modules and entry points in a folder of their own."""

from collections.abc import Mapping
from pathlib import Path

import pytest


def install(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    package: str,
    modules: Mapping[str, str],
    points: Mapping[str, Mapping[str, str]],
) -> None:
    """Install version 1.0 of a package: sources by module, and entry points by group and name."""
    for module, source in modules.items():
        (folder / f"{module}.py").write_text(source)
    info = folder / f"{package}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
    lines = [
        line
        for group, names in points.items()
        for line in (f"[{group}]", *(f"{name} = {value}" for name, value in names.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    monkeypatch.syspath_prepend(str(folder))
