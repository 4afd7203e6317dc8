"""The arrows between packages: imports go down only, heavy libraries stay where they belong, nothing is circular."""

import ast
import graphlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "p2ptrain"

LAYERS: tuple[frozenset[str], ...] = (
    frozenset({"__main__"}),
    frozenset({"cli"}),
    frozenset({"monitor"}),
    frozenset({"status"}),
    frozenset({"node"}),
    frozenset({"serving"}),
    frozenset({"pipeline"}),
    frozenset({"training"}),
    frozenset({"averaging"}),
    frozenset({"network"}),
    frozenset({"codecs"}),
    frozenset({"models"}),
    frozenset({"native"}),
    frozenset(
        {
            "buffers", "disk", "errors", "extensions", "config", "manifest", "hashing", "progress", "runtime",
            "signing", "tasks", "_version",
        }
    ),
)  # fmt: skip
"""From top to bottom. Packages of one layer do not import each other, except in the last."""

TORCH_FREE = LAYERS[-1] | {"network", "native", "cli", "__main__"}
HEAVY = frozenset({"torch", "transformers", "bitsandbytes", "peft"})


@dataclass(frozen=True)
class Import:
    """One import statement's target, and when it runs: ``load`` (with its module), ``call`` or ``typing`` (never)."""

    target: str
    line: int
    when: str


def modules_of(root: Path) -> dict[str, Path]:
    """Dotted name to file, for every module of the package under ``root``."""
    modules = {}
    for path in sorted((root / PACKAGE).rglob("*.py")):
        parts = path.relative_to(root).with_suffix("").parts
        modules[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return modules


def imports_of(name: str, modules: dict[str, Path]) -> list[Import]:
    """Every import in the module, wherever it stands; targets are modules where the tree has them."""
    path = modules[name]
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    found: list[Import] = []

    def visit(node: ast.AST, when: str) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, node.lineno, when) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parent = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parent, *([node.module] if node.module else [])])
            for alias in node.names:
                longer = f"{base}.{alias.name}"
                found.append(Import(longer if longer in modules else base, node.lineno, when))
        elif isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            for statement in node.body:
                visit(statement, "typing")
            for statement in node.orelse:
                visit(statement, when)
        else:
            deferred = when == "load" and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            for child in ast.iter_child_nodes(node):
                visit(child, "call" if deferred else when)

    visit(ast.parse(path.read_text(encoding="utf-8"), str(path)), "load")
    return found


def package_of(module: str) -> str | None:
    """``p2ptrain.network.link`` -> ``network``; None for the root, the façade that hands out names of all layers."""
    parts = module.split(".")
    return parts[1] if len(parts) > 1 else None


def layer_of(package: str) -> int | None:
    return next((index for index, layer in enumerate(LAYERS) if package in layer), None)


def is_ours(target: str) -> bool:
    return target == PACKAGE or target.startswith(f"{PACKAGE}.")


def arrow_faults(root: Path) -> Iterator[str]:
    """Imports that go up or sideways, and modules that belong to no layer."""
    modules = modules_of(root)
    for name in modules:
        package = package_of(name)
        if package is None:
            continue
        layer = layer_of(package)
        if layer is None:
            yield f"{name} belongs to no layer: add it to LAYERS"
            continue
        for entry in imports_of(name, modules):
            target = package_of(entry.target) if is_ours(entry.target) else package
            if target is None or target == package:
                continue
            below = layer_of(target)
            last = len(LAYERS) - 1
            if below is None or below < layer or (below == layer != last):
                yield f"{name}:{entry.line} imports {entry.target}, which is not below it"


def hivemind_faults(root: Path) -> Iterator[str]:
    """Imports of hivemind outside the network package."""
    modules = modules_of(root)
    for name in modules:
        for entry in imports_of(name, modules):
            if entry.target.split(".")[0] == "hivemind" and package_of(name) != "network":
                yield f"{name}:{entry.line} imports {entry.target}"


def loads(name: str, modules: dict[str, Path]) -> set[str]:
    """Everything that importing ``name`` imports: our modules, their parent packages, and others by first name."""
    seen: set[str] = set()
    queue = [name]
    while queue:
        current = queue.pop()
        if current in seen:
            continue
        seen.add(current)
        if current in modules:
            parts = current.split(".")
            queue.extend(".".join(parts[:end]) for end in range(1, len(parts)))
            for entry in imports_of(current, modules):
                if entry.when == "load":
                    queue.append(entry.target if is_ours(entry.target) else entry.target.split(".")[0])
    return seen


