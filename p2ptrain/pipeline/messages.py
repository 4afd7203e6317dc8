"""Messages of the pipeline protocols, with tensor framing and refusals.

A channel carries one microbatch through a stage and all later stages (``pipeline.N``)::

    caller                                      host
      |  HopRequest, inputs, targets              |
      | ----------------------------------------> |
      |  Arrived, Keepalive ..., News ...         |
      | <---------------------------------------- |
      |  ReplyHead, gradient       or Refused     |
      | <---------------------------------------- |

The last host calls a trainer that computes its own loss in the same way (``pipeline.output``, `OutputRequest`). The
other messages are RPC calls: from a trainer to the hosts of its microbatches, or between hosts of one stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from p2ptrain.codecs import CODECS, get_codec
from p2ptrain.errors import TemporaryError
from p2ptrain.network.admission import MAX_CREDENTIAL_BYTES
from p2ptrain.network.schema import Hash, Message, Number

if TYPE_CHECKING:
    import torch

IDS = "ids"
"""Codec name of token ids: int32."""
MAX_STAGES = 256
MAX_SAMPLES = 1 << 16
MAX_VALUES = 1 << 40
"""Limit on the values of one tensor, and on the tokens of one microbatch."""
MAX_IDS = 4096
MAX_WAIT_SECONDS = 60.0
MAX_REASON_CHARS = 512

Buffer = bytes | bytearray | memoryview
Peer = Annotated[str, Meta(max_length=128)]
Round = Annotated[int, Meta(ge=0, lt=1 << 62)]
MaybeRound = Annotated[int, Meta(ge=-2, lt=1 << 62)]
"""Negative before a host or a trainer has entered a round."""
StageNumber = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
MAX_SECONDS = 3600.0
Seconds = Annotated[float, Meta(ge=0.0, le=MAX_SECONDS)]
Samples = Annotated[int, Meta(gt=0, le=MAX_SAMPLES)]
TokenCount = Annotated[int, Meta(gt=0, le=MAX_VALUES)]
MaybePosition = Annotated[int, Meta(ge=0, lt=1 << 62)] | None
"""Position of the data in the trainer's order; None for a script's own data."""


class MicrobatchId(NamedTuple):
    """Microbatch id; ``number`` is unique per trainer and round."""

    trainer: Annotated[str, Meta(min_length=1, max_length=128)]
    round: Round
    number: Round

    def __str__(self) -> str:
        return f"microbatch {self.number} of {self.trainer[-8:]} in round {self.round}"


# Tensors


class TensorHead(Message, frozen=True):
    """Codec, `IDS` or one of `p2ptrain.codecs`, and shape of a tensor whose bytes follow."""

    codec: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Annotated[int, Meta(gt=0, le=MAX_VALUES)], ...], Meta(min_length=1, max_length=8)]

    def __post_init__(self) -> None:
        if self.codec != IDS and self.codec not in CODECS.own:
            raise ValueError(f"the codec {self.codec!r} is not known here")
        if math.prod(self.shape) > MAX_VALUES:
            raise ValueError("a tensor that is too large")

    @property
    def num_bytes(self) -> int:
        """Encoded size of the tensor."""
        count = math.prod(self.shape)
        return 4 * count if self.codec == IDS else get_codec(self.codec).encoded_bytes(count)


@dataclass(frozen=True)
class Payload:
    """A tensor in its wire encoding; ``data`` is empty until the bytes arrive."""

    codec: str
    shape: tuple[int, ...]
    data: Buffer = b""

    @property
    def head(self) -> TensorHead:
        return TensorHead(self.codec, self.shape)


def pack(tensor: torch.Tensor, codec: str) -> Payload:
    """Encode a CPU tensor: integers as `IDS`, floats as fp32 with ``codec``.

    Raises:
        CodecError: A value is not finite, or too large for the codec.
    """
    import torch

    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return Payload(IDS, shape, tensor.to(torch.int32).contiguous().numpy().tobytes())
    return Payload(codec, shape, get_codec(codec).encode(tensor.float().contiguous().view(-1)))


def unpack(payload: Payload) -> torch.Tensor:
    """Decode a payload to int64 or fp32; the caller has validated its length and values."""
    import torch

    if payload.codec == IDS:
        return torch.frombuffer(bytearray(payload.data), dtype=torch.int32).view(payload.shape).long()
    codec, count = get_codec(payload.codec), math.prod(payload.shape)
    values = torch.empty(count, dtype=torch.float32)
    codec.decode_into(payload.data, values)
    return values.view(payload.shape)


def check_values(payload: Payload) -> None:
    """Raise `CodecError` if a value is not finite; nothing is decoded."""
    if payload.codec != IDS:
        get_codec(payload.codec).validate(payload.data, math.prod(payload.shape))


# Hops


class Signature(Message, frozen=True):
    """A trainer's signature of a microbatch; all hops carry it unchanged (`p2ptrain.pipeline.signatures`).

    Attributes:
        inputs: Hash of the first stage's inputs.
        targets: Hash of the targets.
        key: The trainer's session key, for which its identity vouches in ``voucher``, as for ``credential``.
        credential: Admits the trainer to the swarm; empty if it needs none.
    """

    position: MaybePosition
    inputs: Hash
    targets: Hash
    key: Hash
    voucher: Annotated[bytes, Meta(max_length=2048)]
    credential: Annotated[bytes, Meta(max_length=MAX_CREDENTIAL_BYTES)] = b""
    value: Annotated[bytes, Meta(min_length=64, max_length=64)] = bytes(64)


UNSIGNED = Signature(None, bytes(32), bytes(32), bytes(32), b"")


class HopRequest(Message, frozen=True):
    """Request to process a microbatch at a stage; the bytes of inputs and targets follow.

    Attributes:
        route: Hosts of the later stages, planned or already called; an empty name leaves the choice open.
        targets: Class indices for the last stage's loss.
        requires_grad: False for a forward pass alone.
        returns_output: True if the trainer computes the loss from the model's output; targets then count by shape only.
    """

    id: MicrobatchId
    samples: Samples
    tokens: TokenCount
    route: Annotated[tuple[Peer, ...], Meta(max_length=MAX_STAGES)]
    inputs: TensorHead
    targets: TensorHead
    requires_grad: bool
    returns_output: bool
    signature: Signature

    def __post_init__(self) -> None:
        if self.samples > self.tokens:
            raise ValueError("a microbatch of fewer tokens than samples")
        if self.targets.codec != IDS:
            raise ValueError("targets that are no class indices")

    def to_hop(self, stage: int) -> Hop:
        """Return the hop to a stage, without the tensors' bytes."""
        inputs = Payload(self.inputs.codec, self.inputs.shape)
        targets = Payload(self.targets.codec, self.targets.shape)
        return Hop(
            self.id, stage, self.samples, self.tokens, self.route, inputs, targets, self.requires_grad,
            self.returns_output, self.signature,
        )  # fmt: skip


