"""Links of all pages lead somewhere, and what pages name is there: files, classes, functions, tests of promises."""

import ast
import re
from pathlib import Path

import pytest

from tests.support.pages import PAGES, ROOT

FINDING = (ROOT / "docs" / "reference" / "finding.md").read_text(encoding="utf-8")
NAMED = re.findall(r"`(p2ptrain/[\w/.]+)`(?:: `([\w.]+)`)?", FINDING)

SECURITY = (ROOT / "docs" / "explanation" / "security.md").read_text(encoding="utf-8")


def anchor_of(title: str) -> str:
    """Return the name by which links may lead to a title."""
    return re.sub(r"[^\w\- ]", "", title.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Return the names by which links may lead into a page."""
    return set(map(anchor_of, re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), flags=re.MULTILINE)))


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


PROMISES = re.findall(r"^\| promise \| test \|\n\| --- \| --- \|\n((?:\|.*\n)+)", SECURITY, flags=re.MULTILINE)


def test_each_promise_of_security_names_tests_that_are_there() -> None:
    """``path -k name`` is a test; ``-k name`` is another one of the same file, also in the rows below."""
    path = ROOT
    for row in "".join(PROMISES).splitlines():
        cell = row.strip("| ").rpartition(" | ")[2]
        assert re.fullmatch(r"(`([\w/]+\.py )?-k \w+`(, |$))+", cell), row
        for file, word in re.findall(r"`([\w/]+\.py )?-k (\w+)`", cell):
            path = ROOT / "tests" / file.strip() if file else path
            tests = re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
            assert any(word in test for test in tests), f"no test of {path} has {word!r} in its name"


def test_security_says_of_each_adversary_what_is_promised_and_what_is_not() -> None:
    adversaries = re.findall(r"\]\(#([\w-]+)\)", SECURITY.partition("| adversary |")[2].partition("\n\n")[0])
    sections = {anchor_of(each.partition("\n")[0]): each for each in re.split(r"^## ", SECURITY, flags=re.MULTILINE)}
    assert len(adversaries) > 10
    for each in adversaries:
        assert "| promise | test |" in sections[each]
        assert "**Not promised.**" in sections[each]
