"""Ask a swarm's model through `p2ptrain serve`, with OpenAI's client.

python examples/chat/ask.py 'Why is the sky blue?'            # streams the answer
python examples/chat/ask.py --json 'Why is the sky blue?'     # an object of the class below
python examples/chat/ask.py                                   # a conversation; Ctrl-D ends it
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

from openai import OpenAI
from pydantic import BaseModel, Field


class Answer(BaseModel):
    """What --json asks for. Longest lengths keep an answer from being cut in the middle."""

    answer: str = Field(max_length=200)
    confidence: int = Field(ge=0, le=100)
    sources: list[str] = Field(max_length=3)


def stream(client: OpenAI, model: str, messages: list[Any], settings: dict[str, Any]) -> str:
    """Print an answer as it is drawn, and return it."""
    told = ""
    for chunk in client.chat.completions.create(model=model, messages=messages, stream=True, **settings):
        piece = chunk.choices[0].delta.content or ""
        print(piece, end="", flush=True)
        told += piece
    print()
    return told


def main() -> None:
    """Ask once, or until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?")
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--key", default="any", help="an API key, if the server wants one")
    parser.add_argument("--json", action="store_true", help="an object in place of a text")
    parser.add_argument("--max-tokens", type=int, default=400)
    parser.add_argument("--seed", type=int)
    arguments = parser.parse_args()
    client = OpenAI(base_url=arguments.url, api_key=arguments.key)
    model = client.models.list().data[0].id
    settings: dict[str, Any] = {"max_tokens": arguments.max_tokens, "seed": arguments.seed}
    messages: list[Any] = []
    for question in [arguments.question] if arguments.question else map(str.strip, sys.stdin):
        messages.append({"role": "user", "content": question})
        if arguments.json:
            parsed = client.chat.completions.parse(
                model=model, messages=messages, response_format=Answer, **settings
            ).choices[0]
            assert parsed.message.parsed is not None
            print(parsed.message.parsed)
            told = parsed.message.content
        else:
            told = stream(client, model, messages, settings)
        messages.append({"role": "assistant", "content": told})


if __name__ == "__main__":
    main()
