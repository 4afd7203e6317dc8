"""Shared by ``generate``, ``chat`` and ``serve``: options, the model's text, and answers on a terminal."""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from p2ptrain.errors import UsageError

if TYPE_CHECKING:
    from p2ptrain.node.serving.client import SwarmModel
    from p2ptrain.serving.sampling import Sampling
    from p2ptrain.serving.text import Text

DEFAULT_TOKENS = 256


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for the swarm and its tokenizer."""
    from p2ptrain.cli.commands.peer import add_allow_path

    parser.add_argument("link", metavar="LINK", help="the swarm link, 'p2ptrain://…', in quotes")
    parser.add_argument(
        "--weights", type=Path, metavar="DIR", help="the model's folder, if each peer brings the tokenizer"
    )
    add_allow_path(parser)
    parser.add_argument(
        "--draft", type=Path, metavar="DIR",
        help="a draft of the model, as 'p2ptrain draft train' makes one: the same answers, sooner over long hops",
    )  # fmt: skip
    parser.add_argument(
        "--wait", type=float, default=30.0, metavar="SECONDS", help="for a stage without a host (default 30)"
    )


def add_sampling_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options for how tokens are drawn."""
    group = parser.add_argument_group("how it answers")
    group.add_argument(
        "--max-tokens", type=int, default=DEFAULT_TOKENS, metavar="N", help=f"most tokens (default {DEFAULT_TOKENS})"
    )
    group.add_argument(
        "--temperature", type=float, metavar="T",
        help="0 takes the likeliest token, 2 is wild (default: the model's own, or 1)",
    )  # fmt: skip
    group.add_argument(
        "--top-p", type=float, metavar="P",
        help="keep the likeliest tokens up to this sum (default: the model's own, or 1)",
    )  # fmt: skip
    group.add_argument("--seed", type=int, metavar="N", help="the same seed gives the same answer (default: any)")
    group.add_argument(
        "--stop", action="append", default=[], metavar="TEXT", help="end the answer before this text; repeatable"
    )


def sampling_of(arguments: argparse.Namespace, default: Sampling | None = None) -> Sampling:
    """Return the options' sampling; raise `UsageError` for a value out of range.

    ``default`` has the settings that the options leave out.
    """
    from p2ptrain.errors import IntegrityError
    from p2ptrain.network.schema import from_wire, to_wire
    from p2ptrain.serving.sampling import Sampling

    if arguments.max_tokens < 1:
        raise UsageError(f"--max-tokens {arguments.max_tokens}: give a number above 0")
    seed = arguments.seed if arguments.seed is not None else time.time_ns() & 0xFFFFFFFF
    given = {"temperature": arguments.temperature, "top_p": arguments.top_p, "seed": seed}
    values = {name: value for name, value in given.items() if value is not None}
    try:
        return from_wire(Sampling, {**to_wire(default or Sampling()), **values})
    except IntegrityError as error:
        raise UsageError(f"--{str(error).replace('_', '-')}") from error


def read_text(read: Callable[[], str], what: str) -> str:
    """Return a text of the user's; raise `UsageError` for bytes that are no UTF-8, which no tokenizer takes."""
    try:
        text = read()
        text.encode()  # Python keeps such bytes of a command line as surrogates.
    except UnicodeError as error:
        raise UsageError(f"{what}: is not UTF-8") from error
    return text


def text_of(model: SwarmModel, arguments: argparse.Namespace) -> tuple[Text, Any, Sampling]:
    """Return a model's text, tokenizer and default sampling; let it generate with the draft, if there is one.

    Raises:
        ConfigError: Each peer brings the tokenizer, and --weights does not; the draft is of another model; or the
            model's own sampling is out of range.
        UsageError: The model does not read text.
    """
    from p2ptrain.models.pretrained import end_marks, generation_settings, manifest_tokenizer
    from p2ptrain.serving.sampling import default_sampling
    from p2ptrain.serving.text import Text

    manifest = model.peer.manifest
    tokenizer = manifest_tokenizer(manifest, arguments.weights, arguments.allow_path or ())
    if arguments.draft is not None:
        from p2ptrain.serving.client.draft import load_draft

        model.generator.draft = load_draft(arguments.draft, manifest.model.vocabulary, tokenizer)
    own = generation_settings(manifest, arguments.weights)
    return Text(tokenizer, end_marks(manifest, own)), tokenizer, default_sampling(own)


async def answer(
    model: SwarmModel, text: Text, ids: Sequence[int], sampling: Sampling, arguments: argparse.Namespace
) -> str:
    """Write an answer as it is drawn, then who computed it on standard error; return the answer."""
    from p2ptrain.serving.text import StopStrings, TextStream

    stream, stops, loop = TextStream(text, ids), StopStrings(arguments.stop), asyncio.get_running_loop()
    began, first, num_tokens, written = loop.time(), 0.0, 0, ""
    generator = model.generator
    most = min(arguments.max_tokens, await generator.known_context() - len(ids))

    def write(piece: str) -> None:
        nonlocal written
        written += piece
        print(piece, end="", flush=True)

    opened = generator.generate(ids, sampling, max_tokens=max(1, most), stops=tuple(text.end_ids))
    is_stopped = False
    async with opened as generation:
        async for token in generation:
            first, num_tokens = first or loop.time(), num_tokens + 1
            if token.id in text.end_ids:
                break
            piece, is_stopped = stops.push(stream.push(token.id))
            write(piece)
            if is_stopped:
                break
        if not is_stopped:
            write(stops.close())
        print()
        route, failovers = generation.route, generation.failovers
    seconds = loop.time() - first
    rate = f", {(num_tokens - 1) / seconds:.1f} tokens/s" if num_tokens > 1 and seconds > 0 else ""
    hosts = " → ".join(model.name_of(peer) for peer in route)
    replaced = f", {failovers} host{'s' if failovers > 1 else ''} replaced" if failovers else ""
    print(f"[{num_tokens} tokens{rate}, first after {first - began:.2f} s, by {hosts}{replaced}]", file=sys.stderr)
    return written
