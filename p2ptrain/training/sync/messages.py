"""Messages by which peers compare what they train and what they hold."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.head import Head
from p2ptrain.network.schema import Count, Hash, Message
from p2ptrain.training.state.digest import Description

LAYOUT = "layout.compare"
STATE = "state"
"""Under which chunks of the state are served."""
STATE_HEAD = "state.head"


class Trained(Message, frozen=True):
    """What a peer trains: the fingerprint of its layout, and the rule by which it steps."""

    fingerprint: Hash
    rule: Annotated[str, Meta(max_length=1 << 20)]


class HeldHead(Message, frozen=True):
    """Where a peer's state stands."""

    head: Head


class HeldState(Message, frozen=True):
    """What a source of state holds, before its chunks.

    Attributes:
        layout: Fingerprint of its model.
        num_chunks: Of its state.
        description: Of its state, if it was asked for one.
    """

    layout: Hash
    num_chunks: Count
    description: Description | None = None
