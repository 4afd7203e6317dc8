"""Links of all pages lead somewhere, and the page of questions names files, classes and functions that are there."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("*/README.md")])
NAMED = re.findall(r"`(p2ptrain/[\w/.]+)`(?:: `([\w.]+)`)?", (ROOT / "docs" / "finding.md").read_text(encoding="utf-8"))


def anchors(page: Path) -> set[str]:
    """Return the names by which links may lead into a page."""
    titles = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_titles(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if "://" in link:
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize(("path", "name"), NAMED)
def test_the_answers_to_questions_are_there(path: str, name: str) -> None:
    assert (ROOT / path).exists()
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body if name else []
    for part in filter(None, name.split(".")):
        found = [each for each in body if getattr(each, "name", "") == part]
        assert found, f"{path} has no {name}"
        body = getattr(found[0], "body", [])
