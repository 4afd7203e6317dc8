"""What a delegate hands in is held against its group's result, chunk by chunk."""

from itertools import pairwise

import msgpack
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from p2ptrain.averaging.commit.attempt import decode_means
from p2ptrain.averaging.commit.result_chunks import Origin, Source, Span
from p2ptrain.averaging.protocol.certificate import Body, Certificate
from p2ptrain.averaging.vector.chunks import CHUNK_VALUES, chunk_values, mean_root
from p2ptrain.codecs import Codec, PartList, codec_at, get_codec, smaller_codecs
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError
from p2ptrain.manifest import AveragingSpec

SPEC = AveragingSpec(spot_checks=4)
SIZE = 9 * CHUNK_VALUES + 256 * 5
MIXED = by_size(get_codec("int8"), get_codec("fp16"), [100, 30_000, 5000, SIZE - 35_100], 5000)
CODECS = {name: get_codec(name) for name in ("fp32", "fp16", "int8", "int4")} | {"mixed": MIXED}


class Handed:
    """A group's result of random values, and what its delegate hands in of ``[low, high)``.

    Attributes:
        part: That, encoded.
        codec: How.
        spans: Of its chunks.
    """

    def __init__(self, codec: Codec, cuts: list[int], low: int, high: int, slow: bool = False) -> None:
        self.bounds = (0, *sorted(at // codec.block_size * codec.block_size for at in cuts), SIZE)
        values = torch.randn(SIZE, generator=torch.Generator().manual_seed(len(cuts)))
        means, hashes = [], []
        for first, last in pairwise(self.bounds):
            means.append(codec.part(first, last).encode(values[first:last]) if last > first else bytearray())
            chunk = chunk_values(codec)
            root = mean_root(codec.part(first, last), means[-1], last - first, chunk) if last > first else bytes(32)
            hashes.append(root)
        members = tuple(f"member{i}" for i in range(len(hashes)))
        self.body = Body(
            b"s" * 32, 3, b"l" * 32, b"d" * 32, 0, 0, b"g" * 32, members, ((0, 10, 1),),
            f"{codec.name}/{codec.version}", self.bounds, tuple(hashes),
            present=40, levels=2, peers=(1,) * len(members),
        )  # fmt: skip
        parts = [codec.part(first, last) for first, last in pairwise(self.bounds)]
        self.source = Source(self.body, parts, chunk_values(codec))
        self.origin = Origin(Certificate(self.body, ()), means, self.source)
        above = codec_at(codec, 1)
        block = chunk_values(above)
        self.low, self.high = (at // above.block_size * above.block_size for at in (low, high))
        self.high = max(self.high, self.low + above.block_size) if high < SIZE else SIZE
        self.codec = (smaller_codecs(above, SIZE)[0] if slow else above).part(self.low, self.high)
        vector = torch.empty(SIZE)
        decode_means(SPEC, codec, self.body, means, vector)
        self.part = self.codec.encode(vector[self.low : self.high])
        self.spans = [(at, min(at + block, self.high)) for at in range(self.low, self.high, block)]

    def check(self, spans: list[Span] | None = None, shown: bytes | None = None) -> None:
        """As an owner does; raises what that raises."""
        spans = self.spans if spans is None else spans
        shown = self.origin.show(spans) if shown is None else shown
        assert len(shown) <= self.source.max_bytes(spans)
        self.source.check(self.low, spans, shown, self.part, self.codec)


@settings(max_examples=60)
@given(
    st.sampled_from(sorted(CODECS)),
    st.lists(st.integers(0, SIZE), max_size=5),
    st.integers(0, SIZE - 1),
    st.integers(1, SIZE),
    st.booleans(),
)
def test_what_an_honest_delegate_hands_in_passes_wherever_shares_are_cut(
    name: str, cuts: list[int], low: int, length: int, slow: bool
) -> None:
    slow = slow and bool(smaller_codecs(codec_at(CODECS[name], 1), SIZE))
    Handed(CODECS[name], cuts, low, min(low + length, SIZE), slow).check()


@settings(max_examples=60)
@given(st.data())
def test_a_change_is_found_where_it_is_looked_for_and_only_there(data: st.DataObject) -> None:
    handed = Handed(get_codec("int8"), [20_000, 70_000], CHUNK_VALUES // 2, SIZE)
    at = data.draw(st.integers(0, len(handed.part) - 1))
    handed.part[at] ^= 1 << data.draw(st.integers(0, 7))
    codec, low = handed.codec, handed.low

    def holds_it(span: Span) -> bool:
        return codec.encoded_bytes(span[0] - low) <= at < codec.encoded_bytes(span[1] - low)

    handed.check([span for span in handed.spans if not holds_it(span)])
    with pytest.raises(IntegrityError, match="does not bring its group's result"):
        handed.check([span for span in handed.spans if holds_it(span)])


@settings(max_examples=200)
@given(st.data())
def test_nothing_but_the_group_s_own_chunks_is_believed(data: st.DataObject) -> None:
    handed = Handed(get_codec("int4"), [20_000], 0, CHUNK_VALUES)
    shown = bytearray(handed.origin.show(handed.spans))
    shown[data.draw(st.integers(0, len(shown) - 1))] ^= 1 << data.draw(st.integers(0, 7))
    with pytest.raises(IntegrityError):
        handed.check(shown=bytes(shown))


@settings(max_examples=100)
@given(st.one_of(st.binary(max_size=100), st.lists(st.lists(st.binary(max_size=9), max_size=3)).map(msgpack.packb)))
def test_garbage_is_not_believed(garbage: bytes) -> None:
    handed = Handed(get_codec("int8"), [], 0, SIZE)
    with pytest.raises(IntegrityError):
        handed.check(shown=garbage)


def test_lists_of_parts_have_no_chunks() -> None:
    body = Handed(get_codec("fp32"), [], 0, SIZE).body
    assert not Source(body, [PartList(get_codec("topk"), 1)], CHUNK_VALUES).is_traceable
    assert Source(body, [get_codec("fp32")], CHUNK_VALUES).is_traceable
