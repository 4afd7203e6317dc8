"""The all-reduce of one roster: its mean, its certificate, and what it does with members that fail.

Means of sparse contributions are lists of parts: exact, certified, replayable, and guarded.
"""

import asyncio
import contextlib
import math
import struct
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from p2ptrain.averaging.allreduce.member import ALLREDUCE
from p2ptrain.averaging.allreduce.messages import Bring, Mask, Request, Signature
from p2ptrain.averaging.allreduce.session import AllReduceSession
from p2ptrain.averaging.commit.attempt import AttemptFailedError, UnencodableError
from p2ptrain.averaging.protocol.certificate import Certificate
from p2ptrain.averaging.vector.reduce import EncodedStream
from p2ptrain.codecs import Codec, CodecError, get_codec
from p2ptrain.codecs.mixed import by_size
from p2ptrain.errors import IntegrityError, ProtocolError
from p2ptrain.manifest import AveragingSpec
from p2ptrain.network.simulated import SimulatedNetwork
from tests.support.coroutines import simulated
from tests.support.sim.averaging import NUM_VALUES, SPEC, RosterMember, decoded, make_roster, run_all, stop
from tests.support.sim.peers import SWARM, Member, members

TOKENS = [10, 20, 70]
MIXED = by_size(get_codec("fp32"), get_codec("bf16"), [15, 10, 30, 5], 10)
"""Its spans lie across the shares of three members."""


def contributors(certificates: Sequence[object]) -> list[tuple[int, ...]]:
    """Whose contributions each certificate counts."""
    return [
        tuple(index for index, *_ in each.body.contributors) for each in certificates if isinstance(each, Certificate)
    ]


