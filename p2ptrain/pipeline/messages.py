"""The messages of a pipeline's protocols, the tensors that follow them, and the refusals that they carry.

A channel takes one microbatch through a stage and all after it (``pipeline.N``)::

    caller                                      host
      |  HopRequest, inputs, targets              |
      | ----------------------------------------> |
      |  Arrived, Beat ..., News ...              |
      | <---------------------------------------- |
      |  ReplyHead, gradient       or Refused     |
      | <---------------------------------------- |

The last host asks a trainer that makes its own loss in the same way (``pipeline.home``), with a `HomeRequest`. All
other messages are calls: a trainer's to the hosts of its microbatches, and those between hosts of one stage.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum
from typing import TYPE_CHECKING, Annotated, NamedTuple

from msgspec import Meta

from p2ptrain.codecs import codec_names, get_codec
from p2ptrain.errors import TemporaryError
from p2ptrain.network.schema import Message, Number

if TYPE_CHECKING:
    import torch

IDS = "ids"
"""The codec of token ids: 32-bit integers."""
MAX_STAGES = 256
MAX_SAMPLES = 1 << 16
MAX_VALUES = 1 << 40
"""Of one tensor, and of the tokens of one microbatch."""
MAX_IDS = 4096
MAX_WAIT_SECONDS = 60.0
MAX_REASON_CHARS = 512

Buffer = bytes | bytearray | memoryview
Peer = Annotated[str, Meta(max_length=128)]
Round = Annotated[int, Meta(ge=0, lt=1 << 62)]
MaybeRound = Annotated[int, Meta(ge=-2, lt=1 << 62)]
"""Negative before a host, or a trainer, is in any."""
StageNumber = Annotated[int, Meta(ge=0, lt=MAX_STAGES)]
Seconds = Annotated[float, Meta(ge=0.0, le=3600.0)]


class MicrobatchId(NamedTuple):
    """Name of a microbatch: the trainer's ``number``-th of a round."""

    trainer: Annotated[str, Meta(min_length=1, max_length=128)]
    round: Round
    number: Round

    def __str__(self) -> str:
        return f"microbatch {self.number} of {self.trainer[-8:]} in round {self.round}"


# Tensors


class TensorHead(Message, frozen=True):
    """A tensor whose bytes follow.

    Attributes:
        codec: Of `p2ptrain.codecs`, or `IDS`.
        shape: Of the tensor.
    """

    codec: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Annotated[int, Meta(gt=0, le=MAX_VALUES)], ...], Meta(min_length=1, max_length=8)]

    def __post_init__(self) -> None:
        if self.codec != IDS and self.codec not in codec_names():
            raise ValueError(f"the codec {self.codec!r} is not known here")
        if math.prod(self.shape) > MAX_VALUES:
            raise ValueError("a tensor that is too large")

    @property
    def num_bytes(self) -> int:
        """The number of bytes that follow."""
        return payload_bytes(self.codec, self.shape)


@dataclass(frozen=True)
class Payload:
    """A tensor in the form in which it travels.

    Attributes:
        codec, shape: As in `TensorHead`.
        data: Its bytes; empty while they are still to come.
    """

    codec: str
    shape: tuple[int, ...]
    data: Buffer = b""

    @property
    def head(self) -> TensorHead:
        """The message that announces it."""
        return TensorHead(self.codec, self.shape)

    @property
    def num_bytes(self) -> int:
        """The number of its bytes, also of those that are still to come."""
        return payload_bytes(self.codec, self.shape)


def payload_bytes(codec: str, shape: tuple[int, ...]) -> int:
    """Return how many bytes a payload has."""
    count = math.prod(shape)
    return 4 * count if codec == IDS else get_codec(codec).encoded_bytes(count)


def pack(tensor: torch.Tensor, codec: str) -> Payload:
    """Encode a CPU tensor: integers as `IDS`, whatever the codec, and others in fp32 by the codec.

    Raises:
        CodecError: A value is not finite, or too large for the codec.
    """
    import torch

    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return Payload(IDS, shape, tensor.to(torch.int32).contiguous().numpy().tobytes())
    return Payload(codec, shape, get_codec(codec).encode(tensor.float().contiguous().view(-1)))


