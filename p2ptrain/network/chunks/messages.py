"""Messages of a chunk transfer, which has one channel a source::

    receiver                                     source
      | Open{key}                                  |
      | Ask{chunks}, Ask{chunks} (asked ahead) ->  |
      |        <- a description, if there is one   |
      |        <- chunk, chunk, …                  |
      | Enough ->                                  |  ends the channel once all is sent

Chunks travel as bulk buffers, in the order asked for.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.network.schema import Message

MAX_ASKED = 16
"""Chunks that one `Ask` may name."""
MAX_CHUNKS = 1 << 32


class Open(Message, frozen=True):
    """Open a transfer.

    Attributes:
        key: Which of the things that are served under this name.
        waits: Whether the source may wait until it knows of it.
    """

    key: Annotated[bytes, Meta(max_length=64)] = b""
    waits: bool = False


class FromReceiver(Message, frozen=True, tag=True):
    """A message that follows `Open`."""


class Ask(FromReceiver, frozen=True, tag="ask"):
    """Ask for chunks by their numbers."""

    chunks: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]], Meta(min_length=1, max_length=MAX_ASKED)]


class Enough(FromReceiver, frozen=True, tag="enough"):
    """Nothing more will be asked for."""


def service(name: str) -> str:
    """Return the name of the channels that chunks of this name come by."""
    return f"chunks.{name}"
