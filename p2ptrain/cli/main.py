"""``p2ptrain COMMAND``: runs a command and maps its errors to one line and an exit code."""

from __future__ import annotations

import argparse
import difflib
import errno
import logging
import os
import sys
from collections.abc import Sequence
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from p2ptrain import runtime
from p2ptrain._version import __version__
from p2ptrain.errors import ConfigError, P2PTrainError, ResourceError, UsageError

COMMANDS = {
    "up": "run a whole swarm on this machine, offline: the quickest way to see it work",
    "init": "write a commented run.toml and an organizer key to start a swarm of your own",
    "seed": "start a swarm from 'init' and print the link that invites others",
    "join": "take part in a swarm, given its link",
    "generate": "continue a text with a swarm's model",
    "chat": "talk with a swarm's model",
    "serve": "serve OpenAI's API over a swarm's model",
    "draft": "train a small model that makes a swarm's answers come sooner",
    "invite": "print a link that lets people, or one peer, into a swarm",
    "revoke": "make an invite or a pass worthless; the peers that it let in stay",
    "ban": "throw a peer out of a swarm",
    "members": "show which peers a swarm admits, and how they came in",
    "announce": "put a swarm into an index that others can read",
    "list": "show the public swarms of an index",
    "pause": "let a peer on this machine rest; it stays reachable and follows the swarm",
    "resume": "let a paused peer go on",
    "leave": "end a peer on this machine in good order",
    "verify-log": "verify the log of what left a site, and show what did",
    "peer": "run one peer from a role file (see the folder 'peers')",
    "status": "show the peers of a swarm",
    "simulate": "train many sites of a private swarm in one process, to try strategies",
    "monitor": "serve a web page that shows how a swarm is doing",
    "report": "write one HTML page of a finished run",
    "doctor": "check that this machine can take part, with a fix for what is missing",
    "checkpoint": "list, verify and export checkpoints",
    "completion": "print a script that completes commands in a shell, or the manual page",
}

_FOLDERS = {
    **dict.fromkeys(("invite", "revoke", "ban", "members"), "admission."),
    **dict.fromkeys(("announce", "list"), "index."),
    **dict.fromkeys(("pause", "resume", "leave"), "guest."),
    **dict.fromkeys(("simulate", "verify-log"), "private."),
    **dict.fromkeys(("generate", "chat", "serve"), "serving."),
}

ABOUT = "Train and serve one model together, over the internet, on machines that come and go."

EXIT_CODES = """exit codes:
  0    done
  1    internal error
  2    usage: the command line cannot work
  3    config: a file, link or value cannot be used
  4    no bootstrap peer can be reached
  5    the identity is in use or unusable
  6    incompatible with the swarm
  7    not enough resources: memory, disk, port, daemon
  8    integrity: bytes do not match their hash or signature
  9    diverged: this peer's training gives values that cannot count
  75   temporary: trying again later may work
  130  interrupted"""

INTERRUPTED = 130
_WRONG_PATH = (
    errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.ENAMETOOLONG,
)  # fmt: skip


class Parser(argparse.ArgumentParser):
    """An argument parser that raises `UsageError`."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(f"{message}; see '{self.prog} --help'")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit code; ``argv`` excludes the program's name."""
    code = _run(argv)
    if runtime.left_behind:  # Python would wait for these threads, or crash in them; all data are on disk.
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    return code


def _run(argv: Sequence[str] | None) -> int:
    try:
        return _dispatch(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of standard output is gone; the flush at exit must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        deliberate = explain_error(error)
        if deliberate is None:
            raise
        print(f"p2ptrain: error: {' '.join(str(deliberate).split())}", file=sys.stderr)
        return deliberate.exit_code


def _dispatch(argv: list[str]) -> int:
    name = argv[0] if argv else "--help"
    if name in ("-h", "--help", "help"):
        print(_overview())
        return 0
    if name in ("-V", "--version", "version"):
        print(f"p2ptrain {__version__}")
        return 0
    if name not in COMMANDS:
        near = difflib.get_close_matches(name, COMMANDS, n=1)
        hint = f"did you mean {near[0]!r}?" if near else "see 'p2ptrain --help'"
        raise UsageError(f"there is no command {name!r}; {hint}")
    command = module_of(name)
    arguments = parser_of(name).parse_args(argv[1:])
    if name != "peer":  # `peer` configures its log from the role file.
        from p2ptrain.cli.logs import configure_logging

        configure_logging(
            arguments.log_format or "text", arguments.log_level or getattr(command, "LOG_LEVEL", "warning")
        )
    code: int = command.run(arguments)
    return code


def parser_of(name: str) -> Parser:
    """Return the parser of a command's arguments."""
    command = module_of(name)
    parser = Parser(
        prog=f"p2ptrain {name}",
        description=str(command.__doc__).partition("\n\n")[2],
        epilog=EXIT_CODES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    command.add_arguments(parser)
    _add_log_arguments(parser)
    return parser


def _add_log_arguments(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("log")
    group.add_argument("--log-format", choices=("text", "json"), help="how log lines on standard error look")
    group.add_argument(
        "--log-level", choices=("debug", "info", "warning", "error"), help="the least severe messages to show"
    )


def module_of(command: str) -> ModuleType:
    """Return the module of a command."""
    return import_module(f"p2ptrain.cli.commands.{_FOLDERS.get(command, '')}{command.replace('-', '_')}")


def _overview() -> str:
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {text}" for name, text in COMMANDS.items())
    return (
        "usage: p2ptrain COMMAND [OPTIONS]\n\n"
        f"{ABOUT}\n\n"
        f"commands:\n{commands}\n\n"
        "options:\n  --help     show this, or with a command its options\n  --version  show the version\n\n"
        f"{EXIT_CODES}"
    )


def explain_error(error: BaseException) -> P2PTrainError | None:
    """Return the `P2PTrainError` for an exception; None for a defect, which deserves its traceback.

    Searches exception groups, and maps common OS errors, such as a full disk, to errors with a remedy.
    """
    if isinstance(error, P2PTrainError):
        return error
    if isinstance(error, BaseExceptionGroup):
        explained = [explain_error(inner) for inner in error.exceptions]
        return explained[0] if all(explained) else None
    if isinstance(error, OSError):
        return _explain_os_error(error)
    return None


def _explain_os_error(error: OSError) -> P2PTrainError | None:
    what = f"{error.filename}: {error.strerror}" if error.filename else str(error.strerror)
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return ResourceError(f"{what}: free some disk space, or choose another --run-dir")
    if error.errno in (errno.EMFILE, errno.ENFILE):
        return ResourceError(f"{what}: raise the limit of open files (ulimit -n 4096)")
    if error.errno == errno.ENOMEM:
        return ResourceError(f"{what}: close other programs, or choose a smaller model")
    if error.errno == errno.EEXIST:
        return ConfigError(f"{what}: choose another path")
    if error.errno in _WRONG_PATH:
        return ConfigError(f"{what}: choose a path that exists and that you may write to")
    return None
