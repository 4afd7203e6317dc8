"""``p2ptrain generate LINK PROMPT``

Continue a text with a swarm's model. Tokens appear as they are drawn; at the end, standard error tells which peers
computed them. A host that fails is replaced, and the answer goes on with the same tokens.
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
from p2ptrain.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("prompt", metavar="PROMPT", help="the text to continue; - reads it from standard input")
    add_sampling_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from p2ptrain.network.link import SwarmLink

    link, _ = SwarmLink.parse(arguments.link), sampling_of(arguments)  # Fails before it connects.
    prompt = read_text(sys.stdin.read if arguments.prompt == "-" else lambda: arguments.prompt, "PROMPT")
    if not prompt:
        raise UsageError("PROMPT is empty: give a text to continue")
    from p2ptrain.cli.commands.serving.talking import text_of
    from p2ptrain.cli.running import run_async
    from p2ptrain.node.serving.client import generating

    async def talk() -> None:
        async with generating(link, arguments.wait) as model:
            text, _, default = text_of(model, arguments)
            sampling = sampling_of(arguments, default)
            sys.stdout.write(prompt)
            await answer(model, text, text.encode(prompt), sampling, arguments)

    run_async(talk())
    return 0
