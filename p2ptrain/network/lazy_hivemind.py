"""Lets parts of hivemind be imported without the rest of it.

hivemind's package module imports all that hivemind has: its averager, optimizer and servers, and with them SciPy. This
package uses its DHT node, its daemon and their messages. So the package module is put in place here without running
its code, which takes a second and 30 MB less; the code runs when somebody asks the module for one of its names.
"""

from __future__ import annotations

import importlib.util
import sys
from typing import Any


def put_in_place(name: str = "hivemind") -> None:
    """Make ``import name.part`` import that part alone; without effect once the package is imported.

    Args:
        name: A package, installed or not.
    """
    spec = None if name in sys.modules else importlib.util.find_spec(name)
    if spec is None or spec.loader is None:
        return
    loader, module = spec.loader, importlib.util.module_from_spec(spec)

    def get(attribute: str) -> Any:
        if attribute.startswith("__"):  # What asks all modules for such names does not want this one.
            raise AttributeError(f"module {name!r} has no attribute {attribute!r}")
        part = sys.modules.get(f"{name}.{attribute}")
        if part is not None:  # It is being imported, and asked for by another part.
            return part
        del module.__dict__["__getattr__"]
        loader.exec_module(module)
        return getattr(module, attribute)

    module.__dict__["__getattr__"] = get  # PEP 562
    sys.modules[name] = module
