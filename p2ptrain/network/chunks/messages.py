"""Messages of a chunk transfer, which has one channel per source::

    receiver                                     source
      | Open{key} ->                               |
      | Ask{chunks}, Ask{chunks} (pipelined) ->    |
      |        <- a description, if there is one   |
      |        <- chunk, chunk, …                  |
      | Enough ->                                  |  closes the channel once all chunks are sent

Chunks are bulk buffers in the order of the requests.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.network.schema import Message

MAX_ASKED = 16
MAX_CHUNKS = 1 << 32


class Open(Message, frozen=True):
    """Request for the supply of a key; if ``waits``, the source may wait until it has the key."""

    key: Annotated[bytes, Meta(max_length=64)] = b""
    waits: bool = False


class FromReceiver(Message, frozen=True, tag=True):
    """A message after `Open`."""


class Ask(FromReceiver, frozen=True, tag="ask"):
    """Request for chunks, by index."""

    chunks: Annotated[list[Annotated[int, Meta(ge=0, lt=MAX_CHUNKS)]], Meta(min_length=1, max_length=MAX_ASKED)]


class Enough(FromReceiver, frozen=True, tag="enough"):
    """End of the requests."""


def service(name: str) -> str:
    """Return the RPC service name for a chunk server's name."""
    return f"chunks.{name}"
