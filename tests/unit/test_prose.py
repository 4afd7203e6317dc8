"""Summary lines of docstrings name an actor or say what a function does; see CONTRIBUTING.md."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).resolve().parents[2] / "p2ptrain"
BANNED = ("who", "whoever", "whom", "whose", "what", "whatever", "those", "let", "have", "say", "note that", "so that")


def summaries(path: Path) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring's first line, those of attributes and constants included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        value = node.value if isinstance(node, ast.Expr) else None
        if isinstance(value, ast.Constant) and isinstance(value.value, str):
            yield value.lineno, value.value.strip().partition("\n")[0]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_summary_line_begins_without_an_actor(path: Path) -> None:
    banned = tuple(f"{words} " for words in BANNED)
    assert [each for each in summaries(path) if each[1].lower().startswith(banned)] == []