def make_vectors(count: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(5)
    return [torch.randn(NUM_VALUES, generator=generator) for _ in range(count)]


@pytest.mark.parametrize(
    ("codec", "tolerance"),
    [("fp32", 1e-6), ("fp16", 2e-3), ("bf16", 2e-2), ("int8", 5e-2), ("int4", 0.8), (MIXED, 2e-2), ("topk", 4.0)],
    ids=lambda value: str(getattr(value, "name", value)),
)
@simulated(members, 3, seed=1)
async def test_everybody_holds_the_same_weighted_mean_and_a_certificate(
    swarm: list[Member], codec: str | Codec, tolerance: float
) -> None:
    vectors = make_vectors(3)
    roster = make_roster(swarm, vectors, TOKENS, codec, spec=SPEC.model_copy(update={"aggregation": "mean"}))
    certificates = await run_all(roster)
    expected = sum((v * (t / 100) for v, t in zip(vectors, TOKENS, strict=True)), torch.zeros(NUM_VALUES))
    for each, certificate in zip(roster, certificates, strict=True):
        torch.testing.assert_close(decoded(each), expected, rtol=0, atol=tolerance)
        assert each.attempt.means == roster[0].attempt.means
        assert isinstance(certificate, Certificate)
        assert certificate.body == roster[0].attempt.body
        Certificate.from_bytes(certificate.to_bytes(), SWARM, swarm[0].peer.signer)


@simulated(members, 3, seed=3)
async def test_a_member_that_never_comes_fails_the_attempt_and_is_named(swarm: list[Member]) -> None:
    *present, absent = make_roster(swarm, make_vectors(3), TOKENS)
    absent.member.rpc.serve_channel(ALLREDUCE, Request, lambda channel, request: asyncio.sleep(60))
    for failure in await run_all(present):
        assert isinstance(failure, AttemptFailedError)
        assert failure.suspects == (absent.member.rpc.peer_id,)
    await stop([absent])
    assert max(each.ended_at for each in present) <= SPEC.round_seconds + 1


@pytest.mark.parametrize("missing", [Mask, Signature])
@simulated(members, 2, seed=4)
async def test_a_member_that_keeps_its_stream_but_stops_talking_is_named(swarm: list[Member], missing: type) -> None:
    roster = make_roster(swarm, make_vectors(2), [10, 10])
    honest, silent = roster
    send = silent.session.incoming.serve

    async def serve(channel, request):  # type: ignore[no-untyped-def]
        sending = channel.send
        channel.send = lambda message: asyncio.sleep(60) if isinstance(message, missing) else sending(message)
        await send(channel, request)

    silent.member.rpc.serve_channel(ALLREDUCE, Request, serve)
    other = asyncio.create_task(silent.run())
    with pytest.raises(AttemptFailedError) as failure:
        await honest.run()
    assert failure.value.suspects == (silent.member.rpc.peer_id,)
    other.cancel()
    await asyncio.gather(other, return_exceptions=True)
    await stop(roster)


@pytest.mark.parametrize("rule", ["mean", "norm_clip", "centered_clip", "trimmed", "median"])
@simulated(members, 4, seed=8)
async def test_a_thousandfold_contribution_is_left_out_and_its_sender_told(swarm: list[Member], rule: str) -> None:
    vectors, spec = make_vectors(4), SPEC.model_copy(update={"aggregation": rule})
    loud_id = max(member.rpc.peer_id for member in swarm)
    vectors[next(i for i, member in enumerate(swarm) if member.rpc.peer_id == loud_id)] *= 1000
    roster = make_roster(swarm, vectors, [10] * 4, spec=spec)
    assert contributors(await run_all(roster)) == [(0, 1, 2)] * 4
    assert len({each.attempt.body for each in roster}) == 1
    assert float(decoded(roster[0]).abs().max()) < 10
    for each in roster[:3]:
        assert list(each.refused) == [loud_id]
        assert "times the group's median" in each.refused[loud_id]
        assert each.member.rpc.refusals[loud_id, "out of proportion"] == 1
        assert each.result.refusal == ""
    # It takes part otherwise, reduces its share without itself, and knows why.
    assert sorted(roster[3].refused_by) == [0, 1, 2, 3]
    assert "times the group's median" in roster[3].result.refusal


@simulated(members, 4, seed=9)
async def test_one_owner_s_word_is_not_enough_to_drop_a_contribution(swarm: list[Member]) -> None:
    roster = make_roster(swarm, make_vectors(4), [10] * 4)
    share = roster[0].session.share

    def slander(trust: Sequence[int]) -> frozenset[int]:
        share.refused[2] = "smells"
        return frozenset({0, 1, 3})

    share.judge = slander  # type: ignore[method-assign]
    await run_all(roster)
    assert roster[2].attempt.contributors == (0, 1, 3)
    assert roster[2].refused_by == {0: "smells"}
    assert roster[2].result.refusal == ""


@pytest.mark.parametrize("place", ["own share", "others' shares", "beyond the codec"])
@simulated(members, 2, seed=11)
async def test_an_update_beyond_a_limit_is_this_peer_s_own_fault(swarm: list[Member], place: str) -> None:
    vectors = [torch.zeros(NUM_VALUES), torch.zeros(NUM_VALUES)]
    for vector, member in zip(vectors, swarm, strict=True):
        is_first = member.rpc.peer_id == min(other.rpc.peer_id for other in swarm)
        if place == "beyond the codec":
            vector.fill_(1e6)
        else:
            vector[0 if is_first == (place == "own share") else -1] = 2e6
    failures = await run_all(make_roster(swarm, vectors, [10, 10], "fp16" if place == "beyond the codec" else "fp32"))
    assert all(isinstance(failure, UnencodableError) for failure in failures), failures


@simulated(members, 3, seed=7)
async def test_a_stranger_and_a_second_stream_are_refused(swarm: list[Member]) -> None:
    roster = make_roster(swarm[:2], make_vectors(2), [10, 10])
    target = roster[0].member.rpc.peer_id
    for caller in (swarm[2].rpc, roster[1].member.rpc):
        bring = Bring(roster[0].attempt.roster.group_id, "fp32")
        async with caller.open(target, ALLREDUCE, bring, 2.0), caller.open(target, ALLREDUCE, bring, 2.0):
            await asyncio.sleep(0.5)
        assert roster[0].member.rpc.refusals[caller.peer_id, "ProtocolError"] >= 1
    await stop(roster)


@simulated(members, 3, seed=3)
async def test_a_member_whose_background_task_fails_gives_up_at_once_and_says_so(
    swarm: list[Member], network: SimulatedNetwork, caplog: pytest.LogCaptureFixture
) -> None:
    roster = make_roster(swarm, make_vectors(3), TOKENS)

    def judge(trust: Sequence[int]) -> frozenset[int]:
        raise ZeroDivisionError("a defect")

    roster[0].session.share.judge = judge  # type: ignore[method-assign]
    failure = (await run_all(roster))[0]
    assert isinstance(failure, AttemptFailedError)
    assert "a part of this peer failed (ZeroDivisionError" in str(failure)
    assert roster[0].ended_at < SPEC.round_seconds / 4
    network.loop.errors.clear()
    assert "mask failed" in caplog.text


@simulated(members, 9, seed=[1, 2])
async def test_members_share_out_the_checks_of_the_only_owner(swarm: list[Member]) -> None:
    """Of a vector of one block only one member owns a share; the others are not too slow for one."""
    spec = SPEC.model_copy(update={"spot_checks": 4})
    roster = make_roster(swarm, make_vectors(9), [10] * 9, bounds=(0, *[NUM_VALUES] * 9), spec=spec)
    verifier: Any = roster[0].session.verifier
    answer, asked = verifier.audit.answer, list[int]()

    async def counted(chunks: Sequence[int]) -> bytes:
        asked.extend(chunks)
        return await answer(chunks)  # type: ignore[no-any-return]

    verifier.audit.answer = counted
    assert all(isinstance(result, Certificate) for result in await run_all(roster))
    assert 0 < len(asked) < 8


Change = Callable[[bytearray], object]

SIZE = 5 * 4096 + 100
BOUNDS = (0, 2 * 4096, 2 * 4096, 3 * 4096, SIZE)
"""The second of four owns nothing."""
LISTED_TOKENS = [10, 20, 30, 40]
PLAIN = SPEC.model_copy(update={"aggregation": "mean"})
TOPK = get_codec("topk")
SPARSE_MIXED = by_size(TOPK, get_codec("bf16"), [4096, 30, 3 * 4096, 4096 + 70], 70)


def sparse_vectors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(SIZE, generator=generator) for _ in range(4)]


