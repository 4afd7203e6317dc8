"""``p2ptrain chat LINK``

Talk with a swarm's model, in the form that its chat template gives. Ctrl-C ends an answer, Ctrl-D the conversation;
/reset forgets what was said. In a pipe, each line is a message.
"""

from __future__ import annotations

import argparse
import sys

from p2ptrain.cli.commands.serving.talking import (
    add_model_arguments,
    add_sampling_arguments,
    answer,
    read_text,
    sampling_of,
)
from p2ptrain.errors import P2PTrainError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="what the model is told before the conversation")
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.network.link import SwarmLink

    link, _ = SwarmLink.parse(arguments.link), sampling_of(arguments)  # Fails before it connects.
    from p2ptrain.cli.commands.serving.talking import text_of
    from p2ptrain.node.serving.thread import ModelThread

    system = read_text(lambda: arguments.system or "", "--system")
    beginning = [{"role": "system", "content": system}] if system else []
    with ModelThread(link, arguments.wait) as thread:
        text, _, default = text_of(thread.model, arguments)
        sampling = sampling_of(arguments, default)
        text.encode_chat([{"role": "user", "content": ""}])  # Fails without a chat template.
        messages = list(beginning)
        while (said := _read()) is not None:
            if said == "/reset":
                messages = list(beginning)
                continue
            if not said:
                continue
            messages.append({"role": "user", "content": said})
            try:
                told = thread.call(answer(thread.model, text, text.encode_chat(messages), sampling, arguments))
                messages.append({"role": "assistant", "content": told})
            except KeyboardInterrupt:
                print("\n[ended]", file=sys.stderr)
                messages.pop()
            except P2PTrainError as error:
                if not sys.stdin.isatty():
                    raise
                print(f"\n[{error}]", file=sys.stderr)  # The conversation goes on, after /reset if it is too long.
                messages.pop()
    return 0


def _read() -> str | None:
    """Return the next message; None at the end."""
    try:
        return read_text(lambda: input("> " if sys.stdin.isatty() else ""), "standard input").strip()
    except EOFError:
        return None
