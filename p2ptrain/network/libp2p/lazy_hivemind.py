"""Lazy imports of hivemind's packages.

hivemind's ``__init__`` modules import its averager, optimizer, SciPy and torch, but p2ptrain uses only DHT and daemon.
So `put_in_place` installs the packages without running their code. A package resolves names from the submodules that
define them, and runs its own code only for an unknown name.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("hivemind", "hivemind.dht", "hivemind.utils")


def put_in_place(name: str) -> None:
    """Make ``import name.part`` import only that part; no effect if the package is imported already, or missing."""
    spec = None
    if name not in sys.modules:
        with contextlib.suppress(ModuleNotFoundError):  # the parent package is missing
            spec = importlib.util.find_spec(name)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    homes = _homes(name, Path(spec.origin))

    def get(attribute: str) -> Any:
        if attribute.startswith("__"):  # for code that inspects all modules
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        part = sys.modules.get(f"{name}.{attribute}")
        if part is not None:  # a circular import
            return part
        if attribute in homes:
            home, original = homes[attribute]
            return getattr(importlib.import_module(home), original)
        if importlib.util.find_spec(f"{name}.{attribute}") is not None:
            return importlib.import_module(f"{name}.{attribute}")
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
        return getattr(module, attribute)

    module.__dict__["__getattr__"] = get  # PEP 562
    sys.modules[name] = module
    parent, _, last = name.rpartition(".")
    if parent:
        setattr(sys.modules[parent], last, module)


def _homes(name: str, source: Path) -> dict[str, tuple[str, str]]:
    """Return, for each name that a package imports from its submodules, the module and the name there."""
    found = {}
    for statement in ast.parse(source.read_bytes()).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{name}."):
            for alias in statement.names:
                found[alias.asname or alias.name] = (str(statement.module), alias.name)
    return found
