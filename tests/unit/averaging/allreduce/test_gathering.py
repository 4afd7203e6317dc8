"""Sparse contributions of a roster reach everybody as lists of parts: exact, certified, replayable, and guarded."""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise

import pytest
import torch

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Mask, Request
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.commit.attempt import AttemptFailedError
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.codecs import Codec, CodecError, PartList, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork, simulate
from tests.support.sim.averaging import SPEC, RosterMember, make_roster, stop
from tests.support.sim.peers import Member, members

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


def decoded(member: RosterMember) -> torch.Tensor:
    attempt, out = member.attempt, torch.zeros(SIZE)
    for index, mean in enumerate(attempt.means):
        assert mean is not None
        if mean:
            attempt.mean_codec_of(index).decode_into(mean, out[BOUNDS[index] : BOUNDS[index + 1]])
    return out


def reference(contributors: list[int], codec: Codec = TOPK) -> torch.Tensor:
    """The weighted mean of what each contributor's encoded vector decodes to, added up in roster order."""
    total, mean, value = sum(TOKENS[i] for i in contributors), torch.zeros(SIZE), torch.empty(SIZE)
    for index in contributors:
        codec.decode_into(codec.encode(make_vectors(4)[index]), value)
        mean = mean + value * torch.tensor(TOKENS[index] / total, dtype=torch.float32)
    return mean


async def run(roster: list[RosterMember]) -> list[Certificate | BaseException]:
    results = await asyncio.gather(*(each.run() for each in roster), return_exceptions=True)
    await stop(roster, linger=True)
    return results


@pytest.mark.parametrize("codec", [TOPK, MIXED], ids=["topk", "mixed"])
def test_everybody_holds_the_exact_mean_of_what_was_sent(codec: Codec) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm, codec)
            certificates = await run(roster)
            assert all(isinstance(certificate, Certificate) for certificate in certificates), certificates
            expected = reference([0, 1, 2, 3], codec)
            for each in roster:
                assert decoded(each).numpy().tobytes() == expected.numpy().tobytes()
                assert each.attempt.means == roster[0].attempt.means
                assert each.attempt.body == roster[0].attempt.body
                assert each.result.exact_mean is None

    simulate(main, seed=1)


@pytest.mark.parametrize("codec", [TOPK, MIXED], ids=["topk", "mixed"])
def test_what_a_member_sent_is_its_whole_vector_with_its_own_share(codec: Codec) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm, codec)
            await run(roster)
            for each, vector in zip(roster, make_vectors(4), strict=True):
                sent = each.result.sent_parts
                assert sorted(sent) == [0, 2, 3]
                assert b"".join(sent[index] for index in sorted(sent)) == codec.encode(vector)

    simulate(main, seed=2)


def test_a_list_is_as_long_as_there_are_contributors_not_members() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            roster[1].session.contribution.vector.mul_(1000)  # The others refuse it.
            results = await run(roster)
            assert all(isinstance(result, Certificate) for result in results), results
            assert roster[0].attempt.contributors == (0, 2, 3)
            assert [len(mean or b"") for mean in roster[0].attempt.means] == [
                3 * (4 + TOPK.encoded_bytes(high - low)) if high > low else 0 for low, high in pairwise(BOUNDS)
            ]
            for each in roster:
                assert torch.equal(decoded(each), reference([0, 2, 3]))

    simulate(main, seed=3)


def test_lists_wait_for_a_member_that_learns_late_who_contributed() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            late, slow_owner = roster[1], roster[3]
            serve = slow_owner.session.serve

            async def delayed(channel, request):  # type: ignore[no-untyped-def]
                """The owner's mask reaches one member after the means of all others."""
                if channel.remote == late.member.rpc.peer_id:
                    sending = channel.send

                    async def send(message):  # type: ignore[no-untyped-def]
                        if isinstance(message, Mask):
                            await asyncio.sleep(0.5)
                        await sending(message)

                    channel.send = send
                await serve(channel, request)

            slow_owner.member.rpc.serve_channel(ALLREDUCE, Request, delayed)
            results = await run(roster)
            assert all(isinstance(result, Certificate) for result in results), results
            assert late.attempt.means == roster[0].attempt.means

    simulate(main, seed=4)


def tampered(owner: AllReduceSession, change: Callable[[bytearray], None]) -> None:
    """Let an owner change the list that it made before anybody has it."""
    share = owner.share
    list_parts, reduce = share._list_parts, share.reduce

    async def reduce_resizable(runtime, contributors, tokens, mean):  # type: ignore[no-untyped-def]
        mean.data = bytearray(mean.data)
        return await reduce(runtime, contributors, tokens, mean)

    def lie(weights, encoded):  # type: ignore[no-untyped-def]
        list_parts(weights, encoded)
        change(encoded)

    share._list_parts = lie  # type: ignore[method-assign]
    share.reduce = reduce_resizable  # type: ignore[method-assign]


def swap_parts(encoded: bytearray) -> None:
    part_bytes = (len(encoded) - 16) // 4
    first, second = encoded[16 : 16 + part_bytes], encoded[16 + part_bytes : 16 + 2 * part_bytes]
    encoded[16 : 16 + 2 * part_bytes] = second + first


