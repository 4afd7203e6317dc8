"""A result's chunks are those that its certificate vouches for, and go on before all are there."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from p2ptrain.averaging.commit import result_chunks
from p2ptrain.averaging.commit.broadcast import AskOutcome, Outcome
from p2ptrain.averaging.commit.result_chunks import ChunkHashes, ResultChunks
from p2ptrain.averaging.protocol.certificate import AskChain, Chain
from p2ptrain.averaging.vector.chunks import mean_root
from p2ptrain.codecs import PartList, get_codec
from p2ptrain.errors import IntegrityError, PeerRefusedError, ProtocolError
from p2ptrain.network.schema import Message
from p2ptrain.network.simulated import SimulatedNetwork
from p2ptrain.runtime import Runtime
from tests.support.coroutines import simulated
from tests.support.fuzz import check

LEAF_VALUES = 256


def result_of(runtime: Runtime, sizes: list[int], codec_name: str) -> tuple[ResultChunks, ResultChunks]:
    """One result, complete; and the same, of which nothing is there."""
    bounds = tuple(sum(sizes[:end]) for end in range(len(sizes) + 1))
    vector, codec = torch.randn(bounds[-1], generator=torch.Generator().manual_seed(1)), get_codec(codec_name)
    codecs: list[Any] = [codec.part(low, high) for low, high in pairwise(bounds)]
    means: list[Any] = [
        part.encode(vector[low:high]) for part, (low, high) in zip(codecs, pairwise(bounds), strict=True)
    ]
    if codec.sparse:
        codecs = [PartList(part, 1) for part in codecs]
        for number, (part, size) in enumerate(zip(codecs, sizes, strict=True)):
            listed = bytearray(part.encoded_bytes(size))
            if size:
                part.write([0.5], [means[number]], listed)
            means[number] = listed
    hashes = tuple(
        mean_root(part, mean, size, LEAF_VALUES) if size else bytes(32)
        for part, mean, size in zip(codecs, means, sizes, strict=True)
    )
    body: Any = SimpleNamespace(bounds=bounds, hashes=hashes, round=3)
    return ResultChunks(runtime, body, codecs, LEAF_VALUES, means), ResultChunks(runtime, body, codecs, LEAF_VALUES)


@contextlib.asynccontextmanager
async def a_runtime(network: SimulatedNetwork) -> AsyncIterator[Runtime]:
    """A peer's, with chunks of a few kilobytes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(result_chunks, "CHUNK_BYTES", 1 << 12)
        yield network.add_peer("a").runtime


@given(
    sizes=st.lists(st.sampled_from([0, 1, 255, 256, 257, 2048, 5000]), min_size=1, max_size=4).filter(any),
    codec=st.sampled_from(["fp32", "int8", "int4", "topk"]),
)
@simulated(a_runtime, seed=1)
async def test_chunks_are_trusted_if_all_hashes_lead_to_the_certificate_s(
    runtime: Runtime, sizes: list[int], codec: str
) -> None:
    whole, empty = result_of(runtime, sizes, codec)
    hashes = await whole.find_hashes()
    for number in range(len(hashes)):
        false = (*hashes[:number], bytes(32), *hashes[number + 1 :])
        with pytest.raises(ProtocolError, match="do not match its certificate"):
            await empty.trust("liar", false)
    with pytest.raises(ProtocolError):
        await empty.trust("liar", hashes[1:])
    await empty.trust("peer", hashes)
    for index in range(empty.num_chunks):
        data = await whole.read(index)
        with pytest.raises(ProtocolError):
            await empty.put("liar", index, memoryview(bytes([data[0] ^ 1]) + data[1:]))
        assert not empty.done[index]
        assert await empty.put("peer", index, data) == empty.wire_bytes(index) == len(data)
    assert empty.is_complete
    assert list(map(bytes, empty.means)) == list(map(bytes, whole.means))
    await empty.validate()


@simulated(a_runtime, seed=1)
async def test_a_chunk_is_read_once_it_is_there_and_refused_once_it_will_not_come(runtime: Runtime) -> None:
    whole, empty = result_of(runtime, [1000, 3000], "fp32")
    await empty.trust("peer", await whole.find_hashes())
    reading = asyncio.gather(empty.read(0), empty.read(1), return_exceptions=True)
    await asyncio.sleep(1.0)
    assert not reading.done()
    await empty.put("peer", 1, await whole.read(1))
    empty.give_up()
    refused, found = await reading
    assert isinstance(refused, PeerRefusedError)
    assert found == await whole.read(1)


@simulated(a_runtime, seed=1)
async def test_means_that_are_vouched_for_and_malformed_are_refused(runtime: Runtime) -> None:
    whole, _ = result_of(runtime, [1000], "fp32")
    memoryview(whole.means[0]).cast("B")[:4] = b"\xff" * 4
    with pytest.raises(IntegrityError, match="refused"):
        await whole.validate()


@pytest.mark.parametrize("schema", [AskChain, Chain, AskOutcome, Outcome, ChunkHashes])
@given(data=st.data())
def test_messages_are_read_as_they_were_sent_and_others_refused(schema: type[Message], data: st.DataObject) -> None:
    check(schema, data)