@dataclass(frozen=True)
class Hop:
    """A microbatch for a stage, with its tensors; see `HopRequest`."""

    id: MicrobatchId
    stage: int
    samples: int
    tokens: int
    route: tuple[str, ...]
    inputs: Payload
    targets: Payload
    requires_grad: bool = True
    returns_output: bool = False
    signature: Signature = UNSIGNED

    @property
    def request(self) -> HopRequest:
        return HopRequest(
            self.id, self.samples, self.tokens, self.route, self.inputs.head, self.targets.head, self.requires_grad,
            self.returns_output, self.signature,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Host memory for this hop: the input, a gradient of the same size, and the targets."""
        return 2 * self.inputs.head.num_bytes + self.targets.head.num_bytes


class OutputRequest(Message, frozen=True):
    """The model's output for a trainer that computes the loss itself; the bytes follow."""

    id: MicrobatchId
    requires_grad: bool
    output: TensorHead


class Leg(NamedTuple):
    """The host that counted a microbatch at one stage."""

    stage: StageNumber
    host: Peer


@dataclass(frozen=True)
class Reply:
    """A stage's answer to a hop.

    Attributes:
        loss: Mean over the targets, in nats; 0 if the trainer computes the loss.
        legs: This stage and all later ones, in order.
        gradient: With respect to the stage's inputs; None from the first stage, or if none is required.
        seconds: From the call to the reply, by the caller's clock; not sent.
    """

    loss: float
    legs: tuple[Leg, ...]
    gradient: Payload | None
    seconds: float = field(default=0.0, compare=False)

    @property
    def head(self) -> ReplyHead:
        return ReplyHead(self.loss, self.legs, self.gradient.head if self.gradient is not None else None)


class FromHost(Message, frozen=True, tag=True):
    """Base of the messages from a called host, or trainer, to its caller."""


class Keepalive(FromHost, frozen=True, tag="keepalive"):
    """The host still holds the microbatch."""


class Arrived(FromHost, frozen=True, tag="arrived"):
    """All tensors of the request have arrived."""


class News(FromHost, frozen=True, tag="news"):
    """A host other than the planned one was called, or a host finished its forward pass."""

    stage: StageNumber
    host: Peer


class ReplyHead(FromHost, frozen=True, tag="reply"):
    """A `Reply`; the gradient's bytes follow."""

    loss: Number
    legs: Annotated[tuple[Leg, ...], Meta(max_length=MAX_STAGES)]
    gradient: TensorHead | None


class Refused(FromHost, frozen=True, tag="refused"):
    """Final message in place of a reply."""

    kind: Refusal
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]

    @classmethod
    def of(cls, error: RefusalError) -> Refused:
        """Return the refusal for an error, with its text made printable and shortened."""
        text = "".join(each if each.isprintable() else "?" for each in str(error))
        return cls(error.kind, text[:MAX_REASON_CHARS])

    def error(self) -> RefusalError:
        """Return the error to raise at the caller."""
        match self.kind:
            case Refusal.FULL:
                return FullError(self.reason)
            case Refusal.BAD:
                return BadMicrobatchError(self.reason)
            case Refusal.BEYOND:
                return HopFailedError(self.reason)
            case Refusal.EARLY | Refusal.LATE:
                return OtherRoundError(self.reason, is_late=self.kind is Refusal.LATE)


