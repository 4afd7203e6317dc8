"""The package and its tests grow no further: what `tests.support.house` counts stays within these limits."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support import house

LIMITS = {house.PACKAGE: 69_400, house.TESTS: 73_100}
MAX_FILES = 13
MAX_IMPORTS = 12
MAX_PARAMETERS = 5
MAX_FORWARDERS = 40
MAX_FILES_OF_A_ROUND = 59


@pytest.mark.parametrize("root", LIMITS, ids=lambda root: root.name)
def test_lines_stay_within_their_limit(root: Path) -> None:
    assert house.count_lines(root) <= LIMITS[root]


def test_no_folder_of_the_package_is_too_full() -> None:
    number, folder = house.largest_folder()
    assert number <= MAX_FILES, f"{folder} has {number} modules: merge those that change together"


@pytest.mark.fault(47)
def test_no_loader_may_run_code_of_a_repository() -> None:
    calls = [node for tree in house.modules().values() for node in ast.walk(tree) if isinstance(node, ast.Call)]
    loads = [call for call in calls if ast.unparse(call.func).endswith((".from_pretrained", ".load_dataset"))]
    assert len(loads) >= 4
    for call in loads:
        assert "trust_remote_code=False" in ast.unparse(call)


def test_tensors_of_the_shared_arithmetic_name_their_dtype() -> None:
    """A script may call `torch.set_default_dtype`, which holds for all threads."""
    bare = [
        f"{path}:{call.lineno}"
        for path, tree in house.modules().items()
        if path.relative_to(house.PACKAGE).parts[0] in ("averaging", "codecs", "native")
        for call in ast.walk(tree)
        if isinstance(call, ast.Call) and ast.unparse(call.func) in ("torch.empty", "torch.full", "torch.zeros")
        if all(keyword.arg != "dtype" for keyword in call.keywords)
    ]
    assert not bare


def test_no_module_imports_too_many_others() -> None:
    number, module = house.largest_imports(house.modules())
    assert number <= MAX_IMPORTS, f"{module} imports {number} modules: let objects that it holds answer instead"


def test_nine_constructors_in_ten_take_few_parameters() -> None:
    assert house.most_parameters(house.modules()) <= MAX_PARAMETERS


def test_few_members_only_forward() -> None:
    assert house.forwarders(house.modules()) <= MAX_FORWARDERS


def test_a_healthy_round_enters_few_files() -> None:
    files = house.files_of_a_round()
    assert len(files) <= MAX_FILES_OF_A_ROUND, f"entered: {sorted(map(str, files))}"
    assert Path("p2ptrain/averaging/averager.py") in files


def test_its_figures_end_with_their_reader() -> None:
    first = "import sys; sys.stdin.readline()"
    command = f"{sys.executable} -m tests.support.house | {sys.executable} -c '{first}'; exit ${{PIPESTATUS[0]}}"
    ended = subprocess.run(["bash", "-c", command], cwd=house.ROOT, capture_output=True, text=True, timeout=60)
    assert ended.stderr == ""
