"""``p2ptrain leave [RUN_DIR]``

End a peer on this machine as SIGTERM does: the step in progress is finished, state is saved and the others are told.
With --finish it leaves after the round in progress; a trainer that is late for it, after the next that has its work. A
peer that rests leaves at once.
"""

from __future__ import annotations

import argparse

from p2ptrain.cli.commands.guest.runs import add_run_dir, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)
    parser.add_argument("--finish", action="store_true", help="leave after the round in progress, with its work in it")


def run(arguments: argparse.Namespace) -> int:
    run_dir, answer = tell(arguments.run_dir, "finish" if arguments.finish else "leave")
    print(f"{run_dir} ({answer.name}): leaves {answer.leaves}")
    return 0
