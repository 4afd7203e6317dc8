"""Every fault that docs/reference/faults.md promises to survive has a test, and the page names those that have none."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "reference" / "faults.md").read_text()


def _marks() -> Iterator[tuple[str, int]]:
    """(test, number of a fault) for each mark in the tests."""
    for path in sorted((ROOT / "tests").rglob("test_*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
                for mark in node.decorator_list:
                    if isinstance(mark, ast.Call) and ast.unparse(mark.func) == "pytest.mark.fault":
                        for number in mark.args:
                            yield f"{path.name}::{node.name}", ast.literal_eval(number)


def test_the_page_names_the_faults_that_no_test_covers() -> None:
    table, _, without = PAGE.partition("## Without a test")
    rows = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    uncovered = {int(number) for number in re.findall(r"\b\d+\b", without)}
    covered = {number for _, number in _marks()}
    assert rows == set(range(1, max(rows) + 1))
    assert covered <= rows, f"no such fault: {sorted(covered - rows)}"
    assert uncovered == rows - covered, "the page lists other faults without a test than the tests leave"