def gather(swarm: list[Member], codec: Codec = TOPK, spec: AveragingSpec = PLAIN) -> list[RosterMember]:
    """One attempt of four, whose contributions are in roster order."""
    order = sorted(range(4), key=lambda i: swarm[i].rpc.peer_id)
    vectors, tokens = [torch.empty(0)] * 4, [0] * 4
    for vector, count, index in zip(sparse_vectors(), LISTED_TOKENS, order, strict=True):
        vectors[index], tokens[index] = vector, count
    return make_roster(swarm, vectors, tokens, codec, BOUNDS, spec)


def reference(contributors: list[int], codec: Codec = TOPK) -> torch.Tensor:
    """The weighted mean of what each contributor's encoded vector decodes to, added up in roster order."""
    total, mean, value = sum(LISTED_TOKENS[i] for i in contributors), torch.zeros(SIZE), torch.empty(SIZE)
    for index in contributors:
        codec.decode_into(codec.encode(sparse_vectors()[index]), value)
        mean = mean + value * torch.tensor(LISTED_TOKENS[index] / total, dtype=torch.float32)
    return mean


def all_signed(results: list[Certificate | BaseException]) -> bool:
    return all(isinstance(result, Certificate) for result in results)


@pytest.mark.parametrize("codec", [TOPK, SPARSE_MIXED], ids=["topk", "mixed"])
@simulated(members, 4, seed=1)
async def test_everybody_holds_the_exact_mean_of_sparse_parts(swarm: list[Member], codec: Codec) -> None:
    roster = gather(swarm, codec)
    assert all_signed(await run_all(roster))
    expected = reference([0, 1, 2, 3], codec)
    for each, vector in zip(roster, sparse_vectors(), strict=True):
        assert decoded(each).numpy().tobytes() == expected.numpy().tobytes()
        assert each.attempt.means == roster[0].attempt.means
        assert each.attempt.body == roster[0].attempt.body
        assert each.result.exact_mean is None
        sent = each.result.sent_parts  # Of the own share, too.
        assert sorted(sent) == [0, 2, 3]
        assert b"".join(sent[index] for index in sorted(sent)) == codec.encode(vector)


@simulated(members, 4, seed=4)
async def test_lists_wait_for_a_member_that_learns_late_who_contributed(swarm: list[Member]) -> None:
    """The owner's mask reaches one member after the means of all others."""
    roster = gather(swarm)
    late, slow_owner = roster[1], roster[3]
    serve = slow_owner.session.incoming.serve

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

    def lie(weights: Any, encoded: bytearray) -> None:
        list_parts(weights, encoded)
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
        (put(20, bytes(20)), [0, 1, 2], "refused"),
        (swap_parts, [0, 1], "refused"),
        (lambda encoded: encoded.pop(), [0, 1, 2], ""),
        (lambda encoded: encoded.extend(bytes(1)), [0, 1, 2], ""),
        (lambda encoded: encoded.extend(bytes(84)), [0, 1, 2], ""),
    ],
    ids=["nan", "indices", "swapped", "shorter", "longer", "by a block"],
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


@simulated(members, 4, seed=8)
async def test_a_laggard_fetches_lists_and_refuses_those_of_other_contributors(swarm: list[Member]) -> None:
    roster = gather(swarm)
    roster[1].session.contribution.vector.mul_(1000)
    await run_all(roster)
    body, source, reader = roster[0].attempt.body, roster[0].member.rpc.peer_id, roster[1].history
    assert body is not None
    assert await reader.fetch_means([source], body, 5.0) == roster[0].attempt.means
    more = replace(body, contributors=tuple((i, LISTED_TOKENS[i], 1) for i in range(4)))
    roster[0].attempt.body = more  # So that it is found.
    with pytest.raises(IntegrityError, match="bytes"):
        await reader.fetch_means([source], more, 5.0)
    with pytest.raises(ProtocolError, match="nobody"):
        await reader.fetch_means([source], replace(body, contributors=()), 5.0)


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
        await late.recovery.recover(attempt)
        assert attempt.body is None
        assert attempt.proofs == {}
        return
    began = asyncio.get_running_loop().time()
    assert await late.recovery.recover(attempt) is not None
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
