"""Messages between the members of a group in one attempt; `p2ptrain.averaging.allreduce.session` has their order.

Bulk data follow some of them: a part after `Bring`, a mean after `MeanFollows`, an answer after `Shown` or `Opens`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from p2ptrain.averaging.masking.keys import BOX_BYTES
from p2ptrain.averaging.masking.sharing import SHARE_BYTES
from p2ptrain.averaging.protocol.certificate import MAX_MEMBERS, Count, Name, Proof
from p2ptrain.averaging.verification.opening import MAX_CHUNKS, Commitment, Statement
from p2ptrain.manifest import MAX_MASKED
from p2ptrain.network.schema import Hash, Message

MAX_REFUSAL_LENGTH = 120
GAVE_UP = "gave up"  # refusal reason instead of `GaveUp`, in the middle of a mean or after the session ended
Index = Annotated[int, Meta(ge=0, lt=MAX_MEMBERS)]  # into the roster
Indices = Annotated[tuple[Index, ...], Meta(max_length=MAX_MEMBERS)]
Chunks = Annotated[tuple[Count, ...], Meta(max_length=MAX_CHUNKS)]
Boxes = Annotated[tuple[Annotated[bytes, Meta(max_length=BOX_BYTES)], ...], Meta(max_length=MAX_MASKED)]
Share = Annotated[bytes, Meta(min_length=SHARE_BYTES, max_length=SHARE_BYTES)]
Shares = Annotated[tuple[Share, ...], Meta(max_length=MAX_MASKED)]
SomeChunks = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_CHUNKS)]


class Request(Message, frozen=True, tag=True):
    """Request that opens a stream; ``group`` is `Roster.group_id`."""

    group: Hash


class Bring(Request, frozen=True, tag="bring"):
    """Open the member's main stream, once an attempt; its encoded part of the owner's share follows.

    Above level 0, ``credential`` is the certificate of the group result that the delegate brings.
    """

    codec: Name
    credential: bytes = b""


class AskChunks(Request, frozen=True, tag="chunks"):
    """Request to open chunks that the owner did not show to the sender or to another member."""

    chunks: SomeChunks


class AskStatements(Request, frozen=True, tag="statements"):
    """Request for the statements that owners sent to the receiver."""


class FromContributor(Message, frozen=True, tag=True):
    """Message from the member that opened the stream."""


class Committed(FromContributor, frozen=True, tag="committed"):
    commitment: Commitment


class Shown(FromContributor, frozen=True, tag="shown"):
    """Header of the answer to `Trace`; the data follow."""

    num_bytes: Count


class Check(FromContributor, frozen=True, tag="check"):
    """Spot check: open these chunks of the mean; none if the member drew none."""

    chunks: Chunks


class KeyShares(FromContributor, frozen=True, tag="key shares"):
    """The sender's key shares, encrypted for each member in roster order; sent before a masked part."""

    boxes: Boxes


class Agreed(FromContributor, frozen=True, tag="agreed"):
    """The sender's signature of the contributors and the masked sums; see `Masking.result_hash`."""

    proof: Proof


class Revealed(FromContributor, frozen=True, tag="revealed"):
    """The sender's shares that unmask the sum (see `Masking.recovered`), and its signature of them."""

    shares: Shares
    proof: Proof


class FromOwner(Message, frozen=True, tag=True):
    """Message from the member to which the stream was opened."""


class Trace(FromOwner, frozen=True, tag="trace"):
    """Request for the origin of these chunks of the contributor's part."""

    chunks: SomeChunks


class Arrived(FromOwner, frozen=True, tag="arrived"):
    """Acknowledgement of the complete part; the sender's last write may return long before."""


class Mask(FromOwner, frozen=True, tag="mask"):
    """Members whose parts the owner holds completely.

    ``refusal`` is empty if the receiver's part is among them, or was only late.
    """

    contributors: Indices
    refusal: Annotated[str, Meta(max_length=MAX_REFUSAL_LENGTH)] = ""


class MeanFollows(FromOwner, frozen=True, tag="mean"):
    """Header of the owner's mean, which follows."""


class Stated(FromOwner, frozen=True, tag="stated"):
    statement: Statement


class Opens(FromOwner, frozen=True, tag="opens"):
    """Header of the answer to `Check` or `AskChunks`; the data follow."""

    num_bytes: Count


class Clear(FromOwner, frozen=True, tag="clear"):
    """All spot checks of the sender passed."""


class Signature(FromOwner, frozen=True, tag="signature"):
    """The sender's signature of the result whose hash is ``body``."""

    body: Hash
    proof: Proof


class Signatures(FromOwner, frozen=True, tag="signatures"):
    """All (peer, signature) pairs of the result that the sender holds."""

    proofs: Annotated[tuple[tuple[Name, Proof], ...], Meta(max_length=MAX_MEMBERS)]


class ForwardedShares(FromOwner, frozen=True, tag="key shares"):
    """The key shares that members sent for the receiver, in roster order; empty where none arrived."""

    boxes: Boxes


class AllAgreed(FromOwner, frozen=True, tag="agreed"):
    """The sender's signature, once it holds enough; to members without a share, all that it holds, by member."""

    proofs: Annotated[tuple[tuple[Index, Proof], ...], Meta(max_length=MAX_MASKED)]


class AllRevealed(FromOwner, frozen=True, tag="revealed"):
    """The sender's `Revealed`, once it holds enough; to members without a share, all that it holds, by member."""

    revealed: Annotated[tuple[tuple[Index, Revealed], ...], Meta(max_length=MAX_MASKED)]


class Statements(FromOwner, frozen=True, tag="statements"):
    """Statements that owners sent to the sender."""

    statements: Annotated[tuple[Statement, ...], Meta(max_length=MAX_MEMBERS)]


class GaveUp(FromOwner, frozen=True, tag="gave up"):
    """Abort message, sent instead of the pending reply; complaints are (owner, chunk) that it could not check."""

    blamed: Indices = ()
    complaints: Annotated[tuple[tuple[Index, Count], ...], Meta(max_length=MAX_CHUNKS)] = ()
