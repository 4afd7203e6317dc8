"""Figures of the package's structure, so that growth shows: ``python -m tests.support.house``.

`tests/unit/test_house.py` holds seven of them. Each is counted from the source but for the files of a round, which a
profiler sees while three simulated trainers average.
"""

import ast
import signal
import statistics
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = ROOT / "p2ptrain"
TESTS = ROOT / "tests"
ROUNDS = 3
"""Of the profiled swarm; the first one brings imports and downloads."""


@dataclass(frozen=True)
class Figure:
    """One figure, the most that it should be, and which file, class or folder has the most."""

    name: str
    value: float
    goal: float
    where: str = ""

    def __str__(self) -> str:
        return f"{self.name:34} {self.value:8,.0f} of {self.goal:8,.0f}  {self.where}"


def modules() -> dict[Path, ast.Module]:
    return {path: ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def count_lines(root: Path) -> int:
    """Return the lines of all modules below a folder, blank ones included."""
    return sum(path.read_text().count("\n") for path in root.rglob("*.py"))


def largest_folder() -> tuple[int, str]:
    """Return how many modules the fullest folder has, and which it is."""
    folders = Counter(path.parent for path in PACKAGE.rglob("*.py"))
    folder, number = folders.most_common(1)[0]
    return number, str(folder.relative_to(ROOT))


def largest_imports(trees: dict[Path, ast.Module]) -> tuple[int, str]:
    """Return how many of the package's own modules one module imports at most, and which module does."""

    def imported(tree: ast.Module) -> set[str]:
        names = {node.module or "" for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        return {name for name in names if name.split(".")[0] == PACKAGE.name}

    number, path = max((len(imported(tree)), path) for path, tree in trees.items())
    return number, str(path.relative_to(ROOT))


def constructor_parameters(trees: dict[Path, ast.Module]) -> list[int]:
    """Return how many parameters each ``__init__`` has without ``self``, ascending."""
    inits = [node for node in _functions(trees) if node.name == "__init__"]
    return sorted(len(each.args.posonlyargs + each.args.args + each.args.kwonlyargs) - 1 for each in inits)


def most_parameters(trees: dict[Path, ast.Module]) -> float:
    """Return the number of constructor parameters that one class in ten exceeds."""
    return statistics.quantiles(constructor_parameters(trees), n=10)[-1]


def forwarders(trees: dict[Path, ast.Module]) -> int:
    """Return how many members only hand a call or a value on to an attribute's own."""
    return sum(_forwards(node) for node in _functions(trees))


def assigned_callbacks(trees: dict[Path, ast.Module]) -> int:
    """Return how many public attributes are callables that somebody else sets later: a ``lambda`` by default."""
    return sum(
        isinstance(node.value, ast.Lambda)
        and isinstance(node.target, ast.Attribute)
        and not node.target.attr.startswith("_")
        for tree in trees.values()
        for node in ast.walk(tree)
        if isinstance(node, ast.AnnAssign)
    )


def files_of_a_round() -> Counter[Path]:
    """Return how many functions of each file of the package three simulated trainers enter in one healthy round."""
    from p2ptrain.network.simulated import SimulatedNetwork, simulate
    from tests.support.sim.trainers import SimulatedSwarm, make_manifest

    entered: set[tuple[str, str, int]] = set()

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(PACKAGE)):
            entered.add((code.co_filename, code.co_qualname, code.co_firstlineno))

    async def main(network: SimulatedNetwork) -> None:
        swarm = SimulatedSwarm(network, make_manifest(min_peers=3), 0)
        for name in "abc":
            swarm.start(name)
        await swarm.until(lambda: swarm.in_agreement(ROUNDS), 600.0, "rounds begin")
        sys.setprofile(note)
        try:
            await swarm.until(lambda: swarm.in_agreement(ROUNDS + 1), 600.0, "a round is committed")
        finally:
            sys.setprofile(None)
        await swarm.end()

    simulate(main, 0)
    return Counter(Path(file).relative_to(ROOT) for file, _, _ in entered if "/simulated/" not in file)


def figures() -> Iterator[Figure]:
    """Yield all figures, the quick ones first."""
    trees = modules()
    yield Figure("lines of the package", count_lines(PACKAGE), 38_000)
    yield Figure("lines of tests", count_lines(TESTS), 36_000)
    yield Figure("files in a folder, at most", *_with_goal(largest_folder(), 13))
    yield Figure("internal imports, at most", *_with_goal(largest_imports(trees), 12))
    at_most = f"at most {constructor_parameters(trees)[-1]}"
    yield Figure("constructor parameters, p90", most_parameters(trees), 6, at_most)
    yield Figure("members that only forward", forwarders(trees), 40)
    yield Figure("callbacks set after construction", assigned_callbacks(trees), 0)
    files = files_of_a_round()
    folders = Counter(file.parent for file in files).most_common()
    where = ", ".join(f"{number} in {folder}" for folder, number in folders)
    yield Figure("files that a round enters", len(files), 45, f"{files.total()} functions: {where}")


def _with_goal(most: tuple[int, str], goal: float) -> tuple[int, float, str]:
    return most[0], goal, most[1]


def _functions(trees: dict[Path, ast.Module]) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    for tree in trees.values():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                yield from (each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef))


def _forwards(function: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    body = [each for each in function.body if not (isinstance(each, ast.Expr) and isinstance(each.value, ast.Constant))]
    if len(body) != 1 or function.name.startswith("__"):
        return False
    value = body[0].value if isinstance(body[0], ast.Return | ast.Expr) else None
    value = value.value if isinstance(value, ast.Await) else value
    handed_on: list[ast.expr] = []
    if isinstance(value, ast.Call):
        handed_on, value = [*value.args, *(each.value for each in value.keywords)], value.func
    depth = 0
    while isinstance(value, ast.Attribute):
        depth, value = depth + 1, value.value
    of_self = isinstance(value, ast.Name) and value.id == "self" and depth >= 2
    return of_self and all(isinstance(each, ast.Name) for each in handed_on)


if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # For `| head`.
    for figure in figures():
        sys.stdout.write(f"{figure}\n")
        sys.stdout.flush()