def load_faults(root: Path) -> Iterator[str]:
    """Modules whose mere import loads torch (or, in the command line, hivemind) without need."""
    modules = modules_of(root)
    for name in modules:
        package = package_of(name)
        light = package is None or package in TORCH_FREE
        unwanted = HEAVY | {"hivemind"} if package in (None, "cli", "__main__") else HEAVY
        for heavy in sorted(loads(name, modules) & unwanted) if light else ():
            yield f"importing {name} loads {heavy}"


def find_cycle(root: Path) -> list[str] | None:
    """A circle of modules, also through imports inside functions; not for types only, nor by the root's lazy façade."""
    modules = modules_of(root)
    graph = {
        name: {
            entry.target
            for entry in imports_of(name, modules)
            if entry.target in modules
            and entry.target != name
            and (entry.when == "load" or (entry.when == "call" and name != PACKAGE))
        }
        for name in modules
    }
    try:
        graphlib.TopologicalSorter(graph).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return None


def test_imports_go_down_only() -> None:
    assert list(arrow_faults(ROOT)) == []


def test_hivemind_is_imported_in_network_alone() -> None:
    assert list(hivemind_faults(ROOT)) == []


def test_light_modules_load_without_torch() -> None:
    assert list(load_faults(ROOT)) == []


def test_no_modules_import_each_other_in_a_circle() -> None:
    assert find_cycle(ROOT) is None


def test_the_tree_under_test_is_not_empty() -> None:
    modules = modules_of(ROOT)
    assert "p2ptrain.codecs.base" in modules
    assert any(entry.target == "p2ptrain.codecs.base" for entry in imports_of("p2ptrain.codecs.dense", modules))


UP_OR_SIDEWAYS = [
    ("network/rpc/endpoint.py", "import p2ptrain.node.peer"),
    ("network/rpc/endpoint.py", "def f():\n    from p2ptrain.averaging import grid"),
    ("averaging/grouping/cells.py", "from p2ptrain import pipeline"),
    ("averaging/grouping/cells.py", "from ...pipeline import stage"),
    ("averaging/averager.py", "from p2ptrain.pipeline.stage import x"),
    ("errors.py", "if TYPE_CHECKING:\n    from p2ptrain.models import llama"),
    ("misc.py", ""),
]
DOWN = {
    "node/peer.py": "from p2ptrain.network import rpc\nimport p2ptrain.errors", "__init__.py": "",
    "manifest.py": "from p2ptrain.errors import E", "network/a.py": "from .b import c",
}  # fmt: skip
TORCH = {
    "codecs/__init__.py": "import torch.nn", "codecs/base.py": "", "network/a.py": "",
    "network/b.py": "from p2ptrain.codecs.base import Codec", "cli/main.py": "def f():\n    import torch",
}  # fmt: skip
FOR_TYPES = {"network/a.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch"}
HIVEMIND = {"node/peer.py": "def f():\n    import hivemind.p2p", "network/libp2p/transport.py": "import hivemind"}
CIRCLE = {"node/a.py": "import p2ptrain.node.b", "node/b.py": "def f():\n    import p2ptrain.node.a"}


@pytest.mark.parametrize(
    ("faults", "files", "found"),
    [
        *((arrow_faults, {"pipeline/__init__.py": "", file: text}, 1) for file, text in UP_OR_SIDEWAYS),
        (arrow_faults, DOWN, 0),
        (hivemind_faults, HIVEMIND, ["p2ptrain.node.peer:2 imports hivemind.p2p"]),
        (load_faults, TORCH, ["importing p2ptrain.network.b loads torch"]),
        (load_faults, FOR_TYPES, 0),
        (find_cycle, CIRCLE, 3),
        (find_cycle, {**CIRCLE, "node/b.py": ""}, 0),
    ],
)
def test_a_fault_that_is_planted_is_found_and_what_is_right_is_not(
    tmp_path: Path, faults: Callable[[Path], Iterable[str] | None], files: dict[str, str], found: int | list[str]
) -> None:
    for name, text in files.items():
        path = tmp_path / PACKAGE / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    told = list(faults(tmp_path) or ())
    assert (told if isinstance(found, list) else len(told)) == found
