"""What travels between the hosts of a microbatch: a hop there, news meanwhile, a reply back.

Everything from the network is checked here: types, lengths and ranges; shapes and values where they are used.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from p2ptrain.codecs import codec_names, get_codec
from p2ptrain.errors import ProtocolError
from p2ptrain.pipeline.stage.ledger import MicrobatchId

if TYPE_CHECKING:
    import torch

IDS = "ids"
"""How token ids travel: as 32-bit integers."""
MAX_DIMENSIONS = 8
MAX_STAGES = 256
MAX_SECONDS = 3600.0
MAX_PEER_CHARS = 128


@dataclass(frozen=True)
class Payload:
    """A tensor on its way.

    Attributes:
        codec: Of `p2ptrain.codecs`, or `IDS`.
        shape: Of the tensor.
        data: Its bytes.
    """

    codec: str
    shape: tuple[int, ...]
    data: bytes | bytearray | memoryview

    @property
    def num_bytes(self) -> int:
        """How many it has, also while it is still to come."""
        return payload_bytes(self.codec, self.shape)

    def head(self) -> list[Any]:
        """What goes into a message; the bytes go behind it."""
        return [self.codec, list(self.shape)]


def pack(tensor: torch.Tensor, codec: str) -> Payload:
    """Encode a CPU tensor: integers as `IDS`, whatever the codec, and others in fp32 by the codec."""
    import torch

    shape = tuple(tensor.shape)
    if not tensor.is_floating_point():
        return Payload(IDS, shape, tensor.to(torch.int32).contiguous().numpy().tobytes())
    return Payload(codec, shape, get_codec(codec).encode(tensor.float().contiguous().view(-1)))


def unpack(payload: Payload) -> torch.Tensor:
    """The tensor: int64, or fp32.

    Raises:
        CodecError: A value is not finite. (The length was checked when it was received.)
    """
    import torch

    check_values(payload)
    if payload.codec == IDS:
        return torch.frombuffer(bytearray(payload.data), dtype=torch.int32).view(payload.shape).long()
    codec, count = get_codec(payload.codec), math.prod(payload.shape)
    values = torch.empty(count)
    codec.decode_into(payload.data, values)
    return values.view(payload.shape)


def check_values(payload: Payload) -> None:
    """Look whether values are finite without decoding them.

    Raises:
        CodecError: One is not.
    """
    if payload.codec != IDS:
        get_codec(payload.codec).validate(payload.data, math.prod(payload.shape))


def payload_bytes(codec: str, shape: Sequence[int]) -> int:
    """How many bytes a payload has."""
    count = math.prod(shape)
    return 4 * count if codec == IDS else get_codec(codec).encoded_bytes(count)


def head_from_wire(values: Any, peer: str, max_bytes: int) -> tuple[str, tuple[int, ...], int]:
    """Codec, shape and length of a payload that is about to come.

    Raises:
        ProtocolError: It is malformed, or longer than ``max_bytes``.
    """
    _expect(isinstance(values, list) and len(values) == 2, peer, "a malformed tensor")
    codec, shape = values
    _expect(codec == IDS or codec in codec_names(), peer, "a tensor in a codec that is not known here")
    _expect(isinstance(shape, list) and 0 < len(shape) <= MAX_DIMENSIONS, peer, "a tensor of an impossible shape")
    _expect(all(type(size) is int and 0 < size < 1 << 32 for size in shape), peer, "a tensor of an impossible shape")
    count = math.prod(shape)
    _expect(count <= max_bytes * 64, peer, "a tensor that is too large")  # No codec takes less than an eighth of a bit.
    length = payload_bytes(codec, shape)
    _expect(length <= max_bytes, peer, "a tensor that is too large")
    return codec, tuple(shape), length


@dataclass(frozen=True)
class Leg:
    """What one host did for a microbatch.

    Attributes:
        stage: Which stage.
        host: Who.
        forward_seconds, backward_seconds: How long its device took.
    """

    stage: int
    host: str
    forward_seconds: float
    backward_seconds: float

    def to_wire(self) -> list[Any]:
        """Plain values."""
        return [self.stage, self.host, self.forward_seconds, self.backward_seconds]


@dataclass(frozen=True)
class Hop:
    """A microbatch on its way to a stage.

    Attributes:
        id: Which microbatch.
        stage: Where to.
        samples, tokens: How many it has.
        route: The hosts of the stages after it that were called before, or are planned.
        inputs: Of the stage.
        targets: Of the last stage.
        learns: Whether gradients are wanted; else the loss alone.
        goes_home: Whether the model's output goes to the trainer, which makes a loss of it, rather than to the targets.
    """

    id: MicrobatchId
    stage: int
    samples: int
    tokens: int
    route: tuple[str, ...]
    inputs: Payload
    targets: Payload
    learns: bool = True
    goes_home: bool = False

    def to_wire(self) -> dict[str, Any]:
        """Plain values, without the payloads' bytes."""
        return {
            "id": list(self.id), "samples": self.samples, "tokens": self.tokens, "route": list(self.route),
            "inputs": self.inputs.head(), "targets": self.targets.head(), "learns": self.learns,
            "goes_home": self.goes_home,
        }  # fmt: skip


