"""Pages show the truth: Python imports what is there, commands parse, settings load; the site has every page."""

import ast
import importlib
import importlib.util
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import generate
from p2ptrain.cli.main import COMMANDS, parser_of
from p2ptrain.config import PeerConfig
from p2ptrain.manifest import Manifest
from p2ptrain.node.site.policy import PolicyFile
from tests.unit.test_docs import PAGES, ROOT

BLOCK = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", flags=re.MULTILINE | re.DOTALL)
SHELL = ("", "sh", "bash", "console")
MAKE_TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))


def blocks(page: Path, *languages: str) -> list[str]:
    """Return the page's blocks of code in these languages."""
    return [text for _, kind, text in BLOCK.findall(page.read_text(encoding="utf-8")) if kind in languages]


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each shell command, without prompts, comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        if re.match(r"\$? ?(p2ptrain|make|python|\.venv/bin/python) ", line):
            words = shlex.split(re.sub(r" > \S+", "", line.removeprefix("$ ")), comments=True)
            while "&&" in words:
                yield words[: words.index("&&")]
                words = words[words.index("&&") + 1 :]
            yield words


def check_command(words: list[str]) -> None:
    """Raise if there is no such command, option, target of make, module or script."""
    match words:
        case ["p2ptrain", ("--help" | "--version"), *_]:
            pass
        case ["p2ptrain", name, *options]:
            assert name in COMMANDS, words
            if options != ["--help"]:
                parser_of(name).parse_args(options)
        case ["make", *goals]:
            assert {goal for goal in goals if "=" not in goal} <= MAKE_TARGETS, words
        case [_, "-m", module, *_]:
            assert importlib.util.find_spec(module), words
        case [_, script, *_] if script.endswith(".py"):
            assert (ROOT / script).exists(), words


def check_import(node: ast.Import | ast.ImportFrom, of_page: set[str]) -> None:
    """Raise unless what is imported is in a package, in another block of the page, or of a program that is not here."""
    modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
    for module in modules:
        top = module.partition(".")[0]
        if top in of_page or (importlib.util.find_spec(top) is None and top not in ("p2ptrain", "tests")):
            continue
        found = importlib.import_module(module)
        for alias in node.names if isinstance(node, ast.ImportFrom) else ():
            assert hasattr(found, alias.name) or importlib.util.find_spec(f"{module}.{alias.name}"), ast.unparse(node)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_python_compiles_and_imports_what_is_there(page: Path) -> None:
    texts = blocks(page, "python")
    of_page = {match[1] for text in texts if (match := re.match(r"# (\w+)\.py\n", text))}
    for text in texts:
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                check_import(node, of_page)


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, *SHELL)], ids=name_of)
def test_commands_are_there_with_their_options(page: Path) -> None:
    for text in blocks(page, *SHELL):
        for words in commands(text):
            check_command(words)


def test_a_command_with_an_unknown_option_is_found() -> None:
    for line in (
        "p2ptrain joyn LINK",
        "p2ptrain join LINK --no-such-option",
        "make no-such-goal",
        "python -m no_such.one",
    ):
        found = list(commands(f"{line}  # a comment\n"))
        assert len(found) == 1
        with pytest.raises(Exception, match=r".+"):
            check_command(found[0])


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "toml")], ids=name_of)
def test_settings_load(page: Path) -> None:
    """Blocks of a package or of a scenario have tests of their own."""
    for values in map(tomllib.loads, blocks(page, "toml")):
        if "leave" in values:
            PolicyFile.model_validate(values)
        elif values.keys() <= Manifest.model_fields.keys():
            assert values.keys() <= Manifest.model_validate(values).model_fields_set
        elif not values.keys() & {"project", "promise"}:
            config = PeerConfig.model_validate({"role": "trainer", "link": "p2ptrain://…", **values})
            assert values.keys() <= config.model_fields_set


def test_generated_pages_have_every_command_setting_and_message() -> None:
    pages = generate.pages()
    for name in COMMANDS:
        assert f"## p2ptrain {name}\n" in pages["reference/cli.md"]
    for kind, path in ((Manifest, "reference/run-toml.md"), (PeerConfig, "reference/peer-toml.md")):
        for key in kind.model_fields:
            assert f"## [{key}]\n" in pages[path] or f"| `{key}` |" in pages[path]
    assert "### PeerRecord\n" in pages["reference/records.md"]
    assert (
        "| `max_new_tokens` |" in pages["reference/messages.md"] or "### HopRequest\n" in pages["reference/messages.md"]
    )
    for title in re.findall(r"^::: (\S+)$", pages["reference/python.md"], flags=re.MULTILINE):
        module, _, name = title.rpartition(".")
        assert importlib.util.find_spec(title) if name.islower() else hasattr(importlib.import_module(module), name)


def test_the_site_has_every_page_once() -> None:
    named = re.findall(
        r"^ +- (?:.*: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    written = {str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")}
    assert sorted(named) == sorted(written | generate.pages().keys())


def test_a_site_that_loads_from_elsewhere_is_refused(tmp_path: Path) -> None:
    page = tmp_path / "index.html"
    page.write_text('<link rel="stylesheet" href="a.css"><a href="https://example.org">a link is no load</a>')
    assert generate.foreign_loads(tmp_path) == []
    for text in (
        '<script src="https://example.org/a.js">',
        "<img alt=x src=//example.org/a.png>",
        '<link href="https://example.org/a.css" rel="stylesheet">',
        '<style>@import "https://example.org/a.css"</style>',
    ):
        page.write_text(text)
        assert len(generate.foreign_loads(tmp_path)) == 1, text
