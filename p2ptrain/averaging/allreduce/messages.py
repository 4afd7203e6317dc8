"""What members of a group say to each other in one attempt; `p2ptrain.averaging.allreduce.session` says when.

Bulk data goes between these messages: a part after `Bring`, a mean after `MeanFollows`, and what `Shown` and `Opening`
announce.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.protocol.signed import MAX_MEMBERS, Count, Name, Proof
from p2ptrain.averaging.verification.commitments import Commitment, Statement
from p2ptrain.averaging.verification.opening import MAX_CHUNKS
from p2ptrain.network.schema import Hash, Message

MAX_REFUSAL_LENGTH = 120
GAVE_UP = "gave up"
"""What a member is refused with, in place of `GaveUp`, in the middle of a mean, or when the other one has gone."""
Index = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]
"""A member's place in the roster."""
Indices = Annotated[tuple[Index, ...], Meta(max_length=MAX_MEMBERS)]
Chunks = Annotated[tuple[Count, ...], Meta(max_length=MAX_CHUNKS)]
SomeChunks = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]


class Request(Message, frozen=True, tag=True):
    """What a member opens a stream with.

    Attributes:
        group: The roster's id.
    """

    group: Hash


class Bring(Request, frozen=True, tag="bring"):
    """The member's own stream, once an attempt; its part of the owner's share follows.

    Attributes:
        codec: How the part is encoded.
        credential: Above level 0: the certificate of the result that the member brings.
    """

    codec: Name
    credential: bytes = b""


class AskChunks(Request, frozen=True, tag="chunks"):
    """Open these chunks, which you did not show to me or to another member."""

    chunks: SomeChunks


class AskStatements(Request, frozen=True, tag="statements"):
    """Show what owners stated to you."""


class FromContributor(Message, frozen=True, tag=True):
    """What the member that opened a stream says on it."""


class Committed(FromContributor, frozen=True, tag="committed"):
    """What the member signs about its part, after it."""

    commitment: Commitment


class Shown(FromContributor, frozen=True, tag="shown"):
    """The answer to `Trace` follows, this long."""

    num_bytes: Count


class Check(FromContributor, frozen=True, tag="check"):
    """Open these chunks of your mean; none if they are few."""

    chunks: Chunks


class FromOwner(Message, frozen=True, tag=True):
    """What the member that a stream was opened to says on it."""


class Trace(FromOwner, frozen=True, tag="trace"):
    """Show what these chunks of your part come from."""

    chunks: SomeChunks


class Arrived(FromOwner, frozen=True, tag="arrived"):
    """Your part is here: it may have been on its way for long after it was written."""


class Mask(FromOwner, frozen=True, tag="mask"):
    """Whose parts the owner holds completely.

    Attributes:
        contributors: Those.
        refusal: Why yours is not among them; empty if it is, or was only late.
    """

    contributors: Indices
    refusal: Annotated[str, Meta(max_length=MAX_REFUSAL_LENGTH)] = ""


class MeanFollows(FromOwner, frozen=True, tag="mean"):
    """The mean of the owner's share follows."""


class Stated(FromOwner, frozen=True, tag="stated"):
    """What the owner signs about its mean."""

    statement: Statement


class Opens(FromOwner, frozen=True, tag="opens"):
    """The answer to `Check` or `AskChunks` follows, this long."""

    num_bytes: Count


class Clear(FromOwner, frozen=True, tag="clear"):
    """All spot checks of this member passed."""


class Signature(FromOwner, frozen=True, tag="signature"):
    """The member's signature of the result whose hash this is."""

    body: Hash
    proof: Proof


class Signatures(FromOwner, frozen=True, tag="signatures"):
    """All signatures of the result that the member has: (who, signature)."""

    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_MEMBERS)]


class Statements(FromOwner, frozen=True, tag="statements"):
    """What owners stated to the member."""

    statements: Annotated[tuple[Statement, ...], Meta(max_length=MAX_MEMBERS)]


class GaveUp(FromOwner, frozen=True, tag="gave up"):
    """The member gave the attempt up; sent in place of what it owes.

    Attributes:
        blamed: Whom it blames.
        complaints: (owner, chunk) of what it could not check.
    """

    blamed: Indices = ()
    complaints: Annotated[tuple[tuple[Index, Count], ...], Meta(max_length=MAX_CHUNKS)] = ()
