"""Messages of a generation's session.

A session is a chain of channels, from the client to a host of each stage in order. Rows go down the chain; the last
host draws tokens, and sends them to the client and to the first host directly::

    client ──Open, Step──▶ first host ──Open, Step + rows──▶ … ──▶ last host         ``serve.N``
    client ◀────────────────── Token ◀── Listen, Grant ───────── last host           ``serve.tokens``
                           first host ◀──── Fed ──────────────── last host           ``serve.feed``

So a token costs one hop a stage. A client that cannot dial the last host asks the first one for ``serve.tokens``; each
host then asks the next one, and the tokens come up the chain. Every message names positions, so that a repeated one
changes nothing.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import msgspec
from msgspec import Meta

from p2ptrain.models.exact import PAGE
from p2ptrain.network.admission import MAX_CREDENTIAL_BYTES
from p2ptrain.network.schema import Amount, Count, Hash, Message, Number, to_bytes
from p2ptrain.serving.prefix import MAX_PREFIX_PAGES
from p2ptrain.serving.sampling import MAX_TOP_LOGPROBS, Sampling

MAX_STAGES = 256
MAX_CANDIDATES = 8
MAX_CONTEXT = 1 << 20
MAX_CHUNK_ROWS = 256
"""Rows of one `Step`: small enough that decoding sessions wait little for another one's prompt."""
MAX_LOGIT_ROWS = 16
"""Rows of one `LogitRows`: 3 MB with a vocabulary of 50,000."""
MAX_OPEN_BYTES = 256 * 1024
FLOAT_BYTES = 4
IDLE_SECONDS = 600.0
"""Timeout between a caller's messages: a client that takes no more tokens sends none."""
TICKET_SECONDS = 6 * 3600.0
"""Lifetime of a ticket. Hosts refuse a longer one, and end the session with it; the client then asks with another."""
CLOCK_SECONDS = 300.0
"""Difference of clocks that these checks allow."""
STALLED_SECONDS = 300.0
"""Time without progress after which a host ends a session; < `IDLE_SECONDS`."""
AHEAD = 32
"""Tokens that the last host may draw beyond those that the client has taken."""
MAX_DRAFTS = AHEAD - 1
"""Drafted rows of a session at a time: with the token after them, as many as one grant permits."""
MAX_STOPS = 16
_CONTEXT = b"p2ptrain serving ticket\0"

Peer = Annotated[str, Meta(min_length=1, max_length=128)]
SessionId = Annotated[bytes, Meta(min_length=16, max_length=16)]
Position = Annotated[int, Meta(ge=0, le=MAX_CONTEXT)]
TokenId = Annotated[int, Meta(ge=0, lt=1 << 20)]
Together = Annotated[int, Meta(ge=0, le=1024)]
StageNumber = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
Candidates = Annotated[tuple[Peer, ...], Meta(max_length=MAX_CANDIDATES)]
Route = Annotated[tuple[Candidates, ...], Meta(max_length=MAX_STAGES)]
"""Hosts of each stage, in the order in which their caller tries them."""
Epoch = Annotated[tuple[Count, ...], Meta(min_length=1, max_length=MAX_STAGES)]
"""Counts of openings, one of each caller from the client on. The greater tuple is the newer caller."""
Arithmetic = Annotated[str, Meta(min_length=1, max_length=64)]
Reason = Annotated[str, Meta(max_length=256)]


class Version(Message, frozen=True):
    """Weights and arithmetic of a session; they and the tokens determine every bit of it.

    Attributes:
        round: Of the weights.
        digests: Of each stage's state, 32 bytes each.
        arithmetic: See `p2ptrain.models.exact`.
    """

    round: Count
    digests: Annotated[tuple[Hash, ...], Meta(min_length=1, max_length=MAX_STAGES)]
    arithmetic: Arithmetic