def unpack(payload: Payload) -> torch.Tensor:
    """Return the tensor, int64 or fp32, of a payload whose length and values were checked when it was received."""
    import torch

    if payload.codec == IDS:
        return torch.frombuffer(bytearray(payload.data), dtype=torch.int32).view(payload.shape).long()
    codec, count = get_codec(payload.codec), math.prod(payload.shape)
    values = torch.empty(count)
    codec.decode_into(payload.data, values)
    return values.view(payload.shape)


def check_values(payload: Payload) -> None:
    """Raise `CodecError` if a value is not finite, without decoding them."""
    if payload.codec != IDS:
        get_codec(payload.codec).validate(payload.data, math.prod(payload.shape))


# A microbatch on its way


class HopRequest(Message, frozen=True):
    """A microbatch for a stage; the bytes of inputs and targets follow.

    Attributes:
        id: Which microbatch.
        samples, tokens: How many it has.
        route: The hosts of the stages after this one that were called before, or are planned; empty names are open.
        inputs: Of the stage.
        targets: Of the last stage.
        requires_grad: Whether gradients are wanted; else the loss alone.
        goes_home: Whether the model's output goes to the trainer, which makes a loss of it, rather than to the targets.
    """

    id: MicrobatchId
    samples: Annotated[int, Meta(gt=0, le=MAX_SAMPLES)]
    tokens: Annotated[int, Meta(gt=0, le=MAX_VALUES)]
    route: Annotated[tuple[Peer, ...], Meta(max_length=MAX_STAGES)]
    inputs: TensorHead
    targets: TensorHead
    requires_grad: bool
    goes_home: bool

    def __post_init__(self) -> None:
        if self.samples > self.tokens:
            raise ValueError("a microbatch of fewer tokens than samples")
        if self.targets.codec != IDS:
            raise ValueError("targets that are no class indices")

    def to_hop(self, stage: int, inputs: Buffer = b"", targets: Buffer = b"") -> Hop:
        """Return the hop to a stage, with its tensors or, to look at their shapes, without."""
        return Hop(
            self.id, stage, self.samples, self.tokens, self.route,
            Payload(self.inputs.codec, self.inputs.shape, inputs),
            Payload(self.targets.codec, self.targets.shape, targets), self.requires_grad, self.goes_home,
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
    goes_home: bool = False

    @property
    def request(self) -> HopRequest:
        """The message that announces it."""
        return HopRequest(
            self.id, self.samples, self.tokens, self.route, self.inputs.head, self.targets.head, self.requires_grad,
            self.goes_home,
        )  # fmt: skip

    @property
    def num_bytes(self) -> int:
        """Bytes that a host keeps for it: its input, a gradient of the same size, and its targets."""
        return 2 * self.inputs.num_bytes + self.targets.num_bytes


class HomeRequest(Message, frozen=True):
    """The model's output for a microbatch, whose bytes follow, for the trainer that makes the loss."""

    id: MicrobatchId
    requires_grad: bool
    output: TensorHead


class Leg(NamedTuple):
    """One host's part in a microbatch.

    Attributes:
        stage: Its stage.
        host: Its peer id.
        forward_seconds, backward_seconds: How long its device took.
    """

    stage: StageNumber
    host: Peer
    forward_seconds: Seconds
    backward_seconds: Seconds


@dataclass(frozen=True)
class Reply:
    """A stage's answer to a hop.

    Attributes:
        loss: Mean over the targets, in nats.
        legs: Of this stage and all after it, in order.
        gradient: In the stage's inputs; None from the first stage.
    """

    loss: float
    legs: tuple[Leg, ...]
    gradient: Payload | None

    @property
    def head(self) -> ReplyHead:
        """The message that announces it."""
        return ReplyHead(self.loss, self.legs, self.gradient.head if self.gradient is not None else None)


class FromHost(Message, frozen=True, tag=True):
    """A message of the host, or the trainer, that has a caller's microbatch."""


class Beat(FromHost, frozen=True, tag="beat"):
    """It still has the microbatch."""


class Arrived(FromHost, frozen=True, tag="arrived"):
    """It has all tensors of the request."""


class News(FromHost, frozen=True, tag="news"):
    """A host was called though another one was planned, or is through with the forward pass of its stage."""

    stage: StageNumber
    host: Peer


class ReplyHead(FromHost, frozen=True, tag="reply"):
    """A `Reply`; the gradient's bytes follow."""

    loss: Number
    legs: Annotated[tuple[Leg, ...], Meta(max_length=MAX_STAGES)]
    gradient: TensorHead | None


class Refused(FromHost, frozen=True, tag="refused"):
    """The last message of a host that does not take the microbatch through."""

    kind: Refusal
    reason: Annotated[str, Meta(max_length=MAX_REASON_CHARS)]

    @classmethod
    def of(cls, error: RefusalError) -> Refused:
        """Return what a caller is told of an error."""
        text = "".join(each if each.isprintable() else "?" for each in str(error))
        return cls(error.kind, text[:MAX_REASON_CHARS])


class Refusal(Enum):
    """Why a host refuses."""

    FULL = "full"
    """It has no room now."""
    EARLY = "early"
    """The microbatch's round has not begun there."""
    LATE = "late"
    """The round is over there, or has its samples."""
    BEYOND = "beyond"
    """A stage after it failed."""
    BAD = "bad"
    """The microbatch does not fit, or does not fit there."""


class RefusalError(TemporaryError):
    """A host refuses a microbatch; ``kind`` tells the caller how to go on."""

    kind: Refusal


class FullError(RefusalError):
    """There is no room for another microbatch now; no failure of the host. The message says what is full."""

    kind = Refusal.FULL


class BadMicrobatchError(RefusalError):
    """A microbatch is not for this stage, or holds what no honest peer sends. The message says what."""

    kind = Refusal.BAD


class HopFailedError(RefusalError):
    """No host of a stage took a microbatch through. The message names the stage and the hosts."""

    kind = Refusal.BEYOND


class OtherRoundError(RefusalError):
    """A host is in another round than the microbatch.

    Attributes:
        is_late: Whether the microbatch's round is over there; else it has not begun.
    """

    def __init__(self, message: str, is_late: bool) -> None:
        super().__init__(message)
        self.is_late = is_late
        self.kind = Refusal.LATE if is_late else Refusal.EARLY


# Calls

OwnIds = Annotated[tuple[tuple[Round, Round], ...], Meta(max_length=MAX_IDS)]
"""Rounds and numbers of microbatches of the trainer that sends them."""


class SettleRequest(Message, frozen=True):
    """A trainer tells which of its microbatches are settled, and which are given up (``pipeline.N.settle``)."""

    settled: OwnIds = ()
    abandoned: OwnIds = ()


class DoneRequest(Message, frozen=True):
    """A trainer asks which of its microbatches are in the committed average of a round (``pipeline.N.done``)."""

    ids: OwnIds


class Answers(Message, frozen=True):
    """Yes or no for each microbatch of a request: whether it was counted there, or is in the average."""

    answers: Annotated[tuple[bool, ...], Meta(max_length=MAX_IDS)]


class RoundRequest(Message, frozen=True):
    """A peer waits so long for a later round than ``after`` (``pipeline.N.round``)."""

    after: MaybeRound
    seconds: Annotated[float, Meta(ge=0.0, le=MAX_WAIT_SECONDS)]


class RoundReply(Message, frozen=True):
    """The round in progress at a host."""

    round: MaybeRound


class StayRequest(Message, frozen=True):
    """A host that leaves its stage asks another one to stay that is as far as it (``pipeline.stay``)."""

    stage: StageNumber
    round: MaybeRound


class StayReply(Message, frozen=True):
    """Says if the host promises to stay."""

    stays: bool
