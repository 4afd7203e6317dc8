"""Sparse contributions of a roster reach everybody as lists of parts: exact, certified, replayable, and guarded."""

from __future__ import annotations

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Mask, Request
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.vector.streaming import EncodedStream
from p2ptrain.codecs import Codec, CodecError, PartList, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from tests.support.sim.averaging import SPEC, RosterMember, decoded, make_roster, run_all
from tests.support.sim.peers import Member, members
from tests.support.sim.simulated import simulated

Change = Callable[[bytearray], object]

SIZE = 5 * 4096 + 100
BOUNDS = (0, 2 * 4096, 2 * 4096, 3 * 4096, SIZE)
"""The second of four owns nothing."""
TOKENS = [10, 20, 30, 40]
PLAIN = SPEC.model_copy(update={"aggregation": "mean"})
TOPK = get_codec("topk")
MIXED = by_size(TOPK, get_codec("bf16"), [4096, 30, 3 * 4096, 4096 + 70], 70)


def make_vectors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SIZE, generator=generator) for _ in range(count)]


def gather(swarm: list[Member], codec: Codec = TOPK, spec: AveragingSpec = PLAIN) -> list[RosterMember]:
    """One attempt of four, whose contributions are in roster order."""
    order = sorted(range(4), key=lambda i: swarm[i].rpc.peer_id)
    vectors, tokens = [torch.empty(0)] * 4, [0] * 4
    for vector, count, index in zip(make_vectors(4), TOKENS, order, strict=True):
        vectors[index], tokens[index] = vector, count
    return make_roster(swarm, vectors, tokens, codec, BOUNDS, spec)


def reference(contributors: list[int], codec: Codec = TOPK) -> torch.Tensor:
    """The weighted mean of what each contributor's encoded vector decodes to, added up in roster order."""
    total, mean, value = sum(TOKENS[i] for i in contributors), torch.zeros(SIZE), torch.empty(SIZE)
    for index in contributors:
        codec.decode_into(codec.encode(make_vectors(4)[index]), value)
        mean = mean + value * torch.tensor(TOKENS[index] / total, dtype=torch.float32)
    return mean


def all_signed(results: list[Certificate | BaseException]) -> bool:
    return all(isinstance(result, Certificate) for result in results)


@pytest.mark.parametrize("codec", [TOPK, MIXED], ids=["topk", "mixed"])
@simulated(members, 4, seed=1)
async def test_everybody_holds_the_exact_mean_of_what_was_sent(swarm: list[Member], codec: Codec) -> None:
    roster = gather(swarm, codec)
    assert all_signed(await run_all(roster))
    expected = reference([0, 1, 2, 3], codec)
    for each, vector in zip(roster, make_vectors(4), strict=True):
        assert decoded(each).numpy().tobytes() == expected.numpy().tobytes()
        assert each.attempt.means == roster[0].attempt.means
        assert each.attempt.body == roster[0].attempt.body
        assert each.result.exact_mean is None
        sent = each.result.sent_parts  # Of the own share, too.
        assert sorted(sent) == [0, 2, 3]
        assert b"".join(sent[index] for index in sorted(sent)) == codec.encode(vector)


@simulated(members, 4, seed=3)
async def test_a_list_is_as_long_as_there_are_contributors_not_members(swarm: list[Member]) -> None:
    roster = gather(swarm)
    roster[1].session.contribution.vector.mul_(1000)  # The others refuse it.
    assert all_signed(await run_all(roster))
    assert roster[0].attempt.contributors == (0, 2, 3)
    assert [len(mean or b"") for mean in roster[0].attempt.means] == [
        3 * (4 + TOPK.encoded_bytes(high - low)) if high > low else 0 for low, high in pairwise(BOUNDS)
    ]
    for each in roster:
        assert torch.equal(decoded(each), reference([0, 2, 3]))


@simulated(members, 4, seed=4)
async def test_lists_wait_for_a_member_that_learns_late_who_contributed(swarm: list[Member]) -> None:
    """The owner's mask reaches one member after the means of all others."""
    roster = gather(swarm)
    late, slow_owner = roster[1], roster[3]
    serve = slow_owner.session.serve

    async def delayed(channel: Any, request: Request) -> None:
        sending = channel.send

        async def send(message: object) -> None:
            if isinstance(message, Mask) and channel.remote == late.member.rpc.peer_id:
                await asyncio.sleep(0.5)
            await sending(message)

        channel.send = send
        await serve(channel, request)

    slow_owner.member.rpc.serve_channel(ALLREDUCE, Request, delayed)
    assert all_signed(await run_all(roster))
    assert late.attempt.means == roster[0].attempt.means


def tampered(owner: AllReduceSession, change: Change) -> None:
    """Let an owner change the list that it made before anybody has it."""
    share: Any = owner.share
    list_parts, reduce = share._list_parts, share.reduce

    async def reduce_resizable(runtime: Any, contributors: Any, tokens: Any, mean: EncodedStream) -> Any:
        mean.data = bytearray(mean.data)
        return await reduce(runtime, contributors, tokens, mean)

    def lie(contributors: Any, weights: Any, encoded: bytearray) -> None:
        list_parts(contributors, weights, encoded)
        change(encoded)

    share._list_parts, share.reduce = lie, reduce_resizable


def put(at: int, data: bytes) -> Change:
    return lambda encoded: encoded.__setitem__(slice(at, at + len(data)), data)