@dataclass(frozen=True)
class HopHead:
    """What a `Hop` says before its payloads come."""

    id: MicrobatchId
    samples: int
    tokens: int
    route: tuple[str, ...]
    inputs: tuple[str, tuple[int, ...], int]
    targets: tuple[str, tuple[int, ...], int]
    learns: bool
    goes_home: bool

    @classmethod
    def from_wire(cls, values: dict[str, Any], peer: str, max_bytes: int) -> HopHead:
        """Check what a peer sent.

        Raises:
            ProtocolError: It is no hop.
        """
        id, samples, tokens = values.get("id"), values.get("samples"), values.get("tokens")
        route = values.get("route")
        _expect(isinstance(id, list) and [type(each) for each in id] == [str, int, int], peer, "a malformed microbatch")
        assert isinstance(id, list)
        named = id[0] != "" and is_peer_id(id[0]) and 0 <= id[1] < 1 << 62 and 0 <= id[2] < 1 << 62
        _expect(named, peer, "a malformed microbatch")
        counts = type(samples) is int and type(tokens) is int and 0 < samples <= tokens < 1 << 40
        _expect(counts, peer, "a microbatch of impossible size")
        assert isinstance(samples, int)
        assert isinstance(tokens, int)
        _expect(isinstance(route, list) and len(route) < MAX_STAGES, peer, "a malformed route")
        assert isinstance(route, list)
        _expect(all(is_peer_id(host) for host in route), peer, "a malformed route")
        inputs = head_from_wire(values.get("inputs"), peer, max_bytes)
        targets = head_from_wire(values.get("targets"), peer, max_bytes)
        _expect(targets[0] == IDS, peer, "targets that are no class indices")
        learns, goes_home = values.get("learns"), values.get("goes_home")
        _expect(type(learns) is bool and type(goes_home) is bool, peer, "a microbatch that says not what it is for")
        assert isinstance(learns, bool)
        assert isinstance(goes_home, bool)
        return cls(MicrobatchId(*id), samples, tokens, tuple(route), inputs, targets, learns, goes_home)

    @property
    def num_bytes(self) -> int:
        """Of the payloads that are to come."""
        return self.inputs[2] + self.targets[2]

    def to_hop(
        self, stage: int, inputs: bytes | bytearray | memoryview, targets: bytes | bytearray | memoryview
    ) -> Hop:
        """The hop to a stage, with its payloads or, to look at their shapes, without."""
        first, second = Payload(*self.inputs[:2], inputs), Payload(*self.targets[:2], targets)
        return Hop(
            self.id, stage, self.samples, self.tokens, self.route, first, second, self.learns, self.goes_home
        )  # fmt: skip


@dataclass(frozen=True)
class Reply:
    """What comes back from a stage.

    Attributes:
        loss: Mean over the targets, in nats.
        legs: Of this stage and all after it, in order.
        gradient: In the stage's inputs; None from the first stage.
    """

    loss: float
    legs: tuple[Leg, ...]
    gradient: Payload | None

    def to_wire(self) -> dict[str, Any]:
        """Plain values, without the gradient's bytes."""
        gradient = self.gradient.head() if self.gradient is not None else None
        return {"loss": self.loss, "legs": [leg.to_wire() for leg in self.legs], "gradient": gradient}


def legs_from_wire(values: Any, peer: str, first_stage: int) -> tuple[Leg, ...]:
    """Check a trail: consecutive stages, from ``first_stage`` on.

    Raises:
        ProtocolError: It is none.
    """
    _expect(isinstance(values, list) and 0 < len(values) <= MAX_STAGES, peer, "a malformed trail")
    legs = []
    for stage, each in enumerate(values, first_stage):
        good = isinstance(each, list) and [type(value) for value in each] == [int, str, float, float]
        _expect(good and each[0] == stage and is_peer_id(each[1]), peer, "a malformed trail")
        _expect(all(0.0 <= seconds <= MAX_SECONDS for seconds in each[2:]), peer, "a trail of impossible times")
        legs.append(Leg(*each))
    return tuple(legs)


def is_peer_id(value: Any) -> bool:
    """Whether a value could be a peer's id, or empty; it gets into logs, so it has to be one printable word or so."""
    return type(value) is str and len(value) <= MAX_PEER_CHARS and value.isprintable()


def loss_from_wire(value: Any, peer: str) -> float:
    """Check a loss.

    Raises:
        ProtocolError: It is no finite number.
    """
    _expect(type(value) is float and math.isfinite(value), peer, "a loss that is no number")
    return float(value)


def _expect(condition: bool, peer: str, what: str) -> None:
    if not condition:
        raise ProtocolError(peer, f"sent {what}")
