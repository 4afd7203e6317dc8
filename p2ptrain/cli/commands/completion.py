"""``p2ptrain completion bash|zsh|fish|man``

Print a script that completes p2ptrain's commands, options and their values in a shell, or the manual page. Both are
made from the commands' own arguments, so print them again after an update.

  bash   p2ptrain completion bash > ~/.local/share/bash-completion/completions/p2ptrain
  zsh    add to ~/.zshrc, after compinit: source <(p2ptrain completion zsh)
  fish   p2ptrain completion fish > ~/.config/fish/completions/p2ptrain.fish
  man    p2ptrain completion man > ~/.local/share/man/man1/p2ptrain.1
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from pathlib import Path


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("kind", choices=tuple(KINDS), help="the shell, or 'man' for the manual page")


def run(arguments: argparse.Namespace) -> int:
    print(KINDS[arguments.kind]())
    return 0


def bash() -> str:
    """Return the script of bash. It leaves to the shell what it does not know, such as names of files."""
    values, words = [], []
    for name, actions in _commands():
        options = [option for each in actions for option in each.option_strings if option.startswith("--")]
        for each in actions:
            if each.option_strings and each.choices:
                cases = "|".join(f'"{name} {option}"' for option in each.option_strings)
                values.append(f'{cases}) words="{_choices(each)}" ;;')
        places = [_choices(each) for each in actions if not each.option_strings and each.choices]
        words.append(f'{name}) words="{" ".join([*options, *places])}" ;;')
    lines = [
        "_p2ptrain() {",
        '    local current="${COMP_WORDS[COMP_CWORD]}" words=""',
        "    COMPREPLY=()",
        f'    [ "$COMP_CWORD" -gt 1 ] || words="{" ".join([*_names(), "--help", "--version"])}"',
        '    if [ -z "$words" ]; then case "${COMP_WORDS[1]} ${COMP_WORDS[COMP_CWORD-1]}" in',
        *(f"        {line}" for line in values),
        '    esac; fi',
        '    if [ -z "$words" ]; then case "${COMP_WORDS[1]}" in',
        *(f"        {line}" for line in words),
        '    esac; fi',
        '    COMPREPLY=( $(compgen -W "$words" -- "$current") )',
        "}",
        "complete -o default -F _p2ptrain p2ptrain",
    ]  # fmt: skip
    return "\n".join(lines)


def zsh() -> str:
    """Return the script of zsh, which runs that of bash."""
    return f"autoload -U +X bashcompinit && bashcompinit\n{bash()}"


def fish() -> str:
    """Return the script of fish."""
    from p2ptrain.cli.main import COMMANDS

    lines = [
        f"complete -c p2ptrain -n __fish_use_subcommand -f -a {name} -d {_quoted(COMMANDS[name])}" for name in COMMANDS
    ]
    for name, actions in _commands():
        first = f"complete -c p2ptrain -n '__fish_seen_subcommand_from {name}'"
        for each in actions:
            told = f"-d {_quoted(_help(each))}"
            takes = f"-x -a {_quoted(_choices(each))} " if each.choices else "" if each.nargs == 0 else _value(each)
            names = " ".join(
                f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}" for option in each.option_strings
            )
            if names or each.choices:
                lines.append(f"{first} {names} {takes}{told}".replace("  ", " "))
    return "\n".join(lines)


def man() -> str:
    """Return the manual page, in roff."""
    from p2ptrain._version import __version__
    from p2ptrain.cli.main import ABOUT, COMMANDS, EXIT_CODES, parser_of

    codes = [line.split(maxsplit=1) for line in EXIT_CODES.splitlines()[1:]]
    lines = [
        f'.TH P2PTRAIN 1 "" "p2ptrain {__version__}" "User Commands"',
        *(".SH NAME", _roff(f"p2ptrain - {ABOUT[0].lower()}{ABOUT[1:].rstrip('.')}")),
        *(".SH SYNOPSIS", ".B p2ptrain", _roff("COMMAND [OPTIONS]")),
        ".SH COMMANDS",
    ]
    for name, actions in _commands():
        parser = parser_of(name)
        usage = " ".join(parser.format_usage().removeprefix("usage: ").split())
        lines += [
            f".SS p2ptrain {name}",
            _roff(COMMANDS[name][0].upper() + COMMANDS[name][1:] + "."),
            ".PP",
            _roff(usage),
        ]
        for paragraph in (parser.description or "").strip().split("\n\n"):
            is_verbatim = paragraph.startswith(" ")
            text = "\n".join(map(_roff, paragraph.splitlines()))
            lines += [".PP", *([".nf", text, ".fi"] if is_verbatim else [text])]
        for each in actions:
            value = "" if each.nargs == 0 else f" {_metavar(each)}"
            title = ", ".join(each.option_strings) + value if each.option_strings else _metavar(each)
            lines += [".TP", f".B {_roff(title)}", _roff(_help(each))]
    lines += [".SH EXIT STATUS", *(line for code, told in codes for line in (".TP", f".B {code}", _roff(told)))]
    return "\n".join(lines)


KINDS: dict[str, Callable[[], str]] = {"bash": bash, "zsh": zsh, "fish": fish, "man": man}


def _names() -> list[str]:
    from p2ptrain.cli.main import COMMANDS

    return list(COMMANDS)


def _commands() -> Iterator[tuple[str, list[argparse.Action]]]:
    """Yield each command with its arguments."""
    from p2ptrain.cli.main import parser_of

    for name in _names():
        yield name, [each for each in parser_of(name)._actions if each.help is not argparse.SUPPRESS]


def _choices(action: argparse.Action) -> str:
    return " ".join(map(str, action.choices or ()))


def _metavar(action: argparse.Action) -> str:
    if action.metavar is not None:
        return str(action.metavar)
    return f"{{{','.join(map(str, action.choices))}}}" if action.choices else action.dest.upper()


def _help(action: argparse.Action) -> str:
    return " ".join(((action.help or "") % vars(action)).split())


def _value(action: argparse.Action) -> str:
    """Return fish's flag of an option that takes a value: files are proposed for a path alone."""
    return "-r " if action.type is Path else "-x "


def _quoted(text: str) -> str:
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _roff(text: str) -> str:
    """Return one line of text, in which roff finds no request and no hyphen of its own."""
    escaped = text.replace("\\", "\\e").replace("-", "\\-")
    return f"\\&{escaped}" if escaped.startswith((".", "'")) else escaped
