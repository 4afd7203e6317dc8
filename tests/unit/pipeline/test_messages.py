"""Messages of a pipeline: what fits arrives as it was sent, and nothing else raises more than one error."""

import math
from typing import Any

import msgpack
import pytest

from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import from_wire, to_wire
from p2ptrain.pipeline.messages import (
    IDS,
    UNSIGNED,
    FromHost,
    HopFailedError,
    HopRequest,
    OtherRoundError,
    Refusal,
    Refused,
)

HOP: dict[str, Any] = {
    "id": ["a", 0, 0], "samples": 2, "tokens": 16, "route": ["b"], "inputs": {"codec": "int8", "shape": [2, 8, 16]},
    "targets": {"codec": IDS, "shape": [2, 8]}, "requires_grad": True, "returns_output": False,
    "signature": to_wire(UNSIGNED),
}  # fmt: skip


def over_the_wire(values: object) -> Any:
    return msgpack.unpackb(msgpack.packb(values))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": ["a\nb", 0, 0]}, "printable"),
        ({"id": ["a" * 129, 0, 0]}, r"id\[0\]: Expected `str` of length <= 128"),
        ({"id": ["", 0, 0]}, r"id\[0\]: Expected `str` of length >= 1"),
        ({"id": ["a", -1, 0]}, r"id\[1\]: Expected `int` >= 0"),
        ({"samples": 0}, "samples: Expected `int` >= 1"),
        ({"samples": (1 << 16) + 1, "tokens": 1 << 17}, "samples: Expected `int` <= 65536"),
        ({"tokens": 1 << 41}, "tokens: Expected `int` <="),
        ({"route": ["a"] * 257}, "route: Expected `array` of length <= 256"),
        ({"inputs": {"codec": IDS, "shape": []}}, r"inputs.shape: Expected `array` of length >= 1"),
        ({"tokens": 1}, "fewer tokens than samples"),
        ({"inputs": {"codec": "zip9", "shape": [2, 8]}}, "'zip9' is not known"),
        ({"inputs": {"codec": IDS, "shape": [0, 8]}}, r"inputs.shape\[0\]: Expected `int` >= 1"),
        ({"inputs": {"codec": IDS, "shape": [1 << 31, 1 << 31]}}, "too large"),
        ({"targets": {"codec": "fp32", "shape": [2, 8]}}, "no class indices"),
    ],
)
def test_the_error_names_what_is_wrong_with_a_hop(change: dict[str, Any], words: str) -> None:
    from_wire(HopRequest, HOP)
    with pytest.raises(IntegrityError, match=words):
        from_wire(HopRequest, HOP | change)


@pytest.mark.parametrize("loss", [math.nan, math.inf, -math.inf])
def test_a_loss_is_a_number(loss: float) -> None:
    with pytest.raises(IntegrityError, match="loss"):
        from_wire(FromHost, {"type": "reply", "loss": loss, "legs": [], "gradient": None})


def test_a_refusal_arrives_whatever_its_error_says() -> None:
    """A reason may hold what another peer said."""
    for error, kind in (
        (HopFailedError("a\x1b[31m\n" * 999), Refusal.BEYOND),
        (OtherRoundError("", True), Refusal.LATE),
    ):
        refused = Refused.of(error)
        assert from_wire(FromHost, over_the_wire(to_wire(refused))) == refused
        assert refused.kind is kind
