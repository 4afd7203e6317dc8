"""The scripts that complete commands, run by bash, and the manual page, set by groff."""

import argparse
import shutil
import subprocess
from pathlib import Path

import pytest

from p2ptrain.cli.commands.completion import KINDS
from p2ptrain.cli.main import COMMANDS, EXIT_CODES, parser_of


def actions() -> list[tuple[str, argparse.Action]]:
    return [(name, each) for name in COMMANDS for each in parser_of(name)._actions]


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("completion") / "p2ptrain.bash"
    path.write_text(KINDS["bash"]())
    return path


def completed(script: Path, *words: str) -> list[str]:
    """Return what bash proposes for the last of these words."""
    call = 'source "$0"; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _p2ptrain; printf "%s\\n" "${COMPREPLY[@]}"'
    done = subprocess.run(
        ["bash", "-u", "-c", call, str(script), "p2ptrain", *words], capture_output=True, text=True, timeout=60
    )
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout.split()


@pytest.mark.parametrize(
    ("words", "proposed"),
    [
        (["che"], ["checkpoint"]),
        (["m"], ["members", "monitor"]),
        (["checkpoint", "v"], ["verify"]),
        (["join", "--role", ""], ["trainer", "stage", "both"]),
        (["join", "p2ptrain://x", "--serve"], ["--serve", "--serve-only"]),
        (["join", "--log-format", "j"], ["json"]),
        (["list", "--index-"], ["--index-key"]),
        (["completion", ""], ["--help", "--log-format", "--log-level", "bash", "zsh", "fish", "man"]),
        (["nonsense", ""], []),
        (["announce", "ind"], []),
    ],
    ids=lambda words: " ".join(words),
)
def test_bash_completes_commands_options_and_values(script: Path, words: list[str], proposed: list[str]) -> None:
    assert completed(script, *words) == proposed


def test_bash_proposes_all_commands_and_files_where_nothing_else_fits(script: Path) -> None:
    assert completed(script, "") == [*COMMANDS, "--help", "--version"]
    found = subprocess.run(
        ["bash", "-c", 'source "$0"; complete -p p2ptrain', str(script)], capture_output=True, text=True, timeout=60
    )
    assert found.stdout == "complete -o default -F _p2ptrain p2ptrain\n"


@pytest.mark.parametrize("kind", ["bash", "zsh", "fish", "man"])
def test_nothing_is_left_out(kind: str) -> None:
    text = KINDS[kind]().replace("\\-", "-")
    for name, action in actions():
        assert name in text
        for option in action.option_strings:
            shown = f"-l {option[2:]}" if kind == "fish" else option
            assert shown in text or not option.startswith("--"), f"{name} {option}"
    assert kind != "man" or all(line.split()[0] in text for line in EXIT_CODES.splitlines()[1:])


@pytest.mark.skipif(shutil.which("groff") is None, reason="needs groff")
def test_groff_sets_the_manual_page_without_a_warning(tmp_path: Path) -> None:
    page = tmp_path / "p2ptrain.1"
    page.write_text(KINDS["man"](), encoding="utf-8")
    command = ["groff", "-K", "utf8", "-man", "-ww", "-z", "-Tutf8", str(page)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.skipif(shutil.which("man") is None, reason="needs man")
def test_man_shows_each_command_and_option(tmp_path: Path) -> None:
    page = tmp_path / "p2ptrain.1"
    page.write_text(KINDS["man"](), encoding="utf-8")
    done = subprocess.run(
        ["man", "-l", str(page)], capture_output=True, text=True, timeout=60,
        env={"PATH": "/usr/bin:/bin", "MANWIDTH": "120", "MAN_KEEP_FORMATTING": "", "LC_ALL": "C.UTF-8"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    text = done.stdout.replace("\u2010", "-")
    for name in COMMANDS:
        assert f"p2ptrain {name}" in text
    assert "--index-key" in text
    assert "--serve-only" in text