class Refusal(Enum):
    """Reasons of a refusal; see the subclasses of `RefusalError`."""

    FULL = "full"
    EARLY = "early"
    LATE = "late"
    BEYOND = "beyond"
    BAD = "bad"


class RefusalError(TemporaryError):
    """A host refused a microbatch; ``kind`` selects the caller's reaction."""

    kind: Refusal


class FullError(RefusalError):
    """The host has no capacity now, which is no failure. The message gives the cause."""

    kind = Refusal.FULL


class BadMicrobatchError(RefusalError):
    """A microbatch does not fit this stage, or is invalid. The message names the defect."""

    kind = Refusal.BAD


class HopFailedError(RefusalError):
    """No host of a stage completed a microbatch. The message names the stage and the hosts."""

    kind = Refusal.BEYOND


class OtherRoundError(RefusalError):
    """A host is in another round. ``is_late``: the microbatch's is closed or full there; else it has not begun."""

    def __init__(self, message: str, is_late: bool) -> None:
        super().__init__(message)
        self.is_late = is_late
        self.kind = Refusal.LATE if is_late else Refusal.EARLY


# Calls

OwnIds = Annotated[tuple[tuple[Round, Round], ...], Meta(max_length=MAX_IDS)]
"""``(round, number)`` of the sender's microbatches."""


class SettleRequest(Message, frozen=True):
    """A trainer's report of settled and abandoned microbatches (``pipeline.N.settle``)."""

    settled: OwnIds = ()
    abandoned: OwnIds = ()


class Times(NamedTuple):
    """One host's times of a microbatch, with which its trainer measures the hosts before and after it.

    Attributes:
        held: From its arrival to the reply.
        next: From the call of the next host to that host's reply; 0 at the last stage.
        busy: In its device and the device's queue. Only this one is about the host itself.
    """

    held: Seconds
    next: Seconds
    busy: Seconds


class SettleReply(Message, frozen=True):
    """For each settled microbatch of a request, its times; None if it was not counted there."""

    counted: Annotated[tuple[Times | None, ...], Meta(max_length=MAX_IDS)]


class DoneRequest(Message, frozen=True):
    """A trainer's query: which microbatches are in a committed average (``pipeline.N.done``)."""

    ids: OwnIds


class Answers(Message, frozen=True):
    """One answer per microbatch of a request: whether it is in the average."""

    answers: Annotated[tuple[bool, ...], Meta(max_length=MAX_IDS)]


class RoundRequest(Message, frozen=True):
    """Long poll, up to ``seconds``, for a round later than ``after`` (``pipeline.N.round``)."""

    after: MaybeRound
    seconds: Annotated[float, Meta(ge=0.0, le=MAX_WAIT_SECONDS)]


class RoundReply(Message, frozen=True):
    """The round in progress at a host."""

    round: MaybeRound


class StayRequest(Message, frozen=True):
    """A departing host's request that another one, which has reached ``round``, stay (``pipeline.stay``)."""

    stage: StageNumber
    round: MaybeRound


class StayReply(Message, frozen=True):
    """The answer: whether the host promises to stay."""

    stays: bool
