"""Messages of a pipeline: what fits arrives as it was sent, and nothing else raises more than one error."""

from __future__ import annotations

import math
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.codecs import codec_names
from p2ptrain.errors import IntegrityError
from p2ptrain.network.schema import Message, from_wire, to_wire
from p2ptrain.pipeline.messages import (
    IDS,
    Answers,
    DoneRequest,
    FromHost,
    HomeRequest,
    HopFailedError,
    HopRequest,
    MicrobatchId,
    OtherRoundError,
    Refusal,
    Refused,
    RoundReply,
    RoundRequest,
    SettleRequest,
    StayReply,
    StayRequest,
    TensorHead,
)
from tests.support.fuzz import check

HEADS = st.builds(
    TensorHead, st.sampled_from([IDS, *codec_names()]), st.lists(st.integers(1, 30), min_size=1, max_size=8).map(tuple)
)
CALLS = (SettleRequest, DoneRequest, Answers, RoundRequest, RoundReply, StayRequest, StayReply)
each = pytest.mark.parametrize("schema", [HopRequest, HomeRequest, FromHost, *CALLS])
HOP: dict[str, Any] = {
    "id": ["a", 0, 0], "samples": 2, "tokens": 16, "route": ["b"], "inputs": {"codec": "int8", "shape": [2, 8, 16]},
    "targets": {"codec": IDS, "shape": [2, 8]}, "requires_grad": True, "goes_home": False,
}  # fmt: skip


def over_the_wire(values: object) -> Any:
    return msgpack.unpackb(msgpack.packb(values))


def look_at(message: object) -> None:
    """Do what a peer does with a message before it has looked at anything else."""
    str(message)
    if isinstance(message, HopRequest):
        hop = message.to_hop(0)
        assert hop.request == message
        assert hop.num_bytes > 0
    if isinstance(message, HomeRequest):
        assert message.output.num_bytes > 0


@each
@given(data=st.data())
def test_what_fits_arrives_as_it_was_sent_and_the_rest_is_refused(schema: type[Message], data: st.DataObject) -> None:
    message = check(schema, data, {TensorHead: HEADS})
    if message is not None:
        look_at(message)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"id": ["a" * 129, 0, 0]}, r"id\[0\]: Expected `str` of length <= 128"),
        ({"id": ["", 0, 0]}, r"id\[0\]: Expected `str` of length >= 1"),
        ({"id": ["a\nb", 0, 0]}, "printable"),
        ({"id": ["a", -1, 0]}, r"id\[1\]: Expected `int` >= 0"),
        ({"samples": 0}, "samples: Expected `int` >= 1"),
        ({"samples": (1 << 16) + 1, "tokens": 1 << 17}, "samples: Expected `int` <= 65536"),
        ({"tokens": 1}, "fewer tokens than samples"),
        ({"tokens": 1 << 41}, "tokens: Expected `int` <="),
        ({"route": ["a"] * 257}, "route: Expected `array` of length <= 256"),
        ({"inputs": {"codec": "zip9", "shape": [2, 8]}}, "'zip9' is not known"),
        ({"inputs": {"codec": IDS, "shape": []}}, r"inputs.shape: Expected `array` of length >= 1"),
        ({"inputs": {"codec": IDS, "shape": [0, 8]}}, r"inputs.shape\[0\]: Expected `int` >= 1"),
        ({"inputs": {"codec": IDS, "shape": [1 << 31, 1 << 31]}}, "too large"),
        ({"targets": {"codec": "fp32", "shape": [2, 8]}}, "no class indices"),
        ({"requires_grad": 1}, "requires_grad: Expected `bool`"),
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


def test_a_microbatch_is_told_in_words() -> None:
    assert str(MicrobatchId("0123456789", 2, 3)) == "microbatch 3 of 23456789 in round 2"