@pytest.mark.parametrize(
    ("change", "refused_by"),
    [
        (lambda encoded: encoded.__setitem__(slice(0, 4), b"\x00\x00\xc0\x7f"), [0, 1, 2]),
        (lambda encoded: encoded.__setitem__(slice(0, 4), b"\x00\x00\x80\xbf"), [0, 1, 2]),
        (lambda encoded: encoded.__setitem__(slice(0, 4), b"\x00\x00\x80\x3f"), [0, 1, 2]),
        (lambda encoded: encoded.__setitem__(slice(16, 20), b"\xff" * 4), [0, 1, 2]),
        (lambda encoded: encoded.__setitem__(slice(20, 40), bytes(20)), [0, 1, 2]),
        (swap_parts, [0, 1]),
    ],
    ids=["nan", "negative", "too heavy", "level", "indices", "swapped"],
)
def test_members_do_not_sign_a_list_that_is_malformed_or_misquotes_them(
    change: Callable[[bytearray], None], refused_by: list[int]
) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            evil = roster[3]
            tampered(evil.session, change)
            results = await run(roster)
            evil_id = evil.member.rpc.peer_id
            for index in refused_by:
                failure = results[index]
                assert isinstance(failure, AttemptFailedError)
                assert failure.suspects == (evil_id,)
                assert "refused" in str(failure)
                assert roster[index].attempt.body is None
            assert all(each.attempt.certificate() is None for each in roster)

    simulate(main, seed=5)


@pytest.mark.parametrize("change", [-1, 1, 84])
def test_a_list_of_another_length_than_the_contributors_make_is_refused(change: int) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            evil = roster[3]

            def resize(encoded: bytearray) -> None:
                if change < 0:
                    del encoded[change:]
                else:
                    encoded.extend(bytes(change))

            tampered(evil.session, resize)
            results = await run(roster)
            for failure in results[:3]:
                assert isinstance(failure, AttemptFailedError)
                assert failure.suspects == (evil.member.rpc.peer_id,)

    simulate(main, seed=6)


@pytest.mark.parametrize("rule", ["centered_clip", "norm_clip"])
def test_under_a_rule_by_votes_the_mean_is_dense(rule: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm, spec=SPEC.model_copy(update={"aggregation": rule}))
            await run(roster)
            is_list = rule == "norm_clip"
            for each in roster:
                assert isinstance(each.attempt.mean_codec_of(0), PartList) == is_list
                assert each.attempt.means == roster[0].attempt.means
                assert (each.result.exact_mean is None) == (is_list or each is roster[1])

    simulate(main, seed=7)


def test_a_laggard_fetches_lists_and_refuses_those_of_other_contributors() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            roster[1].session.contribution.vector.mul_(1000)
            await run(roster)
            body, source, reader = roster[0].attempt.body, roster[0].member.rpc.peer_id, roster[1].history
            assert body is not None
            assert await reader.fetch_means([source], body, 5.0) == roster[0].attempt.means
            more = replace(body, contributors=tuple((i, TOKENS[i], 1) for i in range(4)))
            roster[0].attempt.body = more  # So that it is found.
            with pytest.raises(IntegrityError, match="bytes"):
                await reader.fetch_means([source], more, 5.0)
            with pytest.raises(ProtocolError, match="nobody"):
                await reader.fetch_means([source], replace(body, contributors=()), 5.0)

    simulate(main, seed=8)


def test_a_member_that_missed_the_end_takes_lists_over_from_a_signer() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            await run(roster)
            late = roster[0]
            attempt, means = late.attempt, list(late.attempt.means)
            attempt.proofs.clear()
            attempt.body, attempt.contributors, attempt.means = None, None, [None] * 4
            assert await late.recovery.recover(attempt) is not None
            assert attempt.means == means
            assert torch.equal(decoded(late), reference([0, 1, 2, 3]))
            assert network.loop.time() < 6.0 + SPEC.round_seconds

    simulate(main, seed=9)


@pytest.mark.parametrize(
    ("weights", "refusal"),
    [
        ([0.1, 0.2, 0.3, 0.4], ""),
        ([0.1, 0.05, 0.0, 0.4], ""),
        ([0.1, 0.2, 0.31, 0.3], "tokens"),
        ([0.101, 0.0, 0.0, 0.0], "tokens"),
    ],
)
def test_nobody_counts_for_more_than_its_tokens_though_for_less_if_clipped(weights: list[float], refusal: str) -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            await run(roster)
            attempt = roster[0].attempt
            data = bytearray(attempt.means[3] or b"")
            data[:16] = struct.pack("<4f", *weights)
            if refusal:
                with pytest.raises(CodecError, match=refusal):
                    attempt.check_quotes(3, data, 0)
            else:
                attempt.check_quotes(3, data, 0)

    simulate(main, seed=10)


def test_a_misquoted_member_does_not_sign_when_it_settles_either() -> None:
    async def main(network: SimulatedNetwork) -> None:
        async with members(network, 4) as swarm:
            roster = gather(swarm)
            await run(roster)
            first, other = roster[0], roster[1]
            assert other.attempt.body is not None
            first.attempt.sent_parts[3] = (
                bytes(first.attempt.sent_parts[3])[:-1] + b"?"
            )  # As if the others' list were wrong.
            first.attempt.proofs.clear()
            first.attempt.body, first.attempt.contributors, first.attempt.means = None, None, [None] * 4
            await first.recovery.recover(first.attempt)
            assert first.attempt.body is None
            assert first.attempt.proofs == {}

    simulate(main, seed=11)