class Ticket(Message, frozen=True):
    """The client's signed order for one session; it travels to every host.

    Attributes:
        prompt: Tokens that the client has.
        given: How many of them are the prompt; penalties do not count those.
        max_tokens: Tokens to generate at most.
        stops: Tokens after which the last host draws no more.
        expires: Wall-clock second after which no host serves it.
        route: Hosts of each stage. The client opens it at those of the first stage, and they at those of the next one;
            no other host takes it, and none from another peer.
        credential: Admits the client; empty if it needs none.
        salt: Of the client's own choice: its sessions share prefix pages with those of equal salts, and with no other
            client's.
        pages: Hashes of the first full pages of the tokens that the client has; see `p2ptrain.serving.prefix`.
        wants_logits: True if the last host keeps its outputs for ``serve.logits``.
    """

    session: SessionId
    client: Peer
    version: Version
    prompt: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    given: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    max_tokens: Annotated[int, Meta(ge=1, le=MAX_CONTEXT)]
    sampling: Sampling
    expires: Amount
    route: Route = ()
    stops: Annotated[tuple[TokenId, ...], Meta(max_length=MAX_STOPS)] = ()
    credential: Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""
    salt: Annotated[bytes, Meta(max_length=32)] = b""
    pages: Annotated[tuple[Hash, ...], Meta(max_length=MAX_PREFIX_PAGES)] = ()
    wants_logits: bool = False
    signature: Annotated[bytes, Meta(max_length=1024)] = b""

    @property
    def num_positions(self) -> int:
        """Positions that a host computes at most: nobody needs the last token's row."""
        return self.prompt + self.max_tokens - 1

    @property
    def num_pages(self) -> int:
        return -(-self.num_positions // PAGE)

    def is_like(self, other: Ticket) -> bool:
        """True if it is the same session's order, on hosts that may differ."""
        return msgspec.structs.replace(self, route=other.route, signature=other.signature) == other

    def to_sign(self, swarm: bytes) -> bytes:
        """Return the message that the client signs."""
        return _CONTEXT + swarm + to_bytes(msgspec.structs.replace(self, signature=b""))


class Open(Message, frozen=True):
    """Request for a stage's part of a session (``serve.N``).

    Attributes:
        feed: The first stage's host, to which the last one sends tokens.
        is_shadow: True to keep pages and outputs only, for the case that the stage's host fails.
    """

    ticket: Ticket
    epoch: Epoch
    feed: Peer
    is_shadow: bool = False


class FromCaller(Message, frozen=True, tag=True):
    """Base of the messages from a caller to a host."""


class Step(FromCaller, frozen=True, tag="step"):
    """Rows of consecutive positions; their hidden states follow as the wire has them, except to the first stage.

    Attributes:
        drafts: So many positions before its end are drafts, those of earlier steps included. Other ids replace them.
        together: Sessions whose rows the caller computed together for this host.
    """

    first: Position
    ids: Annotated[tuple[TokenId, ...], Meta(min_length=1, max_length=MAX_CHUNK_ROWS)]
    drafts: Annotated[int, Meta(ge=0, le=MAX_DRAFTS)] = 0
    together: Together = 0


class Close(FromCaller, frozen=True, tag="close"):
    """The session is over: the host frees its pages, and tells the next stage."""


class FromHost(Message, frozen=True, tag=True):
    """Base of the messages from a host to its caller."""


class Opened(FromHost, frozen=True, tag="opened"):
    """The host takes the session; it has the rows before ``cached``."""

    cached: Position


class Beat(FromHost, frozen=True, tag="beat"):
    """Keepalive: the host has computed the rows before ``position``, and the last host fed it tokens up to ``fed``."""

    position: Position
    fed: Position = 0


class Moved(FromHost, frozen=True, tag="moved"):
    """A later stage's host."""

    stage: StageNumber
    host: Peer


class Cause(Enum):
    """Why a host does not serve a session."""

    FULL = "full"
    VERSION = "version"
    SUPERSEDED = "superseded"
    NO_HOST = "no host"
    BROKEN = "broken"
    STALLED = "stalled"
    LIFETIME = "lifetime"
    OVER = "over"


class Failed(FromHost, frozen=True, tag="failed"):
    """The last message of a host that cannot go on; ``stage`` is the one that failed.

    Attributes:
        retry_after: Seconds until a retry makes sense; 0 if unknown.
    """

    stage: StageNumber
    cause: Cause
    reason: Reason
    retry_after: Amount = 0.0


class Listen(Message, frozen=True):
    """The client's request for a session's tokens from a position on (``serve.tokens``)."""

    session: SessionId
    start: Position
    until: Position
    feed: Peer


class Grant(Message, frozen=True):
    """The last host may draw the tokens before ``until``, and feeds them to ``feed``."""

    until: Position
    feed: Peer


class DrawnToken(Message, frozen=True):
    """One token: its position, id and log-probability, and those of the most likely tokens."""

    position: Position
    id: TokenId
    logprob: Number
    top: Annotated[tuple[tuple[TokenId, Number], ...], Meta(max_length=MAX_TOP_LOGPROBS)] = ()


class LogitsRequest(Message, frozen=True):
    """The client's request for the logits of a session's rows from a position on (``serve.logits``).

    Attributes:
        with_states: True if the last normalisation's outputs are to follow each row's logits.
    """

    session: SessionId
    start: Position
    with_states: bool = False


class LogitRows(Message, frozen=True):
    """Logits of the next rows follow as fp32, each with the state that was asked for."""

    rows: Annotated[int, Meta(ge=1, le=MAX_LOGIT_ROWS)]


class FeedRequest(Message, frozen=True):
    """The last host's request to send a session's tokens to the first host (``serve.feed``)."""

    session: SessionId


class Fed(Message, frozen=True):
    """A drawn token, for the first stage; ``together`` as in `Step`."""

    position: Position
    id: TokenId
    together: Together = 0


def service(stage: int) -> str:
    """Return the RPC name under which hosts of a stage take sessions."""
    return f"serve.{stage}"


TOKENS = "serve.tokens"
LOGITS = "serve.logits"
FEED = "serve.feed"
