"""``p2ptrain resume [RUN_DIR]``

Let a peer that 'p2ptrain pause' paused go on. Other reasons to rest, such as its schedule or the battery, stay.
"""

from __future__ import annotations

import argparse

from p2ptrain.cli.commands.guest.runs import add_run_dir, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    run_dir, answer = tell(arguments.run_dir, "resume")
    print(f"{run_dir} ({answer.name}): {f'still paused: {answer.paused}' if answer.paused else 'goes on'}")
    return 0
