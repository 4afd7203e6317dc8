"""``p2ptrain pause [RUN_DIR]``

Let a peer on this machine rest. It stops after the batch in progress, and hands in its round. Then it stays reachable
and follows the swarm, but contributes nothing; no round waits for it. A host takes no more microbatches or sessions.
'p2ptrain resume' lets it go on. 'p2ptrain status --mine' shows whether it rests, and why.
"""

from __future__ import annotations

import argparse

from p2ptrain.cli.commands.guest.runs import add_run_dir, tell


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_dir(parser)


def run(arguments: argparse.Namespace) -> int:
    run_dir, answer = tell(arguments.run_dir, "pause")
    rests = "it rests" if answer.state == "resting" else "it rests once its round is handed in"
    print(f"{run_dir} ({answer.name}): paused {answer.paused}; {rests}")
    return 0