def swap_parts(encoded: bytearray) -> None:
    part_bytes = (len(encoded) - 16) // 4
    first, second = encoded[16 : 16 + part_bytes], encoded[16 + part_bytes : 16 + 2 * part_bytes]
    encoded[16 : 16 + 2 * part_bytes] = second + first


@pytest.mark.parametrize(
    ("change", "refused_by", "reason"),
    [
        (put(0, struct.pack("<f", math.nan)), [0, 1, 2], "refused"),
        (put(0, struct.pack("<f", -1.0)), [0, 1, 2], "refused"),
        (put(0, struct.pack("<f", 1.0)), [0, 1, 2], "refused"),
        (put(16, b"\xff" * 4), [0, 1, 2], "refused"),
        (put(20, bytes(20)), [0, 1, 2], "refused"),
        (swap_parts, [0, 1], "refused"),
        (lambda encoded: encoded.pop(), [0, 1, 2], ""),
        (lambda encoded: encoded.extend(bytes(1)), [0, 1, 2], ""),
        (lambda encoded: encoded.extend(bytes(84)), [0, 1, 2], ""),
    ],
    ids=["nan", "negative", "too heavy", "level", "indices", "swapped", "shorter", "longer", "by a block"],
)
@simulated(members, 4, seed=5)
async def test_members_do_not_sign_a_list_that_is_malformed_or_misquotes_them(
    swarm: list[Member], change: Change, refused_by: list[int], reason: str
) -> None:
    roster = gather(swarm)
    evil = roster[3]
    tampered(evil.session, change)
    results = await run_all(roster)
    for index in refused_by:
        failure = results[index]
        assert isinstance(failure, AttemptFailedError)
        assert failure.suspects == (evil.member.rpc.peer_id,)
        assert reason in str(failure)
        assert roster[index].attempt.body is None
    assert all(each.attempt.certificate() is None for each in roster)


@pytest.mark.parametrize("rule", ["centered_clip", "norm_clip"])
@simulated(members, 4, seed=7)
async def test_under_a_rule_by_votes_the_mean_is_dense(swarm: list[Member], rule: str) -> None:
    roster = gather(swarm, spec=SPEC.model_copy(update={"aggregation": rule}))
    await run_all(roster)
    is_list = rule == "norm_clip"
    for each in roster:
        assert isinstance(each.attempt.mean_codec_of(0), PartList) == is_list
        assert each.attempt.means == roster[0].attempt.means
        assert (each.result.exact_mean is None) == (is_list or each is roster[1])


@simulated(members, 4, seed=8)
async def test_a_laggard_fetches_lists_and_refuses_those_of_other_contributors(swarm: list[Member]) -> None:
    roster = gather(swarm)
    roster[1].session.contribution.vector.mul_(1000)
    await run_all(roster)
    body, source, reader = roster[0].attempt.body, roster[0].member.rpc.peer_id, roster[1].history
    assert body is not None
    assert await reader.fetch_means([source], body, SIZE, 5.0) == roster[0].attempt.means
    more = replace(body, contributors=tuple((i, TOKENS[i], 1) for i in range(4)))
    roster[0].attempt.body = more  # So that it is found.
    with pytest.raises(IntegrityError, match="bytes"):
        await reader.fetch_means([source], more, SIZE, 5.0)
    with pytest.raises(ProtocolError, match="nobody"):
        await reader.fetch_means([source], replace(body, contributors=()), SIZE, 5.0)


@pytest.mark.parametrize("is_misquoted", [False, True])
@simulated(members, 4, seed=9)
async def test_a_member_that_missed_the_end_takes_lists_over_unless_they_misquote_it(
    swarm: list[Member], is_misquoted: bool
) -> None:
    roster = gather(swarm)
    await run_all(roster)
    late = roster[0]
    attempt, means = late.attempt, list(late.attempt.means)
    attempt.proofs.clear()
    attempt.body, attempt.contributors, attempt.means = None, None, [None] * 4
    if is_misquoted:
        attempt.sent_parts[3] = bytes(attempt.sent_parts[3])[:-1] + b"?"
        await late.settlements.settle(attempt)
        assert attempt.body is None
        assert attempt.proofs == {}
        return
    began = asyncio.get_running_loop().time()
    assert await late.settlements.settle(attempt) is not None
    assert asyncio.get_running_loop().time() - began < SPEC.grace_seconds
    assert attempt.means == means
    assert torch.equal(decoded(late), reference([0, 1, 2, 3]))


@simulated(members, 4, seed=10)
async def test_nobody_counts_for_more_than_its_tokens_though_for_less_if_clipped(swarm: list[Member]) -> None:
    roster = gather(swarm)
    await run_all(roster)
    attempt = roster[0].attempt
    for weights, refusal in (
        ([0.1, 0.2, 0.3, 0.4], ""),
        ([0.1, 0.05, 0.0, 0.4], ""),
        ([0.1, 0.2, 0.31, 0.3], "tokens"),
        ([0.101, 0.0, 0.0, 0.0], "tokens"),
    ):
        data = bytearray(attempt.means[3] or b"")
        data[:16] = struct.pack("<4f", *weights)
        with pytest.raises(CodecError, match=refusal) if refusal else contextlib.nullcontext():
            attempt.check_quotes(3, data, 0)
