"""Lets parts of hivemind be imported without the rest of it.

hivemind's packages import all that they have: its averager, optimizer and servers, and with them SciPy and torch. This
package uses its DHT node, its daemon and their messages. So its package modules are put in place here without running
their code, which takes seconds and 200 MB less. A name that is asked of one is taken from the part that defines it, and
the package's own code runs only for a name that no part is known to define.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import sys
from pathlib import Path
from typing import Any

PACKAGES = ("hivemind", "hivemind.dht", "hivemind.utils")


def put_in_place(name: str) -> None:
    """Make ``import name.part`` import that part alone; without effect once the package is imported.

    Args:
        name: A package, installed or not.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None or spec.origin is None:
        return
    loader, module = spec.loader, importlib.util.module_from_spec(spec)
    homes = _homes(name, Path(spec.origin))

    def get(attribute: str) -> Any:
        if attribute.startswith("__"):  # What asks all modules for such names does not want this one.
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        part = sys.modules.get(f"{name}.{attribute}")
        if part is not None:  # It is being imported, and asked for by another part.
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
    """Return where a package takes its names from: by name the module below the package, and the name there."""
    found = {}
    for statement in ast.parse(source.read_bytes()).body:
        if isinstance(statement, ast.ImportFrom) and (statement.module or "").startswith(f"{name}."):
            for alias in statement.names:
                found[alias.asname or alias.name] = (str(statement.module), alias.name)
    return found
